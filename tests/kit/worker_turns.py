"""Turns of conversations in memory: a topic as a list, requests and answers, and what a worker reads them by."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from typing import Any

from penstock.processors.conversations.messages import answer_message
from penstock.processors.conversations.turns import ConversationTurns, TurnStart
from penstock.processors.kafka.broker_watch import BrokerWatch
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable, NotFound, Overloaded
from penstock.schemas.records import ArtifactRef, ConversationMessage, InferenceRequest, conversation_message_key
from penstock.schemas.topics import TopicNames

CODEC = default_codec()
topic_of = TopicNames().conversation


class MemoryLog:
    """The topic of one conversation. `rivals` are appended by another worker in front of the next append."""

    is_shared = False

    def __init__(self) -> None:
        self.records: list[tuple[int, bytes, bytes | None]] = []
        self.topic_id = "first"
        self.made = False
        self.reads: list[int] = []
        self.rivals: list[ConversationMessage] = []
        self.away = False
        self.lost_acks = 0
        self.before: dict[str, Callable[[], object]] = {}
        """By `open` and `append`: what happens once, in front of the next one."""

    def find(self, topic: str, timeout_s: float) -> str | None:
        self.raise_if_away()
        return self.topic_id if self.made else None

    def meet(self, call: str) -> object:
        return self.before.pop(call, lambda: None)()

    def raise_if_away(self) -> None:
        if self.away:
            raise BrokerUnavailable("away")

    def open(self, topic: str, timeout_s: float) -> str:
        self.raise_if_away()
        self.meet("open")
        self.made = True
        return self.topic_id

    def read(self, topic: str, from_offset: int, timeout_s: float) -> list[tuple[int, bytes, bytes | None]]:
        self.reads.append(from_offset)
        return [record for record in self.records if record[0] >= from_offset]

    async def append(self, topic: str, records: Sequence[tuple[bytes, bytes | None]]) -> list[int]:
        if isinstance(meanwhile := self.meet("append"), Awaitable):
            await meanwhile
        if not self.made:
            raise NotFound(f"there is no topic {topic}")
        rivals, self.rivals = self.rivals, []
        self.put(*rivals)
        first = len(self.records)
        self.records += [(first + number, key, value) for number, (key, value) in enumerate(records)]
        if self.lost_acks:
            self.lost_acks -= 1
            raise BrokerUnavailable("appended, but the acknowledgement was lost")
        return list(range(first, len(self.records)))

    # -- what a test does and sees

    def put(self, *messages: ConversationMessage) -> None:
        for one in messages:
            self.records.append((len(self.records), conversation_message_key(one).encode(), CODEC.encode(one)))

    def recreate(self) -> None:
        """Deletes the topic and creates it again."""
        self.records.clear()
        self.topic_id = "second"

    def keys(self) -> list[str]:
        return [key.decode() for _, key, _ in self.records]

    def live_keys(self) -> list[str]:
        """Keys of the records that no tombstone removes."""
        values = {key.decode(): value for _, key, value in self.records}
        return [key for key, value in values.items() if value is not None]


class Holds:
    """The artifacts that a conversation holds. The first `failures` calls find the store away."""

    def __init__(self, log: MemoryLog | None = None) -> None:
        self.held: set[str] = set()
        self.records_before: list[int] = []
        self.erased: str | None = None
        self.failures = 0
        self._log = log

    def hold(self, tenant: str, conversation_id: str, artifact_ids: Iterable[str]) -> None:
        if self.failures:
            self.failures -= 1
            raise Overloaded("the store is away")
        assert (tenant, conversation_id) == ("default", "c1")
        self.held |= set(artifact_ids)
        self.records_before.append(len(self._log.records) if self._log else 0)

    def let_go(self, tenant: str, conversation_id: str, artifact_ids: Iterable[str]) -> None:
        self.held -= set(artifact_ids)

    def keep_only(self, tenant: str, conversation_id: str, artifact_ids: Set[str], erased: str) -> None:
        self.held &= artifact_ids
        self.erased = erased


def turns_of(log: Any, **options: Any) -> ConversationTurns:
    """A worker's `ConversationTurns` on this log. Its watch sees the broker unless the log is away."""
    watch = BrokerWatch(lambda _: not getattr(log, "away", False))
    return ConversationTurns(log, CODEC, topic_of, **{"threads": 1, "cached_bytes": 1 << 20, "watch": watch, **options})


def mine() -> bool:
    return True


def request(request_id: str, *texts: str, conversation_id: str | None = "c1", **payload: Any) -> InferenceRequest:
    """Text by its messages, or another task by the name of its payload."""
    payload = payload or {"text_generation": {"messages": [{"role": "user", "content": text} for text in texts]}}
    fields = {"task": next(iter(payload)), "conversation_id": conversation_id, "created_at": 0, **payload}
    return InferenceRequest(request_id=request_id, **fields)


def answer(of: InferenceRequest, text: str, *images: str, epoch: int = 1) -> ConversationMessage:
    artifacts = [picture(name) for name in images]
    facts: dict[str, Any] = {"model": "m", "finish_reason": "stop", "usage": None, "now_ms": 0, "artifacts": artifacts}
    return answer_message(of, text, epoch=epoch, attempt=1, **facts)


def picture(name: str) -> ArtifactRef:
    return ArtifactRef(artifact_id=name, uri=name, media_type="image/png", size_bytes=1, sha256=name)


async def take(turns: ConversationTurns, of: InferenceRequest, epoch: int = 1) -> TurnStart:
    """Reads, then begins at once."""
    start = await turns.read(of, mine)
    if start.answer is None:
        assert await turns.begin(of, epoch, 0, mine, start.mark)
    return start


async def turn(turns: ConversationTurns, of: InferenceRequest, text: str, *images: str) -> ConversationMessage:
    """A whole turn."""
    start = await turns.read(of, mine)
    topic_id = await turns.begin(of, 1, 0, mine, start.mark)
    assert topic_id is not None
    return await turns.finish(answer(of, text, *images), mine, topic_id)


def contents(history: Sequence[dict[str, Any]]) -> list[str]:
    return [message["content"] for message in history]
