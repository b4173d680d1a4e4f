"""The topic of usage: read before a view counts, and written while it does."""

from __future__ import annotations

import asyncio
import logging
import time

from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.common.outgoing import usage_record
from penstock.common.reader import newest_values
from penstock.common.settings import KafkaSettings
from penstock.common.transport import AsyncTransport, Delivery
from penstock.gateway.view.view import View
from penstock.schemas.codec import Codec
from penstock.schemas.errors import DecodeError, PenstockError
from penstock.schemas.records import UsageTotal
from penstock.schemas.topics import TP, TopicNames

logger = logging.getLogger(__name__)

READ_S = 600.0
LOOK_S, MOST, MOST_AT_END = 1.0, 20, 500
"""So often totals are looked for that are due, and so many are published then and at the end: encoding is done on the
loop."""


def read_totals(settings: KafkaSettings, codec: Codec, partitions: int) -> tuple[list[UsageTotal], dict[TP, int]]:
    """The newest record of each total, and the topic's ends. Blocks. Raises BrokerUnavailable, Forbidden."""
    tps = [(settings.names.usage, number) for number in range(partitions)]
    firsts, ends = admin.begin_offsets(settings, tps), admin.end_offsets(settings, tps)
    totals: list[UsageTotal] = []
    for value in newest_values(settings, {tp: (firsts[tp], ends[tp]) for tp in tps}, time.monotonic() + READ_S):
        try:
            totals.append(codec.decode(value, UsageTotal))
        except DecodeError as error:
            logger.warning("usage.skipped error=%s", error.code)
    return totals, ends


class UsagePublisher:
    """On the event loop. A record that Kafka does not take is sent again a minute later: the file has the totals."""

    def __init__(self, view: View, transport: AsyncTransport, names: TopicNames, codec: Codec) -> None:
        self._view, self._transport, self._names, self._codec = view, transport, names, codec
        self._refused: PenstockError | None = None

    async def run(self) -> None:
        """Publish what is due until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            self._publish(self._view.known.usage.due(now_ms(), MOST))

    def finish(self) -> None:
        """Send what the topic does not have, as the file has the rest; nothing waits for the acknowledgements."""
        self._publish(self._view.known.usage.all_due(now_ms(), MOST_AT_END))

    def problem(self) -> str | None:
        """Why no totals are published now, for operators."""
        if not self._has_topic:
            return f"there is no topic {self._names.usage}"
        return self._refused and self._refused.message

    @property
    def _has_topic(self) -> bool:
        """An installation of an older release has none."""
        return (self._names.usage, 0) in self._view.offsets()

    def _publish(self, totals: list[UsageTotal]) -> None:
        if not self._has_topic:
            return
        for total in totals:
            record = usage_record(total, self._names, self._codec)
            try:
                self._transport.produce_nowait(
                    record.topic, record.value, key=record.key, headers=record.headers, callback=self._delivered
                )
            except PenstockError as error:
                self._note(error)

    def _delivered(self, delivery: Delivery) -> None:
        self._note(delivery.error)

    def _note(self, error: PenstockError | None) -> None:
        """Log when totals begin to be refused, and when they are taken again."""
        before, self._refused = self._refused, error
        if (error and error.code) != (before and before.code):
            logger.warning("usage.published topic=%s error=%s", self._names.usage, error.code if error else "none")
