"""Forks in the worker: what a turn sees through any chain of them is what a plain copy of the list would have."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit import worker_turns as kit
from kit.examples import examples
from kit.worker_turns import CODEC, Holds, answer, mine, topic_of, turns_of
from memory_topics import MemoryTopics
from penstock.common.forks import ForkRecord, TopicForks, begin_record, deleted_record, fork_record, forked_record
from penstock.common.reader import RawMessage
from penstock.common.shards.addresses import head_of, id_of
from penstock.processors.conversations.messages import as_summary
from penstock.processors.conversations.turns import ConversationTurns, TurnStart
from penstock.processors.earlier_messages import chars_of
from penstock.schemas.errors import Cancelled, Conflict
from penstock.schemas.records import ConversationFork, ConversationMessage, InferenceRequest


class WorkerTopics(MemoryTopics):
    """As `ConversationTurns` wants them; `before_append` runs once, in front of the next append."""

    is_shared = False

    def __init__(self) -> None:
        super().__init__()
        self.before_append: Callable[[], object] | None = None
        self.numbers = itertools.count()

    def find(self, topic: str, timeout_s: float) -> str | None:
        return self.ids.get(topic)

    def open(self, topic: str, timeout_s: float) -> str:
        self.create(topic)
        return self.ids[topic]

    def read(self, topic: str, from_offset: int, timeout_s: float) -> list[tuple[int, bytes, bytes | None]]:
        return [(one.offset, one.key or b"", one.value) for one in self.logs[topic] if one.offset >= from_offset]

    async def append(self, topic: str, records: Sequence[tuple[bytes, bytes | None]]) -> list[int]:
        before, self.before_append = self.before_append, None
        if before is not None:
            before()
        return [self.put(topic, key, value) for key, value in records]

    # -- what gateways do

    def put_record(self, conversation_id: str, record: ForkRecord) -> None:
        self.put(topic_of("default", conversation_id), record.key.encode(), CODEC.encode(record.message))

    def fork(self, parent: str, child: str, through: int) -> None:
        fork_id = f"f{next(self.numbers)}"
        self.put_record(
            parent,
            forked_record("default", parent, fork_id, ConversationFork(conversation_id=child, through=through), 0),
        )
        goes_on_from = ConversationFork(
            conversation_id=parent, through=through, topic_id=self.ids[topic_of("default", parent)]
        )
        self.begin(child, fork_record("default", child, fork_id, goes_on_from, 0))

    def begin(self, conversation_id: str, first: ForkRecord) -> None:
        self.create(topic_of("default", conversation_id))
        self.put_record(conversation_id, first)

    def next(self, conversation_id: str) -> int:
        """The offset of the next record, as far as a reader can know it."""
        return self.ends[topic_of("default", conversation_id)]

    def delete(self, conversation_id: str, base: int = 0, *, late_by: int | None = None) -> None:
        """With `late_by` only if the next record of the topic is so many before."""
        end = self.next(conversation_id)
        behind = None if late_by is None else base + end - late_by - 1
        number = next(self.numbers)
        self.put_record(
            conversation_id,
            deleted_record("default", conversation_id, f"d{number}", base, 0, only_behind=behind),
        )


class SharedTopics(WorkerTopics):
    """As one topic for all looks to a worker: offsets have gaps, and a conversation begins with its head."""

    is_shared = True

    def __init__(self) -> None:
        super().__init__()
        self.end = 0

    def create(self, topic: str) -> None:
        if topic not in self.ids:
            conversation_id = topic.partition(".")[2]
            self.begin(conversation_id, begin_record("default", conversation_id, f"h{next(self.numbers)}", 0))

    def give_new_ids(self) -> None:
        log = f"id{next(self.numbers)}"
        self.ids = {topic: id_of(log, 0, head_of(one) or 0) for topic, one in self.ids.items()}

    def begin(self, conversation_id: str, first: ForkRecord) -> None:
        topic = topic_of("default", conversation_id)
        self.logs[topic], self.ids[topic] = [], id_of("id", 0, self.end)
        self.put_record(conversation_id, first)

    def next(self, conversation_id: str) -> int:
        topic = topic_of("default", conversation_id)
        read = TopicForks(head_of(self.ids[topic]))
        for offset, key, value in self.read(topic, 0, 1):
            read.apply(offset, key.decode(), None if value is None else CODEC.decode(value, ConversationMessage))
        return read.newest + 1

    def put(self, topic: str, key: bytes, value: bytes | None, timestamp_ms: int | None = None) -> int:
        offset, self.end = self.end, self.end + 1
        if topic in self.ids:
            self.logs[topic].append(RawMessage(topic, 0, offset, 1_000 + offset, key, value))
            self.ends[topic] = self.end
        return offset


def request(conversation_id: str, request_id: str, text: str = "?") -> InferenceRequest:
    return kit.request(request_id, text, conversation_id=conversation_id)


async def begin(turns: ConversationTurns, of: InferenceRequest) -> str:
    start = await turns.read(of, mine)
    identity = await turns.begin(of, 1, 0, mine, start.mark)
    assert identity is not None
    return identity


async def turn(turns: ConversationTurns, conversation_id: str, number: int) -> None:
    await kit.turn(turns, request(conversation_id, f"r{number}", f"q{number}"), f"a{number}")


async def add_summary(turns: ConversationTurns, conversation_id: str, request_id: str, text: str) -> int:
    """Where it ends."""
    asked = replace(request(conversation_id, request_id), task="summarization")
    found = await turns.to_sum_up(asked, conversation_id, None, mine)
    await turns.add_summary(as_summary(answer(asked, text), found.through), mine, found.mark)
    return found.through


async def seen(turns: ConversationTurns, conversation_id: str) -> TurnStart:
    return await turns.read(request(conversation_id, "reader"), mine)


async def said(turns: ConversationTurns, conversation_id: str) -> list[str]:
    return [message["content"] for message in (await seen(turns, conversation_id)).past.messages]


async def places(turns: ConversationTurns, conversation_id: str) -> list[int]:
    """Offsets of the messages that count."""
    found: list[int] = []
    through = None
    while (
        up_to := await turns.to_sum_up(request(conversation_id, "reader"), conversation_id, through, mine)
    ) is not None:
        found.insert(0, up_to.through)
        through = up_to.through - 1
    return found


# -- any history, against plain lists


@dataclass
class Said:
    """A message or a summary of the model: the same object in all conversations that have it."""

    text: str
    request_id: str
    covers: list[Said] | None = None


@dataclass
class World:
    """Conversations as plain lists, copied when one is forked; and the topics, read by one worker all the time."""

    topics: WorkerTopics
    lists: dict[str, list[Said]] = field(default_factory=lambda: {"c0": []})
    origins: dict[str, ConversationFork | None] = field(default_factory=lambda: {"c0": None})
    numbers: Any = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        self.turns = turns_of(self.topics)

    def pick(self, number: int) -> str:
        return sorted(self.lists)[number % len(self.lists)]

    async def talk(self, number: int) -> None:
        name, at = self.pick(number), next(self.numbers)
        await turn(self.turns, name, at)
        self.lists[name] += [Said(f"q{at}", f"r{at}"), Said(f"a{at}", f"r{at}")]

    async def sum_up(self, number: int) -> None:
        name, at = self.pick(number), next(self.numbers)
        covered = list(self.lists[name])
        if any(one.covers is None for one in covered):
            await add_summary(self.turns, name, f"s{at}", f"sum{at}")
            self.lists[name].append(Said(f"sum{at}", f"s{at}", covers=covered))

    async def fork(self, number: int, place: int) -> None:
        name = self.pick(number)
        counting = [one for one in self.lists[name] if one.covers is None]
        if not counting:
            return
        last = counting[place % len(counting)]
        child = f"c{len(self.origins)}"
        through = (await places(self.turns, name))[place % len(counting)]
        holder = name
        while (origin := self.origins[holder]) is not None and through <= origin.through:
            holder = origin.conversation_id
        self.topics.fork(holder, child, through)
        self.origins[child] = ConversationFork(conversation_id=holder, through=through)
        self.lists[child] = self.lists[name][: self.lists[name].index(last) + 1]

    async def erase(self, number: int) -> None:
        """A request of whatever conversation still has it; its summaries go wherever they are."""
        name = self.pick(number)
        known = {int(one.request_id[1:]) for one in self.lists[name] if one.covers is None}
        if not known:
            return
        request_id = f"r{sorted(known)[number % len(known)]}"
        for owner in self.origins:
            await self.turns.erase("default", owner, request_id)
        for kept in self.lists.values():
            kept[:] = [
                one
                for one in kept
                if one.request_id != request_id
                and not any(covered.request_id == request_id for covered in one.covers or ())
            ]

    async def delete(self, number: int, late_by: int | None) -> None:
        name = self.pick(number)
        self.topics.open(topic_of("default", name), 1)
        origin = self.origins[name]
        self.topics.delete(name, 0 if origin is None else origin.through + 1, late_by=late_by)
        if not late_by:
            self.lists[name] = []

    async def compact(self, number: int) -> None:
        """Tombstones go only when all readers have read them."""
        await self.check()
        self.topics.compact(tombstones_too=number % 2 == 0)

    async def mirror(self, _: int) -> None:
        """All topics are copied to another cluster, where they have other ids; a new worker reads them."""
        self.topics.give_new_ids()
        self.turns = turns_of(self.topics)

    async def check(self) -> None:
        for turns in (self.turns, turns_of(self.topics, cached_bytes=0)):
            for name, expected in self.lists.items():
                start = await seen(turns, name)
                texts = [one.text for one in expected if one.covers is None]
                assert [message["content"] for message in start.past.messages] == texts
                in_all = list(itertools.accumulate(map(chars_of, start.past.messages)))
                assert start.past.chars[: len(texts)] == in_all
                summaries = [one for one in expected if one.covers is not None]
                assert (start.past.summary is None) == (not summaries)
                if start.past.summary is not None:
                    assert start.past.summary.text == summaries[-1].text
                found = await places(turns, name)
                assert found == sorted(set(found)), "offsets are unique and ascend"
                assert len(found) == len(texts)


NUMBER = st.integers(0, 1_000)
STEP = st.one_of(
    st.tuples(st.just(World.talk), NUMBER),
    st.tuples(st.just(World.talk), NUMBER),
    st.tuples(st.just(World.fork), NUMBER, NUMBER),
    st.tuples(st.just(World.fork), NUMBER, NUMBER),
    st.tuples(st.just(World.sum_up), NUMBER),
    st.tuples(st.just(World.erase), NUMBER),
    st.tuples(st.just(World.delete), NUMBER, st.sampled_from([None, 0, 1])),
    st.tuples(st.just(World.compact), NUMBER),
    st.tuples(st.just(World.mirror), NUMBER),
)


@pytest.mark.parametrize("layout", [WorkerTopics, SharedTopics])
@settings(max_examples=examples(100))
@given(st.lists(STEP, min_size=8, max_size=20))
def test_a_fork_has_what_a_copy_of_its_parent_has(layout: type[WorkerTopics], steps: list[tuple[Any, ...]]) -> None:
    """Whatever is said, forked, summed up, erased, deleted and compacted; by a worker that follows and by a new one."""

    async def live() -> None:
        world = World(layout())
        await world.talk(0)
        await world.fork(0, 1)
        for act, *numbers in steps:
            await act(world, *numbers)
            await world.check()

    asyncio.run(live())


# -- one by one


@pytest.fixture
def log() -> WorkerTopics:
    return WorkerTopics()


@pytest.fixture
async def turns(log: WorkerTopics) -> ConversationTurns:
    return turns_of(log)


async def forked_after_two_turns(log: WorkerTopics, turns: ConversationTurns) -> None:
    await turn(turns, "c", 1)
    await turn(turns, "c", 2)
    log.fork("c", "f", 1)


async def test_a_fork_is_prepared_again_after_an_erasure_in_its_parent(
    log: WorkerTopics, turns: ConversationTurns
) -> None:
    await forked_after_two_turns(log, turns)
    asked = request("f", "r3")
    start = await turns.read(asked, mine)
    await turns.erase("default", "c", "r1")
    assert await turns.begin(asked, 1, 0, mine, start.mark) is None
    assert await said(turns, "f") == []


async def test_a_summary_of_messages_erased_in_the_parent_is_removed(
    log: WorkerTopics, turns: ConversationTurns
) -> None:
    """The parent is another worker's, which erases while the fork's summary is on its way to the log."""
    await forked_after_two_turns(log, turns)
    found = await turns.to_sum_up(request("f", "s"), "f", None, mine)
    keys = (b"r1/in/0/1", b"r1/out/1")
    log.before_append = lambda: [log.put(topic_of("default", "c"), key, None) for key in keys]
    summary = as_summary(answer(request("f", "s"), "told"), found.through)
    with pytest.raises(Conflict):
        await turns.add_summary(summary, mine, found.mark)
    assert (await seen(turns, "f")).past.summary is None


async def test_a_turn_ends_with_its_conversation_though_forks_remain(
    log: WorkerTopics, turns: ConversationTurns
) -> None:
    """The topic stays: an answer that comes behind the deletion is not written, an input is taken back."""
    await forked_after_two_turns(log, turns)
    asked = request("c", "r3", "q3")
    identity = await begin(turns, asked)
    log.delete("c")
    with pytest.raises(Cancelled):
        await turns_of(log).finish(answer(asked, "a3"), mine, identity)
    with pytest.raises(Cancelled):
        await turns.finish(answer(asked, "a3"), mine, identity)
    assert await said(turns, "c") == []
    start = await turns.read(request("c", "r4"), mine)
    log.before_append = lambda: log.delete("c")
    assert await turns.begin(request("c", "r4"), 1, 0, mine, start.mark) is None
    assert await said(turns, "c") == []
    assert await said(turns, "f") == ["q1", "a1"]
    await turn(turns, "c", 5)
    assert await said(turns_of(log), "c") == ["q5", "a5"], "begun anew"


async def test_commands_are_read_again_behind_a_deletion(log: WorkerTopics) -> None:
    read = list[float]()
    turns = turns_of(log, catch_up=read.append)
    await forked_after_two_turns(log, turns)
    before = len(read)
    await turn(turns, "c", 3)
    assert len(read) == before
    log.delete("c")
    await turn(turns, "c", 4)
    assert len(read) == before + 1


async def test_images_of_deleted_messages_are_held_until_erasure(log: WorkerTopics) -> None:
    holds = Holds()
    turns = turns_of(log, held=holds)
    await kit.turn(turns, request("c1", "r1"), "A cat.", "a1")
    log.fork("c1", "f", 1)
    log.delete("c1")
    await turns.erase("default", "c1", "unknown")
    assert holds.held == {"a1"}
    await turns.erase("default", "c1", "r1")
    assert holds.held == set()


async def test_a_summary_added_during_an_erasure_is_removed(log: WorkerTopics, turns: ConversationTurns) -> None:
    """Of a fork that is made, and summed up by another worker, in front of the tombstones."""
    await turn(turns, "c", 1)
    summary = as_summary(answer(request("f", "s"), "told"), 1)

    def fork_and_sum_up() -> None:
        log.fork("c", "f", 1)
        log.put(topic_of("default", "f"), b"s/summary/1", CODEC.encode(summary))

    log.before_append = fork_and_sum_up
    await turns.erase("default", "c", "r1")
    start = await seen(turns_of(log), "f")
    assert (list(start.past.messages), start.past.summary) == ([], None)


async def test_a_fork_without_its_parent_topic_keeps_its_own_messages(
    log: WorkerTopics, turns: ConversationTurns
) -> None:
    await forked_after_two_turns(log, turns)
    await turn(turns, "f", 3)
    topic = topic_of("default", "c")
    log.drop(topic)
    assert await said(turns, "f") == ["q3", "a3"]
    await turn(turns, "c", 4)
    assert await said(turns, "f") == ["q3", "a3"], "one of the same name is another conversation"


async def test_a_fork_reads_only_the_tail_of_a_topic_that_is_not_its_parent(
    log: WorkerTopics, turns: ConversationTurns
) -> None:
    await turn(turns, "c", 0)
    log.fork("c", "f", 1)
    topic = topic_of("default", "c")
    log.drop(topic)
    await turn(turns, "c", 1)
    reads, read = list[tuple[str, int]](), log.read
    log.read = lambda topic, from_offset, timeout_s: (
        reads.append((topic, from_offset)) or read(topic, from_offset, timeout_s)
    )
    assert await said(turns, "f") == []
    assert await said(turns, "f") == []
    assert [begin for read_topic, begin in reads if read_topic == topic] == [0, log.next("c")]


async def test_the_cached_bytes_of_a_fork_include_inherited_messages(log: WorkerTopics) -> None:
    """There is room for one of the two, so that the other one is read from its start again."""
    turns, reads, read = turns_of(log, cached_bytes=350_000), list[tuple[str, int]](), log.read
    await kit.turn(turns, request("c", "r1", "x" * 100_000), "a")
    log.fork("c", "f", 1)
    await said(turns, "f")
    log.read = lambda topic, from_offset, timeout_s: (
        reads.append((topic, from_offset)) or read(topic, from_offset, timeout_s)
    )
    await said(turns, "c")
    assert (topic_of("default", "c"), 0) in reads
