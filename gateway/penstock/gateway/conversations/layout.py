"""Where conversations stand on Kafka: each in a topic of its own, or all in one. Readers and writers name topics as if
each had its own; a layout says what that means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from penstock.gateway.conversations.indexes import Log
from penstock.gateway.conversations.tails import TopicEnd


class Target(NamedTuple):
    """Where a record goes, and under which key."""

    topic: str
    partition: int
    key: bytes


class Layout(Protocol):
    """All methods but `target` block, and raise BrokerUnavailable."""

    @property
    def log(self) -> Log:
        """What reads them."""
        ...

    @property
    def is_shared(self) -> bool:
        """Whether they stand in one topic."""
        ...

    def target(self, topic: str, key: bytes) -> Target: ...

    def create(self, topic: str) -> None:
        """Make the conversation, empty, unless it is there. Raises InsufficientCapacity."""
        ...

    def remove(self, topic: str, place: TopicEnd | None = None) -> bool:
        """Remove it for good, and wait until readers see that it is gone: the next turn must not find it.

        False when it is still there and does not end at `place` any more. One of another id is left alone: another
        gateway has removed this one, and a turn made it anew.
        """
        ...

    def ids(self, tenant: str) -> list[str]:
        """The ids of a tenant's conversations, those that stand for their forks alone too."""
        ...

    def everyone(self) -> list[tuple[str, str]]:
        """(tenant, id) of all conversations."""
        ...

    def topic_ids(self, topics: Sequence[str]) -> dict[str, str]:
        """What distinguishes a conversation from another one of its name, by topic, of those that exist."""
        ...

    def newest_times(self, topics: Sequence[str]) -> dict[str, int]:
        """When the newest record of each was written, in ms since the epoch. One without records may be absent."""
        ...

    def times_of(self, wants: Callable[[str], bool]) -> dict[tuple[str, str], int | None]:
        """By tenant and id, of all conversations of the tenants that are wanted: when the newest record was written, in
        ms since the epoch; None without records."""
        ...

    def take_back(self, before_ms: int) -> int:
        """Erase records, written before that time, that no conversation holds; how many. Whoever wrote them does it
        himself, unless he was killed."""
        ...

    def close(self) -> None: ...
