"""Conversations as their topics hold them: every record for a replay, the folded messages for the history."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from penstock.common import admin
from penstock.common.forks import TopicForks
from penstock.common.reader import RawMessage, read_to_end
from penstock.common.settings import KafkaSettings
from penstock.common.shards.addresses import head_of
from penstock.common.shards.partitioning import partitions_in_use
from penstock.common.shards.scanning import read_shared
from penstock.schemas.codec import Codec, default_codec
from penstock.schemas.errors import DecodeError, NotFound
from penstock.schemas.ids import check_conversation_id, check_tenant
from penstock.schemas.records import ConversationMessage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationRecord:
    """One record of the topic; `message` is None for a tombstone, which removes what its key named.

    `offset` is Kafka's, or the conversation's where that is read through what it goes on from.
    """

    offset: int
    timestamp_ms: int
    key: str
    message: ConversationMessage | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A message at its offset in the conversation."""

    offset: int
    message: ConversationMessage


class TopicRecords(NamedTuple):
    """All records of a conversation's topic, at Kafka's offsets."""

    records: list[ConversationRecord]
    head: int | None = None
    """The offset of its head, where it shares the topic with others."""
    has_id: bool = True
    """Whether the topic has the id that was asked for."""


def fold_messages(records: Iterable[ConversationRecord]) -> list[Turn]:
    """The messages that count, in log order.

    A message may be there several times, written by several epochs: of one request, direction and number the lowest
    offset counts. A tombstone drops the record of its key. Summaries are not messages of the conversation.
    """
    counted: dict[tuple[str | None, str, int], Turn] = {}
    for turn in standing(records):
        message = turn.message
        if message.direction in ("in", "out"):
            counted.setdefault((message.request_id, message.direction, message.index), turn)
    return list(counted.values())


def standing(records: Iterable[ConversationRecord]) -> list[Turn]:
    """All that no tombstone has dropped, repeats and summaries too, in log order."""
    by_key: dict[str, Turn] = {}
    for record in sorted(records, key=lambda record: record.offset):
        if record.message is None:
            by_key.pop(record.key, None)
        else:
            by_key.setdefault(record.key, Turn(offset=record.offset, message=record.message))
    return sorted(by_key.values(), key=lambda turn: turn.offset)


def read_conversation(
    settings: KafkaSettings,
    tenant: str,
    conversation_id: str | int,
    from_offset: int = 0,
    *,
    codec: Codec | None = None,
    deadline_s: float = 10.0,
) -> list[ConversationRecord]:
    """The records from `from_offset` to the end that the topic has now; of a fork those that it inherited come first.

    What does not decode is left out.
    `codec` is that of the installation: with a registry its ids may be in the topic (`schemas.registry`).
    Raises InvalidRequest for an impossible id, NotFound for an unknown conversation, BrokerUnavailable,
    RegistryUnavailable.
    """
    own_id = check_conversation_id(conversation_id)

    owner, shared = check_tenant(tenant), partitions_in_use(settings, deadline_s)

    def read_topic(name: str, topic_id: str | None) -> TopicRecords | None:
        topic = settings.names.conversation(owner, name)
        if shared is not None:
            found_id, messages = read_shared(settings, topic, shared, deadline_s)
            head = head_of(found_id)
        else:
            found_id, head = None if topic_id is None else admin.topic_id(settings, topic, deadline_s), None
            if topic_id is not None and found_id is None:
                return None
            messages = read_to_end(settings, topic, partition=0, deadline_s=deadline_s)
        return TopicRecords(list(decoded(codec or default_codec(), messages)), head, topic_id in (None, found_id))

    try:
        records = read_through(own_id, read_topic)
    except NotFound as error:
        raise NotFound(f"conversation {own_id} does not exist", param="conversation_id") from error
    return [record for record in records if record.offset >= from_offset]


def read_through(
    conversation_id: str, read_topic: Callable[[str, str | None], TopicRecords | None]
) -> list[ConversationRecord]:
    """The records of a conversation at its own offsets, with those that it inherits (`TopicForks`).

    `read_topic` reads a conversation's topic; None when it does not exist and an id is asked for. Nothing is inherited
    from a topic that has neither that id nor a record of the fork. Raises NotFound for a deleted conversation.
    """
    parts: list[list[ConversationRecord]] = []
    name, topic_id, limit, fork_key = conversation_id, None, None, None
    while (found := read_topic(name, topic_id)) is not None:
        records, forks = found.records, TopicForks(found.head)
        for record in records:
            forks.apply(record.offset, record.key, record.message)
        if not (found.has_id or forks.has_fork(fork_key)):
            break
        live = {record.key: record for record in records}
        begin = forks.begin(limit)
        behind = (one for one in live.values() if one.offset >= begin - forks.base and one.key not in forks.void)
        if not parts and forks.deletions and not any(map(_is_of_conversation, behind)):
            raise NotFound("the conversation is deleted")
        parts.append(
            [
                replace(
                    record, offset=at, message=record.message if limit is None or live[record.key].message else None
                )
                for record in records
                if begin <= (at := forks.base + record.offset) and (limit is None or at <= limit)
            ]
        )
        if (fork := forks.goes_on_from(limit)) is None:
            break
        limit = fork.through if limit is None else min(limit, fork.through)
        name, topic_id, fork_key = fork.conversation_id, fork.topic_id, forks.fork_key
    return [record for part in reversed(parts) for record in part]


def _is_of_conversation(record: ConversationRecord) -> bool:
    return record.message is not None and record.message.direction != "forked"


def decoded(codec: Codec, raw: Iterable[RawMessage]) -> Iterator[ConversationRecord]:
    """Records of a conversation's topic. What does not decode is left out. Raises RegistryUnavailable."""
    for item in raw:
        message: ConversationMessage | None = None
        if item.value is not None:
            try:
                message = codec.decode(item.value, ConversationMessage)
            except DecodeError as error:
                logger.warning("conversation.undecodable topic=%s offset=%d %s", item.topic, item.offset, error.code)
                continue
        key = (item.key or b"").decode("utf-8", "replace")
        yield ConversationRecord(offset=item.offset, timestamp_ms=item.timestamp_ms, key=key, message=message)
