"""The order in which a view that catches up applies records: by time across partitions, each partition in its own."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from penstock.common.reader import RawMessage
from penstock.gateway.view.time_order import RECORD_BYTES, SHARE_BYTES, TimeOrder
from penstock.schemas.topics import TP

REQUESTS, RESULTS, OTHERS = ("requests", 0), ("results", 0), ("models", 0)


def record(tp: TP, offset: int, time_ms: int, size: int = 10) -> RawMessage:
    return RawMessage(*tp, offset, time_ms, None, bytes(size))


def places(messages: list[RawMessage]) -> list[tuple[str, int]]:
    return [(message.topic, message.offset) for message in messages]


logs = st.dictionaries(
    st.tuples(st.sampled_from(["requests", "results", "statuses"]), st.integers(0, 2)),
    st.lists(st.integers(0, 30), max_size=30),
    min_size=1,
)


@given(logs, st.booleans(), st.data())
def test_all_is_taken_once_and_as_near_to_the_order_of_times_as_each_log_allows(
    logs: dict[TP, list[int]], crowded: bool, data: st.DataObject
) -> None:
    """However the partitions' records come: one by one or in batches, those of one far ahead of another's."""
    order = TimeOrder(dict.fromkeys(logs, 0), {tp: len(times) for tp, times in logs.items()}, "results", 0.0)
    left = {tp: [record(tp, offset, at) for offset, at in enumerate(times)] for tp, times in logs.items() if times}
    taken: list[RawMessage] = []
    while left:
        tp = data.draw(st.sampled_from(sorted(left)))
        count = data.draw(st.integers(1, len(left[tp])))
        order.add(left[tp][:count], 0.0)
        left[tp] = left[tp][count:]
        if not left[tp]:
            del left[tp]
        taken += order.take(crowded=crowded)
    taken += order.take(crowded=crowded)
    assert order.done
    latest = {tp: list(itertools.accumulate(times, max)) for tp, times in logs.items()}
    for tp, times in logs.items():
        assert [m.offset for m in taken if (m.topic, m.partition) == tp] == list(range(len(times)))
    among = [m for m in taken if not crowded or m.topic == "results"]
    reached = [latest[m.topic, m.partition][m.offset] for m in among]
    assert reached == sorted(reached)


def order_of(requests: int, results: int, **options: int) -> TimeOrder:
    """One partition of each, up to these offsets."""
    return TimeOrder({REQUESTS: 0, RESULTS: 0}, {REQUESTS: requests, RESULTS: results}, "results", 0.0, **options)


def test_requests_wait_for_outcomes_of_their_time() -> None:
    order = order_of(4, 2)
    order.add([record(REQUESTS, offset, 10 * offset) for offset in range(4)], 0.0)
    assert places(order.take()) == [], "no outcome is known"
    order.add([record(OTHERS, 3, 10**12)], 0.0)
    assert places(order.take()) == [("models", 3)], "it has no goal"
    order.add([record(RESULTS, 0, 10)], 0.0)
    assert places(order.take(crowded=True)) == [("results", 0)], "too many are live"
    assert places(order.take()) == [("requests", 0), ("requests", 1)]
    order.add([record(RESULTS, 1, 15)], 0.0)
    rest = [("results", 1), ("requests", 2), ("requests", 3)]
    assert places(order.take(crowded=True)) == rest, "it was the last outcome"
    assert order.done


def test_a_partition_that_is_far_ahead_is_paused_until_it_is_needed() -> None:
    order = order_of(100, 2, buffer_bytes=1)
    some = SHARE_BYTES // (1_000 + RECORD_BYTES) + 1
    order.add([record(REQUESTS, offset, offset, 1_000) for offset in range(some)], 0.0)
    order.take()
    assert [order.to_pause(), order.to_pause(), order.to_resume()] == [[REQUESTS], [], []]
    order.add([record(RESULTS, 0, some - 3)], 0.0)
    order.take()
    assert order.to_resume() == [REQUESTS]


def test_a_silent_partition_is_not_waited_for() -> None:
    """A transaction's marker may be before the goal, or nothing at all after compaction. New records elsewhere do not
    hide it: workers report and requests come all the time."""
    order = order_of(1, 2)
    for number in range(10):
        order.add([record(REQUESTS, number, number)], number / 10)
        order.look_for_silence(number / 10)
        assert bool(order.take()) == (number > 5), "after half a second"
    order.add([record(RESULTS, 0, 12), record(REQUESTS, 10, 13)], 1.0)
    assert places(order.take()) == [("results", 0)], "it has records again: it is waited for again"
    order.finish()
    assert places(order.take()) == [("requests", 10)]
    assert order.done
