"""Pages by the index, and the same pages of a plain re-read, whatever was written, erased and compacted."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import Mock, patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conversation_logs import CODEC, TOPIC, FakeLog, message, reader
from kit.examples import examples
from penstock.common.conversations import ConversationRecord, Turn, fold_messages
from penstock.common.forks import deleted_record
from penstock.gateway.conversations import pages
from penstock.gateway.conversations.indexes import GAP, READ_AT_ONCE
from penstock.gateway.conversations.pages import Conversations
from penstock.schemas.errors import BrokerUnavailable, NotFound
from penstock.schemas.records import ConversationMessage, conversation_message_key
from penstock.schemas.topics import TopicNames


def plain_turns(log: FakeLog, limit: int, after: int | None, newest_first: bool) -> list[Turn]:
    turns = fold_messages(log.plain())
    if newest_first:
        turns = turns[::-1]
    if after is not None:
        turns = [one for one in turns if (one.offset < after if newest_first else one.offset > after)]
    return turns[:limit]


def plain_records(log: FakeLog, limit: int, from_offset: int, end: int | None = None) -> list[ConversationRecord]:
    records = log.plain()
    erased_at = {record.key: record.offset for record in records if record.message is None}
    return [
        replace(one, message=None) if one.offset < erased_at.get(one.key, 0) else one
        for one in records
        if from_offset <= one.offset < (log.ends[TOPIC] if end is None else end)
    ][:limit]


def plain_told(log: FakeLog, limit: int, begin: int, end: int) -> list[Turn]:
    """Messages that count, and of each request the first summary that stands."""
    found = {one.offset: one for one in fold_messages(log.plain())}
    live: dict[str, ConversationRecord] = {}
    for record in log.plain():
        if record.message is None:
            live.pop(record.key, None)
        else:
            live.setdefault(record.key, record)
    summarized: set[tuple[str | None, int]] = set()
    for record in sorted(live.values(), key=lambda record: record.offset):
        made = record.message
        if made is not None and made.direction == "summary" and (made.request_id, made.index) not in summarized:
            summarized.add((made.request_id, made.index))
            found[record.offset] = Turn(offset=record.offset, message=made)
    return [found[offset] for offset in sorted(found) if begin <= offset < end][:limit]


@dataclass
class World:
    """A log to which keys are written once, as the contract says, and a reader that looks now and then."""

    log: FakeLog
    conversations: Conversations
    keys: dict[str, ConversationMessage] = field(default_factory=dict)

    def write(self, request_id: str, direction: str, index: int, epoch: int) -> None:
        made = message(request_id, direction, 0 if direction == "out" else index, epoch)
        if (key := conversation_message_key(made)) not in self.keys:
            self.keys[key] = made
            self.log.write(made)

    def erase(self, number: int) -> None:
        if self.keys:
            self.log.write(list(self.keys.values())[number % len(self.keys)], tombstone=True)

    def make_anew(self) -> None:
        self.log.make_anew()
        self.keys.clear()

    def look(self, limit: int, place: int) -> None:
        """Every kind of page from one place."""
        at = place % (self.log.ends[TOPIC] + 1)
        for after in (None, at):
            for newest_first in (False, True):
                found = self.conversations.turns("acme", "c", limit, after=after, newest_first=newest_first)
                assert found == plain_turns(self.log, limit, after, newest_first)
        found = self.conversations.records("acme", "c", limit, from_offset=at)
        assert found == plain_records(self.log, limit, at)
        end = self.log.ends[TOPIC]
        assert self.conversations.end("acme", "c") == end
        for begin, behind in ((at, end), (0, at)):
            found = self.conversations.records("acme", "c", limit, from_offset=begin, end=behind)
            assert found == plain_records(self.log, limit, begin, behind)
            told = self.conversations.told("acme", "c", limit, begin, behind)
            assert told == plain_told(self.log, limit, begin, behind)
        outline, everything = self.conversations.outline("acme", "c"), plain_told(self.log, 1_000, 0, end)
        summaries = sum(one.message.direction == "summary" for one in everything)
        assert (outline.messages, outline.summaries) == (len(everything) - summaries, summaries)
        assert (outline.topic_id, outline.end) == (self.log.ids[TOPIC], end)


NUMBER = st.integers(0, 1_000)
WRITE = st.tuples(
    st.just(World.write),
    st.sampled_from("ab"),
    st.sampled_from(["in", "out", "summary"]),
    st.integers(0, 1),
    st.integers(1, 3),
)
STEPS = st.lists(
    st.one_of(
        WRITE,
        WRITE,
        WRITE,
        st.tuples(st.just(World.erase), NUMBER),
        st.tuples(st.just(World.look), st.integers(1, 5), NUMBER),
        st.tuples(st.just(lambda world, tombstones: world.log.compact(tombstones_too=tombstones)), st.booleans()),
        st.tuples(st.sampled_from([lambda world: world.log.write(b"odd"), lambda world: world.log.marker()])),
        st.tuples(st.just(World.look), st.just(100), NUMBER),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=examples(300))
@given(STEPS, STEPS, st.sampled_from([10_000, 8, 0]), st.sampled_from([1, 3, 1_000]))
def test_a_page_is_that_of_a_plain_reading(
    steps: list[tuple[Any, ...]], others: list[tuple[Any, ...]], most_records: int, window: int
) -> None:
    log = FakeLog()
    world = World(log, reader(log, most_records))
    with patch.object(pages, "WINDOW", window):
        for act, *with_these in steps:
            act(world, *with_these)
        world.look(100, 0)
        world.make_anew()
        for act, *with_these in others:
            act(world, *with_these)
        world.look(100, 0)


def long_conversation(log: FakeLog, turns: int) -> None:
    for number in range(turns):
        log.write(message(f"r{number}", "in", 0, 1))
        log.write(message(f"r{number}", "out", 0, 1))


def of_turns(turns: int, **options: Any) -> tuple[FakeLog, Conversations]:
    """A conversation, and a reader that has read nothing yet."""
    log = FakeLog()
    long_conversation(log, turns)
    return log, reader(log, **options)


def read_for(log: FakeLog, page: Callable[[], object]) -> int:
    """How many records this page reads."""
    before = log.records_read
    page()
    return log.records_read - before


def test_a_page_of_a_warm_conversation_reads_its_own_records_and_what_is_new() -> None:
    log, conversations = of_turns(5_000, most_records=100_000)
    conversations.turns("acme", "c", 20)
    assert log.records_read == conversations.indexes.records_read == 10_000 + 20
    for page, records in (
        (lambda: conversations.turns("acme", "c", 20, newest_first=True), 20),
        (lambda: conversations.turns("acme", "c", 20, after=5_000), 20),
        (lambda: conversations.records("acme", "c", 1), 1),
        (lambda: conversations.about("acme", "c").created_ms, 0),
    ):
        assert read_for(log, page) == records
    long_conversation(log, 1)
    assert read_for(log, lambda: conversations.turns("acme", "c", 20, newest_first=True)) <= 20 + 2


def test_turns_that_stand_far_apart_are_read_one_by_one() -> None:
    log = FakeLog()
    log.write(message("a", "in", 0, 1))
    for epoch in range(GAP + 50):
        log.write(message("b", "out", 0, epoch))
    log.write(message("c", "in", 0, 1))
    conversations = reader(log)
    conversations.turns("acme", "c", 3)
    assert read_for(log, lambda: conversations.turns("acme", "c", 3)) == 3
    assert len(conversations.turns("acme", "c", 3)) == 3


def uneven_conversation(log: FakeLog, turns: int) -> None:
    """With repeats of other epochs, summaries, and erasures of messages far back and just before."""
    for number in range(turns):
        log.write(message(f"r{number}", "in", 0, 1))
        log.write(message(f"r{number}", "out", 0, 1))
        for every, of, direction, epoch, erases in (
            (5, number, "out", 2, False),
            (7, number, "summary", 1, False),
            (11, number // 2, "in", 1, True),
            (13, number, "out", 1, True),
        ):
            if number % every == 0:
                log.write(message(f"r{of}", direction, 0, epoch), tombstone=erases)


def delete(log: FakeLog) -> None:
    ended = deleted_record("acme", "c", "d", 0, 0)
    log.put(TOPIC, ended.key.encode(), CODEC.encode(ended.message))


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a conversation of some hundred turns is a long one."""
    for name, records in (("WINDOW", 100), ("REPEATS_WITHIN", 30), ("MOST_UNINDEXED", 300)):
        monkeypatch.setattr(pages, name, records)


@pytest.mark.usefixtures("small_windows")
def test_the_newest_page_of_a_long_conversation_is_read_from_its_end() -> None:
    log = FakeLog()
    uneven_conversation(log, 200)
    end = log.ends[TOPIC]
    for limit, after in itertools.product((1, 20, 101), (None, end, end - 1, end - 30, end - 250, 7)):
        conversations, before = reader(log, most_records=100_000), log.records_read
        found = conversations.turns("acme", "c", limit, after=after, newest_first=True)
        assert found == plain_turns(log, limit, after, True)
        if limit < 101 and (after is None or after > end - 100):
            assert log.records_read - before <= pages.MOST_UNINDEXED
        assert conversations.turns("acme", "c", limit, after=after, newest_first=True) == found
        assert log.records_read - before >= end, "who asks again shall have an index"
    delete(log)
    for number in range(3):
        log.write(message(f"new{number}", "in", 0, 1))
        found = reader(log, most_records=100_000).turns("acme", "c", 2, newest_first=True)
        assert [one.message.request_id for one in found] == [f"new{n}" for n in (number, number - 1) if n >= 0]


@pytest.mark.usefixtures("small_windows")
def test_pages_of_a_conversation_that_is_too_long_for_an_index_read_windows_of_it() -> None:
    log = FakeLog()
    uneven_conversation(log, 250)
    conversations = reader(log, most_records=500)
    conversations.turns("acme", "c", 1)
    assert 0 < len(conversations.indexes) < 100, "tombstones alone"

    def look() -> None:
        end = log.ends[TOPIC]
        for at, limit in itertools.product((0, 1, 99, 100, 101, 250, end - 1, end), (1, 50)):
            before = log.records_read
            for newest_first in (False, True):
                found = conversations.turns("acme", "c", limit, after=at, newest_first=newest_first)
                assert found == plain_turns(log, limit, at, newest_first)
            assert conversations.told("acme", "c", limit, at, end) == plain_told(log, limit, at, end)
            for last in (None, at + 10):
                found = conversations.records("acme", "c", limit, from_offset=at, end=last)
                assert found == plain_records(log, limit, at, last)
            assert log.records_read - before < 4 * (pages.WINDOW + pages.REPEATS_WITHIN + 100)

    look()
    log.write(message("r3", "out", 0, 1), tombstone=True)
    log.write(message("last", "in", 0, 1))
    look()
    everything = plain_told(log, 10_000, 0, log.ends[TOPIC])
    assert conversations.outline("acme", "c").messages == sum(t.message.direction != "summary" for t in everything)
    assert conversations.holder("acme", "c", everything[-1].offset).conversation_id == "c"
    assert conversations.tree("acme", "c")[0].messages == conversations.outline("acme", "c").messages
    delete(log)
    with pytest.raises(NotFound):
        conversations.turns("acme", "c", 1)
    log.write(message("anew", "in", 0, 1))
    assert [one.message.request_id for one in conversations.turns("acme", "c", 5)] == ["anew"]


@pytest.mark.parametrize("most_records", [10_000, 4])
def test_a_record_that_does_not_decode_behind_its_head_is_passed_over(most_records: int) -> None:
    log = FakeLog()
    long_conversation(log, 2)
    log.write(CODEC.encode(message("torn", "in", 0, 1))[:-20])
    long_conversation(log, 3)
    conversations = reader(log, most_records)
    for newest_first in (False, True):
        found = [turn.offset for turn in conversations.turns("acme", "c", 20, newest_first=newest_first)]
        assert sorted(found) == [0, 1, 2, 3, 9, 10]
    assert conversations.outline("acme", "c").messages == 6
    assert len(conversations.records("acme", "c", 20)) == 10


def test_when_a_conversation_began_is_two_records_of_a_cold_one() -> None:
    log = FakeLog()
    log.write(b"odd")
    long_conversation(log, 1_000)
    about = reader(log).about("acme", "c")
    assert (about.topic_id, about.created_ms) == ("id-0", 1_001)
    assert about.last_active_ms == 1_000 + log.ends[TOPIC] - 1
    assert log.records_read <= 3
    log.make_anew()
    assert reader(log).about("acme", "c").created_ms is None


def test_who_come_to_a_cold_conversation_together_read_it_once() -> None:
    (log, conversations), together = of_turns(1_000), threading.Barrier(4)

    def ask() -> int:
        together.wait(20)
        return len(conversations.turns("acme", "c", 10))

    with ThreadPoolExecutor(4) as threads:
        assert [one.result(20) for one in [threads.submit(ask) for _ in range(4)]] == [10] * 4
    assert log.records_read == 2_000 + 4 * 10


def test_a_reading_that_fails_goes_on_from_where_it_came_to() -> None:
    log, conversations = of_turns(READ_AT_ONCE)
    log.before_read = Mock(side_effect=itertools.chain([None, BrokerUnavailable("away")], itertools.repeat(None)))
    with pytest.raises(BrokerUnavailable):
        conversations.turns("acme", "c", 1)
    assert len(conversations.turns("acme", "c", 1)) == 1
    assert log.records_read == 2 * READ_AT_ONCE + 1


def test_a_log_that_lost_its_end_is_read_anew() -> None:
    """As after an unclean election: offsets that were read are given to other records."""
    log, conversations = of_turns(3)
    conversations.turns("acme", "c", 20)
    log.logs[TOPIC], log.ends[TOPIC] = log.logs[TOPIC][:2], 2
    log.write(message("other", "in", 0, 1))
    assert [turn.message.request_id for turn in conversations.turns("acme", "c", 20)] == ["r0", "r0", "other"]


def test_what_is_erased_while_a_page_is_read_is_not_what_makes_it_fail() -> None:
    log, conversations = of_turns(3)
    conversations.turns("acme", "c", 20)

    def compacted_meanwhile() -> None:
        log.before_read = lambda: None
        log.write(message("r1", "in", 0, 1), tombstone=True)
        log.compact(tombstones_too=False)

    log.before_read = compacted_meanwhile
    assert [turn.offset for turn in conversations.turns("acme", "c", 20)] == [0, 1, 3, 4, 5]


def test_a_conversation_that_is_never_the_same_is_an_error_and_no_loop() -> None:
    (log, conversations), numbers = of_turns(300), iter(range(300))

    def compacted_meanwhile() -> None:
        if len(conversations.indexes) or conversations.indexes.records_read:
            log.write(message(f"r{next(numbers)}", "in", 0, 1), tombstone=True)
            log.compact(tombstones_too=False)

    log.before_read = compacted_meanwhile
    with pytest.raises(BrokerUnavailable):
        conversations.turns("acme", "c", 1_000)


def test_indexes_are_kept_within_a_bound_and_the_oldest_go_first() -> None:
    log, names = FakeLog(), TopicNames()
    for number in range(6):
        topic = names.conversation("acme", f"c{number}")
        log.create(topic)
        for turn in range(10):
            log.write(message(f"r{turn}", "in", 0, 1), topic=topic)
    long_conversation(log, 50)
    conversations = reader(log, most_records=100)

    def reads_all_of(name: str) -> bool:
        return read_for(log, lambda: conversations.turns("acme", name, 1)) > 1

    assert [reads_all_of(f"c{number}") for number in range(6)] == [True] * 6
    assert [reads_all_of(name) for name in ("c5", "c4")] == [False, False], "the newest are kept"
    assert reads_all_of("c")
    assert [reads_all_of(name) for name in ("c5", "c4")] == [False, False]
    assert reads_all_of("c0")
    assert len(conversations.indexes) <= 100
