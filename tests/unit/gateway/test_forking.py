"""Forks and deletions at the gateway: any history against plain lists, killed anywhere, two calls in any order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.common import forks
from penstock.common.conversations import ConversationRecord, TopicRecords, decoded, fold_messages, read_through
from penstock.common.reader import RawMessage
from penstock.common.shards.addresses import address_of, id_of
from penstock.common.shards.scanning import of_conversation
from penstock.common.shards.shard_file import ShardFile
from penstock.common.transport import Delivery
from penstock.gateway.conversations.layout import Target
from penstock.gateway.conversations.pages import Conversations
from penstock.gateway.conversations.shared import SharedTopic
from penstock.gateway.conversations.tails import Place
from penstock.gateway.openai.item_events import Position
from penstock.gateway.service.forking import Forking
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable, Conflict, NotFound, PenstockError
from penstock.schemas.records import ConversationFork, ConversationMessage, conversation_message_key
from penstock.schemas.topics import TopicNames

CODEC = default_codec()
NAMES = TopicNames()


class Killed(BaseException):
    """The process is gone."""


class Step:
    """Gives the other call its turn."""

    def __await__(self) -> Generator[None]:
        yield


@dataclass
class Cluster:
    """Topics in memory. `kill_at`: so many calls of it work, then the process is killed."""

    logs: dict[str, list[RawMessage]] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    ids: dict[str, str] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)
    kill_at: int | None = None
    calls: int = 0
    numbers: Any = field(default_factory=itertools.count)

    # -- as the log of `Conversations`

    def topic_id(self, topic: str) -> str | None:
        return self.ids.get(topic)

    def back(self, topic: str, end: int, records: int) -> int:
        return max(0, end - records)

    def end(self, topic: str) -> int:
        if topic not in self.logs:
            raise NotFound(topic)
        return self.ends[topic]

    def read(self, topic: str, begin: int, end: int, give_up: float, most: int | None = None) -> list[RawMessage]:
        return [one for one in self.logs[topic] if begin <= one.offset < end][:most]

    def last_records(self, topics: Sequence[str], give_up: float) -> dict[str, RawMessage | None]:
        return {topic: self.logs[topic][-1] for topic in topics if self.logs.get(topic)}

    def places(self, topics: Sequence[str]) -> dict[str, Place]:
        return {topic: Place(self.ids[topic], self.ends[topic]) for topic in topics if topic in self.ids}

    def newest_ms(self, topic: str) -> int | None:
        return max((one.timestamp_ms for one in self.logs[topic]), default=None)

    # -- as topics and producer of `Forking`

    is_shared: ClassVar[bool] = False
    first: ClassVar[int] = 0
    """Where the first message of the first conversation stands."""

    def target(self, topic: str, key: bytes) -> Target:
        return Target(topic, 0, key)

    def create(self, topic: str) -> None:
        if topic not in self.logs:
            self.logs[topic], self.ends[topic], self.ids[topic] = [], 0, f"id-{next(self.numbers)}"

    def remove(self, topic: str) -> None:
        self.logs.pop(topic, None)
        self.ids.pop(topic, None)

    async def produce(self, topic: str, value: bytes | None, *, key: bytes, partition: int) -> Delivery:
        await self.step()
        if topic not in self.logs:
            raise NotFound(topic)
        return Delivery(topic=topic, partition=0, offset=self.write(topic, key, value), timestamp_ms=0)

    def write(self, topic: str, key: bytes, value: bytes | None) -> int:
        offset = self.ends[topic]
        self.ends[topic] += 1
        self.logs[topic].append(RawMessage(topic, 0, offset, 1_000 + offset, key, value))
        return offset

    def compact(self, tombstones_too: bool) -> None:
        for topic, records in self.logs.items():
            self.logs[topic] = _compacted(records, self.ends[topic], tombstones_too)

    def exists(self, topic: str) -> bool:
        return topic in self.ids

    def read_topic(self, topic: str) -> tuple[str, TopicRecords]:
        if topic not in self.ids:
            raise NotFound(topic)
        return self.ids[topic], TopicRecords(list(decoded(CODEC, self.logs[topic])))

    @property
    def is_empty(self) -> bool:
        return not self.logs

    def live_keys(self, topic: str) -> list[bytes]:
        live = {one.key or b"": one.value for one in self.logs[topic]}
        return [key for key, value in live.items() if value is not None]

    # -- as its threads and artifacts

    async def run_for(self, tenant: str, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        await self.step()
        return work(*args, **options)

    async def step(self) -> None:
        await Step()
        if self.kill_at is not None and self.calls >= self.kill_at:
            raise Killed
        self.calls += 1

    def conversation_gone(self, tenant: str, conversation_id: str) -> None:
        self.released.append(conversation_id)

    def gateway(self) -> tuple[Forking, Conversations]:
        """A gateway that has read nothing yet."""
        pages = Conversations(self, NAMES, CODEC)
        threads = SimpleNamespace(conversations=self, artifacts=self)
        return Forking(self, self, pages, NAMES, CODEC, cast(Any, self), cast(Any, threads)), pages


class Offsets(NamedTuple):
    """Where a turn's messages stand: Kafka's offsets."""

    question: int
    answer: int


@dataclass
class SharedCluster(Cluster):
    """The same with one topic of two partitions for all, and the real file that finds what is in it."""

    is_shared: ClassVar[bool] = True
    first: ClassVar[int] = 1
    records_left: int | None = None
    """So many are written, then the process is killed."""

    def __post_init__(self) -> None:
        self.logs = {}
        self.topic, self.partitions, self.topic_id_of_all = NAMES.conversation_log, 2, "shared"
        self.partition_logs: list[list[RawMessage]] = [[], []]
        self.partition_ends = [0, 0]
        self.folder = TemporaryDirectory()
        self.read_anew()

    def read_anew(self) -> None:
        """A file that knows nothing yet reads what is left of the log."""
        self.folder.cleanup()
        self.folder = TemporaryDirectory()
        self.file = ShardFile(Path(self.folder.name) / "file", self.topic_id_of_all, self.partitions)
        for records in self.partition_logs:
            self.file.apply(records, {}, 0)

    # -- as the copy, and as the transport

    def refresh(self, partitions: Iterable[int], timeout_s: float = 0) -> ShardFile:
        return self.file

    def refresh_all(self, timeout_s: float = 0) -> ShardFile:
        return self.file

    def send(self, topic: str, value: bytes | None, *, key: bytes, partition: int, on_delivery: Any) -> None:
        offset = self.put(partition, key, value)
        on_delivery(Delivery(topic=topic, partition=partition, offset=offset, timestamp_ms=0))

    def put(self, partition: int, key: bytes, value: bytes | None) -> int:
        if self.records_left is not None:
            if not self.records_left:
                raise Killed
            self.records_left -= 1
        offset = self.partition_ends[partition]
        self.partition_ends[partition] += 1
        message = RawMessage(self.topic, partition, offset, 1_000 + offset, key, value)
        self.partition_logs[partition].append(message)
        self.file.apply([message], {}, 0)
        return offset

    async def produce(self, topic: str, value: bytes | None, *, key: bytes, partition: int) -> Delivery:
        await self.step()
        return Delivery(topic=topic, partition=partition, offset=self.put(partition, key, value), timestamp_ms=0)

    # -- as its users see it

    @property
    def layout(self) -> SharedTopic:
        return SharedTopic(cast(Any, _Copy(self)), cast(Any, self), NAMES, CODEC)

    def create(self, topic: str) -> None:
        self.layout.create(topic)

    def write(self, topic: str, key: bytes, value: bytes | None) -> int:
        target = self.layout.target(topic, key)
        return self.put(target.partition, target.key, value)

    def exists(self, topic: str) -> bool:
        return self.layout.log.topic_id(topic) is not None

    def read_topic(self, topic: str) -> tuple[str, TopicRecords]:
        address = address_of(NAMES, topic, self.partitions)
        head, records = of_conversation(self.partition_logs[address.partition], address)
        if head is None:
            raise NotFound(topic)
        return id_of(self.topic_id_of_all, head), TopicRecords(list(decoded(CODEC, records)), head)

    def compact(self, tombstones_too: bool) -> None:
        for partition, records in enumerate(self.partition_logs):
            self.partition_logs[partition] = _compacted(records, self.partition_ends[partition], tombstones_too)
        self.read_anew()

    def gateway(self) -> tuple[Forking, Conversations]:
        pages = Conversations(self.layout.log, NAMES, CODEC)
        threads = SimpleNamespace(conversations=self, artifacts=self)
        return Forking(self, self.layout, pages, NAMES, CODEC, cast(Any, self), cast(Any, threads)), pages

    @property
    def is_empty(self) -> bool:
        """Whether compaction will leave nothing, but for what was written for a conversation that was gone."""
        return not self.layout.everyone()

    def live_keys(self, topic: str) -> list[bytes]:
        """But for that of the head."""
        return self.file.live_keys(address_of(NAMES, topic, self.partitions).conversation)[1:]


class _Copy:
    """A `ShardCopy` that is always up to date."""

    def __init__(self, cluster: SharedCluster) -> None:
        self.topic, self.topic_id, self.partitions = cluster.topic, cluster.topic_id_of_all, cluster.partitions
        self.refresh, self.refresh_all, self._cluster = cluster.refresh, cluster.refresh_all, cluster

    @property
    def file(self) -> ShardFile:
        return self._cluster.file


def _compacted(records: Sequence[RawMessage], end: int, tombstones_too: bool) -> list[RawMessage]:
    """The newest record of a key stays; a log's last one always."""
    newest = {one.key: one.offset for one in records}
    return [
        one
        for one in records
        if one.offset == end - 1 or (newest[one.key] == one.offset and not (one.value is None and tombstones_too))
    ]


LAYOUTS = pytest.mark.parametrize("new", [Cluster, SharedCluster])


def run(call: Coroutine[Any, Any, Any]) -> Any:
    while True:
        try:
            call.send(None)
        except StopIteration as end:
            return end.value


def together(first: Coroutine[Any, Any, Any], second: Coroutine[Any, Any, Any], order: Sequence[bool]) -> list[Any]:
    """What both return or raise; `order` says whose step is next, as long as both go on."""
    calls, ends = [first, second], list[Any]([None, None])
    steps = iter(order)
    going = [0, 1]
    while going:
        at = going[next(steps, False)] if len(going) == 2 else going[0]
        try:
            calls[at].send(None)
        except StopIteration as end:
            ends[at] = end.value
            going.remove(at)
        except PenstockError as error:
            ends[at] = error
            going.remove(at)
    return ends


def message(conversation_id: str, request_id: str, direction: str, epoch: int = 0) -> ConversationMessage:
    return ConversationMessage(
        request_id=request_id,
        tenant="acme",
        conversation_id=conversation_id,
        direction=direction,
        epoch=epoch,
        role="user" if direction == "in" else "assistant",
        content=f"{request_id} {direction}",
        created_at=0,
    )


def say(cluster: Cluster, conversation_id: str, request_id: str, epoch: int = 0) -> Offsets:
    """As a worker does: the topic is made, and the whole turn is written."""
    topic = NAMES.conversation("acme", conversation_id)
    cluster.create(topic)
    made = [message(conversation_id, request_id, direction, epoch) for direction in ("in", "out")]
    question, answer = (cluster.write(topic, conversation_message_key(one).encode(), CODEC.encode(one)) for one in made)
    return Offsets(question, answer)


def said(pages: Conversations, conversation_id: str) -> list[str]:
    return [turn.message.content for turn in pages.turns("acme", conversation_id, 1_000)]


# -- any history


@dataclass
class World:
    """Conversations as plain lists of (offset, text), copied when one is forked; None: there is none of this id."""

    cluster: Cluster
    lists: dict[str, list[tuple[int, str]] | None] = field(default_factory=lambda: {"c0": None})
    bases: dict[str, int] = field(default_factory=lambda: {"c0": 0})
    children: dict[str, set[str]] = field(default_factory=dict)
    owners: dict[str, str] = field(default_factory=dict)
    """Text → the conversation in whose topic it stands."""

    def __post_init__(self) -> None:
        self.forking, self.pages = self.cluster.gateway()
        self.numbers = itertools.count()

    def pick(self, number: int) -> str:
        return sorted(self.lists)[number % len(self.lists)]

    def talk(self, number: int) -> None:
        name, request_id = self.pick(number), f"r{next(self.numbers)}"
        topic = NAMES.conversation("acme", name)
        if not self.cluster.exists(topic):
            self.bases[name] = 0
        base, at = self.bases[name], say(self.cluster, name, request_id)
        kept = self.lists[name] or []
        told = [(base + at.question, f"{request_id} in"), (base + at.answer, f"{request_id} out")]
        self.lists[name] = [*kept, *told]
        self.owners |= {f"{request_id} in": name, f"{request_id} out": name}

    def fork(self, number: int, place: int) -> None:
        name, child = self.pick(number), f"c{len(self.lists)}"
        kept = self.lists[name]
        if not kept:
            return
        at = place % len(kept)
        made_of = run(self.forking.fork("acme", name, kept[at][0], child))
        assert made_of == run(self.forking.fork("acme", name, kept[at][0], child)), "a repeat makes no second one"
        assert made_of.through == kept[at][0]
        assert made_of.conversation_id == self.owners[kept[at][1]]
        self.lists[child], self.bases[child] = kept[: at + 1], kept[at][0] + 1
        if any(kept_at == made_of.through for kept_at, _ in self.lists[made_of.conversation_id] or ()):  # not deleted
            self.children.setdefault(made_of.conversation_id, set()).add(child)

    def erase(self, number: int) -> None:
        texts = sorted({text for kept in self.lists.values() for _, text in kept or ()})
        if not texts:
            return
        text = texts[number % len(texts)]
        request_id, direction = text.split()
        key = conversation_message_key(message("", request_id, direction)).encode()
        self.cluster.write(NAMES.conversation("acme", self.owners[text]), key, None)
        for name, kept in self.lists.items():
            self.lists[name] = None if kept is None else [one for one in kept if one[1] != text]

    def delete(self, number: int) -> None:
        name = self.pick(number)
        if run(self.forking.exists("acme", name)):
            run(self.forking.delete("acme", name))
        self.lists[name] = None
        self.children.pop(name, None)
        for children in self.children.values():
            children.discard(name)

    def compact(self, number: int) -> None:
        self.cluster.compact(tombstones_too=number % 2 == 0)

    def create(self, number: int) -> None:
        name = self.pick(number)
        if not self.cluster.exists(NAMES.conversation("acme", name)):
            self.bases[name] = 0
        run(self.forking.create("acme", name))
        self.lists[name] = self.lists[name] or []

    def check(self) -> None:
        for pages in (self.pages, self.cluster.gateway()[1]):
            deleted = pages.deleted("acme", list(self.lists))
            for name, kept in self.lists.items():
                if not kept:  # what is empty may have been erased behind a deletion: then there is none
                    if self.cluster.exists(NAMES.conversation("acme", name)) and name not in deleted:
                        assert pages.turns("acme", name, 10) == []
                        assert kept is not None
                    else:
                        with pytest.raises(NotFound):
                            read_through(name, self.read_topic)
                    continue
                assert name not in deleted
                self.look(pages, name, kept)

    def look(self, pages: Conversations, name: str, kept: list[tuple[int, str]]) -> None:
        def page(**options: Any) -> list[tuple[int, str]]:
            return [(turn.offset, turn.message.content) for turn in pages.turns("acme", name, **options)]

        assert page(limit=100) == kept
        middle = kept[len(kept) // 2][0]
        assert page(limit=2, after=middle) == [one for one in kept if one[0] > middle][:2]
        assert page(limit=3, after=middle, newest_first=True) == [one for one in kept if one[0] < middle][::-1][:3]
        records = pages.records("acme", name, 1_000)
        offsets = [record.offset for record in records]
        assert offsets == sorted(set(offsets))
        shown = {record.offset: record.message.content for record in records if record.message is not None}
        assert {at: shown.get(at) for at, _ in kept} == dict(kept)
        assert self.plain(records) == kept
        folded = fold_messages(read_through(name, self.read_topic))
        assert [(turn.offset, turn.message.content) for turn in folded] == kept
        assert (
            pages.records("acme", name, 2, from_offset=middle) == [one for one in records if one.offset >= middle][:2]
        )
        children = {one for one, _ in pages.forks("acme", name, 100)}
        alive = {one for one in self.children.get(name, ()) if self.lists[one]}
        assert alive <= children <= self.children.get(name, set())

    def read_topic(self, name: str, topic_id: str | None) -> TopicRecords | None:
        found_id, found = self.cluster.read_topic(NAMES.conversation("acme", name))
        return found if topic_id in (None, found_id) else None

    def plain(self, records: list[ConversationRecord]) -> list[tuple[int, str]]:
        messages = [(record.offset, record.message) for record in records if record.message is not None]
        return [(at, one.content) for at, one in messages if one.direction in ("in", "out")]


NUMBER = st.integers(0, 1_000)
STEP = st.one_of(
    st.tuples(st.just(World.talk), NUMBER),
    st.tuples(st.just(World.talk), NUMBER),
    st.tuples(st.just(World.fork), NUMBER, NUMBER),
    st.tuples(st.just(World.fork), NUMBER, NUMBER),
    st.tuples(st.just(World.erase), NUMBER),
    st.tuples(st.just(World.delete), NUMBER),
    st.tuples(st.just(World.delete), NUMBER),
    st.tuples(st.just(World.create), NUMBER),
    st.tuples(st.just(World.compact), NUMBER),
)


@LAYOUTS
@settings(max_examples=100)
@given(st.lists(STEP, min_size=5, max_size=20))
def test_pages_of_forks_are_those_of_copies(new: type[Cluster], steps: list[tuple[Any, ...]]) -> None:
    """Compacted or not. And when all are deleted, no topic is left, whatever the order."""
    world = World(new())
    world.talk(0)
    world.fork(0, 1)
    for act, *numbers in steps:
        act(world, *numbers)
        world.check()
    for number in range(len(world.lists)):
        world.delete(number)
        world.check()
    assert world.cluster.is_empty


# -- killed anywhere


def parent(cluster: Cluster) -> None:
    say(cluster, "c", "r1")
    say(cluster, "c", "r2")


@LAYOUTS
@pytest.mark.parametrize("given_id", ["fresh", "empty"])
def test_a_killed_fork_is_made_or_not_and_a_repeat_makes_it(new: type[Cluster], given_id: str) -> None:
    if new.is_shared and given_id == "empty":
        pytest.skip("there the first record says what a conversation goes on from")
    for kill_at in itertools.count():
        cluster = new(kill_at=kill_at)
        parent(cluster)
        if given_id == "empty":
            cluster.create(NAMES.conversation("acme", "f"))
        try:
            run(cluster.gateway()[0].fork("acme", "c", cluster.first + 1, "f"))
            whole = True
        except Killed:
            whole = False
        cluster.kill_at = None
        forking, pages = cluster.gateway()
        try:
            assert said(pages, "f") in ([], ["r1 in", "r1 out"])
        except NotFound:
            pass
        assert run(forking.fork("acme", "c", cluster.first + 1, "f")).through == cluster.first + 1
        assert said(pages, "f") == ["r1 in", "r1 out"]
        assert [one for one, _ in pages.forks("acme", "c", 10)] == ["f"]
        for one in ("c", "f"):
            run(forking.delete("acme", one))
        assert cluster.is_empty
        if whole:
            assert kill_at > 5
            return


@LAYOUTS
def test_a_killed_deletion_is_finished_by_a_repeat(new: type[Cluster]) -> None:
    for kill_at in itertools.count():
        cluster = new()
        parent(cluster)
        run(cluster.gateway()[0].fork("acme", "c", cluster.first + 1, "f"))
        run(cluster.gateway()[0].delete("acme", "c"))
        cluster.kill_at, cluster.calls = kill_at, 0
        try:
            run(cluster.gateway()[0].delete("acme", "f"))
            whole = True
        except Killed:
            whole = False
        cluster.kill_at = None
        forking, pages = cluster.gateway()
        if run(forking.exists("acme", "f")):
            run(forking.delete("acme", "f"))
        for one in ("f", "c"):
            with pytest.raises(NotFound):
                said(pages, one)
        assert cluster.is_empty
        if whole:
            assert kill_at > 5
            return


@pytest.mark.parametrize("name", ["c", "f"])
def test_what_is_deleted_stays_so_whatever_record_is_the_last_before_a_kill(name: str) -> None:
    for records_left in itertools.count(1):  # the first one says that it is deleted
        cluster = SharedCluster()
        parent(cluster)
        if name == "f":
            run(cluster.gateway()[0].fork("acme", "c", cluster.first + 1, "f"))
            say(cluster, "f", "r3")
        cluster.records_left = records_left
        try:
            run(cluster.gateway()[0].delete("acme", name))
            whole = True
        except Killed:
            whole = False
        cluster.records_left = None
        for _ in range(2):
            with pytest.raises(NotFound):
                said(cluster.gateway()[1], name)
            with pytest.raises(NotFound):
                fold_messages(read_through(name, World(cluster).read_topic))
            cluster.compact(tombstones_too=True)
        run(cluster.gateway()[0].delete("acme", name))
        assert not cluster.exists(NAMES.conversation("acme", name))
        key = address_of(NAMES, NAMES.conversation("acme", name), 2).key(b"")
        newest = {one.key or b"": one.value for records in cluster.partition_logs for one in records}
        left = [one for one, value in newest.items() if value is not None and one.startswith(key)]
        assert [one for one in left if not one.startswith(key + b"deleted/")] == []
        if whole:
            assert records_left > 4
            assert left == []
            return


def test_a_follower_goes_on_at_a_gateway_that_lacks_the_tombstones_at_the_end() -> None:
    cluster = SharedCluster()
    parent(cluster)
    topic, partitions = NAMES.conversation("acme", "c"), range(2)
    for direction in ("in", "out"):
        cluster.write(topic, conversation_message_key(message("c", "r2", direction)).encode(), None)
    for name in ("d", "e", "f", "g"):  # what stands at the end of a partition is not compacted
        say(cluster, name, "r3")
    assert all(records[-1].value is not None for records in (cluster.partition_logs[one] for one in partitions))
    seen = cluster.gateway()[1].place("acme", "c")
    cluster.compact(tombstones_too=True)
    pages = cluster.gateway()[1]
    now = pages.place("acme", "c")
    assert now.end < seen.end
    begin = Position.after(Position(seen.end).event_id, now)
    at = say(cluster, "c", "r4")
    tail = pages.tail("acme", "c", now)
    assert tail.refresh() > begin.offset
    part = tail.part(begin.offset, 10)
    assert part is not None
    assert [one.offset for one in part.turns] == [*at]


def test_of_two_that_remove_a_conversation_the_later_finds_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = SharedCluster()
    parent(cluster)
    topic, span = NAMES.conversation("acme", "c"), cluster.file.span

    def seen_and_removed(conversation: str) -> Any:
        found = span(conversation)
        monkeypatch.setattr(cluster.file, "span", span)
        cluster.layout.remove(topic)
        return found

    monkeypatch.setattr(cluster.file, "span", seen_and_removed)
    cluster.layout.remove(topic)
    assert not cluster.exists(topic)


# -- two at once


ORDER = st.lists(st.booleans(), max_size=60)


@LAYOUTS
@settings(max_examples=300)
@given(ORDER, st.booleans())
def test_a_fork_of_what_is_deleted_meanwhile_is_whole_or_none(
    new: type[Cluster], order: list[bool], through_a_fork: bool
) -> None:
    """Also when it is made through a fork of a deleted conversation, and that fork is the one that is deleted."""
    cluster = new()
    parent(cluster)
    made, pages = cluster.gateway()
    name = "c"
    if through_a_fork:
        run(made.fork("acme", "c", cluster.first + 3, "b"))
        run(made.delete("acme", "c"))
        name = "b"
    others = cluster.gateway()[0]
    forked, _ = together(made.fork("acme", name, cluster.first + 1, "f"), others.delete("acme", name), order)
    with pytest.raises(NotFound):
        said(pages, name)
    if isinstance(forked, ConversationFork):
        assert said(pages, "f") == ["r1 in", "r1 out"]
        run(made.delete("acme", "f"))
    else:
        assert isinstance(forked, NotFound)
    assert cluster.is_empty, "nothing is left over"
    assert "c" in cluster.released


@LAYOUTS
@settings(max_examples=200)
@given(ORDER, st.booleans())
def test_of_two_forks_of_one_id_one_is_made(new: type[Cluster], order: list[bool], alike: bool) -> None:
    cluster = new()
    parent(cluster)
    (one, pages), other = cluster.gateway(), cluster.gateway()[0]
    through = cluster.first + (1 if alike else 3)
    ends = together(one.fork("acme", "c", cluster.first + 1, "f"), other.fork("acme", "c", through, "f"), order)
    made = [end for end in ends if isinstance(end, ConversationFork)]
    assert made
    assert all(isinstance(end, ConversationFork | Conflict) for end in ends)
    assert said(pages, "f") == ["r1 in", "r1 out", "r2 in", "r2 out"][: made[0].through + 1 - cluster.first]
    for name in ("f", "c"):
        run(one.delete("acme", name))
    assert cluster.is_empty


@LAYOUTS
@settings(max_examples=200)
@given(ORDER)
def test_a_repeat_does_not_undo_a_fork_whose_parent_is_deleted_meanwhile(new: type[Cluster], order: list[bool]) -> None:
    cluster = new()
    parent(cluster)
    (one, pages), other = cluster.gateway(), cluster.gateway()[0]
    run(one.fork("acme", "c", cluster.first + 1, "f"))
    repeated, _ = together(one.fork("acme", "c", cluster.first + 1, "f"), other.delete("acme", "c"), order)
    assert isinstance(repeated, ConversationFork | NotFound)
    assert said(pages, "f") == ["r1 in", "r1 out"]


# -- one by one


@LAYOUTS
def test_a_conversation_that_begins_with_a_turn_meanwhile_is_no_fork(new: type[Cluster]) -> None:
    cluster = new()
    parent(cluster)
    forking, pages = cluster.gateway()
    produce = cluster.produce

    async def say_first(topic: str, value: bytes | None, *, key: bytes, partition: int) -> Delivery:
        if b"fork/" in key:
            cluster.produce = produce
            say(cluster, "f", "r3")
        return await produce(topic, value, key=key, partition=partition)

    cluster.produce = say_first
    with pytest.raises(Conflict):
        run(forking.fork("acme", "c", cluster.first + 1, "f"))
    assert said(pages, "f") == ["r3 in", "r3 out"]
    assert cluster.live_keys(NAMES.conversation("acme", "f")) == [b"r3/in/0/0", b"r3/out/0"]
    assert pages.forks("acme", "c", 9) == []
    run(forking.delete("acme", "f"))
    run(forking.delete("acme", "c"))
    assert cluster.is_empty


@LAYOUTS
def test_the_same_request_behind_a_deletion_is_another_turn(new: type[Cluster]) -> None:
    cluster = new()
    parent(cluster)
    forking, pages = cluster.gateway()
    run(forking.fork("acme", "c", cluster.first + 1, "f"))
    run(forking.delete("acme", "c"))
    say(cluster, "c", "r1", epoch=1)
    assert said(pages, "c") == said(pages, "f") == ["r1 in", "r1 out"]


@LAYOUTS
def test_what_cannot_be_forked(new: type[Cluster]) -> None:
    cluster = new()
    parent(cluster)
    say(cluster, "taken", "r3")
    forking, pages = cluster.gateway()
    cluster.write(NAMES.conversation("acme", "c"), b"r2/in/0/0", None)
    for name, through, param in (
        ("nowhere", 0, "conversation_id"),
        ("c", 9, "through"),
        ("c", cluster.first + 2, "through"),
    ):
        with pytest.raises(NotFound) as refused:
            run(forking.fork("acme", name, through, "f"))
        assert refused.value.param == param
    with pytest.raises(Conflict):
        run(forking.fork("acme", "c", cluster.first + 1, "taken"))
    with pytest.raises(NotFound):
        said(pages, "f")
    assert said(pages, "taken") == ["r3 in", "r3 out"]
    assert run(forking.fork("acme", "c", cluster.first, "question")).through == cluster.first, (
        "a question without its answer"
    )


@LAYOUTS
def test_forks_of_forks_are_limited_where_each_adds_a_topic(new: type[Cluster]) -> None:
    cluster = new()
    parent(cluster)
    forking, pages = cluster.gateway()
    for number in range(forks.MOST_ANCESTORS + 5):
        run(forking.fork("acme", f"edit{number - 1}" if number else "c", cluster.first + 1, f"edit{number}"))
    assert pages.forks("acme", "c", 100)[0][0] == "edit0"
    assert len(pages.forks("acme", "c", 100)) == forks.MOST_ANCESTORS + 5, "edits of what is inherited make no chain"
    name = "c"
    for number in range(forks.MOST_ANCESTORS):
        last = pages.turns("acme", name, 1, newest_first=True)[-1].offset
        run(forking.fork("acme", name, last, f"deep{number}"))
        name = f"deep{number}"
        say(cluster, name, f"d{number}")
    with pytest.raises(Conflict):
        run(forking.fork("acme", name, pages.turns("acme", name, 1, newest_first=True)[-1].offset, "deeper"))
    assert len(said(pages, name)) == 4 + 2 * forks.MOST_ANCESTORS


@LAYOUTS
def test_a_broker_that_fails_at_the_end_of_a_repeat_costs_no_fork(new: type[Cluster]) -> None:
    cluster = new()
    parent(cluster)
    forking, pages = cluster.gateway()
    run(forking.fork("acme", "c", cluster.first + 1, "f"))
    real, cluster.calls = cluster.step, 0

    async def fails() -> None:
        await real()
        if cluster.calls > 3:
            raise BrokerUnavailable("away")

    cluster.step = fails
    with pytest.raises(BrokerUnavailable):
        run(forking.fork("acme", "c", cluster.first + 1, "f"))
    assert said(pages, "f") == ["r1 in", "r1 out"]


@LAYOUTS
def test_an_id_that_is_deleted_and_still_needed_begins_anew_and_is_cleaned_up_later(new: type[Cluster]) -> None:
    cluster = new()
    parent(cluster)
    forking, pages = cluster.gateway()
    run(forking.fork("acme", "c", cluster.first + 1, "f"))
    run(forking.delete("acme", "c"))
    assert pages.deleted("acme", ["c", "f"]) == {"c"}
    with pytest.raises(Conflict):
        run(forking.fork("acme", "f", 1, "c"))
    with pytest.raises(NotFound):
        pages.about("acme", "c")
    run(forking.create("acme", "c"))
    assert pages.about("acme", "c").forked_from is None, "it is there at once, whatever was read before"
    assert (pages.turns("acme", "c", 5), pages.deleted("acme", ["c"])) == ([], set())
    say(cluster, "c", "r3")
    assert said(pages, "c") == ["r3 in", "r3 out"]
    assert pages.about("acme", "c").forked_from is None
    run(forking.delete("acme", "f"))
    assert not [key for key in cluster.live_keys(NAMES.conversation("acme", "c")) if key.startswith((b"r1", b"r2"))]
    assert said(cluster.gateway()[1], "c") == ["r3 in", "r3 out"]
    assert cluster.released == ["f"]
