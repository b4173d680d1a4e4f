"""Commands for requests, one by one and for many, and bulk submits, at whatever speed workers follow them."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from gateway_parts import service_with
from kit.gateway_http import call, gateway_app
from kit.records import ORIGIN
from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.inputs import keep_input
from penstock.common.clock import now_ms
from penstock.common.outgoing import Outgoing
from penstock.common.transport import Delivery
from penstock.gateway.edge.bodies import BodyLimits
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.routes import bulk, native
from penstock.gateway.service import control
from penstock.gateway.service.bulk_commands import Bulk, BulkCommands
from penstock.gateway.service.control import AT_ONCE, Control
from penstock.gateway.service.selection import ALL_TENANTS, Selection
from penstock.gateway.service.submitting import Checked
from penstock.gateway.service.turns import Turns
from penstock.gateway.threads import Threads
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable, NotFound, PenstockError, StoreUnavailable, Unauthenticated
from penstock.schemas.ids import idempotent_request_id
from penstock.schemas.records import ControlCommand
from penstock.schemas.topics import TopicNames
from support import wait_until_async

CODEC = default_codec()


class Log:
    """Accepts each command at the broker's time 50, and is caught up at once."""

    def __init__(self, on_command: Callable[[], object] = lambda: None) -> None:
        self.commands: list[ControlCommand] = []
        self._on_command = on_command
        self.catch_up, self.check_whole, self.reached = AsyncMock(), Mock(), AsyncMock(return_value=True)

    async def produce(self, topic: str, value: bytes, **options: Any) -> Any:
        self.commands.append(CODEC.decode(value, ControlCommand))
        self._on_command()
        return SimpleNamespace(offset=0, timestamp_ms=50)


class Broker:
    """Acknowledges commands in their order, or refuses the one with this number."""

    def __init__(self, refused: int = -1, error: PenstockError | None = None) -> None:
        self.slices: list[list[str]] = []
        self._sent = 0
        self._refused, self._error = refused, error

    async def produce_all(self, records: Sequence[Outgoing]) -> list[Delivery]:
        done: list[Delivery] = []
        for record in records:
            error = self._error if self._sent == self._refused else None
            offset = -1 if error else self._sent
            done.append(Delivery(topic=record.topic, partition=0, offset=offset, timestamp_ms=1, error=error))
            self._sent += 1
        self.slices.append([CODEC.decode(one.value or b"", ControlCommand).request_id for one in records])
        return done[::-1]


def control_of(log: Any, *, entry: Any = None, turns: Any = None, store: Any = None, peek: Any = None) -> Control:
    found = AsyncMock(return_value=entry)
    lookups = SimpleNamespace(find=found, with_outcome=found, peek=peek)
    parts: Any = (log, None, log, lookups, CODEC, TopicNames(), store, Allowances(), Threads(), turns)
    return Control(*parts)


def entry_of(request_id: str = "r", **fields: Any) -> Any:
    known = {"tenant": "t", "origin": ORIGIN, "conversation_id": None, "done": True, "artifact_ids": ()}
    return SimpleNamespace(request_id=request_id, **{**known, **fields})


async def test_many_are_abandoned_in_groups_and_one_that_was_erased_stops_none() -> None:
    broker = Broker()
    entries = {f"r{n}": entry_of(f"r{n}", done=n == 1, erased=n == 2) for n in range(250)}
    abandoning = control_of(broker, peek=lambda _, one: entries.get(one))  # type: ignore[reportUnknownLambdaType]
    left = ["unknown", *entries]
    while handled := await abandoning.abandon_some("t", left, "why"):
        left = [one for one in left if one not in handled]
    assert left == ["unknown"]
    assert [len(some) for some in broker.slices] == [98, 100, 50]


@pytest.mark.parametrize("ended", [False, True])
async def test_whether_a_cancel_ends_a_request_is_decided_when_it_is_asked_for(ended: bool) -> None:
    entry = entry_of(done=ended)
    log = Log(lambda: setattr(entry, "done", True))  # it ends before the broker's acknowledgement is back
    assert await control_of(log, entry=entry).cancel(Caller(tenant="t"), "r") == (entry, not ended)
    assert len(log.commands) == (0 if ended else 1)


@pytest.mark.parametrize(("task", "stored_text"), [("image_editing", False), ("embedding", True)])
@pytest.mark.parametrize("calls", range(12))
async def test_a_request_is_erased_with_its_artifacts_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int, task: str, stored_text: bool
) -> None:
    store = ArtifactStore(tmp_path)
    made, brought = store.put("t", b"made"), str(uuid.uuid4())
    keep_input(store, "t", "r", b"brought", artifact_id=brought, media_type="image/png")
    entry = entry_of(task=task, stored_text=stored_text, artifact_ids={made.artifact_id})
    log, left = Log(), iter(range(calls))
    works = type(store.places[None]).as_store_unavailable

    def fails_later(place: Any) -> Any:
        if next(left, None) is None:
            raise StoreUnavailable("the store is away")
        return works(place)

    control = control_of(log, entry=entry, store=store)
    with monkeypatch.context() as patch:
        patch.setattr(type(store.places[None]), "as_store_unavailable", fails_later)
        with pytest.raises(StoreUnavailable):
            await control.erase("t", "r")
    assert log.commands == []
    await control.erase("t", "r")
    assert [command.kind for command in log.commands] == ["erase"]
    assert list(store.places[None].items("t")) == []


async def test_a_request_without_stored_inputs_is_erased_while_the_store_is_away() -> None:
    log = Log()
    await control_of(log, entry=entry_of(task="embedding", stored_text=False)).erase("t", "r")
    assert [command.kind for command in log.commands] == ["erase"]


def requests_that_wait(count: int) -> Any:
    return [entry_of(f"r{number}", done=False) for number in range(count)]


async def test_many_commands_are_sent_in_slices_and_in_order() -> None:
    broker, count = Broker(), 2 * control.AT_ONCE + 1
    assert await control_of(broker).command_all("cancel", requests_that_wait(count)) == count - 1
    assert [len(one) for one in broker.slices] == [control.AT_ONCE, control.AT_ONCE, 1]
    assert [one for some in broker.slices for one in some] == [f"r{number}" for number in range(count)]
    assert await control_of(broker).command_all("cancel", []) == -1


@pytest.mark.parametrize("error", [NotFound("no topic"), BrokerUnavailable("no broker")])
async def test_a_refused_command_ends_a_call_with_many(error: PenstockError) -> None:
    broker = Broker(control.AT_ONCE + 1, error)
    with pytest.raises(BrokerUnavailable):
        await control_of(broker).command_all("cancel", requests_that_wait(3 * control.AT_ONCE))
    assert len(broker.slices) == 2


def turn(request_id: str, append_time_ms: int | None) -> Any:
    origin = None if append_time_ms is None else replace(ORIGIN, append_time_ms=append_time_ms)
    return entry_of(request_id, done=False, origin=origin)


def with_turns(log: Log, turns: list[Any]) -> Control:
    """The control of a gateway that knows these turns of each conversation."""
    view = Mock(known=SimpleNamespace(some_on_disk=False))
    view.census.of_conversation = lambda *_: {one.request_id: one for one in turns if not one.done}
    return control_of(log, turns=Turns(view, Threads()))


async def test_a_deletion_is_commanded_and_waits_for_the_turns_before_it() -> None:
    log, before, after = Log(), turn("before", 50), turn("after", 51)
    control = with_turns(log, [before, after])
    assert await control.has_turns("acme", "c1")
    deleting = asyncio.create_task(control.end_turns("acme", "c1"))
    await wait_until_async(lambda: log.commands, 10, "the command")
    (command,) = log.commands
    assert (command.kind, command.tenant, command.conversation_id) == ("delete_conversation", "acme", "c1")
    await asyncio.sleep(0)
    assert not deleting.done()
    before.done = True
    await asyncio.wait_for(deleting, 10)
    assert not after.done


async def test_a_deletion_waits_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "TURNS_END_S", 0.1)
    log = Log()
    await asyncio.wait_for(with_turns(log, [turn("r", None)]).end_turns("acme", "c1"), 10)
    assert len(log.commands) == 1
    assert not await with_turns(Log(), []).has_turns("acme", "c1")


@pytest.mark.parametrize(("done", "steps"), [(True, ["forget", "erase"]), (False, ["erase"])])
async def test_erasing_over_http_purges_dead_letters_first(done: bool, steps: list[str]) -> None:
    part = Mock(find=AsyncMock(return_value=SimpleNamespace(done=done, status_name="completed")))
    part.forget, part.erase = AsyncMock(), AsyncMock()
    app = gateway_app(native.router, service=service_with(part))
    assert (await call(app, "DELETE", "/v1/requests/r")).json()["deleted"]
    calls = [one for one in part.mock_calls if one[0] != "find"]
    assert [(name, args[-1]) for name, args, _ in calls] == [(step, "r") for step in steps]


# -- bulk submits


class Submitting:
    """Accepts every request, except those whose prompt is `fail`."""

    def __init__(self) -> None:
        self.submitted: list[Any] = []
        self.facts = self
        self.flying = self.most = 0

    def catching_up(self) -> None:
        return None

    async def check(self, caller: Any, request: Any) -> Any:
        return Checked(caller, request, None)

    async def submit(self, checked: Checked, *, idempotency_key: str | None, **_: Any) -> Any:
        request = checked.request
        if request.payload["prompt"] == "fail":
            raise RuntimeError("unforeseen")
        self.flying += 1
        self.most = max(self.most, self.flying)
        await asyncio.sleep(0.01)
        self.flying -= 1
        request_id = request.request_id
        if idempotency_key is not None:
            request_id = idempotent_request_id("default", idempotency_key)
        self.submitted.append(request)
        return SimpleNamespace(request_id=request_id)


def line(**fields: Any) -> bytes:
    return json.dumps({"task": "text_generation", "payload": {"prompt": "p"}, **fields}).encode() + b"\n"


async def answers(
    content: bytes | AsyncIterator[bytes], submitting: Submitting | None = None, limits: BodyLimits | None = None
) -> list[str]:
    """For each line "taken", or the code of its error."""
    app = gateway_app(bulk.router, service=service_with(submitting or Submitting()), bodies=limits)
    headers = {"content-type": bulk.MEDIA_TYPE}
    response = await call(app, "POST", "/v1/requests/bulk", content=content, headers=headers)
    assert response.status_code == 200, response.text
    found = [json.loads(line) for line in response.text.splitlines()]
    assert [one["index"] for one in found] == list(range(len(found)))
    return [one["error"]["code"] if "error" in one else "taken" for one in found]


async def many_lines(stops_after: int | None = None) -> AsyncIterator[bytes]:
    for number in range(20):
        if number == stops_after:
            await asyncio.Event().wait()
        yield line()


@pytest.mark.parametrize(
    ("content", "limits", "most_lines", "taken", "code"),
    [
        (lambda: many_lines(stops_after=3), BodyLimits(timeout_s=0.1), 100, 3, "invalid"),
        (many_lines, BodyLimits(max_lines_bytes=10 * len(line())), 100, 10, "too_large"),
        (lambda: line() * 9, None, 5, 5, "too_large"),
    ],
    ids=["the body stops", "the body is too large", "too many lines"],
)
async def test_a_body_that_breaks_off_is_answered_with_what_was_taken(
    monkeypatch: pytest.MonkeyPatch, content: Any, limits: BodyLimits | None, most_lines: int, taken: int, code: str
) -> None:
    monkeypatch.setattr(bulk, "MAX_LINES", most_lines)
    assert await answers(content(), limits=limits) == ["taken"] * taken + [code]


async def test_a_line_with_an_unforeseen_failure_fails_alone() -> None:
    submitting = Submitting()
    odd = [line(idempotency_key="\ud800"), line(payload={"prompt": "x", "seed": float("inf")})]
    lines = [line(), *odd, line(payload={"prompt": "fail"}), line()]
    assert await answers(b"".join(lines), submitting) == ["taken", "invalid", "invalid", "internal", "taken"]
    assert len(submitting.submitted) == 2


@pytest.mark.parametrize("at_once", [9, 3])
async def test_lines_in_flight_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    submitting = Submitting()
    monkeypatch.setattr(bulk, "AT_ONCE_BYTES", at_once * len(line()))
    assert await answers(line() * 9, submitting) == ["taken"] * 9
    assert submitting.most == at_once


# -- a command about many requests that ends early


OPERATOR = Caller(tenant="ops", key_id="k", scopes=frozenset({"cancel", "admin"}))
CHANGES: dict[str, Any] = {
    "revoked": (Unauthenticated("this key was revoked"), "unauthenticated"),
    "scopes": (replace(OPERATOR, scopes=frozenset({"read"})), "forbidden"),
    "operator": (replace(OPERATOR, scopes=frozenset({"cancel"})), "forbidden"),
    "broker": (BrokerUnavailable("no broker"), "broker_unavailable"),
}


class World:
    """Requests of another tenant, and a key that changes, or a broker that is away, once a batch was commanded."""

    def __init__(self, change: Any, *, comes_again: bool = False) -> None:
        self.change = change
        self.commanded: list[str] = []
        self._comes_again = comes_again
        """Each request that is commanded is submitted anew."""
        self._accepted_ms = [1] * 3 * AT_ONCE
        parts: Any = (self, SimpleNamespace(tenants=self), self, Allowances(renew=self.renew))
        self.commands = BulkCommands(*parts)

    def known(self) -> list[str]:
        return ["others"]

    def renew(self, caller: Caller) -> Caller:
        if not self.commanded or isinstance(self.change, BrokerUnavailable):
            return caller
        if isinstance(self.change, PenstockError):
            raise self.change
        return self.change

    async def catch_up(self) -> None: ...

    async def live(self, tenants: Collection[str], klass: str | None) -> AsyncIterator[Any]:
        for number, accepted_ms in enumerate(self._accepted_ms):  # it gets longer meanwhile
            name = f"r{number}"
            yield SimpleNamespace(
                key=("others", name), request_id=name, tenant="others", accepted_ms=accepted_ms, done=False,
                erased=False, cancelled_ms=None,
            )  # fmt: skip

    async def command_all(self, kind: str, entries: Sequence[Any], priority: int | None) -> int:
        if self.commanded and isinstance(self.change, BrokerUnavailable):
            raise self.change
        self.commanded += [entry.request_id for entry in entries]
        assert len(self.commanded) <= 3 * AT_ONCE, "it follows what its own commands bring about"
        if self._comes_again:
            self._accepted_ms += [now_ms() + 60_000] * len(entries)
        return 0


@pytest.mark.parametrize("change", CHANGES)
async def test_the_error_of_a_command_that_ends_early_says_how_many_were_commanded(change: str) -> None:
    raised, code = CHANGES[change]
    world = World(raised)
    with pytest.raises(PenstockError) as ended:
        await world.commands.cancel(OPERATOR, Bulk(chosen=Selection(tenant=ALL_TENANTS)))
    assert (ended.value.code, (ended.value.details or {})["count"]) == (code, AT_ONCE)
    assert len(world.commanded) == AT_ONCE


@pytest.mark.parametrize("comes_again", [False, True])
async def test_all_that_were_accepted_before_the_call_are_commanded(comes_again: bool) -> None:
    world = World(OPERATOR, comes_again=comes_again)
    done = await world.commands.cancel(OPERATOR, Bulk(chosen=Selection(tenant=ALL_TENANTS)))
    assert (done.count, len(world.commanded)) == (3 * AT_ONCE, 3 * AT_ONCE)
