"""What brokers say of the ends of partitions: that they answer, and which transactions others have left open.

Nobody reads what stands behind an open transaction until it ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.common.settings import KafkaSettings
from penstock.gateway.service.dependencies import Problem, Tried
from penstock.gateway.threads import Threads
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.view import View
from penstock.schemas.errors import BrokerUnavailable, PenstockError
from penstock.schemas.times import rfc3339
from penstock.schemas.topics import TP

T = TypeVar("T")

logger = logging.getLogger(__name__)

EVERY_S = 2.0
ANSWER_S = 3.0
"""So long an answer may take. After `EVERY_S` and this without any, brokers count as away."""
SILENT_MS = 6_000
HELD_MS = 3_000
"""A partition that cannot be read further for so long is reported: transactions that end in time are no problem."""
MOST_NAMED = 5
"""So many partitions are named."""


@dataclass(frozen=True, slots=True)
class Held:
    """A partition that can be read up to `offset` alone, seen so since `since_ms`; `records` stand behind it."""

    offset: int
    records: int
    since_ms: int


@dataclass(frozen=True, slots=True)
class Brokers:
    """How long the brokers have not answered, and for how long they are back, if they were away; in ms."""

    servers: str
    silent_ms: int = 0
    back_ms: int | None = None

    @property
    def away(self) -> bool:
        return self.silent_ms > SILENT_MS


class OpenTransactions:
    """Looks at the ends of the partitions that a view reads, on the event loop."""

    def __init__(self, kafka: KafkaSettings, view: View, threads: Threads) -> None:
        self._kafka, self._view, self._threads = kafka, view, threads
        self._held: dict[TP, Held] = {}
        self._looked_ms: int | None = None
        self._answered_s, self._back_s = time.monotonic(), float("-inf")
        self._told = False

    async def run(self) -> None:
        while True:
            try:
                await self.look()
            except PenstockError as error:
                logger.debug("transactions.unknown error=%s", error)
            await asyncio.sleep(EVERY_S)

    async def look(self) -> None:
        """Ask the brokers once. Raises PenstockError.

        Some broker answers while partitions have no leader, or may not be described: that is asked first.
        """
        partitions = list(self._view.offsets())
        await self._ask(admin.partition_counts, [self._kafka.names.result])
        readable = await self._ask(admin.end_offsets, partitions)
        self.note(readable, await self._ask(admin.log_ends, partitions), now_ms())

    async def _ask(self, question: Callable[..., T], *args: object) -> T:
        try:
            found = await self._threads.brokers.run(question, self._kafka, *args, timeout_s=ANSWER_S)
        except BrokerUnavailable:
            raise
        except PenstockError:
            self._answered()
            raise
        self._answered()
        return found

    def _answered(self) -> None:
        now_s = time.monotonic()
        if (now_s - self._answered_s) * 1000 > SILENT_MS:
            self._back_s = now_s
        self._answered_s = now_s

    def note(self, readable: Mapping[TP, int], ends: Mapping[TP, int], at_ms: int) -> None:
        """Take the brokers' answers: up to where each partition can be read, and where its log ends."""
        held: dict[TP, Held] = {}
        for tp, offset in readable.items():
            if ends.get(tp, 0) > offset:
                before = self._held.get(tp)
                since_ms = before.since_ms if before is not None and before.offset == offset else at_ms
                held[tp] = Held(offset, ends[tp] - offset, since_ms)
        self._held, self._looked_ms = held, at_ms
        if bool(reason := self._reason()) != self._told:
            self._told = not self._told
            logger.warning("transactions.%s %s", "open" if self._told else "ended", reason or "")

    def brokers(self) -> Brokers:
        silent_s, back_s = (time.monotonic() - at_s for at_s in (self._answered_s, self._back_s))
        back_ms = None if back_s == float("inf") else int(back_s * 1000)
        return Brokers(self._kafka.bootstrap_servers, int(silent_s * 1000), back_ms)

    def held(self) -> list[tuple[TP, Held]]:
        """The partitions that open transactions hold back, for so long that they are trouble."""
        return list(self._long_held().items())

    def records(self) -> Mapping[str, int]:
        """How many records nobody can read yet, by topic."""
        found = dict.fromkeys((tp[0] for tp in self._view.offsets()), 0)
        for (topic, _), held in self._held.items():
            found[topic] = found.get(topic, 0) + held.records
        return found

    def result(self) -> Tried:
        """What `/readyz` says of it."""
        reason = self._reason()
        return Tried("transactions", self._looked_ms, None if reason is None else Problem(reason))

    def holds(self, entry: Entry) -> str | None:
        """Why nobody can read the record of a request that this gateway sent; None if no transaction is the cause."""
        if (place := entry.origin) is None:
            return None
        tp = place.topic, place.partition
        held = self._long_held().get(tp)
        return None if held is None or place.offset < held.offset else self._said_of({tp: held})

    def _long_held(self) -> dict[TP, Held]:
        last_ms = self._looked_ms or 0
        return {tp: held for tp, held in sorted(self._held.items()) if last_ms - held.since_ms >= HELD_MS}

    def _reason(self) -> str | None:
        held = self._long_held()
        return self._said_of(held) if held else None

    def _said_of(self, held: Mapping[TP, Held]) -> str:
        named = [f"{topic} partition {partition}" for topic, partition in held][:MOST_NAMED]
        more = [f"{len(held) - MOST_NAMED} others"] if len(held) > MOST_NAMED else []
        records, since_ms = sum(one.records for one in held.values()), min(one.since_ms for one in held.values())
        return (
            f"a producer's open transaction holds back {records} record(s) of {', '.join([*named, *more])}"
            f" since {rfc3339(since_ms)}"
        )
