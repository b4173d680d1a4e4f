"""The control book: bounded, within the horizon, and blind to foreign tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from unittest.mock import Mock

import pytest

from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.processors.kafka import record_follower
from penstock.processors.kafka.control import ControlBook, ControlFollower
from penstock.processors.kafka.record_follower import SLICE
from penstock.schemas.codec import Codec, default_codec
from penstock.schemas.errors import BrokerUnavailable, InternalError, RegistryUnavailable
from penstock.schemas.records import ControlCommand
from support import wait_until_async

DAY_MS = 86_400_000


def command(kind: str, request_id: str = "r1", *, tenant: str = "default", at: int = 0, priority: int | None = None):
    return ControlCommand(kind=kind, request_id=request_id, tenant=tenant, created_at=at, priority=priority)


def deletion(conversation_id: str | None, at: int) -> ControlCommand:
    return ControlCommand(
        kind="delete_conversation", request_id="", tenant="default", created_at=at, conversation_id=conversation_id
    )


def book(remembered: int = 100) -> ControlBook:
    return ControlBook(horizon_s=86_400, remembered=remembered)


def test_commands_are_remembered_for_their_own_tenant_only() -> None:
    control = book()
    assert control.apply(command("cancel"), now_ms=10)
    assert control.apply(deletion("c1", 7), now_ms=10)
    wanted = [("default", "r1", "c1"), ("other", "r1", "c1"), ("default", "r2", "c2")]
    assert [control.cancelled(tenant, request_id) is not None for tenant, request_id, _ in wanted] == [
        True,
        False,
        False,
    ]
    assert [control.deleted_at(tenant, conversation_id) for tenant, _, conversation_id in wanted] == [7, None, None]


def test_the_latest_priority_counts() -> None:
    control = book()
    control.apply(command("reprioritize", priority=1), now_ms=0)
    control.apply(command("reprioritize", priority=9), now_ms=0)
    assert control.priority("default", "r1") == 9


@pytest.mark.parametrize(
    ("passed_over", "now_ms"),
    [
        (command("cancel"), DAY_MS + 1),
        (command("UNKNOWN"), 0),
        (command("reprioritize"), 0),
        (deletion(None, 7), 10),
    ],
    ids=["old", "unknown", "a priority without a number", "a deletion that names nothing"],
)
def test_commands_that_mean_nothing_are_passed_over(passed_over: ControlCommand, now_ms: int) -> None:
    control = book()
    control.apply(command("reprioritize", "r2", priority=2, at=DAY_MS), now_ms=now_ms)
    assert not control.apply(passed_over, now_ms=now_ms)
    assert (len(control), control.priority("default", "r2"), control.priority("default", "r1")) == (1, 2, None)


def test_the_latest_deletion_counts_at_the_broker_s_time() -> None:
    control = book()
    for at in (7, 25, 9):  # a replay repeats older ones
        control.apply(deletion("c1", at), now_ms=20)
    assert control.deleted_at("default", "c1") == 25, "a worker's clock that is behind does not shorten it"


def test_deletions_are_bounded_and_pruned() -> None:
    control = book(remembered=2)
    for number in range(3):
        control.apply(deletion(f"c{number}", number), now_ms=number)
    assert [control.deleted_at("default", f"c{n}") for n in range(3)] == [None, 1, 2]
    control.prune(DAY_MS + 2)
    assert [control.deleted_at("default", f"c{n}") for n in range(3)] == [None, None, 2]


async def test_the_time_of_a_deletion_is_that_of_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared with append times of requests: the gateway's clock is none of them."""
    seen: list[ControlCommand] = []
    _, reader = follower(monkeypatch, seen.extend)
    codec = default_codec()
    records = [codec.encode(deletion("c1", 5)), codec.encode(command("cancel", at=5))]
    await asyncio.to_thread(
        reader.on_batch, [RawMessage("inference.control", 0, n, 70 + n, b"k", one) for n, one in enumerate(records)]
    )
    assert [(one.kind, one.created_at) for one in seen] == [("delete_conversation", 70), ("cancel", 5)]


async def test_a_reader_that_has_ended_is_waited_for_like_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    control, reader = follower(monkeypatch, lambda commands: None)
    reader.wait_until_caught_up.side_effect = InternalError("the reader has ended")
    with pytest.raises(BrokerUnavailable, match="ended"):
        control.catch_up(1.0)


def test_the_book_is_bounded_and_pruned() -> None:
    control = book(remembered=3)
    for number in range(5):
        control.apply(command("cancel", f"r{number}", at=number), now_ms=number)
    assert [control.cancelled("default", f"r{n}") is not None for n in range(5)] == [False, False, True, True, True]
    control.prune(DAY_MS + 3)
    assert [control.cancelled("default", f"r{n}") is not None for n in range(5)] == [False, False, False, True, True]


def test_erasures_are_kept_until_done() -> None:
    control = book()
    erase = command("erase")
    control.apply(erase, now_ms=0)
    assert control.erasures() == [erase]
    control.erasure_done(erase)
    assert control.erasures() == []
    of = partial(control.erasure, erase.tenant, erase.request_id)
    assert of(erase.created_at) == erase, "a repeat of the request does not run"
    assert of(erase.created_at + 1) is None, "a later one of the same id does"
    control.prune(erase.created_at + DAY_MS + 1)
    assert of(erase.created_at) is None


def test_a_clock_that_is_ahead_makes_no_command_live_longer_than_the_others() -> None:
    control = book()
    control.apply(command("cancel", "early", at=10 * DAY_MS), now_ms=0)
    control.apply(command("cancel", "r2", at=0), now_ms=0)
    control.prune(DAY_MS + 1)
    assert len(control) == 0


def follower(
    monkeypatch: pytest.MonkeyPatch, on_commands: Callable[[Sequence[ControlCommand]], None], codec: Codec | None = None
) -> tuple[ControlFollower, Mock]:
    """A test calls the reader's `on_batch` on a thread, as the reader does."""
    made = Mock()
    monkeypatch.setattr(record_follower, "PartitionReader", made)
    control = ControlFollower(KafkaSettings(), codec or default_codec(), asyncio.get_running_loop(), on_commands)
    made.return_value.on_batch = made.call_args.args[2]
    return control, made.return_value


def raw(value: bytes | None, offset: int = 0) -> RawMessage:
    return RawMessage("inference.control", 0, offset, 0, b"k", value)


async def test_no_command_ends_the_worker_and_the_others_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def on_commands(commands: Sequence[ControlCommand]) -> None:
        for each in commands:
            if each.request_id == "r3":
                raise ValueError("a fault in a command")
            done.append(each.request_id)

    _, reader = follower(monkeypatch, on_commands)
    records = [raw(default_codec().encode(command("cancel", f"r{n}"))) for n in range(6)]
    await asyncio.to_thread(reader.on_batch, [raw(None), raw(b"garbage"), *records])
    assert list(dict.fromkeys(done)) == ["r0", "r1", "r2", "r4", "r5"]


async def test_a_long_replay_lets_the_loop_breathe(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    breaths = 0

    async def breathe() -> None:
        nonlocal breaths
        while True:
            breaths += 1
            await asyncio.sleep(0)

    _, reader = follower(monkeypatch, lambda commands: sizes.append(len(commands)))
    breathing = asyncio.create_task(breathe())
    records = [raw(default_codec().encode(command("cancel", f"r{n}"))) for n in range(10 * SLICE)]
    await asyncio.to_thread(reader.on_batch, records)
    breathing.cancel()
    assert sizes == [SLICE] * 10
    assert breaths >= 10, "the loop ran between the slices"


async def test_stopping_ends_the_wait_for_a_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = Mock(**{"decode.side_effect": RegistryUnavailable("away")})
    made, reader = follower(monkeypatch, lambda commands: None, codec)
    reading = asyncio.create_task(asyncio.to_thread(reader.on_batch, [raw(b"\0PN\0\0x")]))
    await wait_until_async(lambda: codec.decode.called, 5)
    await made.stop()
    await asyncio.wait_for(reading, 5)
