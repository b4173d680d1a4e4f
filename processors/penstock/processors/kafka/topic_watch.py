"""What the broker knows of topics: how many partitions those of this worker have, and whether those of pools exist."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from penstock.common import admin
from penstock.common.background import BackgroundTasks
from penstock.common.clock import now_ms
from penstock.common.settings import KafkaSettings
from penstock.common.threads import in_daemon_thread
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)

LOOK_EACH_S = 10.0
"""As often as clients look for new partitions by themselves."""
MISSING_FOR_S = 5.0
"""A topic that was not there is taken for missing so long, then asked for again."""
AGAIN_S = 1.0


class PartitionWatch:
    """Asks the broker for the partitions of topics. `learn` is `Intake.learn_partitions`, called on the event loop."""

    def __init__(
        self, kafka: KafkaSettings, topics: Sequence[str], learn: Callable[[Mapping[str, int], int], Mapping[str, int]]
    ) -> None:
        self._kafka = kafka
        self._topics = topics
        self._learn = learn

    async def run_forever(self) -> None:
        while True:
            asked_at_ms = now_ms()
            try:
                counts = await in_daemon_thread(admin.partition_counts, self._kafka, self._topics)
            except PenstockError as error:
                logger.info("partitions.unknown error=%s", error.code)
            else:
                for topic, before in self._learn(counts, asked_at_ms).items():
                    logger.warning("partitions.changed topic=%s from=%d to=%d", topic, before, counts[topic])
            await asyncio.sleep(LOOK_EACH_S)


class PoolTopics:
    """Whether topics exist, asked before a record is put on one: a producer does not report a missing topic soon.

    Asks once for each topic at a time; one that is there is remembered. All calls on the loop.
    """

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
