"""Turns of conversations: one of each is out at a time, and within a class they go in the order of their log.

Of each class the first turn of a conversation is eligible, none while one of it is out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping
from typing import Generic

from penstock.processors.core.queue.lane_queues import ItemT, LaneQueues, QueuedItem


class _Conversation(Generic[ItemT]):
    """The waiting turns of one conversation. `held`: one of them was started and has not ended."""

    __slots__ = ("fronts", "held", "returned", "waiting")

    def __init__(self) -> None:
        self.waiting: dict[str, list[tuple[int, int, QueuedItem[ItemT]]]] = {}  # by class, in the order of the log
        self.fronts: dict[str, QueuedItem[ItemT]] = {}  # by class, the turn that is eligible
        self.held = False
        self.returned: QueuedItem[ItemT] | None = None  # the turn that is held and waits to be started again

    def __bool__(self) -> bool:
        """Whether there is anything to remember."""
        return self.held or any(self.waiting.values())

    def add(self, queued: QueuedItem[ItemT]) -> None:
        insort(self.waiting.setdefault(queued.klass, []), (queued.seq, queued.ticket, queued))

    def left(self, queued: QueuedItem[ItemT]) -> None:
        turns = self.waiting[queued.klass]
        del turns[bisect_left(turns, (queued.seq, queued.ticket))]

    def front(self, klass: str) -> QueuedItem[ItemT] | None:
        """The turn of a class that should be eligible now."""
        turns = None if self.held else self.waiting.get(klass)
        return turns[0][-1] if turns else None


class TurnAdmission(Generic[ItemT]):
    """Admits turns to the queues of their lanes, and withdraws them, as their conversations move on."""

    def __init__(self, lanes: Mapping[str, LaneQueues[ItemT]]) -> None:
        self._lanes = lanes
        self._conversations: dict[str, _Conversation[ItemT]] = {}

    def __len__(self) -> int:
        """Lines that have an item queued or started."""
        return len(self._conversations)

    def __contains__(self, name: str) -> bool:
        """Whether a conversation has an item queued or started."""
        return name in self._conversations

    def add(self, name: str, queued: QueuedItem[ItemT]) -> None:
        """A turn is queued behind those that are there."""
        conversation = self._conversation(name)
        conversation.add(queued)
        self._update_front(conversation, queued.klass)

    def put_back(self, name: str, queued: QueuedItem[ItemT]) -> None:
        """A turn that was out must start again: it holds its conversation meanwhile."""
        conversation = self._conversation(name)
        conversation.held, conversation.returned = True, queued

    def left(self, name: str, queued: QueuedItem[ItemT]) -> None:
        """A turn is not queued any more."""
        conversation, klass = self._conversations[name], queued.klass
        if queued.returned:
            conversation.returned = None
            return
        conversation.left(queued)
        if conversation.fronts.get(klass) is queued:
            del conversation.fronts[klass]
        self._update_front(conversation, klass)
        self._forget(name)

    def is_out(self, name: str, queued: QueuedItem[ItemT]) -> None:
        """A turn leaves the queue and holds its conversation until `release`: no other one is eligible."""
        conversation = self._conversations[name]
        conversation.held = True
        for klass in list(conversation.fronts):
            if conversation.fronts[klass] is not queued:
                self._update_front(conversation, klass)

    def release(self, name: str) -> bool:
        """The turn that was out has ended: the next ones become eligible. Whether one was out."""
        conversation = self._conversations.get(name)
        if conversation is None or not conversation.held:
            return False
        conversation.held = False
        if (queued := conversation.returned) is not None:  # it waits like the others from now on
            conversation.returned = None
            queued.returned = False
            self._lanes[queued.item.lane].withdraw(queued)
            conversation.add(queued)
        for klass in list(conversation.waiting):
            self._update_front(conversation, klass)
        self._forget(name)
        return True

    def _conversation(self, name: str) -> _Conversation[ItemT]:
        conversation = self._conversations.get(name)
        if conversation is None:
            conversation = self._conversations[name] = _Conversation()
        return conversation

    def _update_front(self, conversation: _Conversation[ItemT], klass: str) -> None:
        before, now = conversation.fronts.get(klass), conversation.front(klass)
        if before is now:
            return
        if now is not None:
            conversation.fronts[klass] = now
            self._lanes[now.item.lane].admit(now)
        else:
            del conversation.fronts[klass]
        if before is not None:
            self._lanes[before.item.lane].withdraw(before)

    def _forget(self, name: str) -> None:
        if not self._conversations[name]:
            del self._conversations[name]
