"""The offsets of one partition, from what the broker has committed to the end of what was delivered: which are done.

An offset costs nine bytes here, done or not: one flag and one mark. The mark is a hash of the request id. By it a
redelivery of finished work differs from another record at the same offset (a topic that was deleted and created again).
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Sequence

from penstock.processors.core.commit import donemap

EMPTY = 0
"""No record is known here: it was not delivered, or the offset has none. So a record that comes is new."""
ANY = 1
"""A done map said that this is done, and it names no request: whatever comes here is done."""
FORGET = 4_096
"""Offsets that are forgotten in one go, so that forgetting is cheap."""


def mark_of(request_id: str) -> int:
    """Neither EMPTY nor ANY. Equal ids have equal marks in one process, other ids other ones (62 bits)."""
    return hash(request_id) | 2


class GapInDelivery(Exception):
    """The consumer skipped offsets: to go on would commit past records that were never seen."""


class CommitSpan:
    """`position`: end of the last delivery. `end`: end of all deliveries, and the highest offset to be committed.

    `brought`: end of the last delivery since the last assignment, after which deliveries begin at the commit again.
    `reached`: end of the deliveries whose records are all in hand or done; after an assignment it falls to the first
    record that nobody took, which is delivered again.
    """

    __slots__ = ("_base", "_done", "_head", "_marks", "_needed", "_resume", "brought", "end", "position", "reached")

    def __init__(self, committed: int, done_map: str) -> None:
        self._base = self._resume = self._needed = self.position = self.brought = self.end = self.reached = committed
        self._done = bytearray(donemap.decode_flags(committed, done_map))
        self._marks = array("q", (ANY if flag else EMPTY for flag in self._done))
        self._head = 0

    def __len__(self) -> int:
        return len(self._done)

    @property
    def head(self) -> int:
        """The lowest offset that is not done, at most `end`."""
        first_open = self._done.find(0, self._head)
        self._head = min(len(self._done) if first_open < 0 else first_open, self.end - self._base)
        return self._base + self._head

    def resume(self, committed: int) -> None:
        """A new assignment: the next delivery starts at the position or at what the broker has committed."""
        self._resume = self._needed = self.brought = committed
        if committed < self._base:
            self._reach_back(committed)
        # What is committed is done, also what was delivered again here and not taken, or never delivered here.
        self._grow(committed)
        self._done[: committed - self._base] = b"\x01" * (committed - self._base)
        self.end = max(self.end, committed)
        self.position = max(self.position, committed)

    def deliver(self, start: int, end: int, offsets: Sequence[int]) -> None:
        """Records came from [start, end); offsets between them that have none are done. Raises GapInDelivery."""
        if not self._resume <= start <= self.position or end < start:
            raise GapInDelivery(f"[{start}, {end}) after {self.position}, resumed at {self._resume}")
        if start < self._base:
            self._reach_back(start)
        self._grow(end)
        if len(offsets) != end - start:
            expected = start
            for offset in (*offsets, end):
                if offset > expected:
                    self._done[expected - self._base : offset - self._base] = b"\x01" * (offset - expected)
                expected = offset + 1
        self._needed = start  # what it brought may arrive later
        self.position = self.brought = end
        self.end = max(self.end, end)
        self.reached = max(self.reached, end)

    def recede(self, held: Container[int]) -> None:
        """After an assignment: what was delivered and is neither held nor done must be delivered again."""
        self.reached = self.head
        while self.reached < self.end and (self.reached in held or self._done[self.reached - self._base]):
            self.reached += 1

    def finished(self, offset: int, mark: int) -> bool:
        """Whether the outcome of this very record is durable. Raises GapInDelivery for what no delivery covers."""
        at = offset - self._base
        if at < 0:
            return True  # it was done, and the broker has committed it since it was delivered again
        if offset >= self.end:
            raise GapInDelivery(f"{offset} was not delivered: deliveries end at {self.end}")
        return bool(self._done[at]) and self._marks[at] in (ANY, mark)

    def done(self, offset: int) -> bool:
        """Of one that was delivered."""
        return offset < self._base or bool(self._done[offset - self._base])

    def finish(self, offset: int, mark: int) -> None:
        """The outcome of this record is durable."""
        at = offset - self._base
        self._done[at] = 1
        self._marks[at] = mark

    def reopen(self, offset: int) -> None:
        """A record that is not done is here now."""
        at = offset - self._base
        self._done[at] = 0
        self._head = min(self._head, at)

    def abandon(self, offset: int) -> None:
        """Nobody works on this record any more. It is done if its offset was committed: it is not delivered again."""
        if offset < self._resume:
            self._done[offset - self._base] = 1

    def forget(self, committed: int, behind_head: int) -> None:
        """What is below `committed`, or further than `behind_head` below the head, is not needed any more.

        What the next delivery may still bring is kept: after a rebalance it begins at what was committed then, though
        the commit has moved on meanwhile.
        """
        below = max(committed, self.head - behind_head) - self._base
        below = min(below, self._head, self._needed - self._base)
        if below >= FORGET or 0 < below == len(self._done):
            del self._done[:below], self._marks[:below]
            self._base += below
            self._head -= below

    def done_map(self) -> str:
        """What is done above the head."""
        head = self.head
        return donemap.encode_flags(head, self._done[self._head :])

    def _grow(self, end: int) -> None:
        more = end - self._base - len(self._done)
        if more > 0:
            self._done += bytes(more)
            self._marks.frombytes(bytes(more * self._marks.itemsize))

    def _reach_back(self, start: int) -> None:
        """The broker delivers again what was forgotten here: it is not known to be done."""
        more = self._base - start
        self._done[:0] = bytes(more)
        self._marks[:0] = array("q", bytes(more * self._marks.itemsize))
        self._base = start
        self._head = 0
