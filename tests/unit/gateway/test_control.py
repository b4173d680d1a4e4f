"""Asking for the end of a request: what is told follows from when it was asked, not from how quick the worker is."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.inputs import keep_input
from penstock.common.outgoing import Outgoing
from penstock.common.transport import Delivery
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service import control
from penstock.gateway.service.control import Control
from penstock.gateway.threads import Threads
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable, NotFound, PenstockError, StoreUnavailable
from penstock.schemas.records import ControlCommand, Origin
from penstock.schemas.topics import TopicNames
from support import wait_until_async

ORIGIN = Origin(topic="inference.request.high", partition=0, offset=1, append_time_ms=1)


class QuickWorker:
    """Ends the request before the broker's acknowledgement is back."""

    def __init__(self, entry: Any) -> None:
        self.entry = entry
        self.commands = 0

    async def produce(self, *args: Any, **options: Any) -> Any:
        self.commands += 1
        self.entry.done = True
        return SimpleNamespace(offset=0)


@pytest.mark.parametrize("ended", [False, True])
async def test_whether_an_end_was_asked_for_is_decided_when_it_is_asked(ended: bool) -> None:
    """202 became 200 where a worker was quick, though this call had asked for the end."""
    entry = SimpleNamespace(request_id="r", tenant="t", done=ended, origin=ORIGIN, conversation_id=None)
    worker = QuickWorker(entry)

    class Found:
        async def find(self, tenant: str, request_id: str) -> Any:
            return entry

        async def with_outcome(self, entry: Any) -> Any:
            return entry

    unused: Any = None
    parts: Any = (worker, unused, unused, Found())
    one = Control(*parts, default_codec(), TopicNames(), unused, Allowances(), Threads())
    assert await one.cancel(Caller(tenant="t"), "r") == (entry, not ended)
    assert worker.commands == (0 if ended else 1)


@pytest.mark.parametrize(("task", "stored_text"), [("image_editing", False), ("embedding", True)])
@pytest.mark.parametrize("calls", range(12))
async def test_a_request_is_erased_with_its_artifacts_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int, task: str, stored_text: bool
) -> None:
    """With the store away it was 503, the repeat was 410, and the images stayed for ever."""
    store = ArtifactStore(tmp_path)
    made, brought = store.put("t", b"made"), str(uuid.uuid4())
    keep_input(store, "t", "r", b"brought", artifact_id=brought, media_type="image/png")
    entry = SimpleNamespace(
        request_id="r",
        tenant="t",
        task=task,
        stored_text=stored_text,
        done=True,
        origin=ORIGIN,
        conversation_id=None,
        artifact_ids={made.artifact_id},
    )
    log, left = Log(), iter(range(calls))
    works = type(store.places[None]).telling_failures

    def fails_later(place: Any) -> Any:
        if next(left, None) is None:
            raise StoreUnavailable("the store is away")
        return works(place)

    class Found:
        async def find(self, tenant: str, request_id: str) -> Any:
            return entry

    parts: Any = (log, None, log, Found(), default_codec(), TopicNames(), store, Allowances(), Threads())
    control = Control(*parts)
    with monkeypatch.context() as patch:
        patch.setattr(type(store.places[None]), "telling_failures", fails_later)
        with pytest.raises(StoreUnavailable):
            await control.erase("t", "r")
    assert log.commands == []
    await control.erase("t", "r")
    assert [command.kind for command in log.commands] == ["erase"]
    assert list(store.places[None].items("t")) == []


async def test_a_request_without_stored_inputs_is_erased_while_the_store_is_away() -> None:
    entry = SimpleNamespace(
        request_id="r",
        tenant="t",
        task="embedding",
        stored_text=False,
        done=True,
        origin=ORIGIN,
        conversation_id=None,
        artifact_ids=(),
    )
    log, unused = Log(), None

    class Found:
        async def find(self, tenant: str, request_id: str) -> Any:
            return entry

    parts: Any = (log, None, log, Found(), default_codec(), TopicNames(), unused, Allowances(), Threads())
    await Control(*parts).erase("t", "r")
    assert [command.kind for command in log.commands] == ["erase"]


class Log:
    """Takes a command at the broker's time 50, and follows at once."""

    def __init__(self) -> None:
        self.commands: list[ControlCommand] = []

    async def produce(self, topic: str, value: bytes, **options: Any) -> Any:
        self.commands.append(default_codec().decode(value, ControlCommand))
        return SimpleNamespace(offset=0, timestamp_ms=50)

    async def catch_up(self) -> None:
        pass

    async def reached(self, ends: Any, deadline_s: float) -> bool:
        return True


class Broker:
    """Acknowledges commands in their order, or refuses the one with this place."""

    def __init__(self, refused: int = -1, error: PenstockError | None = None) -> None:
        self.slices: list[list[str]] = []
        self._sent = 0
        self._refused, self._error = refused, error

    async def produce_all(self, records: Sequence[Outgoing]) -> list[Delivery]:
        told: list[Delivery] = []
        for record in records:
            error = self._error if self._sent == self._refused else None
            offset = -1 if error else self._sent
            told.append(Delivery(topic=record.topic, partition=0, offset=offset, timestamp_ms=1, error=error))
            self._sent += 1
        self.slices.append([default_codec().decode(one.value or b"", ControlCommand).request_id for one in records])
        return told[::-1]


def commanding(broker: Broker) -> Control:
    parts: Any = (broker, None, None, None, default_codec(), TopicNames(), None, Allowances(), Threads())
    return Control(*parts)


def waiting(count: int) -> Any:
    fields: dict[str, Any] = {"tenant": "t", "origin": ORIGIN, "conversation_id": None}
    return [SimpleNamespace(request_id=f"r{number}", **fields) for number in range(count)]


async def test_many_commands_are_sent_some_at_a_time_in_their_order() -> None:
    broker, count = Broker(), 2 * control.AT_ONCE + 1
    assert await commanding(broker).command_all("cancel", waiting(count)) == count - 1
    assert [len(one) for one in broker.slices] == [control.AT_ONCE, control.AT_ONCE, 1]
    assert [one for some in broker.slices for one in some] == [f"r{number}" for number in range(count)]
    assert await commanding(broker).command_all("cancel", []) == -1


@pytest.mark.parametrize("error", [NotFound("no topic"), BrokerUnavailable("no broker")])
async def test_a_command_of_many_that_the_broker_refuses_ends_the_call(error: PenstockError) -> None:
    """Also that there is no control topic: that a request was not found would be wrong."""
    broker = Broker(control.AT_ONCE + 1, error)
    with pytest.raises(BrokerUnavailable):
        await commanding(broker).command_all("cancel", waiting(3 * control.AT_ONCE))
    assert len(broker.slices) == 2


def turn(request_id: str, append_time_ms: int | None) -> Any:
    origin = None if append_time_ms is None else Origin(topic="t", partition=0, offset=1, append_time_ms=append_time_ms)
    return SimpleNamespace(request_id=request_id, done=False, origin=origin)


def control_of(log: Log, turns: list[Any]) -> Control:
    def held(*_: Any) -> list[Any]:
        return [one for one in turns if not one.done]

    known = SimpleNamespace(a_turn=lambda *_: next(iter(held()), None), aside_turns=lambda *_, **__: [])
    view = SimpleNamespace(known=known, census=SimpleNamespace(of_conversation=held))
    parts: Any = (log, view, log, None, default_codec(), TopicNames(), None, Allowances(), Threads())
    return Control(*parts)


async def test_a_deletion_is_commanded_and_waits_for_the_turns_before_it() -> None:
    log, before, after = Log(), turn("before", 50), turn("after", 51)
    deleting = asyncio.create_task(control_of(log, [before, after]).end_turns("acme", "c1"))
    await wait_until_async(lambda: log.commands, 10, "the command")
    (command,) = log.commands
    assert (command.kind, command.tenant, command.conversation_id) == ("delete_conversation", "acme", "c1")
    await asyncio.sleep(0)
    assert not deleting.done()
    before.done = True
    await asyncio.wait_for(deleting, 10)
    assert not after.done


async def test_a_deletion_waits_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a worker the turns end when there is one."""
    monkeypatch.setattr(control, "TURNS_END_S", 0.1)
    log = Log()
    await asyncio.wait_for(control_of(log, [turn("r", None)]).end_turns("acme", "c1"), 10)
    assert len(log.commands) == 1


@pytest.mark.parametrize("turns", [[], [turn("r", 1)]])
async def test_a_conversation_may_consist_of_turns_that_wait(turns: list[Any]) -> None:
    assert await control_of(Log(), turns).has_turns("acme", "c1") == bool(turns)
