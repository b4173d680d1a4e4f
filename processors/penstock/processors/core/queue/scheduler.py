"""The scheduler: which queued request starts next on each lane (its engine).

Classes are strict, but for a share of the starts that goes to what has waited long (`docs/decisions/0007`). Within a
class tenants have fair shares by cost (`fairqueue`). Within a tenant: priority, then deadline, then arrival. Turns of a
conversation go one at a time (`turns`). What may start now is *eligible*: all but the turns behind another one. With
`slack` low work is offered only while its engine has room to spare (`docs/decisions/0028`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic

from penstock.processors.core.queue.fronts import Fronts
from penstock.processors.core.queue.lane_queues import ItemT, LaneQueues, QueuedItem
from penstock.processors.core.queue.queue_statistics import QueueStatistics
from penstock.processors.core.queue.slack import Slack, SlackSettings
from penstock.processors.core.queue.turns import TurnAdmission
from penstock.schemas.topics import CLASSES, RANKS

LOW = CLASSES[-1]
AGED_TRIED = 4
"""Aged items that are offered before all others when it is their turn. More would hide what is urgent if none fits."""


class Scheduler(Generic[ItemT]):
    """What has waited longer than `aging_s` is aged; of `aged_share` starts on a lane one is for the aged."""

    def __init__(
        self,
        *,
        aging_s: float,
        aged_share: int,
        slack: SlackSettings | None = None,
        run_s: Callable[[str], float | None] = lambda lane: None,
    ) -> None:
        """`run_s`: how long a run of a lane takes, None when that is not known."""
        if aged_share < 2:
            raise ValueError("aged_share must be at least 2, or aged work would come before all other")
        self._aging_s = aging_s
        self._aged_share = aged_share
        self._queued_items: dict[int, QueuedItem[ItemT]] = {}  # by ticket
        self._lanes: dict[str, LaneQueues[ItemT]] = {}
        self._turns: TurnAdmission[ItemT] = TurnAdmission(self._lanes)
        self.statistics: QueueStatistics[ItemT] = QueueStatistics()
        self._tickets = 0
        self._changes = 0
        self.fronts: Fronts[ItemT] = Fronts(self._lanes)
        self.slack = Slack(slack)
        self._run_s = run_s

    def __len__(self) -> int:
        return len(self._queued_items)

    def __contains__(self, item: ItemT) -> bool:
        return self._queued_of(item) is not None

    def _queued_of(self, item: ItemT) -> QueuedItem[ItemT] | None:
        queued = self._queued_items.get(item.ticket)
        return queued if queued is not None and queued.item is item else None

    # -- changes

    def add(self, item: ItemT) -> None:
        """Queue an item. Raises ValueError for one that is queued already."""
        self._queue(item, returned=False)

    def put_back(self, item: ItemT) -> None:
        """A started item starts again: it has its old place and its conversation, its tenant gets the cost back."""
        self._queue(item, returned=True, refund=True)

    def _queue(self, item: ItemT, *, returned: bool, refund: bool = False) -> None:
        if item.ticket:
            raise ValueError("the item is queued already")
        self._changes += 1
        self._tickets += 1
        item.ticket = self._tickets
        queued = self._queued_items[item.ticket] = QueuedItem(item, item.ticket, returned=returned)
        lane = self._lanes.get(item.lane)
        if lane is None:
            lane = self._lanes[item.lane] = LaneQueues(self.slack.of(item.lane))
        self.statistics.count(queued)
        lane.depths[queued.klass] += 1
        if queued.klass in lane.arrivals:
            lane.arrivals[queued.klass].add((item.arrived_at, item.ticket, queued))
        if item.conversation is None:
            lane.admit(queued, refund=refund)
            return
        if returned:
            self._turns.put_back(item.conversation, queued)
            lane.admit(queued, refund=refund)
        else:
            self._turns.add(item.conversation, queued)

    def remove(self, item: ItemT) -> bool:
        """Take out an item that will not start; False when it is not queued. What it held of a conversation is free."""
        queued = self._queued_of(item)
        if queued is None:
            return False
        self._withdraw(queued)
        if queued.returned and item.conversation is not None:
            self.release_conversation(item.conversation)
        return True

    def _leave(self, queued: QueuedItem[ItemT]) -> None:
        """The item is not queued any more; its lane has let it go already."""
        self._changes += 1
        item = queued.item
        del self._queued_items[queued.ticket]
        item.ticket = 0
        self.statistics.left(queued)
        lane = self._lanes[item.lane]
        lane.depths[queued.klass] -= 1
        if queued.klass in lane.arrivals and not queued.aged:
            lane.arrivals[queued.klass].remove((item.arrived_at, queued.ticket, queued))
        if item.conversation is not None:
            self._turns.left(item.conversation, queued)

    def reprioritize(self, item: ItemT, klass: str, priority: int) -> bool:
        """Move an item to another class or priority, in the place of its arrival there; False when it is not queued."""
        queued = self._queued_of(item)
        if queued is None:
            return False
        self._withdraw(queued)
        item.klass, item.priority = klass, priority
        self._queue(item, returned=queued.returned)
        return True

    def move(self, item: ItemT, lane: str) -> None:
        """Move an item to another lane, in the place of its arrival there. Raises ValueError if it is not queued."""
        queued = self._queued_of(item)
        if queued is None:
            raise ValueError("the item is not queued")
        self._withdraw(queued)
        item.lane = lane
        self._queue(item, returned=queued.returned)

    def _withdraw(self, queued: QueuedItem[ItemT]) -> None:
        self._lanes[queued.item.lane].withdraw(queued)
        self._leave(queued)

    def start(self, item: ItemT, now: float, tokens: int = 0) -> None:
        """An eligible item starts: it leaves the queue, its tenant pays, its conversation is held until it is released.

        `tokens` of its engine's cache are its own until `EngineSlack.ended`.
        """
        queued = self._eligible(item)
        lane = self._lanes[item.lane]
        strict = lane.strict(self.fronts.paused)
        aged = now - item.arrived_at > self._aging_s and strict is not None and RANKS[queued.klass] > RANKS[strict]
        if aged and self._is_turn_of_aged(lane):
            lane.since_aged = 0
        else:
            lane.since_aged = min(lane.since_aged + 1, self._aged_share)
        lane.slack.took(item.seq, queued.klass, tokens, now)
        self._take(queued, lane)

    def hold(self, item: ItemT) -> None:
        """An eligible item leaves the queue without having started, to be put back later: its conversation is held."""
        self._take(self._eligible(item), self._lanes[item.lane])

    def _eligible(self, item: ItemT) -> QueuedItem[ItemT]:
        queued = self._queued_of(item)
        if queued is None or queued.entry is None:
            raise ValueError("the item is not eligible")
        return queued

    def _take(self, queued: QueuedItem[ItemT], lane: LaneQueues[ItemT]) -> None:
        item = queued.item
        assert queued.entry is not None
        lane.take(queued, queued.entry)
        if item.conversation is not None:
            self._turns.is_out(item.conversation, queued)
        self._leave(queued)

    def _is_turn_of_aged(self, lane: LaneQueues[ItemT]) -> bool:
        return lane.since_aged >= self._aged_share - 1

    def release_conversation(self, name: str) -> None:
        """The started item of a conversation has ended: the next ones become eligible."""
        if self._turns.release(name):
            self._changes += 1

    # -- reading

    def candidates(self, lane: str, now: float) -> Iterator[ItemT]:
        """The eligible items of a lane in the order of starting. It ends when the scheduler has changed meanwhile."""
        known = self._lanes.get(lane)
        if known is None:
            return iter(())
        known.grow_old(now - self._aging_s)
        classes = CLASSES
        if known.slack.restrains and known.queues[LOW]:
            waits = known.slack.holds_back(urgent_waits=known.strict(self.fronts.paused) != LOW)
            if waits or known.slack.is_paced(now, self._run_s(lane)):
                classes = CLASSES[:-1]
        if self.fronts.paused:
            classes = tuple(klass for klass in classes if klass not in self.fronts.paused)
        return self._candidates(known, self._changes, classes)

    def holds_back(self, item: ItemT) -> bool:
        """Whether an eligible low item waits now for slack, although it may fit.

        Where something more urgent waits the aged have their own share, whatever slack says: at their turn they are
        offered.
        """
        known, queued = self._lanes.get(item.lane), self._queued_of(item)
        if item.klass != LOW or known is None or queued is None:
            return False
        urgent_waits = known.strict(self.fronts.paused) != LOW
        its_turn = queued.aged and urgent_waits and self._is_turn_of_aged(known)
        return not its_turn and known.slack.holds_back(urgent_waits=urgent_waits)

    def _candidates(self, lane: LaneQueues[ItemT], changes: int, classes: tuple[str, ...]) -> Iterator[ItemT]:
        if self._changes != changes:
            return
        offered: set[int] = set()
        if self._is_turn_of_aged(lane) and (strict := lane.strict(self.fronts.paused)) is not None:
            for queued in islice(lane.aged_below(strict, self.fronts.paused), AGED_TRIED):
                offered.add(queued.ticket)
                yield queued.item
                if self._changes != changes:
                    return
        for klass in classes:
            for queued in lane.queues[klass]:
                if queued.ticket not in offered:
                    yield queued.item
                    if self._changes != changes:
                        return

    def has_turns(self, conversation: str) -> bool:
        """Whether a turn of a conversation is queued or started."""
        return conversation in self._turns

    def eligible(self, item: ItemT) -> bool:
        """Whether it is queued and no other turn of its conversation is before it."""
        queued = self._queued_of(item)
        return queued is not None and queued.entry is not None
