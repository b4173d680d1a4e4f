"""The control book: bounded, within the horizon, and blind to foreign tenants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from kit import records
from kit.records import CODEC
from penstock.common import admin
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.processors.kafka import record_follower
from penstock.processors.kafka.control import ControlBook, ControlFollower
from penstock.processors.kafka.record_follower import SLICE
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable, InternalError, RegistryUnavailable
from penstock.schemas.records import ControlCommand
from support import wait_until_async

DAY_MS = 86_400_000


def command(kind: str, request_id: str = "r1", at: int = 0, **fields: Any) -> ControlCommand:
    return records.command(kind, request_id, created_at=at, **fields)


def deletion(conversation_id: str | None, at: int) -> ControlCommand:
    return command("delete_conversation", "", at, conversation_id=conversation_id)


def book(remembered: int = 100) -> ControlBook:
    return ControlBook(horizon_s=86_400, remembered=remembered)


def test_the_latest_command_of_each_subject_of_a_tenant_is_remembered() -> None:
    control = book()
    for one in (command("cancel"), *(command("reprioritize", priority=n) for n in (1, 9))):
        assert control.apply(one, now_ms=20)
    for at in (7, 25, 9):  # a replay repeats older ones
        assert control.apply(deletion("c1", at), now_ms=20)
    found = {
        (tenant, number): (
            control.cancelled(tenant, f"r{number}") is not None,
            control.priority(tenant, f"r{number}"),
            control.deleted_at(tenant, f"c{number}"),
        )
        for tenant, number in (("default", 1), ("other", 1), ("default", 2))
    }
    nothing = (False, None, None)  # 25: a worker's clock that is behind does not shorten it
    assert found == {("default", 1): (True, 9, 25), ("other", 1): nothing, ("default", 2): nothing}


@pytest.mark.parametrize(
    ("passed_over", "now_ms"),
    [
        pytest.param(command("cancel"), DAY_MS + 1, id="old"),
        pytest.param(command("UNKNOWN"), 0, id="unknown"),
        pytest.param(command("reprioritize"), 0, id="a priority without a number"),
        pytest.param(deletion(None, 7), 10, id="a deletion that names nothing"),
    ],
)
def test_commands_that_mean_nothing_are_passed_over(passed_over: ControlCommand, now_ms: int) -> None:
    control = book()
    control.apply(command("reprioritize", "r2", DAY_MS, priority=2), now_ms=now_ms)
    assert not control.apply(passed_over, now_ms=now_ms)
    assert (len(control), control.priority("default", "r2"), control.priority("default", "r1")) == (1, 2, None)


@pytest.mark.parametrize("kind", ["cancel", "delete_conversation"])
def test_the_book_is_bounded_and_pruned(kind: str) -> None:
    control = book(remembered=2)

    def known() -> list[bool]:
        if kind == "cancel":
            return [control.cancelled("default", f"x{n}") is not None for n in range(3)]
        return [control.deleted_at("default", f"x{n}") is not None for n in range(3)]

    for n in range(3):
        name = f"x{n}"
        control.apply(command(kind, name if kind == "cancel" else "", n, conversation_id=name), now_ms=n)
    assert known() == [False, True, True]
    control.prune(DAY_MS + 2)
    assert known() == [False, False, True]


def test_erasures_are_kept_until_done() -> None:
    control, erase = book(), command("erase")
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
    for name, at in (("early", 10 * DAY_MS), ("r2", 0)):
        control.apply(command("cancel", name, at), now_ms=0)
    control.prune(DAY_MS + 1)
    assert len(control) == 0


# -- the follower


def follower(
    monkeypatch: pytest.MonkeyPatch, on_commands: Callable[[Sequence[ControlCommand]], None], codec: Codec = CODEC
) -> tuple[ControlFollower, Mock]:
    """A test calls the reader's `on_batch` on a thread, as the reader does."""
    made = Mock()
    monkeypatch.setattr(record_follower, "PartitionReader", made)
    control = ControlFollower(KafkaSettings(), codec, asyncio.get_running_loop(), on_commands)
    made.return_value.on_batch = made.call_args.args[2]
    return control, made.return_value


def raw(value: bytes | ControlCommand | None, timestamp_ms: int = 0) -> RawMessage:
    value = CODEC.encode(value) if isinstance(value, ControlCommand) else value
    return RawMessage("inference.control", 0, 0, timestamp_ms, b"k", value)


async def test_the_time_of_a_deletion_is_that_of_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared with append times of requests: the gateway's clock is none of them."""
    seen: list[ControlCommand] = []
    _, reader = follower(monkeypatch, seen.extend)
    await asyncio.to_thread(reader.on_batch, [raw(deletion("c1", 5), 70), raw(command("cancel", at=5), 71)])
    assert [(one.kind, one.created_at) for one in seen] == [("delete_conversation", 70), ("cancel", 5)]


async def test_a_reader_that_has_ended_is_waited_for_like_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    control, reader = follower(monkeypatch, lambda commands: None)
    reader.wait_until_caught_up.side_effect = InternalError("the reader has ended")
    with pytest.raises(BrokerUnavailable, match="ended"):
        control.catch_up(1.0)


async def test_no_command_ends_the_worker_and_the_others_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def on_commands(commands: Sequence[ControlCommand]) -> None:
        for each in commands:
            if each.request_id == "r3":
                raise ValueError("a fault in a command")
            done.append(each.request_id)

    _, reader = follower(monkeypatch, on_commands)
    told = [raw(command("cancel", f"r{n}")) for n in range(6)]
    await asyncio.to_thread(reader.on_batch, [raw(None), raw(b"garbage"), *told])
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
    await asyncio.to_thread(reader.on_batch, [raw(command("cancel", f"r{n}")) for n in range(10 * SLICE)])
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


async def test_nobody_has_caught_up_with_a_topic_that_is_about_to_be_read_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = KafkaSettings(bootstrap_servers="127.0.0.1:1")
    monkeypatch.setattr(admin, "end_offsets", lambda _settings, partitions, _timeout: dict.fromkeys(partitions, 1))
    follower = ControlFollower(settings, CODEC, asyncio.get_running_loop(), lambda _: None)
    try:
        with pytest.raises(BrokerUnavailable):
            await asyncio.to_thread(follower.catch_up, 0.1)
    finally:
        await follower.stop()
