"""Makes a flow: each part is made once, and gets the parts that it uses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from penstock.processors.core.admission import Admission
from penstock.processors.core.agenda import Agenda
from penstock.processors.core.alone import AloneClaim
from penstock.processors.core.commit.gate import CommitGate
from penstock.processors.core.effects import Effect
from penstock.processors.core.fleet.estimates import Estimates
from penstock.processors.core.fleet.heads import MemoryHeads
from penstock.processors.core.fleet.lane import Lanes
from penstock.processors.core.fleet.lane_failures import LaneFailures
from penstock.processors.core.fleet.ledger import DeviceCapacity, Ledger
from penstock.processors.core.fleet.lifecycle import Lifecycle
from penstock.processors.core.fleet.measurements import Measurements
from penstock.processors.core.fleet.memory import DeviceMemory
from penstock.processors.core.fleet.orders import Orders
from penstock.processors.core.fleet.placing import Placing
from penstock.processors.core.fleet.replicas import Replicas
from penstock.processors.core.fleet.run_memory import RunMemory
from penstock.processors.core.fleet.view_maker import Views
from penstock.processors.core.fleet.watch import FleetWatch
from penstock.processors.core.flow import Flow
from penstock.processors.core.granting import Grants
from penstock.processors.core.preparing import Preparing
from penstock.processors.core.queue.budget import Budget
from penstock.processors.core.queue.explaining import Explainer
from penstock.processors.core.queue.fetching import Fetching
from penstock.processors.core.queue.forecast import Forecast
from penstock.processors.core.queue.lifetimes import Lifetimes
from penstock.processors.core.queue.rereads import Rereads
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.arriving import Arrivals
from penstock.processors.core.requests.attempts import Attempts
from penstock.processors.core.requests.commanding import Commanding
from penstock.processors.core.requests.endings import Endings
from penstock.processors.core.requests.histories import Histories
from penstock.processors.core.requests.holdings import Holdings
from penstock.processors.core.requests.progress import Steps
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.retry_queue import RetryQueue
from penstock.processors.core.requests.screening import Screening
from penstock.processors.core.requests.statuses import Statuses
from penstock.processors.core.requests.streams import Streams
from penstock.processors.core.requests.unkept import Unkept
from penstock.processors.core.requests.waits import Waits
from penstock.processors.core.requests.work import Work, WorkKey
from penstock.processors.core.rooms import Rooms
from penstock.processors.core.settings import Catalog, Commands, FlowSettings
from penstock.processors.core.starting import Starter
from penstock.processors.core.suspect_starts import SuspectStarts
from penstock.schemas.records import AttemptHistory


def new_flow(
    settings: FlowSettings,
    catalog: Catalog,
    commands: Commands,
    *,
    deaths: Callable[[WorkKey, str], int] = lambda key, request_id: 0,
    earlier_attempts: Callable[[WorkKey, str], AttemptHistory | None] = lambda key, request_id: None,
    devices: Sequence[DeviceCapacity] = (),
    estimate_error: Callable[[str, float], None] | None = None,
    memory_error: Callable[[int, int], None] | None = None,
    estimates: Estimates | None = None,
) -> Flow:
    """`estimate_error` hears what came less what was estimated, `memory_error` the peak and what was booked.

    `deaths`: how many workers died while a request ran. `earlier_attempts`: those of a request that the crash journal
    knows. `estimates`: what was learned before.
    """
    placement = replace(settings.placement, longest_reservation_s=settings.longest_reservation_s)
    effects: list[Effect] = []
    emit = effects.append
    agenda = Agenda()
    registry = Registry(emit, settings.output_bytes)
    gate = CommitGate(commit_span=settings.commit_span)
    forecast = Forecast(estimate_error)
    scheduler: Scheduler[Work] = Scheduler(
        aging_s=settings.aging_s, aged_share=settings.aged_share, slack=settings.slack, run_s=forecast.run_s
    )
    budget = Budget(settings.intake_bytes)
    lanes = Lanes(budget.register)
    ledger = Ledger(devices, longest_reservation_s=settings.longest_reservation_s)
    estimates = estimates or Estimates()
    run_memory = RunMemory(ledger)
    claim = AloneClaim()
    memory = DeviceMemory(ledger, estimates, lanes, run_memory, agenda)
    admission = Admission(registry, scheduler, lanes, run_memory, memory, ledger, claim)
    explainer = Explainer(scheduler, lanes, admission, forecast)
    lifetimes = Lifetimes(settings.lifetimes)
    waits = Waits(forecast, explainer, lifetimes)
    statuses = Statuses(emit, settings.status_linger_s, explainer, waits.ran)
    streams = Streams(emit, settings.chunk_linger_s)
    steps = Steps(emit)
    grants = Grants(registry, scheduler, lanes, statuses, run_memory, claim, emit, settings.max_execution_s)
    fetching = Fetching(registry, scheduler, budget, emit)
    rooms = Rooms(admission, grants, run_memory, settings.affinity_s)
    preparing = Preparing(admission, grants, fetching, statuses, run_memory)
    suspects = SuspectStarts(admission, claim, grants, run_memory, preparing)
    starter = Starter(scheduler, admission, claim, grants, fetching, rooms, run_memory, preparing, suspects)
    rereads = Rereads(emit, budget.ends_limit)
    holdings = Holdings(registry, gate, scheduler, budget, lanes, memory, grants, run_memory, agenda, emit, rereads)
    histories = Histories(lanes, ledger, explainer, emit, settings.worker_id, earlier_attempts)
    endings = Endings(registry, holdings, lanes, streams, histories, emit, deaths)
    unkept = Unkept(registry, endings, statuses, emit)
    retries = RetryQueue(registry, scheduler, lanes, statuses, endings, agenda, settings.retries)
    attempts = Attempts(
        registry,
        scheduler,
        lanes,
        memory,
        grants,
        statuses,
        streams,
        steps,
        forecast,
        holdings,
        endings,
        retries,
        histories,
        agenda,
        emit,
    )
    measurements = Measurements(ledger, estimates, lanes, memory, agenda)
    failures = LaneFailures(registry, scheduler, endings, retries, grants)
    replicas = Replicas(lanes, memory, measurements, claim, forecast, attempts, failures, agenda, memory_error)
    heads = MemoryHeads(scheduler, lanes, ledger, admission, run_memory, agenda, placement)
    views = Views(ledger, memory, run_memory, heads, forecast)
    lifecycle = Lifecycle(lanes, grants, agenda, emit)
    placing = Placing(
        registry,
        scheduler,
        lanes,
        ledger,
        memory,
        starter,
        grants,
        run_memory,
        statuses,
        heads,
        views,
        failures,
        endings,
        lifecycle,
        agenda,
        placement,
    )
    commanding = Commanding(registry, gate, scheduler, budget, lanes, endings, unkept, statuses, agenda, emit, commands)
    orders = Orders(scheduler, lanes, lifecycle, agenda)
    watch = FleetWatch(scheduler, lanes, memory, grants, heads, views, agenda)
    screening = Screening(lanes, memory, catalog, commands, retries, deaths)
    arrivals = Arrivals(
        registry,
        gate,
        scheduler,
        budget,
        lanes,
        screening,
        statuses,
        explainer,
        lifetimes,
        holdings,
        histories,
        endings,
        agenda,
        emit,
    )
    return Flow(
        agenda=agenda,
        registry=registry,
        gate=gate,
        forecast=forecast,
        scheduler=scheduler,
        budget=budget,
        lanes=lanes,
        ledger=ledger,
        estimates=estimates,
        run_memory=run_memory,
        claim=claim,
        explainer=explainer,
        statuses=statuses,
        grants=grants,
        endings=endings,
        attempts=attempts,
        unkept=unkept,
        measurements=measurements,
        replicas=replicas,
        lifecycle=lifecycle,
        placing=placing,
        orders=orders,
        watch=watch,
        arrivals=arrivals,
        _waits=waits,
        _streams=streams,
        _steps=steps,
        _retries=retries,
        _holdings=holdings,
        _commanding=commanding,
        _effects=effects,
    )
