"""`penstock models`: orders, `--wait`, the list of models and the difference to the configuration file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kit.cli import Json, ScriptedGateway
from penstock.cli.commands.models import set_fields
from penstock.cli.failures import CliFailure

PATH = "/v1/admin/models"
ADD, LIST, LOAD = f"POST {PATH}", f"GET {PATH}", f"POST {PATH}/chat/load"
MODEL, ORDER, ORDERS = f"GET {PATH}/chat", "GET /v1/admin/orders/7", "GET /v1/admin/orders"
ADDED = "add chat --source x --engine noop"


def order(action: str, **fields: Any) -> Json:
    return {"kind": "model", "name": "chat", "pool": None, "revision": 7, "action": action, **fields}


def observed(*waiting: str, workers: bool = True) -> Json:
    return {"observed": workers and not waiting, "waiting_workers": list(waiting)}


def model(state: str, reason: str | None = None, cause: str | None = None, **fields: Any) -> Json:
    known: Json = {"id": "chat", "state": state, "reason": reason, "cause": cause, "progress": None}
    return {**known, "pinned": False, "paused": False, "preload": True, "desired": {"loaded": None}, **fields}


def in_force(name: str, kind: str = "model", **fields: Any) -> Json:
    unset = dict.fromkeys(("pool", "loaded", "pinned", "entry"))
    origin = {"created_at": "2026-11-25T10:00:00Z", "created_by": "3f9c"}
    return {"kind": kind, "name": name, **unset, "paused": False, "removed": False, **origin, **fields}


READY, OBSERVED = "chat is ready\n", "pin model chat in the pool p: all its workers have observed it\n"
BY_ITSELF: list[tuple[Json, str]] = [
    ({"preload": False}, "chat is absent: it is loaded when somebody asks for it\n"),
    ({"preload": False, "pinned": True}, READY),
    ({"preload": False, "desired": {"loaded": True}}, READY),
    ({"preload": True}, READY),
    ({"preload": True, "paused": True}, "chat is absent: it is paused\n"),
    ({"preload": True, "paused": True, "pinned": True}, READY),
    ({"preload": False, "paused": True, "desired": {"loaded": True}}, READY),
]
CALLS = {
    "remove chat": f"DELETE {PATH}/chat",
    **{f"{action} chat": f"POST {PATH}/chat/{action}" for action in ("pin", "unpin", "pause", "resume")},
    **{f"{action} --class low": f"POST /v1/admin/classes/low/{action}" for action in ("pause", "resume")},
}
FAILED = model("failed", "2 loads in a row failed", "OSError: no weights")
LAZY = {"preload": False}
REPLACED: Json = {f"{ADD}?replace=true": order("add"), ORDER: observed()}
CAUSE = "2 loads in a row failed: OSError: no weights"
SHOWN: Json = {**model("ready"), "pool": None, "desired": None, "replicas": []}
NO_LOAD: Json = {**FAILED, "pool": None, "replicas": []}
REPLICA: Json = {
    **NO_LOAD, "worker_id": "w", "replica": 0, "queued": 0, "running": 0,
    **dict.fromkeys(("device", "memory_bytes", "reserved_bytes")),
}  # fmt: skip
ORDERED = {ORDERS: {"data": [in_force("low", "class", paused=True), in_force("chat", pinned=True)]}}
ROWS: list[tuple[str, Json, int, str, str]] = [
    (
        f"{ADDED} --replace --wait",
        {**REPLACED, ORDER: [observed("w1", "w2"), *[observed("w2")] * 20, observed()], MODEL: model("ready")},
        0, READY,
        "chat: not observed yet by w1, w2\nchat: not observed yet by w2\n",
    ),
    *(
        ("load chat --wait --timeout 0.05", {LOAD: order("load"), ORDER: workers}, 4, "",
         f"the order was not observed within 0.05 s: {reason}")
        for workers, reason in (
            (observed("w1"), "not observed yet by w1"), (observed(workers=False), "no live worker is in its pool"),
        )
    ),
    ("pin chat --wait", {CALLS["pin chat"]: order("pin", pool="p"), f"{ORDER}?pool=p": observed()}, 0, OBSERVED, ""),
    *(
        (f"{ADDED} --wait",
         {ADD: order("add"), ORDER: observed(), MODEL: [model(state, **of) for state in ("absent", "ready")]},
         0, stdout, "")
        for of, stdout in BY_ITSELF
    ),
    *(
        (f"{ADDED} --replace --wait", {**REPLACED, MODEL: [model("draining", **LAZY), model("loading", **LAZY), last]},
         exit_code, stdout, "")
        for last, exit_code, stdout in (
            (model("ready", **LAZY), 0, READY), (model("failed", "its load failed", **LAZY), 1, ""),
        )
    ),
    ("load chat --wait", {LOAD: order("load"), ORDER: observed(), MODEL: FAILED}, 1, "", f"chat failed: {CAUSE}"),
    ("list", {LIST: {"data": [NO_LOAD]}, ORDERS: {"data": []}}, 0, CAUSE, ""),
    ("list", {LIST: {"data": [{**NO_LOAD, "replicas": [REPLICA]}]}, ORDERS: {"data": []}}, 0, CAUSE, ""),
    (
        "list", {LIST: {"data": [SHOWN]}, **ORDERED}, 0, "ready",
        "the class low is paused since 2026-11-25T10:00:00Z by the key 3f9c",
    ),
    ("list", {LIST: {"data": [SHOWN]}, **ORDERED}, 0, "ready", "models resume --class low"),
    (
        "list", {LIST: {"data": [{**SHOWN, "paused": None}]}}, 0, "ready",
        "the topic of orders is missing: create it with `penstock topics create`",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "script", "exit_code", "stdout", "stderr"), ROWS)
def test_orders_and_lists(
    gateway: ScriptedGateway, monkeypatch: pytest.MonkeyPatch, arguments: str, script: Json, exit_code: int,
    stdout: str, stderr: str,
) -> None:  # fmt: skip
    """No state from before the order is judged. The timeout bounds the wait for workers too."""
    monkeypatch.setenv("COLUMNS", "200")  # a narrow terminal breaks the text into lines
    gateway.play(script)
    done = gateway.run("models", *arguments.split())
    said = stdout in done.stdout if arguments == "list" else stdout == done.stdout
    assert (done.exit_code, said, stderr in done.stderr) == (exit_code, True, True), done.output
    if isinstance(looks := script.get(ORDER), list):
        assert gateway.asked == [f"{ADD}?replace=true", *[ORDER] * len(looks), MODEL]


@pytest.mark.parametrize(("arguments", "call"), CALLS.items())
def test_orders_without_a_state_to_wait_for_end_once_observed(
    gateway: ScriptedGateway, arguments: str, call: str
) -> None:
    action = arguments.split()[0]
    script: Json = {call: order(action), ORDER: [observed("w1"), observed()]}
    gateway.play(script)
    done = gateway.run("models", *arguments.split(), "--wait")
    assert (done.exit_code, done.stdout) == (0, f"{action} model chat: all its workers have observed it\n")
    assert gateway.asked == [call, ORDER, ORDER]
    gateway.play(script)
    assert "ordered" in gateway.run("models", *arguments.split()).stdout
    assert gateway.asked == [call], "without --wait there is no wait"


def test_diff_lists_what_was_ordered_beside_the_file(gateway: ScriptedGateway, tmp_path: Path) -> None:
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
    gateway.play({ORDERS: [{"data": orders}, {"data": []}]})
    done = gateway.run("models", "diff", "--config", str(config), "--json")
    assert done.exit_code == 1
    assert [tuple(json.loads(line)[name] for name in ("name", "field", "file", "ordered", "by"))
            for line in done.stdout.splitlines()] == [
        ("low", "paused", False, True, "3f9c"),
        ("chat", "source", "owner/chat", "owner/other", "3f9c"),
        ("chat", "loaded", None, True, "3f9c"),
        ("gone", "served", True, False, "3f9c"),
        ("new", "served", False, True, "3f9c"),
    ]  # fmt: skip
    same = gateway.run("models", "diff", "--config", str(config))
    assert (same.exit_code, "all is as the file says" in same.stdout + same.stderr) == (0, True)


def test_add_refuses_a_file_that_is_not_named_by_its_option(gateway: ScriptedGateway, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    file.write_text('{"id": "chat", "engine": "noop"}')
    done = gateway.run("models", "add", str(file))
    assert (done.exit_code, f"--file {file}" in done.stderr, gateway.asked) == (2, True, [])


@pytest.mark.parametrize(
    ("pairs", "fields"),
    [
        (["priority=3", "keep_alive=5m", "pinned=true"], {"priority": 3, "keep_alive": "5m", "pinned": True}),
        (['options={"tokens": 5, "delay_ms": 0.5}'], {"options": {"tokens": 5, "delay_ms": 0.5}}),
        (["options.slots=4", "options.variant=fp16"], {"options": {"slots": 4, "variant": "fp16"}}),
        (["replicas.max=2"], {"replicas": {"max": 2}}),
    ],
)
def test_set_reads_json_else_text_and_a_dot_leads_into_a_table(pairs: list[str], fields: Json) -> None:
    assert set_fields(pairs) == fields


def test_set_refuses_a_field_of_a_value_that_is_no_table() -> None:
    with pytest.raises(CliFailure, match="options is no table"):
        set_fields(["options=4", "options.slots=4"])
