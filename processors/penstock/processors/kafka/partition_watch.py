"""Watches how many partitions the request topics have: they can be added while workers run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.common.settings import KafkaSettings
from penstock.common.threads import in_daemon_thread
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)

LOOK_EACH_S = 10.0
"""As often as clients look for new partitions by themselves."""


class PartitionWatch:
    """`learn` is called on the event loop with topic → partitions and the wall-clock time when the broker was asked."""

    def __init__(
        self, kafka: KafkaSettings, topics: Sequence[str], learn: Callable[[Mapping[str, int], int], None]
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
                self._learn(counts, asked_at_ms)
            await asyncio.sleep(LOOK_EACH_S)
