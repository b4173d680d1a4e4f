"""watch and submit over HTTP: a lost connection is resumed, a deadline is kept."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from typing import Any

import pytest

from kit.cli import Json, ScriptedGateway, events, invoke
from penstock.cli.paths import free_port
from support import wait_until


def chunk(text: str, cursor: str) -> Json:
    return {"type": "chunk", "text": text, "cursor": cursor}


SUBMIT, REQUEST, EVENTS = "POST /v1/requests", "GET /v1/requests/r", "GET /v1/requests/r/events"
ACCEPTED = (202, {"request_id": "r", "status": "accepted"})
ACTIVE: Json = {"status": "running", "done": False}
RUNNING: Json = {"type": "status", **ACTIVE, "cursor": "c0"}
RESULT: Json = {"type": "result", "status": "completed", "result": {"text": "one two"}, "error": None, "cursor": "c9"}
AWAY = (503, {"error": {"message": "the gateway waits for its broker", "code": "broker_unavailable"}})
GONE = (404, {"error": {"message": "there is no request r", "code": "not_found"}})
FAILED: Json = {"status": "failed", "done": True, "error": {"message": "no luck"}}
WAITS: Json = {"status": "accepted", "done": False, "detail": "no worker is alive", "position": None}
WHY, AWAIT, END = "[accepted: no worker is alive]\n", "\n[the gateway is away; waiting for it]\n", "\n[completed]\n"
COMPLETED: Json = {**RESULT, "done": True}
RESUMED = [
    events(RUNNING, chunk("one", "c1"), then="cut"),
    AWAY,
    events({**RUNNING, "cursor": "c1"}, chunk(" two", "c2"), RESULT),
]


FOLLOWS: dict[str, tuple[str, Json, int, str, str]] = {
    "resumed while the gateway was away": ("watch r", {EVENTS: RESUMED}, 0, "one two", f"[running]\n{AWAIT}{END}"),
    "watched after its end": (
        "watch r --after c9", {EVENTS: (204, None), REQUEST: FAILED}, 1, "",
        "\n[no luck]\n\n[failed]\npenstock: r failed\n",
    ),
    "refused": (
        "watch r", {EVENTS: [events(RUNNING, then="cut"), GONE]}, 1, "",
        f"[running]\n{AWAIT}penstock: there is no request r (not_found)\n",
    ),
    "a separator inside a text ends no line": (
        "watch r", {EVENTS: events(RUNNING, chunk("a\u2028b\x85c", "c1"), RESULT)}, 0, "a\u2028b\x85c",
        f"[running]\n{END}",
    ),
    "the gateway restarts": (
        "submit hello", {SUBMIT: ACCEPTED, REQUEST: [ACTIVE, AWAY, COMPLETED]}, 0, "one two\n", f"[running]\n{AWAIT}"
    ),
    "submit says once why it waits": (
        "submit hello", {SUBMIT: ACCEPTED, REQUEST: [WAITS, WAITS, COMPLETED]}, 0, "one two\n", WHY
    ),
    "watch says why it waits": (
        "watch r", {REQUEST: WAITS, EVENTS: events({**RUNNING, "status": "accepted"}, RUNNING, RESULT)}, 0,
        "one two", f"{WHY}[running]\n{END}",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("arguments", "script", "exit_code", "stdout", "stderr"), FOLLOWS.values(), ids=FOLLOWS)
def test_follow(
    gateway: ScriptedGateway, arguments: str, script: Json, exit_code: int, stdout: str, stderr: str
) -> None:
    gateway.play(script)
    done = gateway.run(*arguments.split())
    assert (done.exit_code, done.stdout, done.stderr) == (exit_code, stdout, stderr)
    if script.get(EVENTS) is RESUMED:
        assert gateway.cursors == [None, "c1", "c1"]


def test_watch_fails_at_once_if_the_gateway_never_answered() -> None:
    assert invoke("watch", "r", "--url", f"http://127.0.0.1:{free_port()}").exit_code == 3


def test_submit_keeps_its_deadline_while_a_stream_is_silent(gateway: ScriptedGateway) -> None:
    gateway.play({SUBMIT: ACCEPTED, EVENTS: events(RUNNING, chunk("one", "c1"), then="hold")})
    began = time.monotonic()
    done = gateway.run("submit", "hello", "--stream", "--timeout", "0.5")
    assert (done.exit_code, done.stdout) == (4, "one"), done.output
    assert f"r is still running after 0.5 s; it goes on: `penstock watch r --url {gateway.url}`" in done.stderr
    assert time.monotonic() - began < 20  # not the 30 s after which a silent connection is given up


@pytest.mark.parametrize(
    "arguments", [["hello"], ["hello", "--stream"], ["embed", "x"], ["caption", "http://127.0.0.1/x.png"]]
)
def test_ctrl_c_ends_the_wait_and_names_the_next_commands(gateway: ScriptedGateway, arguments: list[str]) -> None:
    gateway.play({SUBMIT: ACCEPTED, REQUEST: ACTIVE, EVENTS: events(RUNNING, then="hold")})
    command: list[Any] = [sys.executable, "-m", "penstock.cli.main", "submit", *arguments, "--url", gateway.url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: any(call.startswith(REQUEST) for call in gateway.asked), 60, "it waits")
    process.send_signal(signal.SIGINT)
    out, said = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert f"\nstill running: penstock watch r --url {gateway.url}\n" in said
    assert said.endswith(f"penstock requests cancel r --url {gateway.url}\n")
    assert "Traceback" not in said
