"""What is known of a conversation besides its records: where it comes from, what goes on from it."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schemas.records import ConversationFork


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """A conversation without its messages."""

    topic_id: str
    """Kafka's id of its topic."""
    created_ms: int | None
    """The time of its topic's first record, in ms since the epoch; None while there is none."""
    last_active_ms: int | None
    """That of its topic's newest record."""
    forked_from: ConversationFork | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Where a message of a conversation stands. `ancestors`: how many topics one reads that goes on from there."""

    conversation_id: str
    topic_id: str
    ancestors: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """What a conversation's topic says of forks and deletions. See `TopicForks`."""

    topic_id: str
    base: int
    parent: ConversationFork | None
    fork_key: str | None
    begin: int
    end: int
    """Kafka's offset behind its last record; the others are the conversation's."""
    forks: dict[str, ConversationFork]
    void: list[str]
    """Keys of records `deleted` that say nothing."""
    is_empty: bool
    """No record was ever written."""
    is_deleted: bool
    keys_before_deletion: list[str]
