"""A replay of the topic that conversations share, against a log in memory: whatever is written, and whenever it is
killed, each record that stands comes, none that is erased, and each conversation in order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kit.examples import examples
from penstock.common.group_positions import Kept
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.common.shards.addresses import address_of
from penstock.common.shards.scanning import of_conversation
from penstock.producers import replay as replay_module
from penstock.producers.replay import ConversationReplay
from penstock.producers.replay_plan import Range, ReplayedRecord
from penstock.producers.replay_records import PartitionRecords, SharedTopicRecords
from penstock.producers.replay_topics import Located
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import Conflict
from penstock.schemas.records import ConversationMessage
from penstock.schemas.topics import TP, TopicNames

NAMES = TopicNames()
LOG = NAMES.conversation_log
PARTITIONS = 2
CONVERSATIONS = [("acme", "trip-1"), ("acme", "trip-2"), ("acme", "trip-3"), ("acme", "other"), ("default", "trip-1")]
PATTERN = "trip-*"
DAY_S = 25 * 3_600.0


@dataclass
class Message:
    """As librdkafka gives it."""

    record: RawMessage

    def topic(self) -> str:
        return self.record.topic

    def partition(self) -> int:
        return self.record.partition

    def key(self) -> bytes | None:
        return self.record.key

    def value(self) -> bytes | None:
        return self.record.value


@dataclass
class World:
    """The shared topic, the group's positions, and a clock."""

    logs: dict[TP, list[RawMessage]] = field(default_factory=lambda: {(LOG, n): [] for n in range(PARTITIONS)})
    ended: dict[TP, int] = field(default_factory=lambda: {(LOG, n): 0 for n in range(PARTITIONS)})
    kept: dict[TP, Kept] = field(default_factory=dict[TP, Kept])
    now: float = 0.0
    looked_to: dict[TP, int] = field(default_factory=dict[TP, int])
    """How far each partition went when it was read last."""
    read_at: float = 0.0
    topic_id: str = "id"

    def write(self, conversation: tuple[str, str], key: str, text: str | None) -> None:
        address = address_of(NAMES, NAMES.conversation(*conversation), PARTITIONS)
        place = LOG, address.partition
        value = None if text is None else default_codec().encode(message_of(conversation, text))
        offset = self.ended[place]
        self.logs[place].append(RawMessage(*place, offset, 1_000 + offset, address.key(key.encode()), value))
        self.ended[place] += 1

    def compact(self, *, tombstones_too: bool) -> None:
        for place, log in self.logs.items():
            newest = {record.key: record.offset for record in log}
            kept = [record for record in log if newest[record.key] == record.offset]
            self.logs[place] = [one for one in kept if one.value is not None or not tombstones_too]

    def standing(self, conversation: tuple[str, str], before: int | None = None) -> list[RawMessage]:
        """The records of a conversation that is there, tombstones too, but not those that are erased."""
        address = address_of(NAMES, NAMES.conversation(*conversation), PARTITIONS)
        log = self.logs[LOG, address.partition]
        _, records = of_conversation([one for one in log if before is None or one.offset < before], address)
        erased = {record.key: record.offset for record in records if record.value is None}
        return [one for one in records if one.value is None or one.offset > erased.get(one.key, -1)]

    def live(self, conversation: tuple[str, str]) -> list[str]:
        return [one.key.decode() for one in self.standing(conversation) if one.key and one.value is not None]

    def heads(self, conversation: tuple[str, str]) -> list[str]:
        return [key for key in self.live(conversation) if key.startswith("fork/")]

    def patch(self, patches: pytest.MonkeyPatch) -> None:
        """Stand where a replay finds Kafka."""
        patches.setattr(replay_module, "make_consumer", self.as_consumer)
        patches.setattr(replay_module, "GroupPositions", self.as_group)
        patches.setattr(replay_module, "read_with", self.read_with)
        patches.setattr(replay_module, "LIST_S", 0.0)

    def replay(self, *, follow: bool, batch_records: int = 100) -> ConversationReplay:
        return ConversationReplay(
            KafkaSettings(),
            default_codec(),
            self,  # type: ignore[arg-type]
            {"group": "index", "batch_records": batch_records, "follow": follow},
            clock=lambda: self.now,
        )

    # -- as Kafka answers

    def as_consumer(self, *_: Any, **__: Any) -> World:
        return self

    def as_group(self, **_: Any) -> World:
        return self

    def read_with(
        self, consumer: object, ranges: Mapping[TP, Range], give_up: float, *, keep: Callable[[Any], bool]
    ) -> list[RawMessage]:
        del consumer, give_up
        found = [
            record
            for place, (begin, end) in ranges.items()
            for record in self.logs[place]
            if begin <= record.offset < end and keep(Message(record))
        ]
        self.looked_to |= {place: self.ended[place] for place in ranges}
        self.read_at = self.now
        return found

    def list(self) -> dict[TP, PartitionRecords]:
        return {place: SharedTopicRecords("acme", PATTERN) for place in self.logs}

    def ids(self, places: Iterable[TP]) -> dict[TP, str]:
        return dict.fromkeys(places, self.topic_id)

    def ends(self, places: Iterable[TP]) -> dict[TP, int]:
        return {place: self.ended[place] for place in places}

    def locate(self, places: Iterable[TP], *, from_offset: int | None, since_ms: int | None) -> dict[TP, Located]:
        assert from_offset is None
        assert since_ms is None
        return {place: Located(topic_id=self.topic_id, bounds=(0, self.ended[place]), start=0) for place in places}

    def read_partitions(self, places: Iterable[TP]) -> dict[TP, Kept]:
        return {place: self.kept[place] for place in places if place in self.kept}

    def keep_partitions(self, positions: Mapping[TP, Kept]) -> None:
        self.kept |= positions

    def ignored(self, *_: Any, **__: Any) -> None:
        """What else is asked of a consumer."""

    list_topics = unassign = close = ignored


def message_of(conversation: tuple[str, str], text: str) -> ConversationMessage:
    tenant, name = conversation
    return ConversationMessage(
        tenant=tenant, conversation_id=name, direction="in", role="user", content=text, created_at=0
    )


class Replays(RuleBasedStateMachine):
    """A service that follows `trip-*` of a tenant with a group, while others write."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.written = 0
        self.seen: set[tuple[str, int]] = set()
        self.last: dict[str, int] = {}
        """Of each conversation, what came last in this run."""
        self.handed: list[ReplayedRecord] = []
        self.patches = pytest.MonkeyPatch()
        self.world.patch(self.patches)
        self.replay: ConversationReplay | None = None

    @initialize(window=st.integers(1, 8), look=st.integers(1, 8), batch=st.integers(1, 4))
    def sizes(self, window: int, look: int, batch: int) -> None:
        self.patches.setattr(replay_module, "WINDOW_RECORDS", window)
        self.patches.setattr(replay_module, "LOOK_RECORDS", look)
        self.batch = batch

    def start(self, *, follow: bool) -> ConversationReplay:
        self.last.clear()
        return self.world.replay(follow=follow, batch_records=self.batch)

    def teardown(self) -> None:
        try:
            if hasattr(self, "batch"):
                self.go_on_to_the_end()
        finally:
            self.patches.undo()

    # -- what others write

    @rule(conversation=st.sampled_from(CONVERSATIONS))
    def create(self, conversation: tuple[str, str]) -> None:
        """Also where it is there: two may begin it at a time."""
        self.written += 1
        self.world.write(conversation, f"fork/{self.written}", "head")

    @rule(conversation=st.sampled_from(CONVERSATIONS), count=st.integers(1, 4))
    def append(self, conversation: tuple[str, str], count: int) -> None:
        """Also behind its end: what comes so late is nobody's."""
        for _ in range(count):
            self.written += 1
            self.world.write(conversation, f"r/{self.written}", f"text {self.written}")

    @rule(order=st.lists(st.sampled_from(CONVERSATIONS[:3]), min_size=2, max_size=8))
    def talk(self, order: list[tuple[str, str]]) -> None:
        """Turns of several conversations, one between the others."""
        for conversation in order:
            if not self.world.heads(conversation):
                self.create(conversation)
            self.append(conversation, 1)

    @rule(conversation=st.sampled_from(CONVERSATIONS), which=st.integers(0, 10), again=st.booleans())
    def erase(self, conversation: tuple[str, str], which: int, again: bool) -> None:
        if keys := [key for key in self.world.live(conversation) if not key.startswith("fork/")]:
            key = keys[which % len(keys)]
            self.world.write(conversation, key, None)
            if again:
                self.world.write(conversation, key, "again")

    @rule(conversation=st.sampled_from(CONVERSATIONS), killed=st.booleans())
    def delete(self, conversation: tuple[str, str], killed: bool) -> None:
        """As a gateway does, whose kill leaves the heads."""
        heads, live = self.world.heads(conversation), self.world.live(conversation)
        for key in [*(key for key in live if key not in heads), *([] if killed else heads)]:
            self.world.write(conversation, key, None)

    @rule()
    def compact(self) -> None:
        self.world.compact(tombstones_too=False)

    @rule()
    def compact_after_a_day(self) -> None:
        self.world.now += DAY_S
        self.world.compact(tombstones_too=True)

    # -- what the service does

    @rule(seconds=st.sampled_from([0.1, 1.5, 11.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @rule()
    def step(self) -> None:
        self.replay = self.replay or self.start(follow=True)
        if not self.handed:
            self.take(self.replay.step() or [])

    def take(self, records: list[ReplayedRecord]) -> None:
        self.handed = records
        if not records:
            return
        assert self.world.now - self.world.read_at <= replay_module.STALE_S
        (name,) = {record.conversation_id for record in records}
        conversation = ("acme", name)
        place = LOG, address_of(NAMES, NAMES.conversation(*conversation), PARTITIONS).partition
        stood = {one.offset: one for one in self.world.standing(conversation, self.world.looked_to[place])}
        for record in records:
            assert record.offset > self.last.get(name, -1)
            self.last[name] = record.offset
            if record.offset in {one.offset for one in self.world.logs[place]}:  # else it is compacted by now
                assert stood[record.offset].key == record.key.encode()
                assert (stood[record.offset].value is None) == (record.message is None)

    @precondition(lambda self: self.handed)
    @rule()
    def taken(self) -> None:
        self.replay.taken()
        self.seen |= {(record.conversation_id, record.offset) for record in self.handed}
        self.handed = []

    @rule(closed=st.booleans())
    def end(self, closed: bool) -> None:
        """In order, or by a kill."""
        if self.replay is not None and closed:
            self.replay.close()
        self.replay, self.handed = None, []

    @invariant()
    def no_position_goes_beyond_what_was_taken(self) -> None:
        for place, kept in self.world.kept.items():
            for conversation in CONVERSATIONS[:3]:
                for record in self.world.standing(conversation):
                    if (LOG, record.partition) == place and record.offset < kept.offset and record.value is not None:
                        assert (conversation[1], record.offset) in self.seen

    def go_on_to_the_end(self) -> None:
        """Run once more, to the end: then everything that stands has come."""
        self.end(closed=True)
        self.replay = self.start(follow=False)
        while (records := self.replay.step()) is not None:
            self.take(records)
            if records:
                self.taken()
        self.replay.close()
        for conversation in CONVERSATIONS[:3]:
            standing = {(conversation[1], one.offset) for one in self.world.standing(conversation)}
            assert standing <= self.seen
        assert {name for name, _ in self.seen} <= {name for _, name in CONVERSATIONS[:3]}
        assert all(kept.offset == self.world.ended[place] for place, kept in self.world.kept.items())


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    made.patch(monkeypatch)
    return made


@pytest.mark.parametrize("is_replaced", [False, True])
def test_a_replay_that_does_not_follow_ends_while_each_of_its_records_writes_another(
    world: World, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """What is made anew meanwhile stands behind the end that it began with, at whatever offset."""
    conversation = CONVERSATIONS[0]
    monkeypatch.setattr(replay_module, "WINDOW_RECORDS", 2)
    for number in range(4):
        world.write(conversation, f"fork/{number}" if not number else f"r/{number}", "text")
    replay, taken = world.replay(follow=False, batch_records=1), 0
    while (records := replay.step()) is not None:
        replay.taken()
        taken += len(records)
        assert taken <= 4, "it follows the end of the log"
        world.write(conversation, f"again/{taken}", "text")
        if is_replaced:
            world.topic_id = f"made anew {taken}"
    assert taken == (2 if is_replaced else 4)


TestReplays = Replays.TestCase
TestReplays.settings = settings(max_examples=examples(150), stateful_step_count=50)


def places_of(replay: ConversationReplay) -> list[tuple[str, int]]:
    """What comes next, and is taken."""
    found = [(record.conversation_id, record.offset) for record in replay.step() or ()]
    replay.taken()
    return found


ONE, TWO = ("acme", "trip-1"), ("acme", "trip-2")


@pytest.fixture
def together(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """Two conversations in one partition, turn by turn: trip-1 has the even offsets."""
    monkeypatch.setattr(sys.modules[__name__], "PARTITIONS", 1)
    world.logs, world.ended = {(LOG, 0): []}, {(LOG, 0): 0}
    for number in range(6):
        for conversation in (ONE, TWO):
            key = f"r/{number}" if number else f"fork/{number}"
            world.write(conversation, key, f"text {number}")
    return world


def test_a_slow_service_gets_nothing_twice(together: World) -> None:
    """What waited is read again from the position, which stands before records of the other conversation."""
    replay, found = together.replay(follow=True, batch_records=4), list[tuple[str, int]]()
    while batch := places_of(replay):
        found += batch
        together.now += replay_module.STALE_S + 1
    assert sorted(found) == [(f"trip-{1 + first}", at) for first in (0, 1) for at in range(first, 12, 2)]


def test_a_kill_repeats_no_more_than_the_order_asks_for(together: World) -> None:
    replay = together.replay(follow=True, batch_records=2)
    assert [places_of(replay) for _ in range(3)] == [
        [("trip-1", 0), ("trip-1", 2)],
        [("trip-2", 1), ("trip-2", 3)],
        [("trip-1", 4), ("trip-1", 6)],
    ]
    replay.close()
    again = together.replay(follow=True, batch_records=100)
    assert [places_of(again) for _ in range(2)] == [
        [("trip-2", at) for at in range(5, 12, 2)],
        [("trip-1", at) for at in range(6, 12, 2)],
    ]


def test_what_came_behind_the_end_of_a_conversation_does_not_come_a_day_later(together: World) -> None:
    """The replay has seen the head; its tombstone was dropped before the replay went on."""
    world, replay = together, together.replay(follow=True)
    assert len(places_of(replay) + places_of(replay)) == 12
    for key in (*(f"r/{number}" for number in range(1, 6)), "fork/0"):
        world.write(ONE, key, None)
    world.write(ONE, "r/late", "late")
    world.write(TWO, "r/6", "text 6")
    world.now += DAY_S
    world.compact(tombstones_too=True)
    assert places_of(replay) == [("trip-2", 19)]
    assert places_of(replay) == []


def test_positions_of_another_pattern_are_refused_and_those_of_kafkas_tools_are_not(world: World) -> None:
    world.write(ONE, "fork/0", "head")
    replay = world.replay(follow=False)
    assert len(places_of(replay)) == 1
    replay.close()
    place = LOG, address_of(NAMES, NAMES.conversation(*ONE), PARTITIONS).partition
    world.kept[place] = replace(world.kept[place], note='["acme", "talk-*"]')
    with pytest.raises(Conflict, match=r"positions of the conversations 'talk-\*' of the tenant acme"):
        world.replay(follow=False).step()
    world.kept = {place: Kept(offset=0, topic_id="")}
    assert len(places_of(world.replay(follow=False))) == 1
