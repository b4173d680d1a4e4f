"""Following `inference.worker`: what the workers of an installation report of themselves, this one included."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.common.arrivals import Arrivals
from penstock.common.clock import steady_ms
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.processors.kafka.record_follower import RecordFollower
from penstock.schemas.codec import Codec
from penstock.schemas.records import WorkerState
from penstock.schemas.topics import is_of_gateway


class PeerReports(RecordFollower[WorkerState]):
    """Follows the topic from its start; `on_reports` runs on the event loop, in log order."""

    def __init__(
        self,
        settings: KafkaSettings,
        codec: Codec,
        loop: asyncio.AbstractEventLoop,
        on_reports: Callable[[Sequence[WorkerState]], None],
    ) -> None:
        self._arrivals = Arrivals()
        self._arrivals.begin(sys.maxsize)

        def read(message: RawMessage) -> WorkerState | None:
            return report_in(message, codec, self._arrivals.heard_ms(message, steady_ms()))

        super().__init__(settings, settings.names.worker, read, loop, on_reports, name="peers")

    async def start(self, deadline_s: float) -> None:
        await super().start(deadline_s)
        self._arrivals.begin(0)


def report_in(message: RawMessage, codec: Codec, heard_ms: int) -> WorkerState | None:
    """A worker's report, with the time at which it was heard here for that of the other's clock; None of all else."""
    if message.value is None or is_of_gateway(message.key):
        return None
    return replace(codec.decode(message.value, WorkerState), updated_at=heard_ms)
