"""A user's mistake gives one line that names the cure, the right exit code and no traceback."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from kit.cli import invoke
from penstock.cli import reaching
from penstock.cli.commands.common import BuiltTask
from penstock.cli.failures import ExitCode, failure_of
from penstock.cli.paths import free_port
from penstock.cli.reaching import host_and_port
from penstock.schemas.requests import BUILT_TASKS
from penstock.schemas.texts import shortened

HEAD = {"object": "conversation.export", "version": 1, "id": "a", "log_id": "L", "messages": 0, "summaries": 0}
MANY, FILES = "name a conversation, or many by --pattern", "name conversations, or many by --pattern"


@pytest.fixture(autouse=True)
def nothing_configured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_CONFIG", raising=False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("nothing-of-ours", "nothing-of-ours"),
        ("status --nothing-of-ours", "--nothing-of-ours"),
        ("worker --config /nowhere/penstock.toml", "penstock: no such configuration file: /nowhere/penstock.toml\n"),
        ("topics check -b ::::", "::::"),
        ("dlq show 17", "17"),
        ("models add", "give the model's name, or its entry by --file"),
        ("submit hello --priority -4", "--priority"),
        ("submit hello --timeout -1", "--timeout"),
        ("submit hello --timeout nan", "--timeout"),
        ("submit embed a --timeout -1", "--timeout"),
        ("conversations summarize a --timeout -1", "--timeout"),
        ("models load a --wait --timeout -1", "--timeout"),
        ("models load a --wait --timeout inf", "--timeout"),
        ("bench --timeout -1", "--timeout"),
        ("keys create --rate nan", "--rate"),
        ("keys create --max-priority 1001", "--max-priority"),
        ("submit hello --priority 1001", "--priority"),
        ("submit hello --max-tokens 0", "--max-tokens"),
        ("chat --max-tokens 1000001", "--max-tokens"),
        ("requests cancel r1 --model m", "name the ids of requests, or choose them"),
        ("requests cancel --older-than soon", "'soon' is no length of time"),
        ("conversations replay", MANY),
        ("conversations replay a --pattern *", MANY),
        ("conversations replay a --group g", "--group is for --pattern"),
        ("conversations replay a --rate 2", "--rate is for --pattern"),
        ("conversations replay a --since 1", "--since is for --pattern"),
        ("conversations replay a --follow", "--follow is for --pattern"),
        ("conversations sweep --within 7d", "--within is for --dry-run"),
        ("conversations sweep --dry-run --within soon", "no time to come, as 12h or 7d"),
        ("conversations sweep --dry-run --within -1", "no time to come, as 12h or 7d"),
        ("conversations export", FILES),
        ("conversations export a --pattern *", FILES),
    ],
)  # fmt: skip
def test_wrong_usage(arguments: str, said: str, tmp_path: Path) -> None:
    done = invoke(*arguments.split())
    assert (done.exit_code, said in done.stderr) == (2, True), done.output
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("command", ["submit hello", "chat", "watch r", "requests list", "bench"])
@pytest.mark.parametrize("wrong", ["--url localhost:8000", "--url http://[", "--url ftp://x", "--key schlüssel"])
def test_a_wrong_url_or_key_is_wrong_usage(command: str, wrong: str) -> None:
    done = invoke(*command.split(), *wrong.split())
    assert (done.exit_code, wrong.split()[0] in done.stderr) == (2, True), done.output


@pytest.mark.parametrize(
    ("heads", "options", "said"),
    [
        ([{"id": "a"}, {"id": "b"}], "--id c", "holds 2 conversations: --id is for one"),
        ([{"id": "a"}], "--id c --prefix d", "--id is in place of --prefix"),
        ([{"messages": 2}], "", "export it again"),
    ],
)
def test_a_wrong_import_is_refused_before_any_call(
    tmp_path: Path, heads: list[dict[str, Any]], options: str, said: str
) -> None:
    file = tmp_path / "file.jsonl"
    file.write_text("".join(json.dumps({**HEAD, **head}) + "\n" for head in heads))
    done = invoke("conversations", "import", str(file), *options.split(), "--url", "http://127.0.0.1:1")
    assert said in done.stderr


@pytest.mark.parametrize("command", ["dlq list", "dlq show 0/1", "topics check", "topics list", "topics create"])
def test_without_kafka_it_fails_at_once(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaching.admin, "broker_count", lambda *_: pytest.fail("a refused connection needs no waiting"))
    server = f"127.0.0.1:{free_port()}"
    done = invoke(*command.split(), "--bootstrap-servers", server)
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
def test_each_system_error_has_its_advice(number: int, word: str, code: int) -> None:
    failure = failure_of(OSError(number, os.strerror(number), "somewhere"))
    assert (word in str(failure), int(failure.exit_code)) == (True, code)
    assert ("--data-dir" in str(failure)) == (number == errno.ENOSPC)


def test_an_error_without_a_number_is_shown_as_it_is() -> None:
    assert str(failure_of(OSError("out of luck"))) == "out of luck"


def test_submit_offers_only_tasks_for_text() -> None:
    done = invoke("submit", "hello", "--task", "painting")
    offered = re.sub(r"[\s│]", "", done.stderr)
    assert (done.exit_code, "text_generation" in offered, "image" in offered) == (2, True, False)
    assert {task.value for task in BuiltTask} <= set(BUILT_TASKS)


def test_unknown_settings_of_kafkas_client_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_KAFKA__SECURITY", '{"security.protocl": "SSL"}')
    done = invoke("topics", "list")
    assert done.exit_code == ExitCode.USAGE
    assert "no property security.protocl; the nearest is security.protocol" in done.stderr


def test_a_reason_is_cut_between_words() -> None:
    assert shortened("the model could not be loaded", 40) == "the model could not be loaded"
    assert shortened("the model\n could not be loaded", 20) == "the model could not…"
    assert shortened("x" * 50, 10) == "x" * 9 + "…"
    assert all(len(shortened("so it goes, and on. " * 9, limit)) <= limit for limit in range(5, 60))


@pytest.mark.parametrize(
    ("options", "variables", "exit_code"),
    [
        (["--file", "k"], {"PENSTOCK_URL": "http://127.0.0.1:1"}, ExitCode.FAILED),
        (["--url", "http://127.0.0.1:1"], {"PENSTOCK_AUTH__KEYS_FILE": "k"}, ExitCode.UNREACHABLE),
        ([], {"PENSTOCK_URL": "http://127.0.0.1:1", "PENSTOCK_AUTH__KEYS_FILE": "k"}, ExitCode.USAGE),
        (["--file", "k", "--url", "http://127.0.0.1:1"], {}, ExitCode.USAGE),
    ],
)
def test_an_option_for_keys_goes_before_the_variable_of_the_other(
    options: list[str], variables: dict[str, str], exit_code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert invoke("keys", "list", *options).exit_code == exit_code
