"""Whether the topics of other pools are there: asked of the broker before a record is put on one.

A producer does not say so soon: what is sent to a topic that there is not waits until it is there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from penstock.common import admin
from penstock.common.background import BackgroundTasks
from penstock.common.settings import KafkaSettings
from penstock.common.threads import in_daemon_thread
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)

MISSING_FOR_S = 5.0
"""A topic that was not there is taken for missing so long, then asked for again."""
AGAIN_S = 1.0


class PoolTopics:
    """Asks once for each topic at a time; one that is there is remembered. All calls on the loop."""

    def __init__(self, kafka: KafkaSettings) -> None:
        self._kafka = kafka
        self._there: set[str] = set()
        self._missing: dict[str, float] = {}
        self._asking: dict[str, list[tuple[Callable[[], None], Callable[[], None]]]] = {}
        self._tasks = BackgroundTasks()

    def look(self, topic: str, there: Callable[[], None], missing: Callable[[], None]) -> None:
        """Call one of both, at once when it is known; while no broker answers, neither."""
        if topic in self._there:
            there()
        elif time.monotonic() - self._missing.get(topic, float("-inf")) < MISSING_FOR_S:
            missing()
        elif topic in self._asking:
            self._asking[topic].append((there, missing))
        else:
            self._asking[topic] = [(there, missing)]
            self._tasks.start(self._ask(topic), f"look for {topic}")

    async def _ask(self, topic: str) -> None:
        witness = self._kafka.names.result
        while True:
            try:
                counts = await in_daemon_thread(admin.partition_counts, self._kafka, [topic, witness])
            except PenstockError as error:
                logger.info("pools.unknown topic=%s error=%s", topic, error.code)
            else:
                if witness in counts:  # else the broker has just started, and knows no topics yet
                    break
            await asyncio.sleep(AGAIN_S)
        found = bool(counts.get(topic))
        if found:
            self._there.add(topic)
        else:
            self._missing[topic] = time.monotonic()
        for there, missing in self._asking.pop(topic):
            (there if found else missing)()
