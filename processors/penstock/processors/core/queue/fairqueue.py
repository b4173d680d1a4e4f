"""A queue that is fair to its tenants by cost: start-time fair queueing.

Each tenant has a *tag*: the virtual time at which its next item may start. The tenant of the lowest tag is next, and
its tag grows by the cost of what it starts. So of two tenants that always wait, none gets more than the other by more
than the dearest item of each. A tenant that comes back begins at the queue's virtual time (the highest tag that has
started): being idle earns it nothing. Within a tenant the entries decide: tuples, the lowest first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

CHUNK = 256
"""Entries of a chunk before it is cut in two."""
KEPT_IDLE = 64
"""Tenants without entries that are remembered before it is looked whether they must be."""

Entry = tuple[Any, ...]


class Sorted:
    """Entries in order, in chunks: to add, to remove and to begin reading cost the same for ten and for 100,000."""

    __slots__ = ("_chunks", "_lasts")

    def __init__(self) -> None:
        self._chunks: list[list[Entry]] = []
        self._lasts: list[Entry] = []

    def __bool__(self) -> bool:
        return bool(self._chunks)

    def __iter__(self) -> Iterator[Entry]:
        return chain.from_iterable(self._chunks)

    def first(self) -> Entry | None:
        return self._chunks[0][0] if self._chunks else None

    def add(self, entry: Entry) -> None:
        at = bisect_left(self._lasts, entry)
        if at == len(self._lasts):
            if not at:
                self._chunks.append([entry])
                self._lasts.append(entry)
                return
            at -= 1
            chunk = self._chunks[at]
            chunk.append(entry)
            self._lasts[at] = entry
        else:
            chunk = self._chunks[at]
            insort(chunk, entry)
        if len(chunk) > CHUNK:
            upper = chunk[CHUNK // 2 :]
            del chunk[CHUNK // 2 :]
            self._chunks.insert(at + 1, upper)
            self._lasts[at : at + 1] = [chunk[-1], upper[-1]]

    def remove(self, entry: Entry) -> None:
        at = bisect_left(self._lasts, entry)
        chunk = self._chunks[at]
        place = bisect_left(chunk, entry)
        assert chunk[place] == entry
        del chunk[place]
        if not chunk:
            del self._chunks[at], self._lasts[at]
        elif place == len(chunk):
            self._lasts[at] = chunk[-1]


class Costly(Protocol):
    """An item that costs its tenant something, in tokens."""

    @property
    def cost(self) -> int: ...


C = TypeVar("C", bound=Costly)


class _Tenant:
    __slots__ = ("entries", "place", "serial", "tag")

    def __init__(self, tag: int) -> None:
        self.tag = tag
        self.serial = 0  # of equal tags the one that began to wait first is first
        self.entries = Sorted()
        self.place: tuple[int, int, _Tenant] | None = None  # None without entries


class FairQueue(Generic[C]):
    """Entries are tuples that end with the item; what is before it must differ between any two of a tenant."""

    __slots__ = ("_idle_at_most", "_length", "_order", "_serial", "_tenants", "_virtual")

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._order = Sorted()  # places of the tenants that have entries
        self._length = 0
        self._serial = 0
        self._virtual = 0
        self._idle_at_most = KEPT_IDLE

    def __len__(self) -> int:
        return self._length

    def tenants(self) -> int:
        """Tenants that are remembered: those that wait, and those that have had more than their share recently."""
        return len(self._tenants)

    def __iter__(self) -> Iterator[C]:
        """Items in the order in which they start if each of them can start."""
        tenants: Iterator[Any] = iter(self._order)
        following = next(tenants, None)
        begun: list[tuple[int, int, Iterator[Entry]]] = []
        while following is not None or begun:
            if following is not None and (not begun or following[:2] < begun[0][:2]):
                tag, serial, tenant = following
                entries = iter(tenant.entries)
                following = next(tenants, None)
            else:
                tag, serial, entries = heappop(begun)
            entry = next(entries, None)
            if entry is not None:
                yield entry[-1]
                heappush(begun, (tag + entry[-1].cost, serial, entries))

    def add(self, name: str, entry: Entry) -> None:
        tenant = self._tenant(name)
        if tenant.place is None:
            tenant.tag = max(tenant.tag, self._virtual)
            self._serial += 1
            tenant.serial = self._serial
        self._insert(tenant, entry)

    def put_back(self, name: str, entry: Entry, cost: int) -> None:
        """An entry comes back that was taken: its tenant gets the cost back."""
        tenant = self._tenant(name)
        if tenant.place is None:
            if not tenant.serial:  # it was forgotten meanwhile
                self._serial += 1
                tenant.serial = self._serial
            tenant.tag = max(tenant.tag, self._virtual) - cost
        else:
            self._move(tenant, tenant.tag - cost)
        self._insert(tenant, entry)

    def remove(self, name: str, entry: Entry) -> None:
        """An entry leaves without being started."""
        tenant = self._tenants[name]
        tenant.entries.remove(entry)
        self._left(tenant)

    def take(self, name: str, entry: Entry, cost: int) -> None:
        """An entry is started: its tenant pays."""
        tenant = self._tenants[name]
        self._virtual = max(self._virtual, tenant.tag)
        tenant.entries.remove(entry)
        if tenant.entries:
            self._move(tenant, tenant.tag + cost)
        else:
            tenant.tag += cost
        self._left(tenant)

    def _tenant(self, name: str) -> _Tenant:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._virtual)
        return tenant

    def _insert(self, tenant: _Tenant, entry: Entry) -> None:
        if tenant.place is None:
            tenant.place = (tenant.tag, tenant.serial, tenant)
            self._order.add(tenant.place)
        tenant.entries.add(entry)
        self._length += 1

    def _move(self, tenant: _Tenant, tag: int) -> None:
        assert tenant.place is not None
        self._order.remove(tenant.place)
        tenant.tag = tag
        tenant.place = (tag, tenant.serial, tenant)
        self._order.add(tenant.place)

    def _left(self, tenant: _Tenant) -> None:
        self._length -= 1
        if not self._length:  # nobody waits: all begin alike
            tenant.place = None  # it names the tenant: a circle would wait for the collector
            self._tenants.clear()
            self._order = Sorted()
            self._virtual = 0
            return
        if tenant.entries:
            return
        if tenant.place is not None:
            self._order.remove(tenant.place)
            tenant.place = None
        if len(self._tenants) > self._idle_at_most:
            self._tenants = {name: one for name, one in self._tenants.items() if one.entries or one.tag > self._virtual}
            self._idle_at_most = 2 * len(self._tenants) + KEPT_IDLE
