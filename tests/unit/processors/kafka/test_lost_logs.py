"""Logs that are shorter than the group's commit: they are found at an assignment, and lower offsets are committed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException, TopicPartition

from penstock.processors.core.commit import donemap
from penstock.processors.kafka.batches import TP, Committed
from penstock.processors.kafka.lost_logs import Extent, LostLogs, OnLostLog

A, B = ("t", 0), ("t", 1)


def answer(tp: TP, offset: int, error: KafkaError | None = None) -> Any:
    """As TopicPartition, with an error of one's choice."""
    return SimpleNamespace(topic=tp[0], partition=tp[1], offset=offset, error=error)


class FakeConsumer:
    """Logs with these extents; one whose leader is away has none. `grows`: records that come between two questions."""

    def __init__(self, logs: Mapping[TP, Extent | None], *, grows: int = 0, refused: int | None = None) -> None:
        self.logs = dict(logs)
        self.grows = grows
        self.refused = refused
        self.commits: list[dict[TP, Committed]] = []

    def offsets_for_times(self, partitions: Sequence[TopicPartition], timeout: float) -> list[Any]:
        answers: list[Any] = []
        for p in partitions:
            tp = (p.topic, p.partition)
            log = self.logs[tp]
            if log is None:
                answers.append(answer(tp, p.offset, KafkaError(KafkaError.LEADER_NOT_AVAILABLE)))
                continue
            answers.append(answer(tp, {OFFSET_BEGINNING: log.first, OFFSET_END: log.end}[p.offset]))
            self.logs[tp] = Extent(log.first, log.end + self.grows)
        return answers

    def commit(self, *, offsets: Sequence[TopicPartition], asynchronous: bool) -> Any:
        if self.refused is not None:
            raise KafkaException(KafkaError(self.refused))
        self.commits.append({(p.topic, p.partition): (p.offset, p.metadata or "") for p in offsets})
        return offsets


def never(seconds: float, reason: str) -> bool:
    raise AssertionError("it waited")


def assigned(
    kafka: FakeConsumer, committed: Mapping[TP, Committed], choice: OnLostLog = "beginning"
) -> tuple[Mapping[TP, Committed] | None, list[str]]:
    counted: list[str] = []
    found = LostLogs(choice, counted.append).at_assignment(kafka, committed, never)
    return found, counted


@pytest.mark.parametrize("choice", ["beginning", "end"])
@pytest.mark.parametrize(
    ("committed", "log", "beginning", "end"),
    [
        ((100, donemap.encode(100, [(102, 104)])), Extent(2, 5), 2, 5),
        ((100, ""), Extent(0, 0), 0, 0),
        ((40, donemap.encode(40, [(45, 60)])), Extent(0, 50), 0, 40),  # its map speaks of records that are gone
        ((100, donemap.encode(100, [(250, 300)])), Extent(110, 200), 110, 110),
    ],
)
def test_a_truncated_log_gets_a_lower_commit_without_its_map(
    committed: Committed, log: Extent, beginning: int, end: int, choice: OnLostLog, caplog: pytest.LogCaptureFixture
) -> None:
    kafka, whole = FakeConsumer({A: log, B: Extent(0, 9)}), (7, donemap.encode(7, [(8, 9)]))
    with caplog.at_level(logging.ERROR):
        found, counted = assigned(kafka, {A: committed, B: whole}, choice)
    start = beginning if choice == "beginning" else end
    assert found == {A: (start, ""), B: whole}
    assert kafka.commits == [{A: (start, "")}]
    assert counted == ["log_truncated"]
    assert assigned(kafka, found, choice) == (found, []), "the next assignment does not find it again"
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        f"group.log_truncated topic=t partition=0 committed={committed[0]} log_end={log.end} begins={start}"
        f" on_lost_log={choice}"
    ]


OTHER_MAP = donemap.encode(101, [(103, 120)])


@pytest.mark.parametrize("done", ["", OTHER_MAP], ids=["", "a map of another offset says nothing"])
@pytest.mark.parametrize("log", [Extent(0, 100), Extent(0, 101), Extent(100, 100), Extent(120, 130), None])
def test_nothing_is_changed_otherwise(log: Extent | None, done: str) -> None:
    """A log that begins behind the commit is told when it is fetched; a leader that is away is not waited for."""
    kafka = FakeConsumer({A: log})
    assert assigned(kafka, {A: (100, done)}) == ({A: (100, done)}, [])
    assert kafka.commits == []


Heard = list[tuple[Any, ...]]
REFUSED: Heard = [("position_refused", A, (100, ""))]
READ: Heard = [("has_read", A, 50, [(10, ""), (20, "")])]
REFUSED_AFTER_THE_LOSS: Heard = [("has_read", A, 120, [(100, "")]), ("position_refused", A, None)]
COMMITTED_SINCE: Heard = [("position_refused", A, (90, "")), ("has_read", A, 120, [(90, ""), (100, "")])]


@pytest.mark.parametrize(
    ("heard", "log", "committed", "begins"),
    [
        pytest.param(REFUSED, Extent(3, 150), 100, 3, id="it grew again before the next assignment"),
        pytest.param(REFUSED, Extent(0, 150), 20, 20, id="another member has mended it"),
        pytest.param(REFUSED, Extent(110, 150), 100, 100, id="retention deleted its beginning"),
        pytest.param(REFUSED_AFTER_THE_LOSS, Extent(0, 150), 100, 0, id="the refusal is heard after the loss"),
        pytest.param(COMMITTED_SINCE, Extent(0, 150), 100, 0, id="the commit is of this member"),
        pytest.param(READ, Extent(0, 40), 20, 0, id="it ends before what was read (seed 3830)"),
        pytest.param(READ, Extent(0, 40), 30, 30, id="it ends before that, and another member committed"),
    ],
)
def test_what_was_refused_or_read_before_is_compared_with_the_log_once(
    heard: Heard, log: Extent, committed: int, begins: int
) -> None:
    logs, kafka = LostLogs("beginning"), FakeConsumer({A: log})
    for name, *facts in heard:
        getattr(logs, name)(*facts)
    assert logs.unmended({B: (1, "")}) == set()
    assert logs.at_assignment(kafka, {A: (committed, "")}, never) == {A: (begins, "")}
    assert logs.at_assignment(kafka, {A: (committed, "")}, never) == {A: (committed, "")}


def test_a_log_that_nobody_could_look_at_is_not_taken_for_whole() -> None:
    """Its leader was away at the assignment, and the log has grown since: no fetch will be refused again."""
    kafka, logs = FakeConsumer({A: None}), LostLogs("beginning")
    logs.position_refused(A, (100, ""))
    found = logs.at_assignment(kafka, {A: (100, "")}, never)
    assert found == {A: (100, "")}
    assert logs.unmended(found) == {A}
    kafka.logs[A] = Extent(0, 150)
    assert logs.at_assignment(kafka, found, never) == {A: (0, "")}
    assert logs.unmended({A: (0, "")}) == set()


@pytest.mark.parametrize(
    ("between", "begins"), [((0, ""), (0, "")), ((7, ""), (7, ""))], ids=["it kept its work", "another member had it"]
)
def test_what_was_read_counts_until_others_commit(between: Committed, begins: Committed) -> None:
    """Work is kept over two assignments; in the second one nothing was read yet when it ended (seed 51244)."""
    kafka, logs = FakeConsumer({A: Extent(0, 50)}), LostLogs("beginning")
    logs.has_read(A, 50, [(0, "")])
    assert logs.at_assignment(kafka, {A: between}, never) == {A: between}
    logs.has_read(A, 0, [between])
    kafka = FakeConsumer({A: Extent(0, 40)})
    lowered = logs.at_assignment(kafka, {A: between}, never)
    assert lowered == {A: begins}
    assert kafka.commits == ([{A: begins}] if between == (0, "") else [])


def test_it_is_looked_at_twice() -> None:
    kafka = FakeConsumer({A: Extent(0, 99)}, grows=1)
    assert assigned(kafka, {A: (100, "")}) == ({A: (100, "")}, [])


def test_an_assignment_that_is_over_is_given_up_and_nothing_is_said() -> None:
    kafka = FakeConsumer({A: Extent(0, 5)}, refused=KafkaError.ILLEGAL_GENERATION)
    assert assigned(kafka, {A: (100, "")}) == (None, [])
