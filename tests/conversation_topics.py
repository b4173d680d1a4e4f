"""Topics of conversations in memory, for the parts of a gateway that write them: killed anywhere, two calls at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, cast

from conversation_logs import ReadTopics
from kit.records import conversation_message
from memory_topics import compacted
from penstock.common.conversations import TopicRecords, decoded
from penstock.common.reader import RawMessage
from penstock.common.shards.addresses import address_of, id_of
from penstock.common.shards.scanning import of_conversation
from penstock.common.shards.shard_file import ShardFile
from penstock.common.transport import Delivery
from penstock.gateway.conversations.indexes import Log
from penstock.gateway.conversations.layout import Target
from penstock.gateway.conversations.pages import Conversations
from penstock.gateway.conversations.shared import SharedTopic
from penstock.gateway.conversations.tails import TopicEnd
from penstock.gateway.service.forking import Forking
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import NotFound, PenstockError
from penstock.schemas.records import ConversationMessage, conversation_message_key
from penstock.schemas.topics import TopicNames

CODEC = default_codec()
NAMES = TopicNames()


class Killed(BaseException):
    """The process is gone."""


class Step:
    """Gives the other call its turn."""

    def __await__(self) -> Generator[None]:
        yield


class Cluster(ReadTopics):
    """Topics, producer, threads and artifacts of gateways. `kill_at`: so many calls of it work, then the process is
    killed."""

    is_shared: ClassVar[bool] = False
    first: ClassVar[int] = 0
    """Where the first message of the first conversation stands."""

    def __init__(self, kill_at: int | None = None) -> None:
        super().__init__()
        self.kill_at = kill_at
        self.released: list[str] = []
        self.calls = 0

    @property
    def log(self) -> Log:
        return self

    def target(self, topic: str, key: bytes) -> Target:
        return Target(topic, 0, key)

    def exists(self, topic: str) -> bool:
        return topic in self.ids

    def read_topic(self, topic: str) -> tuple[str, TopicRecords]:
        self.require(topic)
        return self.ids[topic], TopicRecords(list(decoded(CODEC, self.logs[topic])))

    @property
    def is_empty(self) -> bool:
        return not self.logs

    def live_keys(self, topic: str) -> list[bytes]:
        live = {one.key or b"": one.value for one in self.logs[topic]}
        return [key for key, value in live.items() if value is not None]

    def remove(self, topic: str, place: TopicEnd | None = None) -> bool:
        if place is None or self.ids.get(topic) == place.topic_id:
            if place is not None and self.ends[topic] != place.end:
                return False
            self.drop(topic)
        return True

    async def produce(
        self, topic: str, value: bytes | None, *, key: bytes, partition: int, timestamp_ms: int | None = None
    ) -> Delivery:
        await self.step()
        offset = self.put(topic, key, value, timestamp_ms)
        return Delivery(topic=topic, partition=partition, offset=offset, timestamp_ms=0)

    async def run_for(self, tenant: str, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        await self.step()
        return work(*args, **options)

    async def step(self) -> None:
        await Step()
        if self.kill_at is not None and self.calls >= self.kill_at:
            raise Killed
        self.calls += 1

    @property
    def holds(self) -> Cluster:
        return self

    def marks_of(self, tenant: str, conversation_id: str) -> dict[str, int]:
        return {}

    def conversation_gone(self, tenant: str, conversation_id: str, marks: object) -> None:
        self.released.append(conversation_id)

    def gateway(self, artifacts: Any = None) -> tuple[Forking, Conversations]:
        """A gateway that has read nothing yet. `artifacts`: a real store in place of the cluster."""
        pages = Conversations(self, NAMES, CODEC)
        threads = SimpleNamespace(conversations=self, artifacts=self)
        return Forking(self, self, pages, NAMES, CODEC, cast(Any, artifacts or self), cast(Any, threads)), pages


class Offsets(NamedTuple):
    """Where a turn's messages stand: Kafka's offsets."""

    question: int
    answer: int


class SharedCluster(Cluster):
    """The same with one topic of two partitions for all, and the real file that finds what is in it."""

    is_shared: ClassVar[bool] = True
    first: ClassVar[int] = 1
    records_left: int | None = None
    """So many are written, then the process is killed."""

    def __init__(self, kill_at: int | None = None) -> None:
        super().__init__(kill_at)
        self.topic, self.partitions, self.topic_id_of_all = NAMES.conversation_log, 2, "shared"
        self.partition_logs: list[list[RawMessage]] = [[], []]
        self.partition_ends = [0, 0]
        self.folder = TemporaryDirectory()
        self.read_anew()

    def give_new_ids(self) -> None:
        self.topic_id_of_all += "'"
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
        offset = self.append(partition, key, value)
        on_delivery(Delivery(topic=topic, partition=partition, offset=offset, timestamp_ms=0))

    def append(self, partition: int, key: bytes, value: bytes | None, timestamp_ms: int | None = None) -> int:
        if self.records_left is not None:
            if not self.records_left:
                raise Killed
            self.records_left -= 1
        offset = self.partition_ends[partition]
        self.partition_ends[partition] += 1
        time_ms = 1_000 + offset if timestamp_ms is None else timestamp_ms
        message = RawMessage(self.topic, partition, offset, time_ms, key, value)
        self.partition_logs[partition].append(message)
        self.file.apply([message], {}, 0)
        return offset

    async def produce(
        self, topic: str, value: bytes | None, *, key: bytes, partition: int, timestamp_ms: int | None = None
    ) -> Delivery:
        await self.step()
        offset = self.append(partition, key, value, timestamp_ms)
        return Delivery(topic=topic, partition=partition, offset=offset, timestamp_ms=0)

    # -- as its users see it

    @property
    def layout(self) -> SharedTopic:
        return SharedTopic(cast(Any, _Copy(self)), cast(Any, self), NAMES, CODEC)

    @property
    def log(self) -> Log:
        return self.layout.log

    def create(self, topic: str) -> None:
        self.layout.create(topic)

    def put(self, topic: str, key: bytes, value: bytes | None, timestamp_ms: int | None = None) -> int:
        target = self.layout.target(topic, key)
        return self.append(target.partition, target.key, value, timestamp_ms)

    def exists(self, topic: str) -> bool:
        return self.layout.log.topic_id(topic) is not None

    def read_topic(self, topic: str) -> tuple[str, TopicRecords]:
        address = address_of(NAMES, topic, self.partitions)
        head, records = of_conversation(self.partition_logs[address.partition], address)
        if head is None:
            raise NotFound(topic)
        return id_of(self.topic_id_of_all, address.partition, head), TopicRecords(list(decoded(CODEC, records)), head)

    def remove(self, topic: str, place: TopicEnd | None = None) -> bool:
        return self.layout.remove(topic, place)

    def compact(self, *, tombstones_too: bool) -> None:
        for partition, records in enumerate(self.partition_logs):
            self.partition_logs[partition] = compacted(records, self.partition_ends[partition], tombstones_too)
        self.read_anew()

    def gateway(self, artifacts: Any = None) -> tuple[Forking, Conversations]:
        pages = Conversations(self.layout.log, NAMES, CODEC)
        threads = SimpleNamespace(conversations=self, artifacts=self)
        return Forking(self, self.layout, pages, NAMES, CODEC, cast(Any, artifacts or self), cast(Any, threads)), pages

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


def killed_at_each_step(
    new: Callable[[], Cluster], call: Callable[[Cluster], Coroutine[Any, Any, Any]], least: int
) -> Iterator[Cluster]:
    """The cluster after the process was killed at the call's first step, at its second, and so on; the last time the
    call ends, after at least so many steps."""
    for kill_at in itertools.count():
        cluster = new()
        cluster.kill_at, cluster.calls = kill_at, 0
        try:
            run(call(cluster))
            ended = True
        except Killed:
            ended = False
        cluster.kill_at = None
        yield cluster
        if ended:
            assert kill_at > least
            return


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
    fields: dict[str, Any] = {"tenant": "acme", "conversation_id": conversation_id, "request_id": request_id}
    role = "user" if direction == "in" else "assistant"
    return conversation_message(role, content=f"{request_id} {direction}", epoch=epoch, **fields)


def say(cluster: Cluster, conversation_id: str, request_id: str, epoch: int = 0) -> Offsets:
    """As a worker does: the topic is made, and the whole turn is written."""
    topic = NAMES.conversation("acme", conversation_id)
    cluster.create(topic)
    made = [message(conversation_id, request_id, direction, epoch) for direction in ("in", "out")]
    question, answer = (cluster.put(topic, conversation_message_key(one).encode(), CODEC.encode(one)) for one in made)
    return Offsets(question, answer)


def said(pages: Conversations, conversation_id: str) -> list[str]:
    return [turn.message.content for turn in pages.turns("acme", conversation_id, 1_000)]
