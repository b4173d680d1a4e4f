"""The worker's parts and how they are joined. Making them does no I/O but for devices."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.common.background import BackgroundTasks
from penstock.common.clock import now_ms
from penstock.common.refetch import Refetcher
from penstock.common.shards.shard_copy import ShardCopy
from penstock.common.telemetry import active
from penstock.common.transport import AsyncTransport, Transport
from penstock.processors.committing import Committer
from penstock.processors.conversations.held import HeldImages
from penstock.processors.conversations.kafka_log import KafkaLog
from penstock.processors.conversations.shared_log import SharedLog
from penstock.processors.conversations.turns import ConversationTurns
from penstock.processors.core.effects import Erase
from penstock.processors.core.fleet.views import PlacementSettings
from penstock.processors.core.flow import Flow
from penstock.processors.core.intake.intake import Intake
from penstock.processors.core.intake.pools import Pools
from penstock.processors.core.queue.lifetimes import LifetimeSettings
from penstock.processors.core.queue.slack import SlackSettings
from penstock.processors.core.settings import FlowSettings
from penstock.processors.erasing import Erasing
from penstock.processors.execution import Execution
from penstock.processors.faults import Faults
from penstock.processors.images.inputs import image_inputs
from penstock.processors.kafka.broker_watch import BrokerWatch, metadata_probe
from penstock.processors.kafka.control import ControlBook, ControlFollower
from penstock.processors.kafka.journal import CrashJournal, JournalWriter
from penstock.processors.kafka.membership import GroupSettings, Membership
from penstock.processors.kafka.outcomes import Outcomes, trace_of
from penstock.processors.kafka.published_streams import LOOK_BACK_S, PublishedStreams
from penstock.processors.kafka.publisher import Publisher
from penstock.processors.kafka.record_follower import DesiredFollower, PeerReports
from penstock.processors.kafka.topic_watch import PartitionWatch, PoolTopics
from penstock.processors.lanes import LaneShell
from penstock.processors.metrics import Metrics
from penstock.processors.models.catalog import retry_settings
from penstock.processors.models.desired_models import DesiredModels
from penstock.processors.models.remembered import RememberedEstimates
from penstock.processors.models.serving import Serving
from penstock.processors.outputs import Outputs
from penstock.processors.request_traces import RequestTraces
from penstock.processors.settings import WorkerSettings
from penstock.processors.spool import Spool
from penstock.processors.store_threads import StoreThreads
from penstock.processors.worker import Worker, WorkerParts
from penstock.schemas.registry import Codecs
from penstock.schemas.topics import CLASSES, HORIZON_MS

DELIVERY_TIMEOUT_S = 86_400.0
COMMANDS_REMEMBERED = 100_000


@dataclass(frozen=True, slots=True)
class LocalFiles:
    """What the worker has on its own disk. To open it blocks."""

    journal: CrashJournal
    estimates: RememberedEstimates
    copy: ShardCopy | None
    """Of the topic that conversations share, if they share one."""


@dataclass(slots=True)
class Parts:
    """What a worker is made of."""

    transport: Transport
    publisher: Publisher
    turns: ConversationTurns
    copy: ShardCopy | None
    """Of the topic that conversations share, if they share one."""
    watch: BrokerWatch
    worker: Worker
    flow: Flow
    execution: Execution
    serving: Serving
    lanes: LaneShell
    journal: JournalWriter
    book: ControlBook
    control: ControlFollower
    desired: DesiredFollower
    peers: PeerReports
    desired_models: DesiredModels
    refetcher: Refetcher
    membership: Membership
    committer: Committer
    erasing: Erasing
    partitions: PartitionWatch
    background: BackgroundTasks = field(default_factory=BackgroundTasks)


def assemble(
    settings: WorkerSettings,
    group_id: str,
    partitions: dict[str, int],
    codecs: Codecs,
    metrics: Metrics,
    on_broken: Callable[[], None],
    loop: asyncio.AbstractEventLoop,
    files: LocalFiles,
) -> Parts:
    """Make and join the parts of a worker of these request topics.

    `on_broken`: after an internal error the process must exit. Raises UnknownDevice.
    """
    journal, copy = files.journal, files.copy
    conf, kafka = settings.worker, settings.kafka_settings()
    names, clock = kafka.names, time.monotonic
    codec, faults = codecs.blocking, Faults.from_env()
    # A broker that is away is waited for: records leave in order when it is back, so that a stream has no gap.
    transport = Transport(kafka, delivery_timeout_s=DELIVERY_TIMEOUT_S)
    asynchronous = AsyncTransport(transport, loop)
    watch = BrokerWatch(metadata_probe(kafka))
    publisher = Publisher(
        asynchronous, codec, names, loop=loop, max_record_bytes=kafka.max_record_bytes, on_answer=watch.answered
    )
    store_threads = StoreThreads()
    outputs = Outputs(settings.artifacts_location, settings.artifacts, store_threads)

    def catch_up(within_s: float) -> None:
        control.catch_up(within_s)

    conversations = settings.conversations
    turns = ConversationTurns(
        KafkaLog(kafka, asynchronous, max_topics=conversations.max_topics, durability=settings.topics.durability)
        if copy is None
        else SharedLog(copy, asynchronous, names, codec),
        codec,
        names.conversation,
        threads=conversations.threads,
        cached_bytes=conversations.cached_bytes,
        watch=watch,
        catch_up=catch_up,
        held=HeldImages(outputs.store),
        store_threads=store_threads.writes(),
        after_append=lambda: faults.hit("after_answer_append"),
    )
    journal_writer = JournalWriter(journal)
    book = ControlBook(horizon_s=HORIZON_MS / 1000, remembered=COMMANDS_REMEMBERED)
    lanes = LaneShell(metrics, clock=clock)
    serving = Serving(
        settings,
        publish=publisher.record,
        names=names,
        reports=lanes,
        clock_ms=now_ms,
        clock=clock,
        remembered=files.estimates,
    )
    flow = Flow(
        flow_settings(settings),
        serving,
        book,
        deaths=journal.deaths,
        earlier_attempts=journal.attempts,
        devices=serving.machine.capacities,
        estimate_error=metrics.estimate_error,
        memory_error=metrics.memory_error,
        estimates=serving.remembered.estimates,
    )
    urgencies = {topic: CLASSES.index(names.class_of_topic(topic) or "medium") for topic in partitions}

    def urgency(topic: str) -> int:
        return urgencies.get(topic, len(CLASSES))

    def hold(tps: frozenset[tuple[str, int]]) -> None:
        membership.hold(tps)

    def erase(effect: Erase) -> None:
        erasing.erase(effect.command, held=effect.held)

    worker = Worker(
        clock=clock,
        urgency=urgency,
        hold=hold,
        on_erase=erase,
        on_broken=on_broken,
    )
    control = ControlFollower(kafka, codec, loop, worker.on_commands)
    lanes.connect(serving, flow, worker.changed)
    serving.connect(flow)
    membership = Membership(
        kafka,
        _group(settings, group_id),
        list(partitions),
        urgency=urgency,
        on_batch=worker.on_batch,
        on_assigned=worker.on_assigned,
        on_revoking=lambda: flow.commit.commits(),
        stall=lambda: faults.due("fetch"),
        count_reset=metrics.offset_reset,
    )
    erasing = Erasing(turns, book, membership.owns)
    desired_models = DesiredModels(settings.models, conf.pool, lanes)
    telemetry = active()
    traces = None if telemetry is None else RequestTraces(telemetry, settings.worker_id, group_id, names.result)
    outcomes = Outcomes(
        publisher,
        codec,
        names,
        worker_id=settings.worker_id,
        engine_facts=lanes.engine_facts,
        pool_topics=PoolTopics(kafka),
        trace=trace_of if traces is None else traces.headers,
    )
    streams = PublishedStreams(
        kafka,
        codec,
        outcomes.claim,
        look_back_s=conf.session_timeout_s + LOOK_BACK_S,
        owned_since_ms=lambda: flow.registry.owned_since_ms,
        on_lost=None if traces is None else traces.lost,
    )
    execution = Execution(
        flow,
        lanes.engine,
        turns,
        outputs,
        Spool(conf.data_dir, conf.spool_bytes),
        metrics,
        clock=clock,
        changed=worker.changed,
        defaults=serving.defaults,
        images=image_inputs(settings.images, outputs.store, store_threads),
        sees=serving.sees,
        opens=serving.opens,
        published=streams.of,
    )
    refetcher = Refetcher(kafka, loop, worker.on_fetched, worker.on_gone)
    # One file may describe the models of all pools.
    pools = Pools.of(settings.worker.pool, ((model.pool, (model.id, *model.aliases)) for model in settings.models))
    intake = Intake(codecs.prompt, names, partitions, pools)
    worker.connect(
        WorkerParts(
            flow=flow,
            intake=intake,
            execution=execution,
            outcomes=outcomes,
            publisher=publisher,
            refetcher=refetcher,
            lanes=lanes,
            journal=journal,
            journal_writer=journal_writer,
            metrics=metrics,
            faults=faults,
            traces=traces,
        )
    )
    return Parts(
        transport=transport,
        publisher=publisher,
        turns=turns,
        copy=copy,
        watch=watch,
        worker=worker,
        flow=flow,
        execution=execution,
        serving=serving,
        lanes=lanes,
        journal=journal_writer,
        book=book,
        control=control,
        desired=DesiredFollower(kafka, codec, loop, desired_models.on_records, desired_models.on_topic),
        peers=PeerReports(kafka, codec, loop, worker.on_reports),
        desired_models=desired_models,
        refetcher=refetcher,
        membership=membership,
        committer=Committer(
            flow.commit, membership.commit, lambda: membership.joined, interval_s=conf.commit_interval_s
        ),
        erasing=erasing,
        partitions=PartitionWatch(kafka, list(partitions), intake.learn_partitions),
    )


def flow_settings(settings: WorkerSettings) -> FlowSettings:
    """The flow's part of the settings, in seconds."""
    conf, scheduler = settings.worker, settings.scheduler
    return FlowSettings(
        worker_id=settings.worker_id,
        pool=conf.pool,
        model_absent_s=conf.model_absent_s,
        aging_s=conf.aging_s,
        aged_share=conf.aged_share,
        commit_span=conf.commit_span,
        intake_bytes=conf.intake_bytes,
        output_bytes=conf.output_bytes,
        chunk_linger_s=conf.chunk_linger_ms / 1000,
        status_linger_s=conf.status_linger_ms / 1000,
        max_execution_s=conf.max_execution_s,
        retries=retry_settings(conf.retries),
        affinity_s=scheduler.affinity_s,
        longest_reservation_s=scheduler.longest_reservation_s,
        placement=PlacementSettings(
            turn_factor=scheduler.turn_factor,
            lookahead_s=scheduler.lookahead_s,
            scale_after_s=scheduler.scale_after_s,
            reserve_after_s=scheduler.reserve_after_s,
            aging_s=conf.aging_s,
            aged_share=conf.aged_share,
        ),
        slack=SlackSettings(share=conf.slack_share) if conf.slack else None,
        lifetimes=LifetimeSettings(floor_s=scheduler.ttl_floor_s, factor=scheduler.ttl_factor)
        if scheduler.dynamic_ttl
        else None,
    )


def _group(settings: WorkerSettings, group_id: str) -> GroupSettings:
    conf = settings.worker
    return GroupSettings(
        group_id=group_id,
        client_id=settings.worker_id,
        session_timeout_s=conf.session_timeout_s,
        heartbeat_s=conf.heartbeat_s,
        fetch_wait_ms=conf.fetch_wait_ms,
        on_lost_log=conf.on_lost_log,
    )
