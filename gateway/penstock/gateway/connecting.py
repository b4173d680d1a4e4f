"""The parts that need Kafka: made as soon as a broker answers, however late; until then callers hear 503."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import sqlite3
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from penstock.common import admin
from penstock.common.artifacts.configured import open_store
from penstock.common.background import BackgroundTasks
from penstock.common.clock import now_ms
from penstock.common.threads import in_daemon_thread
from penstock.common.transport import Transport
from penstock.gateway.access.access import Access
from penstock.gateway.batches.runner import BatchRunner
from penstock.gateway.context import GatewayContext
from penstock.gateway.conversations.opening import open_layout
from penstock.gateway.conversations.pages import Conversations
from penstock.gateway.dead_letters.follower import LetterFollower
from penstock.gateway.dead_letters.index import LetterIndex
from penstock.gateway.process import limit_malloc_arenas, pause_gc, shorten_thread_switches, trim_heap, tune_gc
from penstock.gateway.producing import ServiceTransport
from penstock.gateway.reporting import Reporter
from penstock.gateway.routes.health import readiness_of
from penstock.gateway.service.dependencies import Problem
from penstock.gateway.service.problem_watch import ProblemWatch
from penstock.gateway.service.run_times import RunTimes
from penstock.gateway.service.service import GatewayService
from penstock.gateway.threads import Threads
from penstock.gateway.view.follower import Follower
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.outcomes import Outcomes
from penstock.gateway.view.snapshot_writer import SnapshotWriter
from penstock.gateway.view.snapshots import Snapshots
from penstock.gateway.view.store import Store
from penstock.gateway.view.topics_read import require_topics
from penstock.gateway.view.usage_topic import UsagePublisher
from penstock.gateway.view.view import View
from penstock.schemas.errors import BrokerRefused, PenstockError, StoreUnavailable
from penstock.schemas.records import ResultEvent
from penstock.schemas.registry import registry_codecs
from penstock.schemas.texts import without_user

logger = logging.getLogger(__name__)

MOST_LAGGING = 20
"""Topics that are named with their lag, those with the most first."""
_VIEW_FILES = [f"{name}{end}" for name in ("", ".imported") for end in ("", "-wal", "-shm")]


def own_state(context: GatewayContext, follower: Follower) -> dict[str, Any]:
    """The fields of GatewayState that change."""
    body, _ = readiness_of(context, for_operators=True)
    lag = sorted(follower.lag.items(), key=lambda item: (-item[1], item[0]))
    return {
        "status": "draining" if context.draining else body["status"],
        "reason": body["reason"],
        "lag": dict(lag[:MOST_LAGGING]),
        "streams": context.allowances.streams.open,
        "sockets": context.allowances.sockets.open,
        "http_requests": context.allowances.http.open,
        "expiring_certificates": context.certificates.expiring(),
        "view_bytes": _size(context.settings.gateway.view_path),
    }


def _size(view: Path) -> int:
    size_bytes = 0
    for end in _VIEW_FILES:
        with suppress(OSError):  # SQLite makes and removes these as it likes
            size_bytes += view.with_name(view.name + end).stat().st_size
    return size_bytes


ASK_S = 5.0
RETRY_S = 1.0
ENDED_S = 2.0
HELD_AT_MOST_S = 600.0
HELD_PART = 10
"""One part in so many of `gateway.max_live` stays in memory though nobody follows it."""


class Connecting:
    """Connects a gateway to its Kafka: then `context.connected` is there; `context.waits_for` says why it is not."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._settings = context.settings
        self._stack = AsyncExitStack()
        self._since_ms = now_ms()
        self._logged = ""

    async def until_connected(self) -> None:
        """Try until it works. What only a person can mend ends the gateway."""
        while True:
            try:
                await self._connect()
                return
            except StoreUnavailable as error:  # the folder of artifacts cannot be made
                self._context.on_failure(error.message)
                return
            except PenstockError as error:
                reason = str(error)
                if reason != self._logged:
                    logger.warning("gateway.waits reason=%s", reason)
                self._logged = reason
                is_refused = isinstance(error, BrokerRefused)
                self._context.waits_for = Problem(BrokerRefused.PUBLIC, reason) if is_refused else Problem(reason)
            except (OSError, sqlite3.Error) as error:  # a folder that it may not write, a disk that is full
                where = getattr(error, "filename", None) or self._settings.gateway.view_path
                self._context.on_failure(f"{where}: {error.__class__.__name__}: {error}")
                return
            except Exception as error:
                logger.exception("gateway.cannot_connect")
                self._context.on_failure(f"{type(error).__name__} while the gateway was connected")
                return
            await asyncio.sleep(RETRY_S)

    async def _connect(self) -> None:
        """Raises PenstockError, with nothing left open."""
        limit_malloc_arenas()
        shorten_thread_switches()
        settings, kafka, conf = self._settings, self._settings.kafka_settings(), self._settings.gateway
        names = kafka.names
        counts = await asyncio.to_thread(admin.partition_counts, kafka, None, ASK_S)
        require_topics(names, counts)
        result_id = await asyncio.to_thread(admin.topic_id, kafka, names.result) or "none"
        identity = f"{kafka.topic_prefix} {result_id}"
        registry = settings.schema_registry
        self._context.waits_for = Problem(f"the schema registry at {without_user(registry.url or '')}")
        codecs = await in_daemon_thread(partial(registry_codecs, registry.access, write=registry.write))
        self._context.waits_for = Problem("the view to be opened")
        async with AsyncExitStack() as stack:
            threads = Threads(one_tenant=settings.auth.keys_file is None)
            stack.callback(threads.close)
            store = await asyncio.to_thread(Store, conf.view_path, identity)
            stack.push_async_callback(asyncio.to_thread, store.close)
            transport = Transport(kafka, delivery_timeout_s=10)
            stack.push_async_callback(asyncio.to_thread, transport.close, 5)
            hub = Hub(client_frames=conf.client_queue_frames)
            run_times = RunTimes()

            def on_outcome(event: ResultEvent, klass: str) -> None:
                self._context.metrics.outcomes.count(event, klass)
                run_times.on_outcome(event)

            view = await asyncio.to_thread(
                View,
                store,
                hub,
                names,
                counts[names.result],
                on_outcome=on_outcome,
                on_request=run_times.on_request,
                on_status=self._context.metrics.on_status,
                codec=codecs.prompt,
                recent_bytes=conf.recent_bytes,
                held_live=conf.max_live // HELD_PART,
                counts_since_ms=self._since_ms,
                tenants=self._context.allowances.tenants,
            )
            view.fleet.declare(settings.models)
            view.known.usage.begin(result_id, round(conf.usage_s * random.uniform(1_000, 2_000)))
            loop = asyncio.get_running_loop()

            def on_failure(reason: str) -> None:
                loop.call_soon_threadsafe(self._context.on_failure, reason)

            layout = await asyncio.to_thread(open_layout, settings, transport, codecs.blocking, on_failure)
            stack.push_async_callback(asyncio.to_thread, layout.close)
            artifacts = await asyncio.to_thread(open_store, settings.artifacts, settings.artifacts_location)
            snapshots = None
            if conf.view_snapshot_s:
                snapshots = await asyncio.to_thread(Snapshots, artifacts.places[None], identity, conf.view_path)
            follower = Follower(
                kafka,
                view,
                store,
                horizon_ms=int(conf.horizon_h * 3_600_000),
                rediscover_s=conf.rediscover_s,
                threads=threads,
                on_caught_up=_caught_up,
                on_failure=lambda reason: self._context.on_failure(reason),
                conversations=layout.everyone if layout.is_shared else None,
                snapshots=snapshots,
            )
            outcomes = Outcomes(kafka, codecs.prompt, view)
            stack.push_async_callback(outcomes.stop)
            dlq_id = await asyncio.to_thread(admin.topic_id, kafka, names.dlq) or "none"
            letters_path = conf.view_path.with_name(f"{conf.view_path.name}.dead-letters")
            index = await asyncio.to_thread(LetterIndex, letters_path, f"{kafka.topic_prefix} {dlq_id}")
            stack.push_async_callback(asyncio.to_thread, index.close)
            letters = LetterFollower(kafka, codecs.prompt, index)
            sender = ServiceTransport(transport, asyncio.get_running_loop())
            access = await Access.open(
                kafka,
                codecs.blocking,
                sender,
                self._context.key_book,
                self._context.policy.keys,
                self._context.allowances,
                conf.probe_s,
            )
            stack.push_async_callback(access.follower.stop)
            service = GatewayService(
                settings,
                sender,
                view,
                follower,
                hub,
                codecs.blocking,
                artifacts,
                threads,
                run_times,
                self._context.allowances,
                outcomes,
                Conversations(layout.log, kafka.names, codecs.blocking),
                layout,
                letters,
            )
            pause_gc()
            # Should it never catch up: what outages leave behind must be collected some day.
            asyncio.get_running_loop().call_later(HELD_AT_MOST_S, tune_gc)
            stack.push_async_callback(follower.stop)
            await follower.start()
            publisher = UsagePublisher(view, sender, names, codecs.blocking)
            stack.callback(publisher.finish)
            self._context.usage_problem = publisher.problem
            stack.push_async_callback(asyncio.to_thread, letters.stop)
            await asyncio.to_thread(letters.start)
            self._context.metrics.read_letters = letters.counts
            self._context.metrics.read_records = lambda: follower.records(outcomes.read)
            sweeps = service.conversation_sweeps
            self._context.metrics.read_held_records = service.transactions.records
            self._context.metrics.read_swept = lambda: (sweeps.due, sweeps.counts)
            batches = BatchRunner(self._context, service)
            self._context.wake_batches = batches.wake
            self._context.metrics.read_batches = batches.counts
            self._context.problems = problems = ProblemWatch(
                service.facts,
                service.model_orders,
                index,
                partial(self._context.tried, service),
                self._context.allowances,
                conf.view_path.parent,
            )
            self._context.metrics.read_problems = problems.counts
            reporter = Reporter(
                "gateway",
                (conf.host, conf.port),
                transport,
                names,
                codecs.blocking,
                partial(own_state, self._context, follower),
            )
            view.gateways.reports_as(reporter.id, reporter.started_at, lambda: reporter.is_refused)
            reporter.start()
            stack.push_async_callback(self._stop_reports, reporter)
            errands = BackgroundTasks()
            stack.push_async_callback(errands.cancel)
            running = errands.start(batches.run(), "batches")
            self._context.stop_batches = running.cancel
            stack.push_async_callback(_ended, running)
            for errand, name in (
                (service.sweeps.run(), "sweep-artifacts"),
                (service.conversation_sweeps.run(), "sweep-conversations"),
                (service.ending_lost.run(), "end-lost"),
                (service.withdrawing.run(), "withdraw-models"),
                (service.dependencies.run(), "dependencies"),
                (service.transactions.run(), "transactions"),
                (service.feeds.run(), "feeds"),
                (problems.run(), "problems"),
                (access.dependencies.run(), "access"),
                (publisher.run(), "usage"),
            ):
                errands.start(errand, name)
            if snapshots is not None:
                writer = SnapshotWriter(snapshots, view, store, conf.view_snapshot_s, follower.is_whole)
                errands.start(writer.run(), "snapshots")
            self._stack = stack.pop_all()
        self._context.access, self._context.connected = access, service

    async def _stop_reports(self, reporter: Reporter) -> None:
        await reporter.stop(in_order=not self._context.failed)

    async def close(self) -> None:
        """Read nothing new, write what was read, send what was accepted."""
        gc.enable()
        await self._stack.aclose()


async def _ended(task: asyncio.Task[None]) -> None:
    """Batches let their leases go: that takes the store a moment."""
    task.cancel()
    await asyncio.wait([task], timeout=ENDED_S)


def _caught_up() -> None:
    tune_gc()
    asyncio.get_running_loop().run_in_executor(None, trim_heap)
