"""The composition root of `penstock summarizer`: makes the parts, sums up until a signal, and stops in order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics

from penstock.common import admin
from penstock.common.background import BackgroundTasks
from penstock.common.reader import PartitionReader, RawMessage
from penstock.common.shards.shard_copy import ShardCopy
from penstock.common.telemetry import register, tracing
from penstock.gateway.side_process import Over, run
from penstock.gateway.summarizer.following import Following
from penstock.gateway.summarizer.own_topics import OwnTopics
from penstock.gateway.summarizer.progress import CommittedPositions
from penstock.gateway.summarizer.requests import COMPLETED, GONE, Requests
from penstock.gateway.summarizer.settings import SummarizerSettings
from penstock.gateway.summarizer.shared_topic import SharedTopic
from penstock.gateway.summarizer.sources import Source
from penstock.gateway.summarizer.summary_scheduler import Key, Submit, SummaryScheduler
from penstock.schemas.registry import Codecs

logger = logging.getLogger(__name__)

disable_created_metrics()


class SummarizerMetrics:
    """One per process, with a registry of its own."""

    def __init__(self, scheduler: SummaryScheduler) -> None:
        self.registry = CollectorRegistry()
        self._ended = Counter(
            "penstock_summaries", "Requests for due summaries, by their outcome.", ["outcome"], registry=self.registry
        )
        followed = Gauge("penstock_conversations_followed", "Conversations that have a policy.", registry=self.registry)
        due = Gauge("penstock_summaries_due", "Summaries that are due and not asked for.", registry=self.registry)
        running = Gauge("penstock_summaries_in_flight", "Requests for summaries under way.", registry=self.registry)
        followed.set_function(lambda: len(scheduler.followed))
        due.set_function(lambda: scheduler.due)
        running.set_function(lambda: scheduler.running)

    def on_end(self, outcome: str) -> None:
        """Count a request that ended: as its status says, or refused, gone or lost."""
        self._ended.labels(outcome=outcome).inc()


async def run_summarizer(settings: SummarizerSettings) -> int:
    """Sum up conversations until SIGTERM or SIGINT; the process's exit code."""

    async def make(over: Over, codecs: Codecs) -> Summarizer:
        return Summarizer(settings, codecs)

    with tracing(settings.telemetry, "summarizer"):
        return await run("summarizer", settings.summarizer, settings.schema_registry, settings.kafka_settings(), make)


class Summarizer:
    """One summarizer. Raises PenstockError for what it cannot be made of."""

    def __init__(self, settings: SummarizerSettings, codecs: Codecs) -> None:
        section, kafka = settings.summarizer, settings.kafka_settings()
        self._kafka, self._codec, self._data_dir = kafka, codecs.blocking, section.data_dir
        self._scheduler = SummaryScheduler(section.of_tenant, section.max_in_flight)
        self._metrics = SummarizerMetrics(self._scheduler)
        self.registry = self._metrics.registry
        register(self.registry)
        self._progress = CommittedPositions(kafka, section.group_id)
        self._changed = asyncio.Event()
        self._following = Following(kafka, codecs, self._scheduler, self._source, section.look_s, self._changed.set)
        self._requests = Requests(kafka, codecs.blocking, section, self._end)
        self._background = BackgroundTasks()

    oldest_ms = None

    @property
    def waits_for(self) -> str | None:
        return self._following.waits_for or self._requests.waits_for

    def _end(self, key: Key, topic_id: str) -> int | None:
        return self._following.source.end(key, topic_id)

    def _source(self, reader: PartitionReader, put: Callable[[Sequence[RawMessage]], None]) -> Source:
        """Blocks. Raises BrokerUnavailable, Overloaded, Forbidden."""
        if admin.topic_id(self._kafka, self._kafka.names.conversation_log) is None:
            self._progress.check()
            return OwnTopics(self._kafka, self._codec, reader, put, self._progress)
        copy = ShardCopy(self._kafka, self._data_dir / "conversations")
        return SharedTopic(self._kafka, self._codec, copy, put)

    def start(self) -> None:
        self._background.start(self._run(), "summarizer")

    async def stop(self) -> None:
        """What is under way continues; the next process finds it in the topics."""
        await self._background.cancel()
        await self._requests.close()
        await asyncio.to_thread(self._progress.close)
        logger.info("summarizer.stopped")

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._following.run())
            while True:
                await self._changed.wait()
                self._changed.clear()
                while (submit := self._scheduler.next()) is not None:
                    parts.create_task(self._sum_up(submit))

    async def _sum_up(self, submit: Submit) -> None:
        outcome, end = await self._requests.run(submit)
        self._metrics.on_end(outcome)
        if outcome == GONE:
            self._following.forget(submit.key)
        self._following.ended(submit, end, failed=outcome not in (COMPLETED, GONE))
        self._changed.set()
