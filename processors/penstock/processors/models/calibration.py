"""What a process of an engine owns before it holds a model: measured once in the worker's life, with a real one.

Pages that it does not share with the fork server, pools of threads, the allocator's own, the modules of its kind: some
fifty to a hundred megabytes that differ by machine, version and number of threads.
"""

from __future__ import annotations

import asyncio
import logging

from penstock.processors.engines.base import Limits
from penstock.processors.engines.process.host import ChildEngine
from penstock.processors.models.parts import PROCESS_BYTES
from penstock.schemas.errors import EngineFailed

logger = logging.getLogger(__name__)

BARE = "penstock.processors.engines.bare:Bare"
PATIENCE_S = 120.0


class Calibration:
    """Measured when it is asked for first, for each kind of engine."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}
        self._measuring = asyncio.Lock()

    async def process_bytes(self, kind: str, threads: int, silent_s: float) -> int:
        """Of main memory. Cancelled, it leaves no process. One that is silent for `silent_s` is given up."""
        async with self._measuring:
            if kind not in self._known:
                self._known[kind] = await self._measure(kind, threads, silent_s)
            return self._known[kind]

    async def _measure(self, kind: str, threads: int, silent_s: float) -> int:
        engine = ChildEngine(
            f"bare {kind}",
            BARE,
            kind,
            {"threads": threads},
            limits=Limits(slots=1),
            load_timeout_s=PATIENCE_S,
            silent_s=silent_s,
        )
        try:
            await engine.start()
            measured = engine.peak_memory() or PROCESS_BYTES
        except EngineFailed as error:
            logger.warning("calibration.failed kind=%s error=%s", kind, error)
            return PROCESS_BYTES
        finally:
            await engine.stop()
        logger.info("calibration.done kind=%s process_bytes=%d", kind, measured)
        return measured
