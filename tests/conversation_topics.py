"""Topics of conversations in memory, for the parts of a gateway that write them: killed anywhere, two calls at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from penstock.common.reader import RawMessage
from penstock.common.transport import Delivery
from penstock.gateway.conversations.pages import Conversations
from penstock.gateway.conversations.tails import Place
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
        if topic not in self.logs:
            raise NotFound(topic)
        return max((one.timestamp_ms for one in self.logs[topic]), default=None)

    # -- as topics and producer of `Forking`

    def create(self, topic: str) -> None:
        if topic not in self.logs:
            self.logs[topic], self.ends[topic], self.ids[topic] = [], 0, f"id-{next(self.numbers)}"

    def remove(self, topic: str, place: Place | None = None) -> bool:
        if place is None or self.ids.get(topic) == place.topic_id:
            if place is not None and self.ends[topic] != place.end:
                return False
            self.logs.pop(topic, None)
            self.ids.pop(topic, None)
        return True

    async def produce(
        self, topic: str, value: bytes | None, *, key: bytes | None = None, timestamp_ms: int | None = None
    ) -> Delivery:
        await self.step()
        if topic not in self.logs:
            raise NotFound(topic)
        offset = self.write(topic, key or b"", value, timestamp_ms)
        return Delivery(topic=topic, partition=0, offset=offset, timestamp_ms=0)

    def write(self, topic: str, key: bytes, value: bytes | None, timestamp_ms: int | None = None) -> int:
        offset = self.ends[topic]
        self.ends[topic] += 1
        time_ms = 1_000 + offset if timestamp_ms is None else timestamp_ms
        self.logs[topic].append(RawMessage(topic, 0, offset, time_ms, key, value))
        return offset

    def compact(self, tombstones_too: bool) -> None:
        """The newest record of a key stays; a log's last one always."""
        for topic, records in self.logs.items():
            newest = {one.key: one.offset for one in records}
            self.logs[topic] = [
                one
                for one in records
                if one.offset == self.ends[topic] - 1
                or (newest[one.key] == one.offset and not (one.value is None and tombstones_too))
            ]

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


def say(cluster: Cluster, conversation_id: str, request_id: str, epoch: int = 0) -> None:
    """As a worker does: the topic is made, and the whole turn is written."""
    topic = NAMES.conversation("acme", conversation_id)
    cluster.create(topic)
    for direction in ("in", "out"):
        made = message(conversation_id, request_id, direction, epoch)
        cluster.write(topic, conversation_message_key(made).encode(), CODEC.encode(made))


def said(pages: Conversations, conversation_id: str) -> list[str]:
    return [turn.message.content for turn in pages.turns("acme", conversation_id, 1_000)]
