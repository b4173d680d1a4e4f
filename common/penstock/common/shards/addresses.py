"""How a conversation is in the shared topic: its keys, its partition, and what stands for a topic's id. Pure.

A conversation begins with a record whose key is `fork/…`, its head; it is gone when the head has a tombstone. So it
behaves as a topic of its own: begun again under the same name it has another id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.schemas.topics import TopicNames, conversation_key, partition_for

HEAD = b"fork/"
"""What the key of a head begins with, behind the conversation."""
_HEAD_AT = ":"
"""Kafka's ids are base64, which has no colon."""
_CONVERSATION = re.compile(rb"(?:[a-z0-9-]{1,63}\.)?[A-Za-z0-9_-]{1,128}")
"""`conversation_key`: readers would stumble over an id or a tenant that cannot be."""


@dataclass(frozen=True, slots=True)
class Address:
    """A conversation in the shared topic."""

    conversation: str
    """Its key: the id, or `{tenant}.{id}`."""
    partition: int

    def key(self, of_record: bytes) -> bytes:
        """The key in the shared topic of a record of this conversation."""
        return self.conversation.encode() + b"/" + of_record


def address_of(names: TopicNames, topic: str, partitions: int) -> Address:
    """Where the records stand that would be in `topic` if each conversation had one. Raises ValueError for others."""
    found = names.parse_conversation(topic)
    if found is None:
        raise ValueError(f"{topic} is no conversation's")
    conversation = conversation_key(*found)
    return Address(conversation, partition_for(conversation.encode(), partitions))


def split_key(key: bytes | None) -> tuple[str, bytes] | None:
    """The conversation, and the record's key in it. None for a key that nobody of ours wrote."""
    conversation, slash, of_record = (key or b"").partition(b"/")
    if not slash or _CONVERSATION.fullmatch(conversation) is None:
        return None
    return conversation.decode("ascii"), of_record


def id_of(topic_id: str, partition: int, head: int) -> str:
    """What stands for the id of the conversation's topic, which no other has: Kafka's of the shared one, and where the
    head is in it."""
    return f"{topic_id}{_HEAD_AT}{partition}{_HEAD_AT}{head}"


def is_shared(conversation_topic_id: str | None) -> bool:
    return conversation_topic_id is not None and _HEAD_AT in conversation_topic_id


def head_of(conversation_topic_id: str | None) -> int | None:
    """Kafka's offset of the conversation's head; None: it has a topic of its own."""
    return (
        int(conversation_topic_id.rpartition(_HEAD_AT)[2])
        if conversation_topic_id and is_shared(conversation_topic_id)
        else None
    )


def topic_id_of(conversation_topic_id: str) -> str:
    """Kafka's id of the topic that holds the conversation."""
    return conversation_topic_id.partition(_HEAD_AT)[0]


def first_offset(conversation_topic_id: str | None) -> int:
    """Kafka's offset of the conversation's first record; a topic of its own begins with 0."""
    return head_of(conversation_topic_id) or 0
