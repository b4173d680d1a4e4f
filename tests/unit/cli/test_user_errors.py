"""What a person gets wrong is told in one line that fits, with the right exit code and no traceback."""

from __future__ import annotations

import errno
import os
import re
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock.cli import reaching
from penstock.cli.commands.common import BuiltTask
from penstock.cli.failures import ExitCode, failure_of
from penstock.cli.main import app
from penstock.cli.paths import free_port
from penstock.cli.reaching import host_and_port
from penstock.schemas.requests import BUILT_TASKS
from penstock.schemas.texts import shortened


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)


@pytest.mark.parametrize(
    "command", [["dlq", "list"], ["dlq", "show", "0/1"], ["topics", "check"], ["topics", "list"], ["topics", "create"]]
)
def test_without_kafka_it_is_said_at_once(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching, "answers", lambda *_: pytest.fail("a refused connection needs no waiting"))
    server = f"127.0.0.1:{free_port()}"
    done = run(*command, "--bootstrap-servers", server)
    assert done.exit_code == 3
    assert done.stderr.startswith(f"penstock: no Kafka answers at {server} (Connection refused)")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("server", "found"),
    [
        ("kafka:9092", ("kafka", 9092)),
        (" SASL_SSL://kafka-1.example:19092", ("kafka-1.example", 19092)),
        ("[::1]:9093", ("::1", 9093)),
        ("kafka", ("kafka", 9092)),
    ],
)
def test_addresses_as_kafka_writes_them(server: str, found: tuple[str, int]) -> None:
    assert host_and_port(server) == found


def test_an_address_that_is_none_is_wrong_usage() -> None:
    assert run("topics", "check", "-b", "::::").exit_code == 2


@pytest.mark.parametrize(
    ("number", "word", "code"),
    [
        (errno.ENOSPC, "free some space", 1),
        (errno.EACCES, "this user may", 1),
        (errno.ENOENT, "check the name", 1),
        (errno.EADDRINUSE, "another port", 1),
        (errno.EMFILE, "ulimit", 1),
        (errno.ECONNREFUSED, "it runs", 3),
    ],
)
def test_what_the_system_refuses_comes_with_the_advice_that_fits(number: int, word: str, code: int) -> None:
    failure = failure_of(OSError(number, os.strerror(number), "somewhere"))
    assert (word in str(failure), int(failure.exit_code)) == (True, code)
    assert ("--data-dir" in str(failure)) == (number == errno.ENOSPC)


def test_an_error_without_a_number_is_told_as_it_is() -> None:
    assert str(failure_of(OSError("out of luck"))) == "out of luck"


def test_a_negative_priority_is_wrong_usage_and_no_question_of_keys() -> None:
    done = run("submit", "hello", "--priority", "-4")
    assert done.exit_code == 2
    assert "--priority" in done.stderr


def test_only_tasks_that_a_text_can_ask_for_are_offered_for_one() -> None:
    done = run("submit", "hello", "--task", "painting")
    assert done.exit_code == 2
    told = re.sub(r"[\s│]", "", done.stderr)
    assert "text_generation" in told
    assert "image" not in told
    assert {task.value for task in BuiltTask} <= set(BUILT_TASKS)


@pytest.mark.parametrize("command", [["submit", "hello"], ["chat"], ["watch", "r"], ["requests", "list"], ["bench"]])
@pytest.mark.parametrize(
    "wrong", [["--url", "localhost:8000"], ["--url", "http://["], ["--url", "ftp://x"], ["--key", "schlüssel"]]
)
def test_a_url_or_key_that_is_none_is_wrong_usage(command: list[str], wrong: list[str]) -> None:
    done = run(*command, *wrong)
    assert (done.exit_code, wrong[0] in done.stderr) == (2, True), done.output


def test_settings_that_kafkas_client_does_not_know_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening:  # so that its client is asked at all
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        monkeypatch.setenv("PENSTOCK_KAFKA__SECURITY", '{"security.protocl": "SSL"}')
        done = run("topics", "list", "-b", f"127.0.0.1:{listening.getsockname()[1]}")
    assert done.exit_code == 1
    assert done.stderr.startswith("penstock: the Kafka settings are wrong")
    assert "security.protocl" in done.stderr


def test_an_id_of_a_dead_letter_has_its_form() -> None:
    assert run("dlq", "show", "17").exit_code == ExitCode.USAGE


def test_a_reason_is_cut_between_words() -> None:
    assert shortened("the model could not be loaded", 40) == "the model could not be loaded"
    assert shortened("the model\n could not be loaded", 20) == "the model could not…"
    assert shortened("x" * 50, 10) == "x" * 9 + "…"
    assert all(len(shortened("so it goes, and on. " * 9, limit)) <= limit for limit in range(5, 60))
