"""What each tenant keeps in the artifact store: measured now and then, and counted between."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager


class ArtifactBytes:
    """Bytes by tenant, as last measured and with what was added here since. Used on one event loop."""

    def __init__(self, measured_for_s: float = 60.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._measured_for_s = measured_for_s
        self._clock = clock
        self._bytes: dict[str, tuple[int, float]] = {}
        self._under_way: dict[str, int] = {}
        self._missed: dict[str, int] = {}
        """By tenant that is being measured: what was added too late for that, or perhaps so."""
        self._measuring: dict[str, asyncio.Task[None]] = {}

    async def used(self, tenant: str, measure: Callable[[], Awaitable[int]]) -> int:
        """As of now: who asks and then adds without an await between has counted all the others.

        `measure` runs once for all who wait for it. Raises what it raises.
        """
        while (known := self.known(tenant)) is None:
            measuring = self._measuring.get(tenant)
            if measuring is None:
                measuring = self._measuring[tenant] = asyncio.create_task(self._measure(tenant, measure))
            await asyncio.shield(measuring)  # the others still wait when one of them leaves
        return known

    async def _measure(self, tenant: str, measure: Callable[[], Awaitable[int]]) -> None:
        self.begin(tenant)
        try:
            self.measured(tenant, await measure())
        finally:
            self._missed.pop(tenant, None)
            del self._measuring[tenant]

    def known(self, tenant: str) -> int | None:
        """None if it is to be measured."""
        used, measured_at = self._bytes.get(tenant, (0, -math.inf))
        return used if self._clock() - measured_at < self._measured_for_s else None

    def begin(self, tenant: str) -> None:
        """The store is listed from now on, and may or may not show what is on its way."""
        self._missed[tenant] = self._under_way.get(tenant, 0)

    def measured(self, tenant: str, used: int) -> None:
        """It was listed. What may be missing is counted, even if twice: until the next time."""
        self._bytes[tenant] = (used + self._missed.pop(tenant, 0), self._clock())

    def removed(self, tenant: str) -> None:
        """Something is there no more: it is measured anew when somebody next asks."""
        if tenant not in self._missed:  # a measurement that is under way may show it or not: the next one will
            self._bytes.pop(tenant, None)

    @contextmanager
    def adding(self, tenant: str, more: int) -> Generator[None]:
        """Around the keeping of so many bytes more: they count from now on, unless it raises."""
        self._count(tenant, more)
        self._under_way[tenant] = self._under_way.get(tenant, 0) + more
        try:
            yield
        except Exception:
            self._count(tenant, -more)
            raise
        finally:
            self._under_way[tenant] -= more
            if not self._under_way[tenant]:
                del self._under_way[tenant]

    def _count(self, tenant: str, more: int) -> None:
        used, measured_at = self._bytes.get(tenant, (0, -math.inf))
        self._bytes[tenant] = (used + more, measured_at)
        if tenant in self._missed:
            self._missed[tenant] += more
