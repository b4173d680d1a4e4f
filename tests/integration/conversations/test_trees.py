"""Trees of conversations: listed in one call, exported whole, and built anew at another installation."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import conversing
from conversing import Json, append, ask, output, penstock, worked
from support import wait_until
from system import NOOP, Process

MODELS = [{**NOOP, "id": "talk", "tasks": ["text_generation", "summarization"], "options": {"echo": True}}]


@pytest.fixture(scope="module")
def places(kafka: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Process]]:
    """The gateways of two installations."""
    folders = [tmp_path_factory.mktemp("trees") for _ in range(2)]
    with worked(kafka, folders[0], MODELS) as here, worked(kafka, folders[1], MODELS) as there:
        yield [here.process("g1"), there.process("g1")]


@pytest.fixture
def here(places: list[Process]) -> Process:
    return places[0]


@pytest.fixture
def there(places: list[Process]) -> Process:
    return places[1]


def say(gateway: Process, conversation: str, *texts: str) -> None:
    append(gateway, conversation, [{"role": "user", "content": text} for text in texts])


def fork(gateway: Process, conversation: str, through: int, fork_id: str) -> None:
    with httpx.Client(base_url=gateway.url, timeout=60) as client:
        conversing.fork(client, conversation, through, fork_id)


def shape(gateway: Process, conversation: str, prefix: str = "") -> list[tuple[str, int | None, bool, int, list[str]]]:
    """The tree by what it says: id, depth, whether it is deleted, what is inherited, and the texts that are added.

    The depth is None of a fork that came between the two looks, as what an import sent before it was killed.
    """
    found: list[tuple[str, int | None, bool, int, list[str]]] = []
    depths = {one["id"]: one["depth"] for one in tree(gateway, conversation)}
    for text in output(gateway, "export", "--tree", conversation).splitlines():
        line = json.loads(text)
        if "object" in line:
            name = line["id"].removeprefix(prefix)
            inherited = line.get("forked_from", {}).get("messages", 0)
            found.append((name, depths.get(line["id"]), line.get("deleted", False), inherited, []))
        elif line["type"] == "message":
            found[-1][-1].append(line["content"])
    return found


def tree(gateway: Process, conversation: str) -> list[Json]:
    answer = httpx.get(f"{gateway.url}/v1/conversations/{conversation}/tree", timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def grown(gateway: Process, root: str) -> None:
    """A deleted root with two forks, one of which has forks of its own, and one of those adds nothing."""
    say(gateway, root, "a0", "a1", "a2")
    ask(gateway, {"task": "summarization", "model": "talk", "conversation_id": root, "payload": {}})
    fork(gateway, root, 1, f"{root}-b")
    say(gateway, f"{root}-b", "b0", "b1")
    fork(gateway, f"{root}-b", 3, f"{root}-c")
    say(gateway, f"{root}-c", "c0")
    fork(gateway, f"{root}-b", 4, f"{root}-d")
    fork(gateway, f"{root}-b", 0, f"{root}-e")
    say(gateway, f"{root}-e", "e0")
    assert httpx.delete(f"{gateway.url}/v1/conversations/{root}", timeout=60).status_code == 200


def expected(root: str) -> list[tuple[str, int, bool, int, list[str]]]:
    return [
        (root, 0, True, 0, ["a0", "a1"]),
        (f"{root}-e", 1, False, 1, ["e0"]),
        (f"{root}-b", 1, False, 2, ["b0", "b1"]),
        (f"{root}-c", 2, False, 3, ["c0"]),
        (f"{root}-d", 2, False, 4, []),
    ]


def test_a_tree_is_the_same_whichever_of_it_is_named(here: Process) -> None:
    grown(here, "all")
    assert shape(here, "all-d") == shape(here, "all-e") == expected("all")
    found = tree(here, "all-c")
    assert [(one["id"], one["depth"], one["messages"], one["deleted"]) for one in found][:2] == [
        ("all", 0, 2, True), ("all-e", 1, 1, False)
    ]  # fmt: skip
    assert found[3]["forked_from"] == {"conversation_id": "all-b", "through": 3}
    plain = httpx.get(f"{here.url}/v1/conversations/all-c").json()
    assert {**found[3], "created_at": 0} == {**plain, "created_at": 0, "depth": 2, "messages": 1, "deleted": False}
    assert httpx.get(f"{here.url}/v1/conversations/all/tree").status_code == 404
    lines = output(here, "forks", "--tree", "all-b").splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["all", "all-e", "all-b", "all-c", "all-d"]
    assert "all (deleted)" in lines[1]


def test_an_import_builds_the_same_tree_and_a_repeat_adds_nothing(
    here: Process, there: Process, tmp_path: Path
) -> None:
    grown(here, "trip")
    file = tmp_path / "trip.jsonl"
    file.write_text(output(here, "export", "--tree", "trip-b"))
    for gateway, words in ((there, []), (here, ["--prefix", "copy-"])):
        prefix = "copy-" if words else ""
        result = output(gateway, "import", str(file), *words)
        assert result.splitlines() == [
            f"{prefix}{name}: {len(own)} messages, {len(own)} appended" for name, _, _, _, own in expected("trip")
        ]
        assert shape(gateway, f"{prefix}trip-e", prefix) == expected("trip")
        assert httpx.get(f"{gateway.url}/v1/conversations/{prefix}trip").status_code == 404, "it was deleted"
        again = output(gateway, "import", str(file), *words)
        assert all(line.endswith(" 0 appended") for line in again.splitlines()), again
        assert shape(gateway, f"{prefix}trip-e", prefix) == expected("trip")
    say(there, "trip-c", "it goes on")
    assert "0 appended" in output(there, "import", str(file))


def test_what_is_another_tree_is_left_alone(here: Process, there: Process, tmp_path: Path) -> None:
    grown(here, "other")
    file = tmp_path / "other.jsonl"
    file.write_text(output(here, "export", "--tree", "other-b"))
    say(there, "other-e", "somebody else's")
    refused = penstock(there, "import", str(file))
    assert refused.exit_code == 1
    assert "other-e is here, and is no such fork as in the file" in refused.output
    cut = "".join(line + "\n" for line in file.read_text().splitlines()[:-1])
    file.write_text(cut)
    refused = penstock(there, "import", str(file), "--prefix", "x-")
    assert "1 forks are missing at the end of their tree" in refused.output


def test_an_import_that_is_killed_is_gone_on_with(here: Process, there: Process, tmp_path: Path) -> None:
    """At several places: the tree is the same in the end, and no message stands there twice."""
    say(here, "long", *(f"root {number}" for number in range(250)))
    for number in range(6):
        fork(here, "long", 40 * number, f"long-{number}")
        say(here, f"long-{number}", *(f"{number} adds {one}" for one in range(150)))
    whole = shape(here, "long")
    file = tmp_path / "long.jsonl"
    file.write_text(output(here, "export", "--tree", "long"))
    command = [sys.executable, "-m", "penstock.cli.main", "conversations", "import", str(file), "--url", there.url]

    def branches() -> int:
        answer = httpx.get(f"{there.url}/v1/conversations/long/tree", timeout=60)
        return len(answer.json()["data"]) if answer.is_success else 0

    in_the_middle = 0
    for count in (1, 3, 6):
        process = subprocess.Popen(command, env={**os.environ, "COLUMNS": "200"})
        wait_until(lambda count=count: branches() >= count, 60)
        process.send_signal(signal.SIGKILL)
        process.wait(10)
        in_the_middle += shape(there, "long") != whole
    assert in_the_middle, "it was killed while something was missing"
    output(there, "import", str(file))
    assert shape(there, "long") == whole
