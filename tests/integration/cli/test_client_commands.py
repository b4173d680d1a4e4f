"""Commands and client library against a running system: a killed gateway, large outputs, dead letters."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.cli.commands import dlq
from penstock.cli.main import app
from penstock.common.transport import Transport
from penstock.producers import Client, KafkaSettings
from penstock.schemas.records import DeadLetter, Origin
from registry_server import Registry, foreign
from support import wait_until
from system import System

TEXT = "".join(f"word{n} " for n in range(60))
MODELS = [
    {"id": "slow", "engine": "noop", "source": "noop", "options": {"tokens": 60, "delay_ms": 100}},
    {"id": "reader", "engine": "noop", "source": "noop", "tasks": ["embedding", "summarization"]},
    {"id": "large", "engine": "noop", "source": "noop", "options": {"tokens": 4, "chars": 100_000}},
]


SYSTEM = {"models": MODELS}


def run(system: System, *arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(app, [*arguments, "--url", system.process("g1").url], input=input)


def test_watch_and_chat_go_on_when_the_gateway_is_killed(system: System) -> None:
    gateway = system.process("g1")
    body = {"task": "text_generation", "model": "slow", "stream": True, "payload": {"prompt": "x", "max_tokens": 60}}
    submitted = run(system, "submit", "--no-wait", "-f", "-", input=json.dumps(body))
    request_id = submitted.stdout.strip()
    watching = start("watch", request_id, "--url", gateway.url)
    chatting = start("chat", "--model", "slow", "--max-tokens", "60", "--url", gateway.url)
    assert chatting.stdin is not None
    assert chatting.stdout is not None
    assert watching.stdout is not None
    chatting.stdin.write(b"hello\n")
    first, answer = watching.stdout.read(12), chatting.stdout.read(6)  # both have begun
    gateway.kill9()
    system.gateway("g1", port=gateway.port).wait_ready()
    rest, said = watching.communicate(timeout=90)
    assert (watching.returncode, (first + rest).decode()) == (0, TEXT), said
    told, said = chatting.communicate(timeout=90)
    assert (chatting.returncode, (answer + told).decode()) == (0, f"{TEXT}\n"), said


def start(*arguments: str) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "penstock.cli.main", *arguments]
    pipe = subprocess.PIPE
    # Without buffers here: what was read ahead would be missing from what comes later.
    return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)


def test_ctrl_c_leaves_the_request_running_and_stats_show_it(system: System) -> None:
    url = system.process("g1").url
    said, tries = b"", 0
    while not said:  # it says nothing of a request whose acceptance it has not read yet
        tries += 1
        assert tries < 5, "it never says how to go on"
        wait_until(lambda: stats(system)["inflight"] == 0, 60, lambda: stats(system))
        submitting = start("submit", "hello", "--model", "slow", "--max-tokens", "60", "--url", url)
        wait_until(lambda: stats(system)["inflight"] == 1, 60, lambda: stats(system))
        submitting.send_signal(signal.SIGINT)
        out, said = submitting.communicate(timeout=60)
        assert (submitting.returncode, out) == (130, b"")
    found = re.search(rf"still running: penstock watch (\S+) --url {url}\n", said.decode())
    assert found is not None, said
    shown = run(system, "stats", "--all")
    assert "workers running" in shown.stdout, shown.output
    watched = run(system, "watch", found[1])
    assert (watched.exit_code, watched.stdout) == (0, TEXT), watched.output
    assert stats(system)["inflight"] == 0
    assert "outcomes completed" in run(system, "stats").stdout


def stats(system: System) -> dict[str, Any]:
    return json.loads(run(system, "stats", "--json").stdout)


def test_texts_from_stdin_and_what_a_gateway_says_of_itself(system: System) -> None:
    summed = run(system, "submit", "summarize", "-", input="a long text\n" * 99)
    assert (summed.exit_code, bool(summed.stdout.strip())) == (0, True), summed.output
    embedded = run(system, "submit", "embed", "one", "-", input="two")
    assert embedded.exit_code == 0, embedded.output
    first, second = map(json.loads, embedded.stdout.splitlines())
    assert len(first) == len(second) > 0
    (device,) = map(json.loads, run(system, "devices", "--json").stdout.splitlines())
    table = run(system, "devices")
    assert f"{device['worker_id']} {device['device']}" in table.stdout, table.output
    wait_until(lambda: run(system, "status").exit_code == 0, 30, lambda: run(system, "status").output)
    wait_until(lambda: "processes: gateway 1" in run(system, "status").stdout, 10, "a gateway reports every 2 s")
    told = json.loads(run(system, "status", "--json").stdout)
    assert (told["url"], told["status"], told["ready"]) == (system.process("g1").url, "ready", True)


def test_a_large_output_reaches_those_who_produce_by_themselves(system: System) -> None:
    settings = system.kafka
    with Client(settings, artifacts=system.folder / "artifacts") as client:
        outcome = client.result(
            client.submit(task="text_generation", model="large", payload={"prompt": "x"}), timeout=60
        )
        assert outcome.output_artifact is not None
        assert outcome.output_text is not None
        assert len(outcome.output_text) == 400_000


def test_one_dead_letter_is_shown_without_reading_the_others(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = system.kafka
    poison = Transport(settings)
    for number in range(12):
        poison.send(settings.names.request("text_generation", 5), b"no request %d" % number, partition=0)
    poison.close()
    where = ["--bootstrap-servers", system.bootstrap, "--topic-prefix", system.prefix]

    def letters(limit: int) -> list[dict[str, Any]]:
        listed = CliRunner().invoke(app, ["dlq", "list", "--json", "--limit", str(limit), *where])
        return [json.loads(line) for line in listed.stdout.splitlines()]

    wait_until(lambda: len(letters(50)) == 12, 30, "all are dead letters")
    read: list[Any] = []
    read_ranges = dlq.read_ranges

    def watched(settings: KafkaSettings, ranges: Any, give_up: float) -> Any:
        read.append(ranges)
        return read_ranges(settings, ranges, give_up)

    monkeypatch.setattr(dlq, "read_ranges", watched)
    (last,) = letters(1)
    assert last["original"].startswith("no request ")
    assert all(end - begin <= 1 for begin, end in read.pop().values())
    shown = CliRunner().invoke(app, ["dlq", "show", last["id"], "--raw", *where])
    assert shown.stdout_bytes.decode() == last["original"]
    ((begin, end),) = read.pop().values()
    assert end - begin == 1
    letter = DeadLetter(
        reason_code="invalid", reason="of a worker that writes a registry's ids", original=b"x", worker_id="w",
        origin=Origin(topic="t", partition=0, offset=0, append_time_ms=1), created_at=1 << 41,
    )  # fmt: skip
    poison = Transport(settings)
    poison.send(settings.names.dlq, foreign("DeadLetter")(letter))
    poison.close()
    with Registry.running() as registry:
        monkeypatch.setenv("PENSTOCK_SCHEMA_REGISTRY__URL", registry.url)
        assert letters(1)[0]["error"] == letter.reason
        monkeypatch.delenv("PENSTOCK_SCHEMA_REGISTRY__URL")
    for unknown in ("0/99999", "99/0"):
        done = CliRunner().invoke(app, ["dlq", "show", unknown, *where])
        assert (done.exit_code, "there is no dead letter" in done.stderr) == (1, True)
