"""Conversations as their topics hold them: every record for a replay, the folded messages for the history."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.common.reader import RawMessage, read_to_end
from penstock.common.settings import KafkaSettings
from penstock.schemas.codec import Codec, default_codec
from penstock.schemas.errors import DecodeError, NotFound
from penstock.schemas.ids import check_conversation_id, check_tenant
from penstock.schemas.records import ConversationMessage

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConversationRecord:
    """One record of the topic; `message` is None for a tombstone, which removes what its key named."""

    offset: int
    timestamp_ms: int
    key: str
    message: ConversationMessage | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """A message at its offset in the topic."""

    offset: int
    message: ConversationMessage


def fold_messages(records: Iterable[ConversationRecord]) -> list[Turn]:
    """The messages that count, in log order.

    A message may stand there several times, written by several epochs: of one request, direction and number the lowest
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
    """The records from `from_offset` to the end that the topic has now.

    What does not decode is left out.
    `codec` is that of the installation: with a registry its ids may stand in the topic (`schemas.registry`).
    Raises InvalidRequest for an impossible id, NotFound for an unknown conversation, BrokerUnavailable,
    RegistryUnavailable.
    """
    topic = settings.names.conversation(check_tenant(tenant), check_conversation_id(conversation_id))
    try:
        messages = read_to_end(settings, topic, from_offset, partition=0, deadline_s=deadline_s)
        return list(decoded(codec or default_codec(), messages))
    except NotFound as error:
        raise NotFound(f"conversation {conversation_id} does not exist", param="conversation_id") from error


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
