"""`penstock models … --wait` against a scripted gateway: no state of before the order is judged."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from penstock.cli.commands import order_waits
from penstock.cli.commands.models import set_fields
from penstock.cli.failures import CliFailure
from penstock.cli.main import app

Json = dict[str, Any]
MODEL, ORDER = "/v1/admin/models/chat", "/v1/admin/orders/7"
ORDERS = "GET /v1/admin/orders"


class Gateway(ThreadingHTTPServer):
    """Answers each method and path by the next of its script, the last one again and again."""

    daemon_threads = True
    script: dict[str, list[Json]]
    asked: list[str]

    def run(self, *arguments: str) -> Result:
        url = f"http://127.0.0.1:{self.server_address[1]}"
        return CliRunner().invoke(app, ["models", *arguments, "--url", url])


class Handler(BaseHTTPRequestHandler):
    server: Gateway
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", "0")))
        asked = f"{self.command} {self.path}"
        self.server.asked.append(asked)
        answers = self.server.script.get(asked) or [{"error": {"message": asked, "code": "not_found"}}]
        body = json.dumps(answers.pop(0) if len(answers) > 1 else answers[0]).encode()
        self.send_response(200 if asked in self.server.script else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_DELETE = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        return


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gateway]:
    monkeypatch.setattr(order_waits, "POLL_S", 0.01)
    monkeypatch.setattr(order_waits, "FAILED_S", 0.1)
    server = Gateway(("127.0.0.1", 0), Handler)
    server.script, server.asked = {}, []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join(10)
    server.server_close()


def order(action: str, **fields: Any) -> Json:
    return {"kind": "model", "name": "chat", "pool": None, "revision": 7, "action": action, **fields}


def observed(*waiting: str, workers: bool = True) -> Json:
    return {"observed": workers and not waiting, "waiting_workers": list(waiting)}


def model(state: str, reason: str | None = None, cause: str | None = None, **fields: Any) -> Json:
    known: Json = {"id": "chat", "state": state, "reason": reason, "cause": cause, "progress": None}
    return {**known, "pinned": False, "paused": False, "preload": True, "desired": {"loaded": None}, **fields}


def test_a_state_of_before_the_order_is_not_judged(gateway: Gateway) -> None:
    """`add --replace --wait` after an add that had failed ended with "2 loads in a row failed", of the old entry."""
    gateway.script = {
        "POST /v1/admin/models?replace=true": [order("add")],
        f"GET {ORDER}": [observed("w1", "w2"), *[observed("w2")] * 20, observed()],
        f"GET {MODEL}": [model("ready")],
    }
    done = gateway.run("add", "chat", "--source", "x", "--engine", "noop", "--replace", "--wait")
    assert (done.exit_code, done.stdout) == (0, "chat is ready\n")
    assert gateway.asked.index(f"GET {MODEL}") == 23, "the model is not even looked at before"
    assert "chat: not observed yet by w1, w2\nchat: not observed yet by w2\n" in done.stderr


@pytest.mark.parametrize(
    ("workers", "why"),
    [(observed("w1"), "not observed yet by w1"), (observed(workers=False), "no live worker is in its pool")],
)
def test_an_order_that_nobody_observes_is_waited_for_so_long_as_asked(
    gateway: Gateway, workers: Json, why: str
) -> None:
    gateway.script = {f"POST {MODEL}/load": [order("load")], f"GET {ORDER}": [workers]}
    done = gateway.run("load", "chat", "--wait", "--timeout", "0.05")
    assert done.exit_code == 4
    assert f"the order was not observed within 0.05 s: {why}" in done.stderr


@pytest.mark.parametrize(
    ("method", "path", "arguments", "action"),
    [
        ("DELETE", MODEL, ["remove", "chat"], "remove"),
        ("POST", f"{MODEL}/pin", ["pin", "chat"], "pin"),
        ("POST", f"{MODEL}/unpin", ["unpin", "chat"], "unpin"),
        ("POST", f"{MODEL}/pause", ["pause", "chat"], "pause"),
        ("POST", f"{MODEL}/resume", ["resume", "chat"], "resume"),
        ("POST", "/v1/admin/classes/low/pause", ["pause", "--class", "low"], "pause"),
        ("POST", "/v1/admin/classes/low/resume", ["resume", "--class", "low"], "resume"),
    ],
)
def test_orders_without_a_state_to_wait_for_end_once_observed(
    gateway: Gateway, method: str, path: str, arguments: list[str], action: str
) -> None:
    gateway.script = {f"{method} {path}": [order(action)], f"GET {ORDER}": [observed("w1"), observed()]}
    done = gateway.run(*arguments, "--wait")
    assert (done.exit_code, done.stdout) == (0, f"{action} model chat: all its workers have observed it\n")
    assert gateway.asked == [f"{method} {path}", f"GET {ORDER}", f"GET {ORDER}"]
    gateway.asked.clear()
    assert "ordered" in gateway.run(*arguments).stdout
    assert gateway.asked == [f"{method} {path}"], "without --wait nothing is waited for"


def test_an_order_in_a_pool_asks_the_workers_of_that_pool(gateway: Gateway) -> None:
    gateway.script = {f"POST {MODEL}/pin": [order("pin", pool="p")], f"GET {ORDER}?pool=p": [observed()]}
    done = gateway.run("pin", "chat", "--wait")
    assert (done.exit_code, done.stdout) == (0, "pin model chat in the pool p: all its workers have observed it\n")


@pytest.mark.parametrize(
    ("fields", "ends"),
    [
        ({"preload": False}, True),
        ({"preload": False, "pinned": True}, False),
        ({"preload": False, "desired": {"loaded": True}}, False),
        ({"preload": True}, False),
        ({"preload": True, "paused": True}, True),
        ({"preload": True, "paused": True, "pinned": True}, False),
        ({"preload": False, "paused": True, "desired": {"loaded": True}}, False),
    ],
)
def test_an_added_model_that_nobody_loads_is_not_waited_for(gateway: Gateway, fields: Json, ends: bool) -> None:
    gateway.script = {
        "POST /v1/admin/models": [order("add")],
        f"GET {ORDER}": [observed()],
        f"GET {MODEL}": [model("absent", **fields), model("ready", **fields)],
    }
    done = gateway.run("add", "chat", "--source", "x", "--engine", "noop", "--wait")
    why = "it is paused" if fields.get("paused") else "it is loaded when somebody asks for it"
    expected = f"chat is absent: {why}\n" if ends else "chat is ready\n"
    assert (done.exit_code, done.stdout) == (0, expected)


@pytest.mark.parametrize(
    ("last", "exit_code", "said"),
    [(model("ready", preload=False), 0, "chat is ready\n"), (model("failed", "its load failed", preload=False), 1, "")],
)
def test_one_that_takes_the_place_of_a_loaded_model_is_waited_for(
    gateway: Gateway, last: Json, exit_code: int, said: str
) -> None:
    """`--replace --set preload=false --wait` ended with "chat is loading", whatever came of the load."""
    gateway.script = {
        "POST /v1/admin/models?replace=true": [order("add")],
        f"GET {ORDER}": [observed()],
        f"GET {MODEL}": [model("draining", preload=False), model("loading", preload=False), last],
    }
    done = gateway.run("add", "chat", "--source", "x", "--engine", "noop", "--replace", "--wait")
    assert (done.exit_code, done.stdout) == (exit_code, said)


def test_a_load_that_keeps_failing_ends_the_wait_with_its_cause(gateway: Gateway) -> None:
    failed = model("failed", "2 loads in a row failed", "OSError: no weights")
    gateway.script = {f"POST {MODEL}/load": [order("load")], f"GET {ORDER}": [observed()], f"GET {MODEL}": [failed]}
    done = gateway.run("load", "chat", "--wait")
    assert done.exit_code == 1
    assert "chat failed: 2 loads in a row failed: OSError: no weights" in done.stderr


def test_the_list_says_what_made_a_load_fail(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal breaks the text into lines
    failed = {**model("failed", "2 loads in a row failed", "OSError: no weights"), "pool": None, "paused": False}
    replica = {**failed, "worker_id": "w", "replica": 0, "device": None, "memory_bytes": None, "reserved_bytes": None}
    for replicas in ([], [{**replica, "queued": 0, "running": 0}]):
        gateway.script = {
            "GET /v1/admin/models": [{"data": [{**failed, "replicas": replicas}]}],
            ORDERS: [{"data": []}],
        }
        assert "2 loads in a row failed: OSError: no weights" in gateway.run("list").stdout


def in_force(name: str, kind: str = "model", **fields: Any) -> Json:
    unset = dict.fromkeys(("pool", "loaded", "pinned", "entry"))
    told = {"created_at": "2026-11-25T10:00:00Z", "created_by": "3f9c"}
    return {"kind": kind, "name": name, **unset, "paused": False, "removed": False, **told, **fields}


def test_the_list_says_which_classes_are_paused(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing said so: requests of the class waited for days, and every model was ready."""
    monkeypatch.setenv("COLUMNS", "200")
    shown = {**model("ready"), "pool": None, "paused": False, "desired": None, "replicas": []}
    orders = [in_force("low", "class", paused=True), in_force("chat", pinned=True)]
    gateway.script = {"GET /v1/admin/models": [{"data": [shown]}], ORDERS: [{"data": orders}]}
    told = gateway.run("list").stderr
    assert "the class low is paused since 2026-11-25T10:00:00Z by the key 3f9c" in told
    assert "models resume --class low" in told


def test_what_was_ordered_beside_the_file(gateway: Gateway, tmp_path: Path) -> None:
    entry = {"id": "chat", "source": "owner/chat", "engine": "text"}
    others = "".join(f'[[models]]\nid = "{one}"\nsource = "o/{one}"\nengine = "text"\n' for one in ("gone", "plain"))
    config = tmp_path / "penstock.toml"
    config.write_text('[[models]]\nid = "chat"\nsource = "owner/chat"\nengine = "text"\npinned = true\n' + others)
    orders = [
        in_force("low", "class", paused=True),
        in_force("chat", entry={**entry, "source": "owner/other"}, pinned=True, loaded=True),
        in_force("gone", removed=True),
        in_force("new", entry={**entry, "id": "new"}),
        in_force("added-and-removed", removed=True),
    ]
    gateway.script = {ORDERS: [{"data": orders}]}
    done = gateway.run("diff", "--config", str(config), "--json")
    assert done.exit_code == 1
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["by"] for row in rows} == {"3f9c"}
    assert [(row["name"], row["field"], row["file"], row["ordered"]) for row in rows] == [
        ("low", "paused", False, True),
        ("chat", "source", "owner/chat", "owner/other"),
        ("chat", "loaded", None, True),
        ("gone", "served", True, False),
        ("new", "served", False, True),
    ]
    gateway.script = {ORDERS: [{"data": []}]}
    same = gateway.run("diff", "--config", str(config))
    assert (same.exit_code, "all is as the file says" in same.stdout + same.stderr) == (0, True)


def test_the_list_shows_models_whose_orders_are_unknown(gateway: Gateway) -> None:
    shown = {**model("ready"), "pool": None, "paused": None, "desired": None, "replicas": []}
    gateway.script = {"GET /v1/admin/models": [{"data": [shown]}]}
    listed = gateway.run("list")
    assert (listed.exit_code, "ready" in listed.stdout) == (0, True)
    assert "the topic of orders is missing: create it with `penstock topics create`" in listed.stderr


def test_a_file_without_its_option_is_no_id(gateway: Gateway, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text('{"id": "chat", "engine": "noop"}')
    result = gateway.run("add", str(file))
    assert result.exit_code == 2
    assert f"--file {file}" in result.stderr
    assert not gateway.asked


def test_set_gives_numbers_as_numbers_and_what_is_no_json_as_text() -> None:
    pairs = ["priority=3", "keep_alive=5m", "pinned=true", 'options={"tokens": 5, "delay_ms": 0.5}']
    fields = {"priority": 3, "keep_alive": "5m", "pinned": True, "options": {"tokens": 5, "delay_ms": 0.5}}
    assert set_fields(pairs) == fields


def test_a_dot_leads_into_a_table() -> None:
    assert set_fields(["options.slots=4", "options.variant=fp16", "replicas.max=2"]) == {
        "options": {"slots": 4, "variant": "fp16"},
        "replicas": {"max": 2},
    }
    with pytest.raises(CliFailure, match="options is no table"):
        set_fields(["options=4", "options.slots=4"])
