"""What the thread of the consumer tells of an assignment."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY, AsyncMock, Mock

import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, TopicPartition

from penstock.processors.kafka.batches import TP, Committed
from penstock.processors.kafka.lost_logs import Extent, LostLogs
from penstock.processors.kafka.poll_thread import PollThread
from support import wait_until_async

A = ("t", 0)


class Broker:
    """One partition with this log and this commit."""

    def __init__(self, log: Extent, committed: Committed) -> None:
        self.log, self.stored = log, committed
        self.leader_away = self.closed = False
        self.assigned: list[dict[TP, int]] = []

    def committed(self, partitions: Sequence[TopicPartition], timeout: float) -> list[Any]:
        return [TopicPartition(*A, self.stored[0], self.stored[1])]

    def offsets_for_times(self, partitions: Sequence[TopicPartition], timeout: float) -> list[TopicPartition]:
        if self.leader_away:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        at = {OFFSET_BEGINNING: self.log.first, OFFSET_END: self.log.end}
        return [TopicPartition(p.topic, p.partition, at[p.offset]) for p in partitions]

    def commit(self, *, offsets: Sequence[TopicPartition], asynchronous: bool) -> Sequence[TopicPartition]:
        self.stored = offsets[0].offset, offsets[0].metadata or ""
        return offsets

    def assign(self, partitions: Sequence[TopicPartition]) -> None:
        self.assigned.append({(p.topic, p.partition): p.offset for p in partitions})

    def consumer_group_metadata(self) -> bytes:
        return b"CGMDv2:" + (7).to_bytes(4, "little")

    def memberid(self) -> str:
        return "m"

    def close(self) -> None:
        self.closed = True


def make_thread() -> tuple[PollThread, AsyncMock]:
    """A thread, and what hears of its assignments."""
    events = Mock(assigned=AsyncMock(), revoked=AsyncMock(return_value={}))
    config = {"bootstrap.servers": "127.0.0.1:1", "group.id": "g"}
    nobody = Mock(**{"replaces.return_value": False})
    parts: Any = {"lost_logs": LostLogs("beginning"), "lost_brokers": nobody, "rights": nobody}
    return PollThread(config, asyncio.get_running_loop(), events, urgency=lambda topic: 0, **parts), events.assigned


@pytest.mark.parametrize(
    ("end", "read", "begins_again"),
    [(90, 90, False), (60, 0, True), (85, 90, True)],
    ids=["whole", "shorter than the commit", "shorter than what was read"],
)
async def test_it_says_when_a_log_begins_again(end: int, read: int, begins_again: bool) -> None:
    """Found by the simulator (seed 1500): a member that kept its partition went on with what it knew to be done."""
    broker = Broker(Extent(0, end), (80, ""))
    thread, assigned = make_thread()
    if read:
        await asyncio.to_thread(thread._assign, broker, [TopicPartition(*A)])
        thread._buffer.reached_end(A, read)
        await asyncio.to_thread(thread._begin, {})
        assigned.reset_mock()
    await asyncio.to_thread(thread._assign, broker, [TopicPartition(*A)])
    start = 0 if begins_again else 80
    assigned.assert_called_once_with(ANY, ANY, {A: (start, "")}, begins_again=begins_again)
    assert broker.assigned[-1] == {A: start}
    assert broker.stored == (start, "")


async def test_a_log_that_was_refused_and_not_looked_at_since_is_not_read_on() -> None:
    """Its leader was away at the next assignment. The log had grown beyond the commit when the leader came back."""
    broker = Broker(Extent(0, 90), (80, ""))
    thread, assigned = make_thread()
    await asyncio.to_thread(thread._assign, broker, [TopicPartition(*A)])
    thread._take_message(refusal())
    broker.log, broker.leader_away = Extent(0, 200), True
    await asyncio.to_thread(thread._begin, {})
    await asyncio.to_thread(thread._assign, broker, [TopicPartition(*A)])
    assert broker.assigned[-1] == {}
    assigned.assert_called_with(ANY, ANY, {A: (80, "")}, begins_again=False)
    broker.leader_away = False
    thread._kafka = broker  # pyright: ignore[reportAttributeAccessIssue]
    thread._topics = ["t"]
    await asyncio.to_thread(thread._mend_positions)
    assert broker.stored == (0, "")
    assert broker.closed, "it leaves the group, and joins it again as of a new generation"
    await asyncio.to_thread(thread.stop)


async def test_a_client_that_is_lost_in_an_assignment_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker(Extent(0, 90), (80, ""))
    thread, assigned = make_thread()
    broker.committed = Mock(side_effect=KafkaException(KafkaError(KafkaError._TRANSPORT)))
    monkeypatch.setattr(thread._lost_brokers, "replaces", lambda consumer: True)
    await asyncio.wait_for(asyncio.to_thread(thread._assign, broker, [TopicPartition(*A)]), 10)
    assert (broker.assigned, assigned.called, thread._lost) == ([{}], False, True)
    await asyncio.to_thread(thread.stop)


class Coordinator(Broker):
    """A consumer with one member and one partition; a test holds back the callbacks of its commits."""

    def __init__(self, config: Mapping[str, Any], **_: Any) -> None:
        super().__init__(Extent(0, 100), (0, ""))
        self.on_commit = config["on_commit"]
        self.loses = 0
        """This many commits get no callback."""
        self._due: list[Callable[[], None]] = []

    def subscribe(self, topics: Sequence[str], **callbacks: Any) -> None:
        self._due.append(lambda: callbacks["on_assign"](self, [TopicPartition(*A)]))

    def poll(self, timeout: float) -> None:
        due, self._due = self._due, []
        for call in due:
            call()

    def commit(self, *, offsets: Sequence[TopicPartition], asynchronous: bool) -> Sequence[TopicPartition]:
        if asynchronous and self.loses:
            self.loses -= 1
        elif asynchronous:
            self._due.append(lambda: self.on_commit(None, offsets))
        return super().commit(offsets=offsets, asynchronous=asynchronous)


async def test_a_lost_callback_leaves_the_answers_of_later_commits_with_their_commits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Mock(side_effect=Coordinator)
    monkeypatch.setattr("penstock.processors.kafka.poll_thread.Consumer", made)
    monkeypatch.setattr("penstock.processors.kafka.poll_thread.ANSWER_S", 0.2)
    thread, assigned = make_thread()
    thread.subscribe(["t"])
    await wait_until_async(lambda: assigned.called)
    thread._kafka.loses = 1  # pyright: ignore[reportAttributeAccessIssue]
    answers: queue.SimpleQueue[dict[TP, bool]] = queue.SimpleQueue()
    for offset, taken in ((5, False), (5, True), (6, True), (7, True)):
        thread.commit(7, {A: (offset, "map")}, answers.put)
        assert await asyncio.to_thread(answers.get, timeout=10) == {A: taken}
    await asyncio.to_thread(thread.stop)


def refusal() -> Any:
    error = KafkaError(KafkaError._AUTO_OFFSET_RESET)
    return SimpleNamespace(error=lambda: error, topic=lambda: A[0], partition=lambda: A[1])
