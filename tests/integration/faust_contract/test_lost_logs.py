"""Logs that lose records under a member, or before it joins: it goes on, and commits what it can stand on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from group import Group, Seen

from broker_files import back_up, restore
from penstock.processors.core.commit import donemap
from penstock.processors.kafka import poll_thread
from support import ask_broker, wait_until_async

Groups = Callable[..., Group]


def commit(one: Group, offset: int, done_map: str = "") -> None:
    consumer = Consumer({"bootstrap.servers": one.bootstrap, "group.id": one.id})
    try:
        ask_broker(lambda: consumer.commit(offsets=[TopicPartition(*one.tp, offset, done_map)], asynchronous=False))
    finally:
        consumer.close()


def delete_records(one: Group, before: int) -> None:
    """As retention does."""
    (future,) = one.admin.delete_records([TopicPartition(*one.tp, before)]).values()
    assert future.result(20).low_watermark == before


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    return [message.split(":")[0].split(" ", 3)[3] for message in messages if message.startswith("group.")]


def position_refused(caplog: pytest.LogCaptureFixture) -> bool:
    """Whether the broker has told a member that a log does not hold what it has read."""
    return any(record.getMessage().startswith("group.position_refused") for record in caplog.records)


@pytest.fixture(autouse=True)
def errors(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR)
    caplog.set_level(logging.INFO, poll_thread.__name__)


@pytest.mark.parametrize(
    ("choice", "begins"), [("beginning", 0), ("end", 10)], ids=["at the beginning", "at the committed offset"]
)
async def test_a_done_map_beyond_the_end_is_dropped(
    group: Groups, caplog: pytest.LogCaptureFixture, choice: str, begins: int
) -> None:
    """It names records that are gone; others may stand at their offsets one day."""
    one, seen, again = group(), Seen(), Seen()
    one.produce(12)
    commit(one, 10, donemap.encode(10, [(11, 20)]))
    async with one.member("a", seen, on_lost_log=choice):
        await wait_until_async(lambda: seen.ends[one.tp] == 12, 20, lambda: seen.batches)
        assert seen.assignments[-1].committed == one.committed() == {one.tp: (begins, "")}
        assert [offset for *_, offset in seen.places()] == list(range(begins, 12))
    assert said(caplog) == [f"committed=10 log_end=12 begins={begins} on_lost_log={choice}"]
    async with one.member("b", again, on_lost_log=choice):
        await wait_until_async(lambda: again.ends[one.tp] == 12, 20, lambda: again.batches)
    assert len(said(caplog)) == 1


async def test_records_that_were_deleted_unread_are_said(group: Groups, caplog: pytest.LogCaptureFixture) -> None:
    one, seen = group(), Seen()
    one.produce(10)
    commit(one, 3, donemap.encode(3, [(8, 9)]))
    delete_records(one, 7)
    async with one.member("a", seen):
        await wait_until_async(lambda: seen.ends.get(one.tp) == 10, 20, lambda: seen.batches)
        assert [offset for *_, offset in seen.places()] == [7, 8, 9]
        assert seen.assignments[-1].committed == {one.tp: (3, donemap.encode(3, [(8, 9)]))}
        assert len(seen.assignments) == 1
        await seen.commit_all()
    assert said(caplog) == ["position=3 begins=7"]


async def test_a_log_that_is_empty_after_retention_holds_nothing_up(
    group: Groups, caplog: pytest.LogCaptureFixture
) -> None:
    one, seen = group(), Seen()
    one.produce(10)
    delete_records(one, 10)
    commit(one, 3)
    async with one.member("a", seen):
        await wait_until_async(lambda: seen.ends.get(one.tp) == 10, 20, lambda: seen.batches)
        await seen.commit_all()
        one.produce(2, start=10)
        await wait_until_async(lambda: len(seen.records) == 2, 20, lambda: seen.batches)
    assert said(caplog) == ["position=3 begins=10"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [0, 15], ids=["shorter", "grown again"])
async def test_an_older_log_under_a_running_member(
    group: Groups, kafka: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, more: int
) -> None:
    """Two partitions: work of the one that is whole goes on from its commit, the other one begins again."""
    one, seen = group(partitions=2), Seen()
    one.produce(10)
    copy = back_up(kafka, one.tp, tmp_path / "copy")
    one.produce(10, start=10)
    one.produce(5, partition=1)
    async with one.member("a", seen, session_timeout_s=30) as member:
        await wait_until_async(lambda: len(seen.records) == 25, 30, lambda: seen.ends)
        await seen.commit_all()
        first = seen.assignments[-1].generation
        restore(kafka, one.tp, copy)
        # A log that has grown beyond what was read before anybody looks at it would be taken for whole.
        await wait_until_async(lambda: position_refused(caplog), 60, lambda: seen.assignments)
        one.produce(more, start=100)
        count = 25 + 10 + more
        await wait_until_async(lambda: len(seen.records) == count, 60, lambda: (seen.ends, seen.assignments))
        latest = seen.assignments[-1]
        assert latest.committed == {one.tp: (0, ""), one.partitions[1]: (5, "")}
        assert latest.fenced
        assert latest.generation > first
        assert seen.values()[25:] == [str(n).encode() for n in (*range(10), *range(100, 100 + more))]
        await seen.commit_all()
        assert not member.crashed
    begins = "begins=0 on_lost_log=beginning"
    assert len(said(caplog)) == 1
    assert said(caplog)[0].startswith("committed=20 log_end=")
    assert said(caplog)[0].endswith(begins)
