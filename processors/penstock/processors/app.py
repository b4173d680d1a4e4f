"""The worker's composition root: makes the parts, joins them, runs until a signal, and stops in order."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from penstock.common import admin
from penstock.common.background import on_faults
from penstock.common.certificates import Certificates
from penstock.common.clock import now_ms
from penstock.common.file_differences import file_differences
from penstock.common.group_names import group_name
from penstock.common.own_path import claim_folder
from penstock.common.release import release
from penstock.common.settings import KafkaSettings
from penstock.common.shards.shard_copy import ShardCopy
from penstock.common.stop_bound import StopBound
from penstock.common.tasks import awake_timeout, end_all, set_within
from penstock.common.telemetry import register, tracing
from penstock.common.threads import in_daemon_thread
from penstock.processors.assembly import DELIVERY_TIMEOUT_S, LocalFiles, Parts, assemble
from penstock.processors.health import HealthServer
from penstock.processors.kafka.batches import TP, PartitionProgress
from penstock.processors.kafka.journal import CrashJournal
from penstock.processors.kafka.watchdog import DeliveryWatch, JoinWatch, StallWatch
from penstock.processors.metrics import Metrics
from penstock.processors.models.machine import UnknownDevice
from penstock.processors.models.serving import open_estimates
from penstock.processors.settings import WorkerSettings
from penstock.schemas.errors import BrokerRefused, BrokerUnavailable, Overloaded, PenstockError, RegistryUnavailable
from penstock.schemas.records import WAITING_REASONS, WorkerState
from penstock.schemas.registry import registry_codecs
from penstock.schemas.texts import without_user
from penstock.schemas.topics import CLASSES, TopicNames

logger = logging.getLogger(__name__)

UNJOINED_S = 120.0
UNDELIVERED_S = 600.0
"""After so long without any acknowledgement of a Kafka that answers the worker ends."""
OBSERVE_S = 1.0
"""How often the devices are measured."""
REPORT_GAP_S = 0.25
"""Between reports, however much changes."""
LEAVE_S = 15.0
STOP_S = 35.0
"""The bound of a stop, after the drain. A supervisor should wait a little longer: then the log says what hung."""
GROUP = "penstock-worker"
EXIT_OK, EXIT_FAILED, EXIT_UNREACHABLE = 0, 1, 3


class CannotStart(Exception):
    """The worker must not join: the message says why and what cures it."""

    def __init__(self, message: str, code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.code = code


async def run_worker(settings: WorkerSettings) -> int:
    """Run one worker until SIGTERM or SIGINT; the process's exit code. Never raises for what a user can mend."""
    with tracing(settings.telemetry, "worker"):
        return await _run_worker(settings)


async def _run_worker(settings: WorkerSettings) -> int:
    try:
        folder = await in_daemon_thread(claim_folder, settings.worker.data_dir)
    except OSError as error:
        cause = f"{error.strerror}: {error.filename}"
        print(f"penstock worker: its folder cannot be used ({cause}); set worker.data_dir", file=sys.stderr, flush=True)
        return EXIT_FAILED
    worker = settings.worker.model_copy(update={"data_dir": folder.path})
    app = WorkerApp(settings.model_copy(update={"worker": worker}))
    with StopBound("worker", settings.worker.drain_s + STOP_S, app.asked_to_stop) as bound:
        try:
            code = await app.run()
        except CannotStart as error:
            print(f"penstock worker: {error}", file=sys.stderr, flush=True)
            code = error.code
        bound.begin()
        await app.stop()
    folder.release()
    return code


class WorkerApp:
    """One worker process: `run`, then `stop`."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.settings = settings
        self._started_ms = now_ms()
        self._metrics = Metrics()
        register(self._metrics.registry)
        self._certificates = Certificates(settings.kafka_settings(), settings.schema_registry.access)
        self._metrics.registry.register(self._certificates)
        self._watch = StallWatch(settings.worker.stall_s)
        self._join_watch = JoinWatch(UNJOINED_S)
        self._delivery_watch = DeliveryWatch(UNDELIVERED_S, DELIVERY_TIMEOUT_S)
        self._waits_for_kafka = False
        self._over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._parts: Parts | None = None
        self._state = "starting"
        self._step = ""
        """What the start waits for."""
        self._joins = False
        """Whether it has begun to join the group."""
        self._health = HealthServer(
            settings.worker.health_host,
            settings.worker.health_port,
            self._metrics,
            readiness=self._not_ready,
            describe=self._describe,
            refresh=self._refresh_gauges,
        )
        self._seen: dict[TP, PartitionProgress] = {}
        self._observed: tuple[str | None, int | None] = None, None
        """The topic of orders, and how far it was observed."""
        self._file_differences: list[str] = []
        """As they were last logged."""
        self._changed = asyncio.Event()
        """A model stands otherwise than it was last reported, or an order was observed."""

    async def run(self) -> int:
        """Run until a signal (0) or until only a new process can go on (1). Raises CannotStart."""
        starting = asyncio.create_task(self._start(), name="start")
        await asyncio.wait({starting, self._over}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            await end_all([starting])
        elif not starting.cancelled() and (error := starting.exception()) is not None:
            raise error
        return await self._over

    def asked_to_stop(self) -> None:
        if not self._over.done():
            waits_for = [*self._not_ready(), *self._must_end()]
            logger.info("worker.stopping waits_for=%s", "; ".join(waits_for) or "nothing")
        self._finish(EXIT_OK)

    def _must_end(self) -> list[str]:
        """What a stop waits for: runs and the processes of engines."""
        if self._parts is None:
            return []
        running, held = self._parts.flow.running, self._parts.serving.manager.held()
        runs = [f"{running} runs"] if running else []
        return runs + [f"the process {one.pid} of {one.model}" for one in held.values() if one.pid is not None]

    async def _start(self) -> None:
        """Verify, connect, replay control, load models in the background, begin to join. Raises CannotStart."""
        loop = asyncio.get_running_loop()
        on_faults(loop, self._break_down)
        conf, kafka, registry = self.settings.worker, self.settings.kafka_settings(), self.settings.schema_registry
        try:
            await self._health.start()
        except OSError as error:
            where = f"{conf.health_host}:{conf.health_port}"
            raise CannotStart(f"{where} cannot be bound ({error.strerror}); set worker.health_port") from error
        try:
            self._step = f"the topics of Kafka at {kafka.bootstrap_servers}"
            partitions = await in_daemon_thread(verify_topics, self.settings)
            group_id = await in_daemon_thread(name_group, self.settings)
            files = await in_daemon_thread(open_files, self.settings)
            self._step = f"the schema registry at {without_user(registry.url or '')}"
            codecs = await in_daemon_thread(partial(registry_codecs, registry.access, write=registry.write))
            parts = self._parts = assemble(
                self.settings,
                group_id,
                partitions,
                codecs,
                self._metrics,
                lambda: self._finish(EXIT_FAILED),
                loop,
                files,
            )
            if (copy := files.copy) is not None:
                copy.on_failure = lambda reason: loop.call_soon_threadsafe(self._copy_failed, reason)
            parts.desired_models.on_observed = self._orders_observed
        except RegistryUnavailable as error:
            raise CannotStart(str(error), EXIT_UNREACHABLE) from error
        except UnknownDevice as error:
            raise CannotStart(str(error)) from error
        for follower, topic in (
            (parts.control, kafka.names.control),
            (parts.desired, kafka.names.desired),
            (parts.peers, kafka.names.worker),
        ):
            self._step = f"{topic} to be read to its end"
            try:
                await follower.start(deadline_s=30)
            except PenstockError as error:
                raise CannotStart(f"{topic} could not be read: {error}", EXIT_UNREACHABLE) from error
        parts.refetcher.start()
        parts.serving.on_change = self._changed.set  # a reader that looks for a model that was just loaded finds it
        self._step = "the devices to be measured"
        await parts.serving.observe()
        parts.serving.publish_models()
        parts.lanes.load_all()
        parts.membership.on_joined = lambda: self._report(parts)
        parts.membership.start()
        self._joins = True
        parts.background.start(parts.worker.tick_forever(), "ticker")
        parts.background.start(parts.committer.run_forever(), "committer")
        parts.background.start(self._watch_forever(parts), "watchdog")
        parts.background.start(self._report_forever(parts), "reporter")
        parts.background.start(self._observe_forever(parts), "observer")
        parts.background.start(parts.partitions.run_forever(), "partition watch")
        self._state = "running"
        # What has been made so far lives as long as the process: the collector need not look at it per few messages.
        gc.collect()
        gc.freeze()
        gc.set_threshold(50_000, 20, 50)
        logger.info("worker.started worker_id=%s topics=%d", self.settings.worker_id, len(partitions))

    def _finish(self, code: int) -> None:
        if not self._over.done():
            self._over.set_result(code)

    def _break_down(self) -> None:
        """A fault of ours: the worker must not go on half alive."""
        if self._parts is not None:
            self._parts.worker.break_down()
        self._finish(EXIT_FAILED)

    async def _watch_forever(self, parts: Parts) -> None:
        """Once a second."""
        trouble = None
        while trouble is None:
            await asyncio.sleep(1.0)
            trouble = await self._trouble(parts)
        logger.error("%s: exiting to be restarted", trouble)
        self._finish(EXIT_FAILED)

    async def _trouble(self, parts: Parts) -> str | None:
        """Why this process can do no good any more, as it is in the log; None while it can."""
        if parts.membership.crashed:
            return "worker.faust_crashed"
        if not (parts.control.alive and parts.desired.alive and parts.peers.alive):
            return "worker.control_reader_died"
        parts.book.prune(now_ms())
        joined, generation = parts.membership.joined, parts.membership.generation
        answers = joined or await parts.watch.wait(1.0)
        if self._join_watch.look(
            joined=joined, was_member=generation >= 0, broker_answers=answers, now=time.monotonic()
        ):
            return f"worker.not_joined generation={generation}"
        if await self._undelivered(parts):
            publisher = parts.publisher
            return f"worker.undelivered records={publisher.unacknowledged} oldest_s={publisher.oldest_s:.0f}"
        if not joined:
            return None
        try:
            async with awake_timeout(self.settings.worker.stall_s):
                self._seen = await parts.membership.progress()
        except TimeoutError:
            return "worker.consumer_thread_stuck"
        stalled = self._watch.look(self._seen, room=parts.worker.has_room, now=time.monotonic())
        return f"worker.stalled partitions={sorted(stalled)}" if stalled else None

    async def _undelivered(self, parts: Parts) -> bool:
        """Whether records wait for Kafka for ever. Logs when they begin to wait."""
        publisher, waits = parts.publisher, parts.publisher.trouble
        if waits is not None and not self._waits_for_kafka:
            logger.warning("worker.waits_for_kafka reason=%s", waits)
        self._waits_for_kafka = waits is not None
        answers = waits is None or await parts.watch.wait(1.0)
        return self._delivery_watch.look(publisher.oldest_s, publisher.acknowledged, answers, now=time.monotonic())

    async def _report_forever(self, parts: Parts) -> None:
        rounds = 0
        while True:
            self._report(parts)
            self._log_file_differences(parts)
            if rounds % 30 == 29:  # a gateway that starts late finds recent facts of every model
                parts.serving.publish_models()
            rounds += 1
            self._changed.clear()
            await asyncio.sleep(REPORT_GAP_S)
            await set_within(self._changed, self.settings.worker.state_interval_s)

    async def _observe_forever(self, parts: Parts) -> None:
        """What others use of the devices changes at any time."""
        while True:
            await asyncio.sleep(OBSERVE_S)
            await parts.serving.observe()
            parts.worker.changed()

    def _log_file_differences(self, parts: Parts) -> None:
        found = file_differences(parts.flow.peers.running)
        if found != self._file_differences:
            self._file_differences = found
            if found:
                logger.warning("worker.files_differ %s", "; ".join(found))
            else:
                logger.info("worker.files_agree: all live workers of this pool serve the same models")

    def _report(self, parts: Parts) -> None:
        committed = parts.flow.commit.offsets()
        behind = {tp: (one.highwater or 0) - committed[tp] for tp, one in self._seen.items() if tp in committed}
        assigned = sorted(parts.membership.partitions, key=_place)
        state = WorkerState(
            worker_id=self.settings.worker_id,
            # Gateways count a worker as alive from its first assignment on.
            state="starting" if self._state == "running" and parts.membership.generation < 0 else self._state,
            started_at=self._started_ms,
            updated_at=now_ms(),
            pool=self.settings.worker.pool,
            assigned=[_place(tp) for tp in assigned],
            queued={str(klass): depth for klass, depth in parts.flow.scheduler.statistics.depths().items()},
            running=parts.flow.running,
            models=parts.serving.model_states(),
            devices=parts.serving.device_states(),
            completed_total=self._metrics.completed_total,
            failed_total=self._metrics.failed_total,
            paused=parts.flow.orders.paused(),
            waiting=parts.flow.explainer.reasons(),
            reason="; ".join(self._not_ready()) or None,
            evictions_total=parts.flow.lifecycle.evictions,
            observed_revision=self._observed[1],
            observed_topic_id=self._observed[0],
            version=release(),
            host=socket.gethostname(),
            pid=os.getpid(),
            committed=[committed.get(tp, -1) for tp in assigned],
            lag=[max(0, behind.get(tp, 0)) for tp in assigned],
            expiring_certificates=self._certificates.expiring(),
        )
        parts.publisher.record(self.settings.kafka_settings().names.worker, self.settings.worker_id, state)

    def _orders_observed(self) -> None:
        """Report the revision only after the turn that the orders have made due: that turn decides what they change."""
        assert self._parts is not None

        def report(topic_id: str | None, revision: int | None) -> None:
            self._observed = topic_id, revision
            self._changed.set()

        desired = self._parts.desired_models
        asyncio.get_running_loop().call_soon(report, desired.observed_topic_id, desired.observed_revision)

    def _copy_failed(self, reason: str) -> None:
        logger.critical("worker.ends reason=%s", reason)
        self._finish(EXIT_FAILED)

    def _not_ready(self) -> list[str]:
        parts = self._parts
        if parts is None or self._state != "running":
            return [f"starting: waits for {self._step}" if self._state == "starting" else self._state]
        reasons: list[str] = []
        if not parts.membership.joined:
            reasons.append("Kafka does not answer" if parts.watch.away else parts.membership.waits_for)
        if self._watch.stalled:
            reasons.append("a partition has lag and does not move")
        if parts.worker.registry_waits:
            reasons.append("the schema registry is unreachable")
        if (trouble := parts.publisher.trouble) is not None:
            reasons.append(trouble)
        reasons += list(parts.turns.missing_rights.values())[:1]
        readers = (parts.membership, parts.control, parts.desired, parts.peers)
        reasons += [reason for reader in readers if (reason := reader.rights.reason) is not None]
        if parts.journal.trouble is not None:
            reasons.append(parts.journal.trouble)
        if parts.copy is not None and parts.copy.trouble is not None:
            reasons.append(f"conversations cannot be copied: {parts.copy.trouble}")
        for lane in parts.flow.lanes.values():
            if lane.lost and lane.served:
                reasons.append(f"the model {lane.name} has died and cannot be loaded again")
        for engine in parts.serving.manager.left():
            reasons.append(f"the process {engine.left_pid} of {engine.model} was killed and does not end")
        for device, (why, seconds) in parts.serving.machine.unread().items():
            reasons.append(f"the device {device} has not been measured for {seconds:.0f} s ({why}): nothing is granted")
        idle_s = parts.flow.watch.idle_in_spite_of_work(time.monotonic())
        if idle_s >= self.settings.worker.stall_s:
            reasons.append(f"work waits, memory is free, and nothing was admitted for {idle_s:.0f} s")
        return reasons

    def _describe(self) -> dict[str, Any]:
        parts = self._parts
        return {
            "worker_id": self.settings.worker_id,
            "state": self._state,
            "generation": -1 if parts is None else parts.membership.generation,
            "assigned": 0 if parts is None else len(parts.membership.partitions),
            "models": {} if parts is None else {name: parts.flow.lane(name).state for name in parts.serving.shown},
            "devices": {} if parts is None else {name: parts.serving.devices(name) for name in parts.serving.shown},
        }

    def _refresh_gauges(self) -> None:
        parts = self._parts
        if parts is None:
            return
        metrics = self._metrics
        metrics.inflight.set(parts.flow.commit.inflight)
        metrics.running.set(parts.flow.running)
        metrics.rebalances.set(parts.membership.rebalances)
        ages = parts.flow.scheduler.statistics.oldest_age(time.monotonic())
        for klass, depth in parts.flow.scheduler.statistics.depths().items():
            metrics.depth.labels(klass).set(depth)
            metrics.oldest.labels(klass).set(ages.get(klass, 0.0))
        lanes, pool = parts.flow.lanes.values(), self.settings.worker.pool or ""
        for lane in lanes:
            metrics.batch.labels(lane.name, pool).set(lane.running())
            depth = sum(parts.flow.scheduler.fronts.depth(lane.name, klass) for klass in CLASSES)
            metrics.model_depth.labels(metrics.model_label.of(lane.name), pool).set(depth)
            metrics.utilisation.labels(lane.name).set(parts.flow.scheduler.slack.of(lane.name).utilisation)
        reasons = {**parts.flow.explainer.reasons(), "scheduled": len(parts.flow.registry.scheduled)}
        for reason in WAITING_REASONS:
            metrics.waiting.labels(reason).set(reasons.get(reason, 0))
        for klass in CLASSES:
            metrics.parked.labels(klass).set(sum(lane.parked[klass] for lane in lanes))
        metrics.intake.set(parts.flow.budget.used_bytes)
        metrics.output_bytes.set(parts.flow.registry.output_bytes + parts.publisher.chunk_bytes)
        metrics.unacknowledged.set(parts.publisher.backlog + parts.publisher.unacknowledged)
        metrics.unacknowledged_s.set(parts.publisher.oldest_s)
        metrics.awaiting_store.set(parts.flow.awaiting_store.waiting())
        metrics.paused.set(sum(one.paused for one in self._seen.values()))
        metrics.beyond.set(
            sum(max(0, (one.highwater or 0) - one.position) for one in self._seen.values() if one.paused)
        )
        for device in parts.serving.device_states():
            limit, measured = device.limit_bytes, device.measured_bytes
            sizes = {
                "limit": device.total_bytes if limit is None else limit,
                "reserved": device.reserved_bytes,
                "measured": device.used_bytes if measured is None else measured,
                "foreign": device.foreign_bytes,
            }
            for kind, size in sizes.items():
                if size is not None:
                    metrics.memory.labels(device.device, kind).set(size)

    async def stop(self) -> None:
        """In order: stop taking, finish or hand back, flush, commit, leave the group, end the engines, close."""
        self._state = "stopping"
        if (parts := self._parts) is not None:
            await self._stop_parts(parts)
        await self._health.stop()
        logger.info("worker.stopped worker_id=%s", self.settings.worker_id)

    async def _stop_parts(self, parts: Parts) -> None:
        if self._joins:
            await self._drain(parts)
        await parts.background.cancel()
        await parts.erasing.close()
        if self._joins:
            await self._leave(parts)
        await parts.execution.close()
        await parts.serving.stop()
        self._state = "stopped"
        self._report(parts)
        await asyncio.gather(parts.control.stop(), parts.desired.stop(), parts.peers.stop(), parts.refetcher.stop())
        parts.turns.close()
        if parts.copy is not None:
            await asyncio.to_thread(parts.copy.close)
        parts.watch.close()
        await asyncio.to_thread(parts.transport.close, 5.0)
        await parts.journal.close(orderly=not parts.worker.broken)

    async def _leave(self, parts: Parts) -> None:
        """Leave the group within `LEAVE_S`. Cancelling it would not end it: Faust's services go on stopping."""
        leaving = asyncio.create_task(parts.membership.stop(), name="leave")
        await asyncio.wait({leaving}, timeout=LEAVE_S)
        if not leaving.done():
            logger.warning("worker.leave_failed: not left after %.0f s", LEAVE_S)
        elif (error := leaving.exception()) is not None:
            logger.warning("worker.leave_failed error=%r", error)

    async def _drain(self, parts: Parts) -> None:
        """Let what runs finish within drain_s, then hand it back; wait for the broker's acks; commit."""
        give_up = time.monotonic() + self.settings.worker.drain_s
        parts.worker.stop_taking()
        await _until(lambda: not parts.flow.works or parts.membership.crashed or parts.worker.broken, give_up)
        parts.worker.hand_back()
        await _until(lambda: not (parts.publisher.backlog or parts.publisher.unacknowledged), time.monotonic() + 5)
        if parts.membership.joined and not parts.membership.crashed:
            try:
                async with asyncio.timeout(5):
                    await parts.committer.commit_now()
            except TimeoutError:
                logger.warning("worker.commit_failed: the work is done again elsewhere, seen once")


def _place(tp: TP) -> str:
    return f"{tp[0]}/{tp[1]}"


async def _until(condition: Callable[[], bool], give_up: float) -> None:
    while not condition() and time.monotonic() < give_up:
        await asyncio.sleep(0.02)


def unreachable(kafka: KafkaSettings, error: BrokerUnavailable) -> CannotStart:
    """The end of a worker that cannot use Kafka."""
    if isinstance(error, BrokerRefused):
        return CannotStart(str(error), EXIT_UNREACHABLE)
    return CannotStart(f"no Kafka at {kafka.bootstrap_servers}: {error}", EXIT_UNREACHABLE)


def verify_topics(settings: WorkerSettings) -> dict[str, int]:
    """Request topic → partitions. Raises CannotStart when one is missing or those that turns come on differ."""
    kafka = settings.kafka_settings()
    names: TopicNames = kafka.names
    requests = names.request_topics(settings.worker.pool)
    others = [names.result, names.status, names.control, names.dlq, names.worker, names.model, names.desired]
    try:
        counts = admin.partition_counts(kafka, [*requests, *others])
    except BrokerUnavailable as error:
        raise unreachable(kafka, error) from error
    missing = [topic for topic in (*requests, *others) if not counts.get(topic)]
    if missing:
        pool = "" if settings.worker.pool is None else f" --pool {settings.worker.pool}"
        raise CannotStart(f"missing topics: {', '.join(missing)}; create them with `penstock topics create{pool}`")
    turns = {topic: counts[topic] for topic in names.conversation_topics(settings.worker.pool)}
    if len(set(turns.values())) > 1:
        raise CannotStart(f"the topics of text and of images must have equal partition counts, found {turns}")
    for topic in (names.control, names.desired):
        if counts[topic] != 1:
            raise CannotStart(f"{topic} must have one partition, it has {counts[topic]}")
    return {topic: counts[topic] for topic in requests}


def name_group(settings: WorkerSettings) -> str:
    """The consumer group. Raises CannotStart.

    The request topics of all pools count: an epoch is the group's generation, and a request may change its pool.
    """
    kafka = settings.kafka_settings()
    try:
        topics = [topic for topic in admin.known_topics(kafka) if kafka.names.is_request_topic(topic)]
        return group_name(kafka, settings.worker.group_id, GROUP, topics)
    except BrokerUnavailable as error:
        raise unreachable(kafka, error) from error
    except PenstockError as error:
        raise CannotStart(f"{error}; grant the right to describe it, or set worker.group_id") from error


def open_files(settings: WorkerSettings) -> LocalFiles:
    """What this worker has on its disk. Blocks. Raises CannotStart."""
    folder = settings.worker.data_dir
    copy = open_copy(settings)
    try:
        return LocalFiles(CrashJournal(folder / "journal", settings.worker_id), open_estimates(folder), copy)
    except OSError as error:
        raise CannotStart(f"its folder cannot be used ({error}); set worker.data_dir") from error


def open_copy(settings: WorkerSettings) -> ShardCopy | None:
    """This worker's copy of the topic that conversations share; None where each has its own. Raises CannotStart."""
    kafka = settings.kafka_settings()
    try:
        if admin.topic_id(kafka, kafka.names.conversation_log) is None:
            return None
        return ShardCopy(kafka, settings.worker.data_dir / "conversations")
    except BrokerUnavailable as error:
        raise unreachable(kafka, error) from error
    except Overloaded as error:
        raise CannotStart(str(error)) from error
