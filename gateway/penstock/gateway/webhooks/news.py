"""Statuses that receivers are to hear of: of each request the newest, while it is news. Pure; times in ms.

An outcome is told until somebody takes it. A status is worth nothing once the next one is there, so a newer one takes
the place of one that waits, and what became of these calls is kept nowhere. The offset stays before the first status
that is still to be told: whoever gets its partition tells it again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from penstock.common.reader import Headers
from penstock.gateway.held_offsets import HeldOffsets
from penstock.gateway.webhooks.bodies import type_of, webhook_id
from penstock.gateway.webhooks.deliveries import Deliveries, Key, Room, key_of, partition_of
from penstock.gateway.webhooks.policy import DELIVERED, DROPPED, FAILED, WAITING, Answer, RetryRules, decide
from penstock.schemas.fold import StatusFold
from penstock.schemas.records import DeliveryAttempt, Place, StatusEvent, WebhookDelivery
from penstock.schemas.topics import TP

NEWS_S = 300.0
"""So long a status is tried, and so old one may be when it is read."""
FOLLOWED = 100_000
"""Requests whose last status is remembered, so that a repeat is known."""


@dataclass(frozen=True, slots=True)
class News:
    """`headers` are those of the status's record."""

    delivery: WebhookDelivery
    event: StatusEvent
    headers: Headers


class StatusNews:
    """The statuses of the partitions that this process owns. `offsets` holds those whose calls are due."""

    def __init__(self, room: Room, rules: RetryRules) -> None:
        self._rules = replace(rules, give_up_s=min(rules.give_up_s, NEWS_S))
        self._deliveries = Deliveries(replace(room, ended=0))
        self.offsets = HeldOffsets[None]()
        self._folds = OrderedDict[Key, StatusFold]()
        self._held: dict[Key, News] = {}
        self._next: dict[Key, News] = {}
        """What came while the status before it was being sent."""

    def __len__(self) -> int:
        return len(self._held)

    def revoke(self, tp: TP) -> None:
        """Another process has it now, and makes the calls that were not made here."""
        self.offsets.revoke(tp)
        self._deliveries.revoke([tp])
        for waiting in (self._held, self._next):
            for key in [key for key, one in waiting.items() if partition_of(one.delivery) == tp]:
                del waiting[key]
                self._folds.pop(key, None)  # if the partition comes back, it is no repeat

    def on_status(
        self, tp: TP, offset: int, event: StatusEvent, url: str, now_ms: int, headers: Headers = ()
    ) -> str | None:
        """Take the next status of the topic; DROPPED when there is no room to tell it."""
        key = (event.tenant, event.request_id)
        if not self._is_another(key, event):
            return None
        if event.done:
            self.drop(key)
            self._folds.pop(key, None)
            return None
        if event.created_at < now_ms - 1000 * self._rules.give_up_s:
            return None
        delivery = WebhookDelivery(
            webhook_id=webhook_id(event),
            request_id=event.request_id,
            tenant=event.tenant,
            type=type_of(event),
            url=url,
            state=WAITING,
            place=Place(topic=tp[0], partition=tp[1], offset=offset),
            created_at=event.created_at,
            updated_at=now_ms,
            next_at=now_ms,
        )
        self.offsets.hold(tp, offset, None)
        news = News(delivery, event, headers)
        if self._deliveries.flies(key):
            self._settle(self._next.pop(key, None))
            self._next[key] = news
            return None
        self._settle(self._take(key))
        return self._hold(key, news)

    def begin(self, now_ms: int) -> list[News]:
        """Those to send now: tenants and hosts in turn, within the bounds."""
        return [self._held[key_of(one)] for one in self._deliveries.begin(now_ms)]

    def ended(self, delivery: WebhookDelivery, answer: Answer, now_ms: int, chance: float) -> str | None:
        """A call of `begin` has ended. What became of the status; None while a call is due, or none was asked for."""
        if not self.holds(delivery):
            return None
        key = key_of(delivery)
        held = self._held[key]
        number = len(delivery.attempts) + 1
        state, next_at = decide(answer, number, now_ms, delivery.created_at, self._rules, chance)
        newer = self._next.pop(key, None)
        if state == WAITING and newer is None:
            attempt = DeliveryAttempt(attempt=number, at=now_ms, duration_ms=0)
            tried = replace(delivery, attempts=[*delivery.attempts, attempt], next_at=next_at)
            self._held[key] = replace(held, delivery=tried)
            self._deliveries.wait(tried)
            return None
        self._settle(self._take(key))
        if newer is not None:
            self._hold(key, newer)
        return DELIVERED if state == DELIVERED else DROPPED if state == WAITING else FAILED

    def holds(self, delivery: WebhookDelivery) -> bool:
        """Whether a call for this one is still due: meanwhile its request may have ended, or its partition gone."""
        held = self._held.get(key_of(delivery))
        return held is not None and held.delivery is delivery

    def drop(self, key: Key) -> None:
        """Nobody is to hear of its statuses any more: it has ended, or was erased."""
        self._settle(self._next.pop(key, None))
        self._settle(self._take(key))

    def next_ms(self) -> int | None:
        """When the next retry is due."""
        return self._deliveries.next_ms()

    def _is_another(self, key: Key, event: StatusEvent) -> bool:
        """Whether it is another status than the one before, not its place or step alone."""
        fold = self._folds.get(key)
        if fold is None:
            fold = self._folds[key] = StatusFold(event.request_id, event.tenant)
            if len(self._folds) > FOLLOWED:
                self._folds.popitem(last=False)
        else:
            self._folds.move_to_end(key)
        before = fold.latest
        if not fold.apply(event):
            return False
        return before is None or (before.status, before.attempt, before.epoch) != (
            event.status,
            event.attempt,
            event.epoch,
        )

    def _hold(self, key: Key, news: News) -> str | None:
        if self._deliveries.add(news.delivery):
            self._held[key] = news
            return None
        self._settle(news)
        return DROPPED

    def _take(self, key: Key) -> News | None:
        news = self._held.pop(key, None)
        if news is not None:
            self._deliveries.end(news.delivery)
        return news

    def _settle(self, news: News | None) -> None:
        """It was called, or never will be."""
        if news is not None:
            self.offsets.release(partition_of(news.delivery), news.delivery.place.offset)
