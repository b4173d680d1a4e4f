"""Where the summarizer reads conversations: what a layout has to answer. See `OwnTopics`, `SharedTopic`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.common.conversations import Turn
from penstock.common.reader import Headers
from penstock.gateway.summarizer.summary_scheduler import Commit, Key

REACHED: Headers = (("reached", None),)
"""Marks what is no record: its offset is the reader's position, behind all batches before it."""


@dataclass(frozen=True, slots=True)
class ReadingPlace:
    """Where the reading of a conversation begins, and what a predecessor has committed."""

    topic_id: str
    begin: int
    committed: Commit
    end: int


class Source(Protocol):
    """What is read goes to the queue of batches as records of the conversation's topic, at Kafka's offsets.

    All methods but `begin`, `forget` and `mark` block. They raise BrokerUnavailable.
    """

    @property
    def failure(self) -> BaseException | None:
        """Why nothing is read any more."""
        ...

    def there(self) -> set[Key]:
        """All conversations."""
        ...

    def ids(self, keys: Sequence[Key]) -> dict[Key, str]:
        """What distinguishes a conversation from another one of its name, of those that exist."""
        ...

    def places(self, keys: Sequence[Key]) -> dict[Key, ReadingPlace]:
        """Those that exist. Raises NotFound for one that is deleted at this moment."""
        ...

    def end(self, key: Key, topic_id: str) -> int | None:
        """The offset behind its last record; None: it is gone, or another one."""
        ...

    def standing(self, key: Key, topic_id: str) -> tuple[list[Turn], int]:
        """What stands in the conversation with this id, and its end. Raises NotFound, RegistryUnavailable."""
        ...

    def begin(self, begin: Mapping[Key, int]) -> None:
        """Read each of these from its offset on, once more if it was read already."""
        ...

    def forget(self, key: Key) -> None:
        """Read it no more."""
        ...

    def mark(self, unread: Mapping[Key, int]) -> None:
        """Tell with a mark where each of these stands, with the given number as its time."""
        ...

    def commit(self, commits: Mapping[Key, tuple[str, Commit]]) -> None:
        """Keep these, each with its conversation's id."""
        ...

    def stop(self) -> None:
        """Read nothing any more."""
        ...
