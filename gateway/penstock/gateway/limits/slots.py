"""Slots: things that are open at one time, shared by tenants so that none can take all of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from penstock.schemas.errors import Overloaded, TenantLimit

Holder = tuple[str, int | None]
"""Who holds slots (`tenant acme`, `key 3f9c…`), and how many it may hold at once."""


def share_of(total: int, reserve: float) -> int:
    """What a single tenant can take of a total of which a part is held back for the others; at least one."""
    return max(1, math.floor(total * (1 - reserve)))


class Slots:
    """Counts one kind of thing, in all and by holder."""

    __slots__ = ("_held", "_total", "_what", "open")

    def __init__(self, what: str, total: int) -> None:
        """`what`: the plural that errors use."""
        self._what = what
        self._total = total
        self._held: dict[str, int] = {}
        self.open = 0

    def take(self, holders: Sequence[Holder], size: int = 1) -> Callable[[], None]:
        """So many slots for all these holders at once; call what is returned, once, to give them back.

        Raises TenantLimit when one of them holds as many as it may, Overloaded when too few are left for anybody.
        """
        for holder, limit in holders:
            if limit is not None and self._held.get(holder, 0) + size > limit:
                raise TenantLimit(
                    f"{holder} has {limit} {self._what} open, as many as it may",
                    retry_after_s=1,
                    details={"limit": self._what, "value": limit},
                )
        if self.open + size > self._total:
            raise Overloaded(f"the gateway has too many {self._what} open", retry_after_s=1)
        self.open += size
        names = [holder for holder, _ in holders]
        for name in names:
            self._held[name] = self._held.get(name, 0) + size
        return lambda: self._give_back(names, size)

    def held(self, holder: str) -> int:
        return self._held.get(holder, 0)

    def _give_back(self, names: Sequence[str], size: int) -> None:
        self.open -= size
        for name in names:
            left = self._held[name] - size
            if left:
                self._held[name] = left
            else:
                del self._held[name]
