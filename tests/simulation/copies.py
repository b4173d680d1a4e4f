"""What each fork must hold: a copy of its parent's records, made when it was forked, less what was erased since."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.common.conversations import ConversationRecord, Turn, fold_messages
from penstock.processors.conversations.log import ConversationLog
from simulation.layouts import Layout
from simulation.truth import Violation


class Copies:
    """Of the records alone; nothing of the product's `ConversationLog` goes into a copy."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._copies: dict[str, list[tuple[str, int, ConversationRecord]]] = {}
        """By fork: the topic, Kafka's offset in it, and the record at the conversation's offset."""
        self._bases: dict[str, int] = {}
        self._begins: dict[str, int] = {}
        """Kafka's offset behind the newest deletion."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._copies)

    def copy(self, parent: str, fork: str, through: int) -> None:
        self._copies[fork] = [one for one in self._records(parent) if one[2].offset <= through]
        self._bases[fork] = through + 1

    def forget(self, line: str) -> None:
        """Its topic is gone."""
        for known in (self._copies, self._bases, self._begins):
            known.pop(line, None)

    def end(self, line: str) -> None:
        """What stands there is deleted, but for forks that have copied it."""
        self._copies.pop(line, None)
        self._begins[line] = self._layout.records(line)[-1][0] + 1

    def holder(self, line: str, offset: int) -> str:
        """The topic in which the record at this offset stands."""
        return next(topic for topic, _, record in self._records(line) if record.offset == offset)

    def base(self, line: str) -> int:
        return self._bases.get(line, 0)

    def check(self, line: str, log: ConversationLog) -> None:
        held = [(entry.offset, entry.message.content) for entry in log.through(None)]
        wanted = [(turn.offset, turn.message.content) for turn in self._turns(line)]
        if held != wanted:
            offsets, others = ([offset for offset, _ in some] for some in (held, wanted))
            raise Violation(f"fork: {line} holds {offsets}, and a copy of what it was made of {others}")

    def _turns(self, line: str) -> list[Turn]:
        records = self._records(line)
        erased = {
            topic: {key.decode(): offset for offset, key, message in self._layout.records(topic) if message is None}
            for topic in {topic for topic, _, _ in records}
        }
        return fold_messages(record for topic, at, record in records if erased[topic].get(record.key, -1) < at)

    def _records(self, line: str) -> list[tuple[str, int, ConversationRecord]]:
        base, begin = self._bases.get(line, 0), self._begins.get(line, 0)
        own = [
            (line, at, ConversationRecord(offset=base + at, timestamp_ms=0, key=key.decode(), message=message))
            for at, key, message in self._layout.records(line)
            if at >= begin and message is not None and message.direction in ("in", "out")
        ]
        return [*self._copies.get(line, ()), *own]
