"""The follower of the view: how much it folds at once, which topics it reads, in which order, and where they end."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common import admin
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.gateway.limits.tenants import Tenants
from penstock.gateway.threads import Threads
from penstock.gateway.view import ends as ends_module
from penstock.gateway.view import topic_watch, topics_read
from penstock.gateway.view.ends import Ends
from penstock.gateway.view.follower import _public_reason
from penstock.gateway.view.pieces import BYTES_AT_ONCE, FOLDED_AT_ONCE, folds
from penstock.gateway.view.progress import ReadProgress
from penstock.gateway.view.time_order import RECORD_BYTES, SHARE_BYTES, TimeOrder
from penstock.gateway.view.topic_watch import OLD_S, PAUSES, TopicWatch
from penstock.gateway.view.topics_read import UNKNOWN_S, MissingTopics, UnknownTopics, always_read
from penstock.schemas.errors import BrokerUnavailable, Forbidden, PenstockError
from penstock.schemas.topics import TP


def size(messages: Sequence[RawMessage]) -> int:
    return sum(len(message.value or b"") for message in messages)


sizes = st.lists(st.sampled_from([None, 0, 1, 5_000, 100_000, BYTES_AT_ONCE, 3 * BYTES_AT_ONCE]), max_size=300)


@given(sizes)
def test_a_batch_is_folded_in_pieces_of_few_records_and_few_bytes(values: list[int | None]) -> None:
    batch = [
        RawMessage("t", 0, offset, 0, None, None if length is None else bytes(length))
        for offset, length in enumerate(values)
    ]
    pieces = list(folds(batch))
    assert [message.offset for piece in pieces for message in piece] == list(range(len(batch)))
    for piece in pieces:
        assert 0 < len(piece) <= FOLDED_AT_ONCE
        assert len(piece) == 1 or size(piece) <= BYTES_AT_ONCE, "a record alone may be larger"
    for piece, after in itertools.pairwise(pieces):
        assert len(piece) == FOLDED_AT_ONCE or size([*piece, after[0]]) > BYTES_AT_ONCE, "no piece is needless"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (MissingTopics("missing topics: t; create them"), "missing topics: t; create them"),
        (Forbidden("look up topics: Kafka refuses this client: t"), "the broker refuses this client"),
        (BrokerUnavailable("reach Kafka at kafka.internal:9092: timed out"), "the broker does not answer"),
    ],
)
def test_a_probe_reads_why_the_topics_could_not_be_looked_up(error: PenstockError, reason: str) -> None:
    assert _public_reason(error) == reason


RESULT, REQUEST = ("inference.result", 0), ("inference.request.low", 0)


@pytest.mark.parametrize(
    ("offsets", "now_s", "text"),
    [
        ({}, 100.5, "0 of 1,000 records"),
        ({RESULT: 150}, 100.5, "50 of 1,000 records"),
        ({RESULT: 150}, 110, "50 of 1,000 records, about 3 min left"),
        ({RESULT: 300, REQUEST: 300}, 110, "500 of 1,000 records, about 10 s left"),
        ({RESULT: 9_999, REQUEST: 9_999}, 120, "1,000 of 1,000 records, about 0 s left"),
    ],
)
def test_a_view_that_catches_up_says_how_long_it_will_take(offsets: dict[TP, int], now_s: float, text: str) -> None:
    progress = ReadProgress(begin={RESULT: 100}, goal={RESULT: 300, REQUEST: 800}, began_s=100)
    assert progress.text({RESULT: 100, REQUEST: 0, **offsets}, now_s) == text


def test_nothing_to_read_says_nothing() -> None:
    assert ReadProgress().text({}, 10) == ReadProgress(begin={RESULT: 5}, goal={RESULT: 5}).text({RESULT: 5}, 10) == ""


async def test_ends_that_were_read_beyond_are_not_believed_at_once(
    threads: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, told = [100.0], {RESULT: 40, REQUEST: 7}
    view: Any = SimpleNamespace(offsets=lambda: {RESULT: 50, REQUEST: 7})
    monkeypatch.setattr(admin, "end_offsets", lambda settings, partitions, timeout_s: dict(told))
    monkeypatch.setattr(ends_module.time, "monotonic", lambda: now[0])
    ends = Ends(KafkaSettings(), view, threads)
    for _ in range(2):
        with pytest.raises(BrokerUnavailable, match=r"inference\.result that this gateway has read beyond"):
            await ends.of_now(2)
        now[0] += ends_module.SHORT_S - 1
        told[RESULT] = 50
        assert await ends.of_now(2) == told, "the broker knows its log again"
        told[RESULT] = 40
    now[0] += 3_600
    with pytest.raises(BrokerUnavailable):
        await ends.of_now(2)  # an hour later it is another time
    now[0] += ends_module.SHORT_S
    assert await ends.of_now(2) == told, "the log has lost its end"


async def test_empty_ranges_are_asked_for_once_nothing_moves(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the past is read in the order of time most partitions wait for one, and each look is a new consumer."""
    at, goal = {RESULT: 0, REQUEST: 3}, {RESULT: 20, REQUEST: 7}
    asked = Mock(side_effect=lambda _, ranges: {tp: end for tp, (_, end) in ranges.items()})
    monkeypatch.setattr(ends_module, "empty_ranges", asked)
    monkeypatch.setattr(ends_module, "STANDSTILL_S", 0.05)
    monkeypatch.setattr(ends_module, "LOOK_S", 0)
    view: Any = SimpleNamespace(offsets=lambda: at)
    reaching = asyncio.ensure_future(Ends(KafkaSettings(), view, threads).reach(goal, 30))
    for offset in range(1, 20):
        at[RESULT] = offset
        await asyncio.sleep(0.02)
    assert not asked.called, "the result topic moves"
    await reaching
    assert [one.args[1] for one in asked.call_args_list] == [{RESULT: (19, 20), REQUEST: (3, 7)}]


# -- topics that do not exist are remembered for a moment


def test_an_unknown_topic_is_looked_up_again_after_a_while() -> None:
    now = 100.0
    unknown = UnknownTopics(lambda: now)
    assert "t" not in unknown
    unknown.add("t")
    assert "t" in unknown
    now += UNKNOWN_S
    assert "t" not in unknown


def test_unknown_topics_are_bounded() -> None:
    unknown, most = UnknownTopics(), topics_read.MAX_UNKNOWN
    for number in range(3 * most):
        unknown.add(f"t{number}")
    assert [number for number in range(3 * most) if f"t{number}" in unknown] == [*range(2 * most, 3 * most)]


# -- the watch over topics


SETTINGS = KafkaSettings()
NAMES = SETTINGS.names
NEEDED = [*always_read(NAMES), *NAMES.request_topics()]
POOL = NAMES.request("text_generation", 5, "gpu")


class Broker:
    """Has these topics, with a partition each. `asked`: the topics of each look-up; None: all."""

    def __init__(self) -> None:
        self.now, self.look_s = 1_000.0, 0.0
        self.topics = set(NEEDED)
        self.asked: list[list[str] | None] = []

    def partition_counts(
        self, settings: KafkaSettings, topics: Iterable[str] | None = None, timeout_s: float = 10.0
    ) -> dict[str, int]:
        wanted = None if topics is None else list(topics)
        self.asked.append(wanted)
        self.now += self.look_s
        return {topic: 1 for topic in self.topics if wanted is None or topic in wanted}


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Broker:
    made = Broker()
    monkeypatch.setattr(admin, "partition_counts", made.partition_counts)
    monkeypatch.setattr(topic_watch, "time", SimpleNamespace(monotonic=lambda: made.now, time=lambda: made.now))
    return made


def watch_of(tenants: Tenants, threads: Threads, conversations: Any = None) -> TopicWatch:
    read = {(topic, 0): 0 for topic in NEEDED}
    view: Any = SimpleNamespace(tenants=tenants, offsets=lambda: read, result_partitions=[].append)
    return TopicWatch(SETTINGS, view, threads, conversations)


async def test_conversations_are_counted_by_their_own_errand_alone(broker: Broker, threads: Threads) -> None:
    tenants = Tenants()
    broker.topics |= {NAMES.conversation("acme", "c1"), NAMES.conversation("default", "c2")}
    watch = watch_of(tenants, threads)
    await watch.look()
    assert not tenants.known()
    await watch.count_conversations()
    found = {tenant: work.conversations for tenant, work in tenants.known().items()}
    assert found == {"acme": {"c1"}, "default": {"c2"}}
    broker.topics.discard(NAMES.conversation("acme", "c1"))
    await watch.count_conversations()
    assert not tenants.of("acme").conversations


async def test_others_have_their_turn_while_conversations_are_counted(broker: Broker, threads: Threads) -> None:
    """Of any number of conversations the loop takes one set for each tenant; of tenants a few in one go."""
    most, in_one_go = topic_watch.COUNTED_AT_ONCE, [0]

    class Counting(Tenants):
        def on_conversations(self, tenant: str, listed: set[str], now_s: float) -> None:
            in_one_go[-1] += 1
            super().on_conversations(tenant, listed, now_s)

    async def others() -> None:
        while True:
            in_one_go.append(0)
            await asyncio.sleep(0)

    listed = [(f"t{number}", f"c{n}") for number in range(3 * most) for n in range(3)]
    tenants = Counting()
    tenants.on_conversations("gone", {"c"}, 0.0)
    broker.now = 1e6
    task = asyncio.create_task(others())
    await watch_of(tenants, threads, lambda: listed).count_conversations()
    task.cancel()
    assert max(in_one_go) <= most
    assert len(tenants.known()) == 3 * most
    assert tenants.of("t7").conversations == {"c0", "c1", "c2"}


async def test_long_lists_of_topics_are_made_less_often(broker: Broker, threads: Threads) -> None:
    watch = watch_of(Tenants(), threads)
    for look_s, pause_s in ((0.0, OLD_S), (3.0, 3.0 * PAUSES)):
        broker.look_s = look_s
        await watch.look()
        broker.now += pause_s - 0.1
        assert not watch.is_old
        broker.now += 0.2
        assert watch.is_old


async def test_unknown_pools_do_not_have_all_topics_listed(broker: Broker, threads: Threads) -> None:
    watch = watch_of(Tenants(), threads)
    await watch.look()
    broker.asked.clear()
    for _ in range(2):
        assert not await watch.look_for(f"{POOL}x")
    assert broker.asked == [[f"{POOL}x"]], "and what is not there is remembered"


# -- the order in which a view that catches up applies records


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
