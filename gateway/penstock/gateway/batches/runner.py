"""A gateway's runner of batches: it looks for open ones that nobody runs, takes their leases and runs them."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

from penstock.common.clock import now_ms
from penstock.common.tasks import end_all, set_within
from penstock.gateway.batches.keeping import BatchStore, Key, Lease
from penstock.gateway.batches.leases import Leases
from penstock.gateway.batches.records import WINDOW_S, Batch, batch_name
from penstock.gateway.batches.running import BatchRun, LeaseLost
from penstock.gateway.context import GatewayContext
from penstock.gateway.limits.callers import Caller
from penstock.gateway.routes.window import Budget
from penstock.gateway.service.service import GatewayService
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)

LOOK_S = 2.0
AGAIN_S = 5.0
"""A batch whose run failed is taken again after so long."""
MOST, MOST_OF_ONE = 64, 16
"""Batches that run at one gateway, and those of one tenant among them."""
KEPT_MS = 30 * 86_400_000
"""A batch that ended can be asked for so long after it was made."""
FORGET_EVERY_S = 3_600.0
UNMADE_S = 60.0


class BatchRunner:
    """Used on one event loop."""

    def __init__(self, context: GatewayContext, service: GatewayService) -> None:
        self._context = context
        self._service = service
        self._keeping = BatchStore(service.artifacts)
        self._leases = Leases()
        self._budget = Budget()
        self._runs: dict[Key, BatchRun] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._again_at: dict[Key, float] = {}
        self._unmade: dict[Key, float] = {}
        self._made_ms: dict[Key, int] = {}
        self._woken = asyncio.Event()
        self._forgot_at = time.monotonic()

    def wake(self) -> None:
        """There is news of some batch."""
        self._woken.set()
        for run in self._runs.values():
            run.woken.set()

    def counts(self) -> Mapping[str, int]:
        """Batches that run here, by what they wait for; under "" those that wait for nothing."""
        return Counter((run.batch.waiting_for or {"reason": ""})["reason"] or "" for run in self._runs.values())

    async def run(self) -> None:
        """Until it is cancelled; then the leases are let go, so that another gateway goes on at once."""
        try:
            while True:
                try:
                    await self._look()
                except PenstockError as error:
                    logger.warning("batches.not_looked reason=%s", error)
                except Exception:
                    logger.exception("batches.look_failed")
                await set_within(self._woken, LOOK_S)
                self._woken.clear()
        finally:
            await self._let_all_go()

    async def _look(self) -> None:
        if self._service.facts.catching_up() is not None or self._service.facts.lacks() is not None:
            return  # which lines are submitted already is not known
        open_ones = await asyncio.to_thread(self._keeping.open)
        known = set(open_ones)
        self._leases.keep_only(known)
        self._again_at = {key: at for key, at in self._again_at.items() if key in known}
        self._unmade = {key: since for key, since in self._unmade.items() if key in known}
        for key in await self._in_turn(open_ones):
            if time.monotonic() >= self._again_at.get(key, 0) and (self._has_room(key[0]) or await self._is_over(key)):
                await self._try(key)
        if time.monotonic() - self._forgot_at >= FORGET_EVERY_S:
            self._forgot_at = time.monotonic()
            await asyncio.to_thread(self._keeping.forget_ended, now_ms() - KEPT_MS)

    async def _in_turn(self, keys: Sequence[Key]) -> list[Key]:
        """Those that do not run here: first of the tenants with the fewest, and of a tenant the oldest."""
        new = [key for key in keys if key not in self._made_ms]
        made = await asyncio.to_thread(lambda: [self._keeping.made_ms(key) for key in new])
        known = {**self._made_ms, **dict(zip(new, made, strict=True))}
        self._made_ms = {key: known[key] for key in keys}
        runs = Counter(tenant for tenant, _ in self._runs)
        ranks: dict[Key, tuple[int, int]] = {}
        for key in sorted((key for key in keys if key not in self._runs), key=lambda key: self._made_ms[key]):
            ranks[key] = runs[key[0]], self._made_ms[key]
            runs[key[0]] += 1
        return sorted(ranks, key=lambda key: ranks[key])

    async def _is_over(self, key: Key) -> bool:
        """Whether no line of it has to run: then it needs no place to end."""
        if 0 < self._made_ms[key] <= now_ms() - WINDOW_S * 1000:
            return True
        return await asyncio.to_thread(self._keeping.cancelled_at, key) is not None

    def _has_room(self, tenant: str) -> bool:
        return len(self._runs) < MOST and sum(key[0] == tenant for key in self._runs) < MOST_OF_ONE

    async def _try(self, key: Key) -> None:
        """Take it if nobody runs it. One that cannot be read leaves the others their turn. Raises PenstockError."""
        try:
            await self._take(key)
        except Exception as error:
            self._again_at[key] = time.monotonic() + AGAIN_S
            if isinstance(error, PenstockError):
                raise
            logger.exception("batch.not_taken batch=%s", batch_name(key[1]))

    async def _take(self, key: Key) -> None:
        lease = await asyncio.to_thread(self._keeping.lease, key)
        number = self._leases.to_take(key, lease, time.monotonic())
        if number is None:
            return
        batch = await asyncio.to_thread(self._keeping.running, key)
        if batch is None:
            await self._forget_unmade(key)
            return
        mine = Lease(number, uuid.uuid4().hex)
        if not await asyncio.to_thread(self._keeping.take_lease, key, number, mine.beat):
            return
        run = self._runs[key] = BatchRun(
            batch,
            mine,
            self._keeping,
            self._service,
            self._context.allowances,
            lambda: self._caller_of(batch),
            lambda: self._share(batch.tenant),
            self._budget,
            lambda end: self._context.metrics.on_batch_line(completed=end.completed),
        )
        logger.info("batch.taken batch=%s lease=%d", batch_name(batch.batch_id), number)
        self._tasks[key] = asyncio.create_task(self._run(key, run), name=f"batch-{batch.batch_id}")

    async def _forget_unmade(self, key: Key) -> None:
        """A mark whose batch is not there: it is being made, has ended, or its maker died."""
        since = self._unmade.setdefault(key, time.monotonic())
        if time.monotonic() - since < UNMADE_S:
            return
        del self._unmade[key]
        await asyncio.to_thread(self._keeping.forget_unmade, key)

    def _caller_of(self, batch: Batch) -> Caller | None:
        caller = self._context.policy.caller_of_work(batch.tenant, batch.key_id)
        return None if caller is None else self._context.allowances.with_priority(caller)

    def _share(self, tenant: str) -> int:
        """Lines that one of the tenant's batches may have in flight."""
        most = self._service.settings.gateway.batch_lines // max(1, len(self._runs))
        outstanding = self._context.allowances.limits_of(tenant).outstanding
        if outstanding is not None:
            of_tenant = sum(key[0] == tenant for key in self._runs)
            most = min(most, outstanding // 2 // max(1, of_tenant))
        return max(1, most)

    async def _run(self, key: Key, run: BatchRun) -> None:
        try:
            await run.run()
        except LeaseLost:
            logger.warning("batch.lease_lost batch=%s", batch_name(key[1]))
        except Exception as error:
            self._again_at[key] = time.monotonic() + AGAIN_S
            if isinstance(error, PenstockError | OSError):
                logger.warning("batch.run_failed batch=%s reason=%s", batch_name(key[1]), error)
            else:
                logger.exception("batch.run_failed batch=%s", batch_name(key[1]))
            await self._let_go(run)
        finally:
            self._runs.pop(key, None)
            self._tasks.pop(key, None)

    async def _let_all_go(self) -> None:
        runs = list(self._runs.values())
        await end_all(self._tasks.values())
        await asyncio.gather(*(self._let_go(run) for run in runs))

    async def _let_go(self, run: BatchRun) -> None:
        """The next process that looks may take it."""
        free = Lease(run.lease.number, "")
        with suppress(PenstockError):
            await asyncio.to_thread(self._keeping.renew, run.batch.key, free)
