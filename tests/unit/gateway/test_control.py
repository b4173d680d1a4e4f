"""Commands for requests: cancel, erase and the deletion of a conversation, at whatever speed workers follow them."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from gateway_parts import service_with
from kit.gateway_http import client, gateway_app
from kit.records import ORIGIN
from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.inputs import keep_input
from penstock.common.outgoing import Outgoing
from penstock.common.transport import Delivery
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.routes import native
from penstock.gateway.service import control
from penstock.gateway.service.control import Control
from penstock.gateway.service.turns import Turns
from penstock.gateway.threads import Threads
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable, NotFound, PenstockError, StoreUnavailable
from penstock.schemas.records import ControlCommand
from penstock.schemas.topics import TopicNames
from support import wait_until_async

CODEC = default_codec()


class Log:
    """Accepts each command at the broker's time 50, and is caught up at once."""

    def __init__(self, on_command: Callable[[], object] = lambda: None) -> None:
        self.commands: list[ControlCommand] = []
        self._on_command = on_command
        self.catch_up, self.reached = AsyncMock(), AsyncMock(return_value=True)

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
    works = type(store.places[None]).telling_failures

    def fails_later(place: Any) -> Any:
        if next(left, None) is None:
            raise StoreUnavailable("the store is away")
        return works(place)

    control = control_of(log, entry=entry, store=store)
    with monkeypatch.context() as patch:
        patch.setattr(type(store.places[None]), "telling_failures", fails_later)
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
    view = Mock(known=SimpleNamespace(some_aside=False))
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
    async with client(gateway_app(native.router, service=service_with(part))) as http:
        assert (await http.delete("/v1/requests/r")).json()["deleted"]
    calls = [call for call in part.mock_calls if call[0] != "find"]
    assert [(name, args[-1]) for name, args, _ in calls] == [(step, "r") for step in steps]
