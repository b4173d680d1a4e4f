"""What one outcome adds to usage, and totals of another result topic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from kit.records import outcome
from penstock.cli.restored.usage import moved
from penstock.common import reader
from penstock.common.settings import KafkaSettings
from penstock.gateway.view import usage_topic
from penstock.gateway.view.usage import AMOUNTS, EARLIER, FILE_DAYS, OPEN_DAYS, Usage, amounts_of, day_of
from penstock.schemas.codec import default_codec
from penstock.schemas.records import Attempt, AttemptHistory, Origin, Timings, UsageShare, UsageTotal
from penstock.schemas.records import Usage as Used

NOW_MS, DAY_MS = 1_900_000_000_000, 86_400_000
ORIGIN = Origin(topic="t", partition=0, offset=0, append_time_ms=NOW_MS)


def attempt(started_at: int, ended_at: int | None) -> Attempt:
    return Attempt(attempt=1, started_at=started_at, ended_at=ended_at)


def total(topic_id: str, updated_at: int, *shares: UsageShare, day: str = day_of(NOW_MS)) -> UsageTotal:
    return UsageTotal(day=day, tenant="default", topic_id=topic_id, updated_at=updated_at, shares=[*shares])


def share(partition: int, through: int, completed: int, last_at: int = 0) -> UsageShare:
    return UsageShare(partition=partition, through=through, last_at=last_at, completed=completed)


def begun(topic_id: str = "id", *totals: UsageTotal) -> Usage:
    """Of this topic, with these totals merged."""
    usage = Usage()
    usage.begin(topic_id, 10)
    for one in totals:
        usage.merge(one, NOW_MS)
    return usage


def sums(usage: Usage) -> list[int]:
    """Completed requests of each total."""
    return [amounts[0] for _, amounts in usage.rows("", "9")()]


@pytest.mark.parametrize(
    ("fields", "added"),
    [
        ({"status": "expired"}, {"expired": 1}),
        ({"timings": Timings(run_ms=7)}, {"completed": 1, "device_ms": 7}),
        (
            {"usage": Used(prompt_tokens=3, completion_tokens=4), "cached_tokens": 2},
            {"completed": 1, "input_tokens": 3, "output_tokens": 4, "cached_tokens": 2},
        ),
        (
            {"task": "embedding", "usage": Used(prompt_tokens=3)},
            {"completed": 1, "input_tokens": 3, "embedding_tokens": 3},
        ),
        (
            {"task": "image_generation", "image_generation": {"images": [{}, {}]}, "usage": Used(pixels=50)},
            {"completed": 1, "images": 2, "pixels": 50},
        ),
        (
            # Of the former request, of this one, and of one whose worker was killed.
            {
                "history": AttemptHistory(
                    attempts=[
                        attempt(NOW_MS - 90, NOW_MS - 10),
                        attempt(NOW_MS + 5, NOW_MS + 8),
                        attempt(NOW_MS + 9, None),
                        attempt(NOW_MS + 10, NOW_MS + 50),
                    ]
                ),
                "timings": Timings(run_ms=40),
            },
            {"completed": 1, "device_ms": 43},
        ),
    ],
    ids=["outcome", "run", "text", "embedding", "images", "attempts of a redriven request"],
)
def test_what_an_outcome_adds(fields: dict[str, Any], added: dict[str, int]) -> None:
    found = dict(zip(AMOUNTS, amounts_of(outcome(origin=ORIGIN, **fields)), strict=True))
    assert {name: amount for name, amount in found.items() if amount} == added


def test_a_topic_that_was_made_anew_is_added_to_what_was_counted_before() -> None:
    usage = begun("new", total("old", 1, share(0, 90, 2)), total("old", 2, share(0, 100, 3), share(1, 7, 4)))
    usage.count(outcome(origin=ORIGIN), 0, 0, NOW_MS, NOW_MS)
    assert sums(usage) == [8]
    (made,) = usage.due(NOW_MS + 10, 9)
    assert (made.topic_id, {one.partition for one in made.shares}) == ("new", {EARLIER, 0})
    usage.merge(made, NOW_MS)
    assert (sums(usage), usage.all_due(NOW_MS)) == ([8], [])


def test_a_mirror_has_its_offsets_and_nothing_counts_twice() -> None:
    """Retention has left three of the five outcomes that are counted, and one came after them."""
    before = total("old", 1, share(0, 100, 5, last_at=30), share(1, 9, 2, last_at=50))
    made = moved([before, total("new", 1)], "new", {0: [(0, 10), (1, 20), (2, 30), (4, 31)]}, NOW_MS)
    assert [(one.partition, one.through) for one in made[0].shares] == [(0, 4), (1, 0)]
    assert len(made) == 1
    usage = begun("new", before, made[0])
    for offset in (0, 1, 2, 4):
        usage.count(outcome(origin=ORIGIN), 0, offset, NOW_MS, NOW_MS)
    assert sums(usage) == [8]


def test_a_lower_record_is_answered() -> None:
    usage = begun("id", total("id", 1, share(0, 50, 5)))
    assert not usage.all_due(NOW_MS)
    usage.merge(total("id", 2, share(0, 40, 4), share(1, 3, 1)), NOW_MS)
    (made,) = usage.due(NOW_MS + 10, 9)
    assert {(one.partition, one.through) for one in made.shares} == {(0, 50), (1, 3)}


def test_old_days_keep_their_totals_alone() -> None:
    usage, later = begun(), NOW_MS + (OPEN_DAYS + 1) * DAY_MS
    usage.count(outcome(origin=ORIGIN), 0, 0, NOW_MS, NOW_MS)
    usage.close_days(later)
    (made,) = usage.due(later, 9)
    assert sums(usage) == [1]
    usage.merge(made, later)
    usage.close_days(later)
    usage.count(outcome(origin=ORIGIN), 0, 1, NOW_MS, later)
    assert (sums(usage), usage.all_due(later)) == ([1], []), "a clock that is days behind"
    usage.merge(replace(made, shares=[share(0, 9, 3)]), later)
    assert sums(usage) == [3]


def test_a_start_decodes_the_newest_record_of_each_total(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that compaction has not come to are many times as many as totals."""
    codec = default_codec()
    values = [codec.encode(total("id", number, share(0, number, number))) for number in range(5)]
    records: Sequence[tuple[bytes, bytes | None]] = [(b"a", one) for one in values] + [(b"b", values[0]), (b"b", None)]

    def read(*_: Any, keep: Any) -> None:
        for key, value in records:
            keep(Mock(**{"key.return_value": key, "value.return_value": value}))

    monkeypatch.setattr(reader, "read_ranges", read)
    for look in ("begin_offsets", "end_offsets"):
        monkeypatch.setattr(usage_topic.admin, look, lambda _, tps: dict.fromkeys(tps, 7))
    counting = Mock(wraps=codec)
    totals, ends = usage_topic.read_totals(KafkaSettings(), counting, 1)
    decoded = [one.args[0] for one in counting.decode.call_args_list]
    assert ([one.updated_at for one in totals], decoded) == ([4], [values[4]])
    assert [*ends.values()] == [7]


def test_a_merged_share_is_written_and_what_the_file_has_is_not_written_again() -> None:
    usage = begun("id", total("id", 1, share(0, 50, 5)))
    rows = usage.drain()["usage"]
    again = Usage(rows)
    assert (sums(again), again.drain()) == ([5], {})
    assert [one.shares for one in again.all_due(NOW_MS, 1)] == [[share(0, 50, 5)]], "unless the topic has it"


def test_a_total_that_is_never_published_leaves_memory_with_its_row_of_the_file() -> None:
    usage = begun()
    usage.count(outcome(origin=ORIGIN), 0, 0, NOW_MS, NOW_MS)
    usage.close_days(NOW_MS + FILE_DAYS * DAY_MS)
    assert len(usage.all_due(NOW_MS)) == 1
    usage.close_days(NOW_MS + (FILE_DAYS + 1) * DAY_MS)
    assert (sums(usage), usage.all_due(NOW_MS)) == ([1], [])


def test_a_topic_that_was_restored_from_before_a_total_is_counted_from_its_end() -> None:
    usage = Usage([(day_of(NOW_MS), "t", "", "", f"[[1,40,0,4{',0' * (len(AMOUNTS) - 1)}]]")])
    usage.begin("id", 10)
    usage.merge(total("id", 1, share(0, 50, 5), share(EARLIER, NOW_MS, 1)), NOW_MS)
    usage.end_at({0: 30, 1: 60}, NOW_MS)
    usage.count(outcome(origin=ORIGIN, tenant="default", model=None), 0, 30, NOW_MS, NOW_MS)
    assert sorted(sums(usage)) == [4, 7]
    shares = {(one.partition, one.through) for made in usage.all_due(NOW_MS) for one in made.shares}
    assert shares == {(EARLIER, NOW_MS), (0, 31), (1, 40)}
