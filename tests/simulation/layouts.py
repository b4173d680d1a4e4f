"""Where conversations stand: what the rest of the simulation asks of either layout, and the one of a topic each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from penstock.common.forks import ForkRecord
from penstock.schemas.records import ConversationMessage

Value = ConversationMessage | None
Record = tuple[int, bytes, Value]
"""(offset, key in the conversation, message); None: a tombstone."""


class View(Protocol):
    """What a reader sees of the conversations, each known by its key."""

    def topic_id(self, line: str) -> str | None:
        """Another one when the conversation was deleted and made anew; None when there is none."""
        ...

    def records(self, line: str) -> Sequence[Record]: ...


class Layout(View, Protocol):
    """Kafka's own view, and what is done to it."""

    @property
    def is_shared(self) -> bool: ...

    def view(self) -> View | None:
        """What a worker that starts now reads from; None: Kafka itself."""
        ...

    def lines(self) -> list[str]: ...

    def open(self, line: str, seen: str | None) -> None:
        """Make the conversation unless it is there. `seen`: its id when the caller looked last."""
        ...

    def begin(self, line: str, first: ForkRecord) -> None:
        """Make a fork, of which this is the first record."""
        ...

    def append(self, line: str, records: Iterable[tuple[bytes, Value]]) -> bool:
        """False when there is no topic for them."""
        ...

    def removal(self, line: str) -> list[Callable[[], object]]:
        """The steps that remove the conversation for good, one after the other."""
        ...

    def check(self) -> None:
        """All ways to read a conversation see the same. Raises Violation."""
        ...


class OwnTopics:
    """A `Layout`: a topic each."""

    is_shared = False

    def __init__(self) -> None:
        self._topics: dict[str, list[Record]] = {}
        self._removed: Counter[str] = Counter()

    def topic_id(self, line: str) -> str | None:
        return f"{line}/{self._removed[line]}" if line in self._topics else None

    def records(self, line: str) -> Sequence[Record]:
        return self._topics.get(line, [])

    def view(self) -> View | None:
        return None

    def lines(self) -> list[str]:
        return list(self._topics)

    def open(self, line: str, seen: str | None) -> None:
        self._topics.setdefault(line, [])

    def begin(self, line: str, first: ForkRecord) -> None:
        self.open(line, None)
        self.append(line, [(first.key.encode(), first.message)])

    def append(self, line: str, records: Iterable[tuple[bytes, Value]]) -> bool:
        if (topic := self._topics.get(line)) is None:
            return False
        topic.extend((offset, key, value) for offset, (key, value) in enumerate(records, len(topic)))
        return True

    def removal(self, line: str) -> list[Callable[[], object]]:
        return [lambda: self._remove(line)]

    def _remove(self, line: str) -> None:
        if self._topics.pop(line, None) is not None:
            self._removed[line] += 1

    def check(self) -> None:
        """There is one way."""
