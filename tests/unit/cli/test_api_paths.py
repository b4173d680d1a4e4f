"""An id that a person chose never reaches another route."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kit.cli import ScriptedGateway
from penstock.cli.commands.api_paths import api_path, named_path
from penstock.cli.failures import CliFailure

ROOT = Path(__file__).parents[3]
NO_IDS = ("../../etc", "..", ".", "", "a/b", "x/../../artifacts/y")
BY_ID = (
    "conversations show",
    "conversations set",
    "conversations follow",
    "conversations replay",
    "conversations export",
    "conversations fork --through 1",
    "conversations forks",
    "conversations forks --tree",
    "conversations summarize",
    "conversations delete --yes",
    "requests show",
    "requests cancel",
    "requests reprioritize --to high",
    "requests delete",
    "watch",
    "artifacts show",
    "artifacts delete --yes",
)


@pytest.mark.parametrize("command", BY_ID)
def test_what_is_no_id_is_not_asked_for(gateway: ScriptedGateway, command: str) -> None:
    for wrong in NO_IDS:
        done = gateway.run(*command.split(), "--", wrong) if wrong == "" else gateway.run(*command.split(), wrong)
        assert done.exit_code == 2, (wrong, done.output)
    assert gateway.asked == []


@pytest.mark.parametrize("command", ["show", "load", "pin", "pause", "remove"])
def test_names_of_models_have_slashes_and_no_dot_segments(gateway: ScriptedGateway, command: str) -> None:
    done = gateway.run("models", command, "../../v1/requests")
    assert (done.exit_code, gateway.asked) == (2, [])
    gateway.run("models", command, "hub/a model?")
    assert gateway.asked[0].split()[1].startswith("/v1/admin/models/hub/a%20model%3F")


def test_segments_are_escaped() -> None:
    assert api_path("/v1/requests", "a b?c#d%2F\udcff", "events") == "/v1/requests/a%20b%3Fc%23d%252F%FF/events"
    assert named_path("/v1/admin/models", "Qwen/Q 1", "load") == "/v1/admin/models/Qwen/Q%201/load"
    for wrong in ("", "a//b", "../b", "/a"):
        with pytest.raises(CliFailure):
            named_path("/v1/admin/models", wrong)


def test_a_path_with_a_plain_id_in_it_fails_the_type_check(tmp_path: Path) -> None:
    program = tmp_path / "raw.py"
    program.write_text(
        "from penstock.cli.commands.api_paths import api_path\n"
        "from penstock.cli.commands.common import Gateway\n"
        "def by_helper(gateway: Gateway, a: str) -> None:\n"
        "    gateway.call('DELETE', api_path('/v1/requests', a))\n"
        "def raw(gateway: Gateway, a: str) -> None:\n"
        "    gateway.call('DELETE', f'/v1/requests/{a}')\n"
        "    gateway.answer('DELETE', f'/v1/requests/{a}')\n"
        "    gateway.pages(f'/v1/requests/{a}', 1)\n"
        "    gateway.stream('GET', f'/v1/requests/{a}')\n"
    )
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, str(program)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert [done.stdout.count(f"raw.py:{line}:") for line in range(4, 10)] == [0, 0, 1, 1, 1, 1], done.stdout
