"""Following `inference.worker`: what the workers of an installation report of themselves, this one included."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.processors.kafka.record_follower import RecordFollower
from penstock.schemas.codec import Codec
from penstock.schemas.records import WorkerState


class PeerReports(RecordFollower[WorkerState]):
    """Follows the topic from its start; `on_reports` runs on the event loop, in log order."""

    def __init__(
        self,
        settings: KafkaSettings,
        codec: Codec,
        loop: asyncio.AbstractEventLoop,
        on_reports: Callable[[Sequence[WorkerState]], None],
    ) -> None:
        def read(message: RawMessage) -> WorkerState | None:
            return None if message.value is None else codec.decode(message.value, WorkerState)

        super().__init__(settings, settings.names.worker, read, loop, on_reports, name="peers")
