"""What of one conversation no summary covers yet, and how far the next one is to go. Pure.

A span is a number of whole turns behind the last summary. It is due when `RECENT_TURNS` more have begun behind it:
those stand in prompts as they are. Where it ends depends on the log and the policy alone, not on when somebody looks,
so whoever looks again finds the same span.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from itertools import accumulate

from penstock.schemas.limits import RECENT_TURNS
from penstock.schemas.records import ConversationMessage, SummarizePolicy

BYTES_PER_TOKEN = 4
"""A guess for what nobody has counted: which model will read it is not known yet."""

_NONE, _SYSTEM, _USER, _OTHER = range(4)
_ROLES = {"system": _SYSTEM, "user": _USER}


def tokens_of(message: ConversationMessage) -> int:
    """Tokens of a message: those that its model counted, else about as many as its text has."""
    if message.usage is not None and message.usage.completion_tokens:
        return message.usage.completion_tokens
    return -(-len(message.content.encode()) // BYTES_PER_TOKEN)


class Spans:
    """Fed with the records of a conversation's topic in log order, from its beginning or from behind `covered`."""

    def __init__(self, covered: int = -1) -> None:
        self.covered = covered
        """The offset up to which the newest summary covers the conversation."""
        self.base = -1
        """The offset of the first summary that covers up to there; -1 while none was seen."""
        self._offsets = array("q")
        """Of the messages behind `covered`; of each its role (`_ROLES`) and its tokens stand in the next two."""
        self._roles = array("b")
        self._counts = array("q")
        self._ends = array("q")
        """Of each turn among them, the offset of its last message so far, and its tokens."""
        self._tokens = array("q")
        self._given_up = -1
        """Where a span ends that could not be summed up: the next one ends behind it."""
        self._role = _NONE
        """Of the last message that was no system message."""

    @property
    def turns(self) -> int:
        """Turns that have begun behind the last summary."""
        return len(self._ends)

    def add(self, offset: int, message: ConversationMessage) -> None:
        if message.direction == "summary":
            if message.covers_through is not None:
                self._cover(message.covers_through, offset)
        elif message.direction in ("in", "out"):
            self._add(offset, message)

    def offsets(self, through: int) -> array[int]:
        """The offsets of the messages behind the last summary, up to this offset."""
        return self._offsets[: bisect_right(self._offsets, through)]

    def give_up(self, through: int) -> None:
        """The span that ends there could not be summed up: it becomes part of the next one."""
        self._given_up = max(self._given_up, through)

    def due(self, policy: SummarizePolicy) -> int | None:
        """The offset up to which a summary is due; None while none is."""
        whole = self.turns - RECENT_TURNS
        first = bisect_right(self._ends, self._given_up)
        if whole <= first:
            return None
        counts: list[int] = []
        if (turns := policy.every_turns or 0) > 0 and first + turns <= whole:
            counts.append(first + turns)
        if (most := policy.every_tokens or 0) > 0:
            sums = enumerate(accumulate(self._tokens[first:whole]), first + 1)
            counts += [next((count for count, tokens in sums if tokens >= most), whole + 1)]
        count = min(counts, default=whole + 1)
        return self._ends[count - 1] if count <= whole else None

    def _add(self, offset: int, message: ConversationMessage) -> None:
        self._offsets.append(offset)
        self._roles.append(_ROLES.get(message.role, _OTHER))
        self._counts.append(tokens_of(message))
        self._count(-1)

    def _count(self, at: int) -> None:
        """Count the message at this place as part of its turn."""
        role = self._roles[at]
        if role != _SYSTEM:
            if self._role == _NONE or (role == _USER and self._role != _USER):
                self._ends.append(0)
                self._tokens.append(0)
            self._role = role
        if self._ends:  # a system message belongs to the turn that it follows
            self._ends[-1] = self._offsets[at]
            self._tokens[-1] += self._counts[at]

    def _cover(self, through: int, offset: int) -> None:
        """Turns are counted anew behind it, as by somebody who begins to read there."""
        if through < self.covered or (through == self.covered and self.base >= 0):
            return
        self.covered, self.base = through, offset
        told = bisect_right(self._offsets, through)
        for values in (self._offsets, self._roles, self._counts):
            del values[:told]
        del self._ends[:], self._tokens[:]
        self._role = _NONE
        for at in range(len(self._offsets)):
            self._count(at)
