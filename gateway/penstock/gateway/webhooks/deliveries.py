"""The webhooks that this process holds: which have ended, which wait, whose turn it is. Pure; times in ms.

One slow receiver holds up nobody else: a host and a tenant have at most a part of the calls at once, and a tenant and
each of its hosts at most a part of the room here. What finds no room is left to its topic, and comes back when there is
some.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import urlsplit

from penstock.schemas.records import WebhookDelivery
from penstock.schemas.topics import HORIZON_MS, TP

Key = tuple[str, str]
"""(tenant, request id)"""
Group = tuple[str, str]
"""(tenant, host and port)"""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """How much there may be at once."""

    in_flight: int
    held: int = 200_000
    held_per_tenant: int = 50_000
    held_per_group: int = 20_000
    ended: int = 500_000
    """So many that have ended are remembered, so that a repeat of their event is known."""

    def bound(self, group: Group) -> int:
        """How many are held of a tenant's host; with "" as the host of the tenant, with "" as both of all."""
        return self.held_per_group if group[1] else self.held_per_tenant if group[0] else self.held

    @property
    def per_tenant(self) -> int:
        return max(1, self.in_flight // 2)

    @property
    def per_host(self) -> int:
        return max(1, self.in_flight // 8)


def key_of(delivery: WebhookDelivery) -> Key:
    return delivery.tenant, delivery.request_id


def group_of(delivery: WebhookDelivery) -> Group:
    """A URL that cannot be parsed has a group of its own: its first call fails for good."""
    try:
        return delivery.tenant, urlsplit(delivery.url).netloc.lower()
    except ValueError:
        return delivery.tenant, delivery.url


def partition_of(delivery: WebhookDelivery) -> TP:
    return delivery.place.topic, delivery.place.partition


class Deliveries:
    """Those of the partitions that this process owns."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._held: dict[Key, WebhookDelivery] = {}
        self._ended: dict[Key, tuple[TP, int]] = {}
        """With the time at which its outcome was seen."""
        self._later: list[tuple[int, Key]] = []
        self._ready = OrderedDict[str, OrderedDict[str, deque[Key]]]()
        """By tenant, and then by host. Who was served last stands last."""
        self._in_flight: dict[Key, Group] = {}
        self._busy_hosts, self._busy_tenants = Counter[str](), Counter[str]()
        self._held_in = Counter[Group]()
        """Held by tenant and host; with "" as the host those of a tenant, with "" as both all."""
        self._leaving = set[TP]()
        self._left: dict[Group, set[TP]] = {}
        """By what had no room: partitions of which some were left to their topic."""

    # -- what is known

    def __len__(self) -> int:
        return len(self._held)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    def knows(self, key: Key, since_ms: int) -> bool:
        """Whether the webhook of this request, which is there since then, is held or has ended.

        An id may be used again when its request has ended long ago: that is another webhook.
        """
        ended = self._ended.get(key)
        return key in self._held or (ended is not None and since_ms < ended[1] + HORIZON_MS)

    def find(self, key: Key) -> WebhookDelivery | None:
        return self._held.get(key)

    def flies(self, key: Key) -> bool:
        """Whether it is being sent now."""
        return key in self._in_flight

    def oldest_ms(self) -> int | None:
        """When the oldest that waits was first seen."""
        return min((one.created_at for one in self._held.values()), default=None)

    def next_ms(self) -> int | None:
        """When the next of those that wait for their retry is due."""
        return self._later[0][0] if self._later else None

    # -- coming and going

    def add(self, delivery: WebhookDelivery) -> bool:
        """Hold one that waits; False when there is no room, and it is left to its topic."""
        bounds = _bounds_of(group_of(delivery))
        full = next((one for one in bounds if self._held_in[one] >= self._room.bound(one)), None)
        if full is not None:
            self._left.setdefault(full, set()).add(partition_of(delivery))
            return False
        self._held[key_of(delivery)] = delivery
        self._held_in.update(bounds)
        self._queue(delivery)
        return True

    def end(self, delivery: WebhookDelivery) -> None:
        """It is delivered, has failed or was dropped."""
        self._forget(key_of(delivery))
        self._ended[key_of(delivery)] = (partition_of(delivery), delivery.created_at)
        if len(self._ended) > self._room.ended:
            del self._ended[next(iter(self._ended))]

    def wait(self, delivery: WebhookDelivery) -> None:
        """It was tried, and is to be tried again. Where others had no room it gives up its place, and is left too."""
        key = key_of(delivery)
        self._land(key)
        waited_for = next((one for one in _bounds_of(group_of(delivery)) if one in self._left), None)
        if partition_of(delivery) in self._leaving:
            self._forget(key)
        elif waited_for is not None and key in self._held:
            self._forget(key)
            self._left[waited_for].add(partition_of(delivery))
        elif key in self._held:
            self._held[key] = delivery
            self._queue(delivery)

    def leave(self, partitions: Iterable[TP]) -> None:
        """These are being given away: only what is being sent is held on, until it has landed or `revoke`."""
        self._leaving.update(partitions)
        for key, delivery in list(self._held.items()):
            if key not in self._in_flight and partition_of(delivery) in self._leaving:
                self._forget(key)

    def stay(self, partitions: Iterable[TP]) -> None:
        """These are ours, also where they were being given away."""
        self._leaving.difference_update(partitions)

    def revoke(self, partitions: Iterable[TP]) -> None:
        """Another process has these partitions now."""
        gone = set(partitions)
        self._leaving -= gone
        for key, delivery in list(self._held.items()):
            if partition_of(delivery) in gone:
                self._forget(key)
        self._ended = {key: ended for key, ended in self._ended.items() if ended[0] not in gone}
        for left in self._left.values():
            left -= gone

    def to_load(self) -> set[TP]:
        """Partitions to read again, because there is room for what was left of them."""
        found = set[TP]()
        if len(self._held) > self._room.held // 2:
            return found
        for full in [one for one in self._left if self._held_in[one] <= self._room.bound(one) // 2]:
            found |= self._left.pop(full)
        return found

    # -- whose turn it is

    def begin(self, now_ms: int) -> list[WebhookDelivery]:
        """Those to send now: the tenants in turn, and the hosts of each in turn, within the bounds."""
        while self._later and self._later[0][0] <= now_ms:
            _, key = heapq.heappop(self._later)
            delivery = self._held.get(key)
            if delivery is not None and key not in self._in_flight and (delivery.next_at or 0) <= now_ms:
                hosts = self._ready.setdefault(delivery.tenant, OrderedDict())
                hosts.setdefault(group_of(delivery)[1], deque()).append(key)
        if self._is_full():
            return []
        begun: list[WebhookDelivery] = []
        turns = deque(self._ready)
        while turns and not self._is_full():
            tenant = turns.popleft()
            if (found := self._take(tenant)) is not None:
                group, key = found
                self._in_flight[key] = group
                self._busy_tenants[tenant] += 1
                self._busy_hosts[group[1]] += 1
                begun.append(self._held[key])
                turns.append(tenant)
        return begun

    def _is_full(self) -> bool:
        return len(self._in_flight) >= self._room.in_flight

    def _take(self, tenant: str) -> tuple[Group, Key] | None:
        """The next of a tenant, whose turn is last then. Of its hosts only those without a slot are passed over."""
        hosts = self._ready.get(tenant)
        if hosts is None or self._busy_tenants[tenant] >= self._room.per_tenant:
            return None
        while (host := next((one for one in hosts if self._busy_hosts[one] < self._room.per_host), None)) is not None:
            key = hosts[host].popleft()
            hosts.move_to_end(host)
            if not hosts[host]:
                del hosts[host]
            if key in self._held and key not in self._in_flight:
                self._ready.move_to_end(tenant)
                if not hosts:
                    del self._ready[tenant]
                return (tenant, host), key
        if not hosts:
            del self._ready[tenant]
        return None

    def _queue(self, delivery: WebhookDelivery) -> None:
        heapq.heappush(self._later, (delivery.next_at or 0, key_of(delivery)))

    def _land(self, key: Key) -> None:
        if (group := self._in_flight.pop(key, None)) is not None:
            _less(self._busy_tenants, group[0])
            _less(self._busy_hosts, group[1])

    def _forget(self, key: Key) -> None:
        self._land(key)
        if (delivery := self._held.pop(key, None)) is not None:
            for one in _bounds_of(group_of(delivery)):
                _less(self._held_in, one)


def _bounds_of(group: Group) -> tuple[Group, Group, Group]:
    """What bounds those of a group: all, its tenant, itself."""
    return ("", ""), (group[0], ""), group


def _less(counts: Counter[T], name: T) -> None:
    """A name that counts nothing any more is forgotten: callers choose them."""
    counts[name] -= 1
    if counts[name] <= 0:
        del counts[name]
