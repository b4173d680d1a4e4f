"""What is not well, whom it affects, why, and what mends it: `GET /v1/admin/problems`. Pure; times are passed in."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from penstock.common.desired import Desired
from penstock.gateway.dead_letters.letters import LetterCount
from penstock.gateway.service.dependencies import Tried
from penstock.gateway.service.disks import Disk
from penstock.gateway.service.open_transactions import Brokers, Held
from penstock.gateway.service.problem import Action, Found
from penstock.gateway.view.census import Waiting
from penstock.gateway.view.fleet import SERVING
from penstock.gateway.view.gateways import LATE_MS, is_alive
from penstock.gateway.view.liveness import Liveness, ModelId
from penstock.schemas.desired import CLASS
from penstock.schemas.errors import InsufficientCapacity, InvalidRequest
from penstock.schemas.records import GatewayState, WorkerState
from penstock.schemas.times import rfc3339
from penstock.schemas.topics import TP

SILENT_SHOWN_MS = 60_000
"""A silent worker whose partitions others have is shown for so long."""
NEAR_LIMIT = 0.95
"""The share of its outstanding requests from which on a tenant is near its limit."""
STUCK_MS = 30_000
"""The oldest request waits for so long while nothing runs."""
FOREIGN_SHARE = 0.1
"""The share of a device's limit that other processes may hold before they count as the cause of a lack of memory."""

LOAD_S = 10
"""Seconds over which it is judged how fast requests of a tenant come and end."""
FLOOD_REQUESTS = 500
FLOOD_S = 600
"""So many requests of the classes high and medium, and so many seconds of work, wait of a tenant who floods."""

SETTLES_MS = 10_000
"""What a worker reports for a moment, as while a group rebalances, is no problem."""
WEBHOOK_LATE_MS = 600_000
"""A webhook waits for so long although its first calls are repeated within seconds."""
MANY_UNAUTHENTICATED_PER_S = 5.0
"""Calls without a good key, over a minute, from which on they are a problem."""
MOST_UNKNOWN = 20
MOST_NAMED = 5
"""Processes that a problem of many names."""
LOADING = frozenset({"loading", "draining", "unloading"})
"""States of a model on a worker in which a request for it waits with good reason."""
_EXPLAINS_ALL = frozenset({"gateway_behind", "no_worker", "transaction_open", "rights_missing"})
"""Problems that explain why requests wait though nothing runs."""
_EXPLAINS_POOL = frozenset(
    {
        *("pool_without_worker", "model_failed", "model_without_worker", "model_too_large", "model_unknown"),
        "task_without_model",
        *("class_paused", "model_paused", "device_short"),
    }
)
"""The same, for the requests of their pool."""

_DEPENDENCIES = {
    "artifacts": ("artifacts_unusable", "inputs and outputs that are too large for Kafka", "penstock doctor"),
    "orders": ("orders_unusable", "orders about models and classes", "penstock workers list"),
    "rights": ("rights_missing", "what the missing rights are for", "penstock doctor"),
    "key_topic": ("key_topic_unusable", "keys and limits made at /v1/admin", "penstock topics check"),
    "audit": ("audit_unusable", "the record of what operators do", "penstock topics check"),
    "usage": ("usage_unpublished", "totals of usage, which are lost after 30 days", "penstock topics check"),
    "keys": ("keys_file_broken", "changes of keys, revocations among them", "penstock keys list"),
}
"""By dependency: the problem's code, what it affects, and the command that says more."""
_WITHOUT_KAFKA = frozenset({"artifacts", "keys"})
"""Dependencies that are tried without Kafka."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What a tenant has under way, in all and in the classes high and medium; how fast these come, and all end."""

    outstanding: int
    urgent: int = 0
    came_per_s: float = 0.0
    ended_per_s: float = 0.0

    @property
    def drained_s(self) -> float:
        """How long the urgent ones take, if no more of them come."""
        return self.urgent / self.ended_per_s


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The facts of one moment. `limits`: of outstanding requests, by tenant."""

    now_ms: int
    judged_ms: int
    """The moment as of which others are silent."""
    liveness: Liveness
    behind: str | None = None
    """Why this gateway does not show the newest records; None if it does."""
    lacks: str | None = None
    """What of the history it does not know yet; None if it knows all."""
    unwritten: str | None = None
    """The same, if it cannot write its view."""
    workers: Sequence[WorkerState] = ()
    late_ms: int = 20_000
    gateways: Sequence[GatewayState] = ()
    """With the processes beside them."""
    own_id: str | None = None
    """This gateway's own among them."""
    waiting: Sequence[Waiting] = ()
    running: int = 0
    """Requests that run, as their newest statuses say."""
    depths: Mapping[tuple[str, str | None], int] = field(default_factory=dict[tuple[str, str | None], int])
    """Requests that wait, by class and pool."""
    ended_per_s: float = 0.0
    tried: Sequence[Tried] = ()
    orders: Sequence[Desired] | None = None
    """None while they cannot be read."""
    letters: Sequence[LetterCount] = ()
    tenants: Mapping[str, Load] = field(default_factory=dict[str, Load])
    limits: Mapping[str, int | None] = field(default_factory=dict[str, int | None])
    brokers: Brokers = field(default_factory=lambda: Brokers(""))
    held: Sequence[tuple[TP, Held]] = ()
    unauthenticated_per_s: float = 0.0
    """Calls without a good key here, over the last minute."""
    disk: Disk | None = None
    """Where this gateway's files are."""

    @property
    def awaits_workers(self) -> bool:
        """The brokers are just back: a worker that has not reported since then is not silent."""
        return self.brokers.back_ms is not None and self.brokers.back_ms <= self.late_ms

    @property
    def cut_off(self) -> str | None:
        """Why nothing is known but what this gateway sees of itself."""
        if self.brokers.away:
            return "no broker answers"
        if self.awaits_workers and not any(self.now_ms - one.updated_at <= self.late_ms for one in self.workers):
            return "the brokers answer again, and no worker has reported yet"
        return None

    @property
    def live(self) -> list[WorkerState]:
        return [one for one in self.workers if self.judged_ms - one.updated_at <= self.late_ms]

    @property
    def oldest_s(self) -> float:
        """How long the oldest request waits."""
        return _Waits.of(self.waiting).age_s(self.now_ms)


@dataclass(slots=True)
class _Waits:
    """So many requests wait, the oldest since then."""

    requests: int = 0
    since_ms: int | None = None

    @classmethod
    def of(cls, kinds: Iterable[Waiting]) -> _Waits:
        waits = cls()
        for one in kinds:
            waits.add(one)
        return waits

    def add(self, one: Waiting) -> None:
        self.requests += one.requests
        if one.since_ms is not None:
            self.since_ms = one.since_ms if self.since_ms is None else min(self.since_ms, one.since_ms)

    def age_s(self, now_ms: int) -> float:
        return 0.0 if self.since_ms is None else (now_ms - self.since_ms) / 1000

    @property
    def text(self) -> str:
        return _requests(self.requests)


class _Waiting:
    """What waits, grouped once: by pool, and by the model that is meant, of which aliases are other names."""

    def __init__(self, seen: Seen) -> None:
        named = {(name, one.pool): one.model for one in seen.liveness.models for name in (one.model, *one.aliases)}
        self.by_pool: dict[str | None, _Waits] = {}
        self.by_model: dict[ModelId, _Waits] = {}
        self.unknown: dict[ModelId, _Waits] = {}
        self.any_model: dict[tuple[str, str | None], _Waits] = {}
        """By task and pool, requests that name no model."""
        for one in seen.waiting:
            self.by_pool.setdefault(one.pool, _Waits()).add(one)
            if one.model is None:
                self.any_model.setdefault((one.task, one.pool), _Waits()).add(one)
            else:
                model = named.get((one.model, one.pool))
                group = self.unknown if model is None else self.by_model
                group.setdefault((model or one.model, one.pool), _Waits()).add(one)

    def of(self, model: str, pool: str | None) -> _Waits:
        return self.by_model.get((model, pool)) or _Waits()


def problems(seen: Seen) -> list[Found]:
    """All of them, the gravest first."""
    if (cause := seen.cut_off) is not None:
        return [
            _cut_off(seen, cause),
            *_disk(seen),
            *_certificates(seen),
            *_dependencies(one for one in seen.tried if one.name in _WITHOUT_KAFKA),
        ]
    waiting = _Waiting(seen)
    found = [
        *_disk(seen),
        *_behind(seen),
        *_workers(seen),
        *_gateways(seen),
        *_certificates(seen),
        *(() if seen.awaits_workers else _models(seen, waiting)),
        *_transactions(seen),
        *_dependencies(seen.tried),
        *_paused(seen, waiting),
        *_devices(seen),
        *_letters(seen.letters),
        *_limits(seen),
        *_unauthenticated(seen),
    ]
    if seen.awaits_workers or any(one.problem in _EXPLAINS_ALL for one in found):
        return found
    explained = {one.pool for one in found if one.problem in _EXPLAINS_POOL}
    return [*found, *(() if explained else _floods(seen)), *_stuck(seen, waiting, explained)]


def summary(seen: Seen, found: Sequence[Found]) -> str:
    """One sentence: that all is well, with the figures that show it, or how many problems there are."""
    lacks = "" if seen.lacks is None else f"; {seen.lacks}"
    if found:
        return ("1 problem" if len(found) == 1 else f"{len(found)} problems") + lacks
    if seen.liveness.live_workers == 0:
        return f"No worker is alive; nothing waits for one{lacks}"
    waits = f"nothing waits longer than {seen.oldest_s:.1f} s" if seen.waiting else "nothing waits"
    return f"All well: {seen.ended_per_s:.1f} requests/s, {waits}{lacks}"


def _requests(count: int) -> str:
    return f"{count:,} request waits" if count == 1 else f"{count:,} requests wait"


def _disk(seen: Seen) -> list[Found]:
    disk = seen.disk
    if disk is None or not disk.is_low:
        return []
    affects = "a gateway that cannot write refuses new requests (503)"
    return [
        Found(
            problem="disk_low",
            subject=str(disk.folder),
            affects=affects if seen.unwritten is None else f"{affects}: {seen.unwritten}",
            cause=f"{disk.free_bytes / 2**20:,.0f} MiB of {disk.size_bytes / 2**20:,.0f} MiB are free",
            action=Action(label="make room", command=f"df -h {shlex.quote(str(disk.folder))}"),
        )
    ]


def _behind(seen: Seen) -> Iterator[Found]:
    if seen.behind is not None and not (seen.unwritten and _disk(seen)):
        look = Action(label="see what it waits for", command="penstock status")
        affects = "this gateway shows an older state, and accepts requests late or not at all"
        yield Found(problem="gateway_behind", affects=affects, cause=seen.behind, action=look)


def _cut_off(seen: Seen, cause: str) -> Found:
    return Found(
        problem="kafka_away",
        subject=seen.brokers.servers,
        affects="new requests are refused (503), and nothing that was accepted is told until it is back",
        cause=cause,
        action=Action(label="find out more", command="penstock doctor"),
        since_ms=seen.now_ms - seen.brokers.silent_ms if seen.brokers.away else None,
    )


def _transactions(seen: Seen) -> Iterator[Found]:
    """One problem: a producer that hangs holds partitions of many topics at once."""
    if not seen.held:
        return
    (topic, partition), first = seen.held[0]
    servers = f" --bootstrap-server {seen.brokers.servers}"
    places = f"partition {partition} of {topic}" + (f" and {len(seen.held) - 1} more" if seen.held[1:] else "")
    place = f"--topic {topic} --partition {partition} --start-offset {first.offset}"
    yield Found(
        problem="transaction_open",
        subject=topic,
        affects=f"{sum(one.records for _, one in seen.held):,} records that nobody can read yet",
        cause=f"a producer has left a transaction open at offset {first.offset} of {places}",
        action=Action(
            label="end the producer, or abort its transaction",
            command=f"kafka-transactions.sh{servers} abort {place}",
        ),
        since_ms=min(one.since_ms for _, one in seen.held),
    )


def _in_pool(pool: str | None) -> tuple[str, str]:
    """The option of a command and the query of a path that name a pool."""
    return ("", "") if pool is None else (f" --pool {shlex.quote(pool)}", f"?pool={quote(pool)}")


def _workers(seen: Seen) -> Iterator[Found]:
    live = seen.live
    if seen.liveness.live_workers == 0:
        if seen.liveness.silent_workers or seen.waiting or seen.running:  # else nobody misses one
            yield _no_worker(seen)
        return
    held = {place for one in live for place in one.assigned}
    for one in sorted(seen.workers, key=lambda state: state.worker_id):
        if one in live:
            if (reason := _unwell(one, seen.liveness)) is not None and one.state == SERVING:
                look = Action(label="look at its log", command="penstock logs worker")
                waits = _requests(sum(one.queued.values()))
                yield Found(
                    problem="worker_unwell",
                    subject=one.worker_id,
                    affects=waits,
                    cause=reason,
                    action=look,
                    settles_ms=SETTLES_MS,
                )
            continue
        left = [place for place in one.assigned if place not in held]
        if seen.awaits_workers:
            continue
        if not left and seen.judged_ms - one.updated_at > SILENT_SHOWN_MS:
            continue
        affects = f"nobody has taken over {len(left)} of its partitions" if left else "others have its partitions"
        yield Found(
            problem="worker_silent",
            subject=one.worker_id,
            affects=affects,
            cause=f"it has not reported for more than {seen.late_ms / 1000:g} s",
            action=Action(label="look at the workers", command="penstock workers list"),
            since_ms=one.updated_at,
        )


def _no_worker(seen: Seen) -> Found:
    starting = sorted(one.worker_id for one in seen.live if one.state == "starting")
    affects = [
        _Waits.of(seen.waiting).text,
        f"{seen.running:,} that ran wait for another worker" if seen.running else "",
        f"{', '.join(starting)} is starting" if starting else "",
    ]
    return Found(
        problem="no_worker",
        affects="; ".join(filter(None, affects)),
        cause=seen.liveness.degraded_for_operators or "",  # by this it is one problem, also while a worker starts
        action=Action(label="see what it waits for", command="penstock workers list")
        if starting
        else Action(label="start a worker", command="penstock worker"),
        since_ms=max((one.updated_at for one in seen.workers if one.state != "starting"), default=None),
    )


_PROCESSES = {
    "gateway": ("gateway_silent", "gateway_unwell", "its clients must call another gateway"),
    "bridge": ("bridge_silent", "bridge_unwell", "no bridge reads the queues"),
    "webhooks": ("webhooks_silent", "webhooks_unwell", "no webhook is sent"),
    "summarizer": ("summarizer_silent", "summarizer_unwell", "no conversation is summarized by itself"),
}
"""By kind: the problem's code if one is silent, if one is not well, and what it affects while none is well."""


def _gateways(seen: Seen) -> Iterator[Found]:
    """Gateways and the processes beside them. Of itself this gateway knows more than its reports say."""
    if seen.awaits_workers:
        return
    well = {one.kind for one in seen.gateways if is_alive(one, seen.judged_ms) and one.status in ("ready", "degraded")}
    for one in seen.gateways:
        if one.id == seen.own_id or one.kind not in _PROCESSES:
            continue
        silent, unwell, affects = _PROCESSES[one.kind]
        if one.kind in well and one.kind != "gateway":
            affects = "another process of its kind does its work"
        if not is_alive(one, seen.judged_ms):
            yield Found(
                problem=silent,
                subject=one.id,
                affects=affects,
                cause=f"it has not reported for more than {LATE_MS // 1000} s: pid {one.pid} on {one.host}",
                action=Action(label="start it again", command=f"penstock {one.kind}"),
                since_ms=one.reported_at,
            )
        elif one.status == "unavailable" or (one.status == "degraded" and one.kind != "gateway"):
            # Of a degraded gateway each reason is a problem of its own.
            yield Found(
                problem=unwell,
                subject=one.id,
                affects=affects if one.status == "unavailable" else "its work continues, as the cause says",
                cause=one.reason or "it gives no reason",
                action=Action(label="look at its log", command=f"penstock logs {one.kind}"),
                settles_ms=SETTLES_MS,
            )
        elif one.oldest_waiting_at is not None and seen.judged_ms - one.oldest_waiting_at > WEBHOOK_LATE_MS:
            minutes = (seen.judged_ms - one.oldest_waiting_at) // 60_000
            yield Found(
                problem="webhooks_late",
                subject=one.id,
                affects="the receiver of a webhook has not heard of an outcome",
                cause=f"the oldest webhook that waits is {minutes} min old: its receiver does not take it",
                action=Action(label="see which, and its answers", command=f"penstock logs {one.kind}"),
                since_ms=one.oldest_waiting_at,
            )


def _certificates(seen: Seen) -> Iterator[Found]:
    """One problem for each setting: most processes have the same certificate, or were given theirs at the same time."""
    ends: defaultdict[str, dict[str, int]] = defaultdict(dict)
    gateways = [(one.id, one) for one in seen.gateways if is_alive(one, seen.judged_ms)]
    for process, state in (*gateways, *((one.worker_id, one) for one in seen.live)):
        for setting, ends_at in state.expiring_certificates.items():
            ends[setting][process] = ends_at
    for setting, by_process in sorted(ends.items()):
        soonest = min(by_process.values())
        days = (soonest - seen.now_ms) / 86_400_000
        more = f" and {len(by_process) - MOST_NAMED} more" if len(by_process) > MOST_NAMED else ""
        restarts_itself = setting.startswith("kafka.") and ".location" in setting
        restart = "" if restarts_itself else ", and restart the processes"
        yield Found(
            problem="certificate_expires",
            subject=setting,
            affects="new connections are refused from then on: of " + ", ".join(sorted(by_process)[:MOST_NAMED]) + more,
            cause=f"the certificate expires in {days:.1f} days, at {rfc3339(soonest)}"
            if days > 0
            else f"the certificate expired at {rfc3339(soonest)}",
            action=Action(label=f"find its file and renew it{restart}", command="penstock config show"),
        )


def _unwell(worker: WorkerState, liveness: Liveness) -> str | None:
    """What a worker lacks, but for models of which no other worker has one: those are problems of their own."""
    lost = {f"the model {model} " for model, pool in liveness.lost if pool == worker.pool}
    reasons = (worker.reason or "").split("; ")
    return "; ".join(one for one in reasons if one and not any(one.startswith(name) for name in lost)) or None


def _models(seen: Seen, waiting: _Waiting) -> Iterator[Found]:
    liveness = seen.liveness
    if liveness.live_workers == 0:
        return
    missed = [one for one in liveness.without_worker if liveness.empty_pool(one[1]) is None]
    for model, pool in sorted(missed, key=_by_name):
        yield _lost_model(liveness, (model, pool), waiting.of(model, pool))
    for pool, waits in sorted(waiting.by_pool.items(), key=lambda one: one[0] or ""):
        if (cause := liveness.empty_pool(pool)) is not None:
            setting = "" if pool is None else f"PENSTOCK_WORKER__POOL={shlex.quote(pool)} "
            start = Action(label="start a worker of this pool", command=f"{setting}penstock worker")
            yield Found(
                problem="pool_without_worker", subject=pool, pool=pool, affects=waits.text, cause=cause, action=start
            )
    yield from _unknown(liveness, waiting.unknown)
    yield from _without_model(liveness, waiting.any_model)
    for line in liveness.file_differences:
        look = Action(label="compare the models", command="penstock models list")
        affects = "some requests wait or take a detour"
        yield Found(problem="files_differ", affects=affects, cause=line, action=look)


def _by_name(one: ModelId) -> tuple[str, str]:
    return one[0], one[1] or ""


def _unknown(liveness: Liveness, unknown: Mapping[ModelId, _Waits]) -> Iterator[Found]:
    """Any producer chooses names: those with the most requests are listed, the others are counted together."""
    look = Action(label="see which models there are", command="penstock models list")
    ranked = sorted(unknown.items(), key=lambda item: (-item[1].requests, _by_name(item[0])))
    for (model, pool), waits in ranked[:MOST_UNKNOWN]:
        others = {one.pool for one in liveness.models if model in (one.model, *one.aliases)}
        elsewhere = "; it is served in " + " and ".join(sorted(map(_pool_text, others))) if others else ""
        yield Found(
            problem="model_unknown",
            subject=model,
            pool=pool,
            affects=waits.text,
            cause=f"no worker of {_pool_text(pool)} serves a model of this name{elsewhere}",
            action=look,
            since_ms=waits.since_ms,
        )
    if more := ranked[MOST_UNKNOWN:]:
        affects = _requests(sum(waits.requests for _, waits in more))
        cause = f"no worker serves {len(more)} further models that requests name"
        yield Found(problem="model_unknown", affects=affects, cause=cause, action=look)


def _without_model(liveness: Liveness, any_model: Mapping[tuple[str, str | None], _Waits]) -> Iterator[Found]:
    """Requests that name no model, of a task that no model of a pool with workers has."""
    served = {(task, one.pool) for one in liveness.models for task in one.tasks}
    for (task, pool), waits in sorted(any_model.items(), key=lambda one: _by_name(one[0])):
        if (task, pool) not in served and liveness.empty_pool(pool) is None:
            yield Found(
                problem="task_without_model",
                subject=task,
                pool=pool,
                affects=waits.text,
                cause=f"no worker of {_pool_text(pool)} serves a model for the task {task}",
                action=Action(label="add a model for it", command="penstock models add --help"),
                since_ms=waits.since_ms,
            )


def _pool_text(pool: str | None) -> str:
    return "the common pool" if pool is None else f"the pool {pool}"


def _lost_model(liveness: Liveness, of: ModelId, waits: _Waits) -> Found:
    model, pool = of
    name, (option, query) = shlex.quote(model), _in_pool(pool)
    if of not in liveness.lost:
        return Found(
            problem="model_without_worker",
            subject=model,
            pool=pool,
            affects=waits.text,
            cause="no live worker serves it",
            action=Action(
                label="forget it, if its worker does not come back", command=f"penstock models remove {name}{option}"
            ),
            since_ms=waits.since_ms,
        )
    why = ": ".join(filter(None, (liveness.lost[of], liveness.causes.get(of))))
    code = liveness.codes.get(of)
    # What no device can hold, or nobody can find, is not loaded by another try.
    label, order = ("do not load it", "unload") if code == InsufficientCapacity.code else ("load it again", "load")
    act = Action(
        label=label,
        command=f"penstock models {order} {name}{option}",
        path=f"/v1/admin/models/{quote(model)}/{order}{query}",
    )
    if code == InvalidRequest.code:
        (engine,) = {one.engine for one in liveness.models if (one.model, one.pool) == of}
        correct = f"penstock models add {name} --replace --engine {engine} --source SOURCE{option}"
        act = Action(label="correct its entry or its files", command=correct)
    return Found(
        problem="model_too_large" if code == InsufficientCapacity.code else "model_failed",
        subject=model,
        pool=pool,
        affects=waits.text,
        cause=why or "its load failed",
        action=act,
    )


def _dependencies(tried: Iterable[Tried]) -> Iterator[Found]:
    for one in tried:
        if one.problem is None:
            continue
        if one.name == "transactions":
            continue  # more is known of them
        code, affects, command = _DEPENDENCIES[one.name]
        cause = one.problem.text if one.problem.cause is None else f"{one.problem.text}: {one.problem.cause}"
        action = Action(label="find out more", command=command)
        yield Found(problem=code, subject=one.name, affects=affects, cause=cause, action=action)


def _unauthenticated(seen: Seen) -> Iterator[Found]:
    if seen.unauthenticated_per_s >= MANY_UNAUTHENTICATED_PER_S:
        yield Found(
            problem="auth_failures",
            affects="nobody yet: each address is slowed on its own",
            cause=f"{seen.unauthenticated_per_s:.1f} calls a second came without a good key during the last minute:"
            " somebody guesses keys, or a client still sends one that was revoked."
            " Lines `auth.refused` in the gateway's log have addresses and ids of keys",
            action=Action(label="see which keys there are", command="penstock keys list"),
        )


def _paused(seen: Seen, waiting: _Waiting) -> Iterator[Found]:
    for state in (one.state for one in seen.orders or () if one.state.paused):
        option, query = _in_pool(state.pool)
        if state.kind == CLASS:
            problem, waits = "class_paused", _requests(seen.depths.get((state.name, state.pool), 0))
            command, path = f"penstock models resume --class {state.name}", f"/v1/admin/classes/{state.name}"
        else:
            problem, waits = "model_paused", waiting.of(state.name, state.pool).text
            command, path = f"penstock models resume {shlex.quote(state.name)}", f"/v1/admin/models/{quote(state.name)}"
        by = "" if state.created_by in (None, "anybody") else f"; the last order is by the key {state.created_by}"
        yield Found(
            problem=problem,
            subject=state.name,
            pool=state.pool,
            affects=waits,
            cause=f"an order pauses it{by}",
            action=Action(label="resume", command=command + option, path=f"{path}/resume{query}"),
            since_ms=state.created_at if state.action == "pause" else None,
        )


def _devices(seen: Seen) -> Iterator[Found]:
    """A worker whose requests wait for memory though nothing of its own would free some, or others hold it."""
    for worker in seen.live:
        short = worker.waiting.get("memory", 0)
        limits = [(one, one.total_bytes if one.limit_bytes is None else one.limit_bytes) for one in worker.devices]
        foreign = [one for one, limit in limits if limit and (one.foreign_bytes or 0) > FOREIGN_SHARE * limit]
        if not short or (worker.running and not foreign):
            continue
        shown = ", ".join(
            f"{one.device}: {one.reserved_bytes / 2**30:.1f} of {limit / 2**30:.1f} GiB reserved,"
            f" {(one.foreign_bytes or 0) / 2**30:.1f} GiB held by other processes"
            for one, limit in limits
        )
        look = Action(label="see who holds the memory", command="penstock devices")
        yield Found(
            problem="device_short",
            subject=worker.worker_id,
            pool=worker.pool,
            affects=_requests(short),
            cause=shown,
            action=look,
            settles_ms=SETTLES_MS,
        )


def _letters(letters: Iterable[LetterCount]) -> Iterator[Found]:
    for one in letters:
        since, reason = rfc3339(one.since_ms), shlex.quote(one.reason)
        many = "" if one.letters == 1 else "s"
        again = Action(
            label="run them again",
            command=f"penstock dlq redrive --reason {reason} --since {since}",
            path="/v1/admin/dlq/redrive",
            body={"filter": {"reason": one.reason, "since": since}},
        )
        look = Action(
            label="see who wrote them; `dlq purge` takes them away", command=f"penstock dlq list --reason {reason}"
        )
        yield Found(
            problem="dead_letters" if one.redrivable else "dead_letters_unreadable",
            subject=one.reason,
            affects=(
                f"{one.letters:,} request{many} of the last hour ended as dead letters"
                if one.redrivable
                else f"{one.letters:,} record{many} of the last hour could not be read"
            ),
            cause=f"{one.reason}: {one.newest}" if one.newest else one.reason,
            action=again if one.redrivable else look,
            since_ms=one.since_ms,
        )


def _limits(seen: Seen) -> Iterator[Found]:
    for tenant, load in sorted(seen.tenants.items()):
        name, limit = shlex.quote(tenant), seen.limits.get(tenant)
        if limit and load.outstanding >= NEAR_LIMIT * limit:
            yield Found(
                problem="tenant_near_limit",
                subject=tenant,
                affects="its further requests are refused with 429 at the limit",
                cause=f"{load.outstanding:,} of {limit:,} outstanding requests",
                action=Action(
                    label="see its requests", command=f"penstock requests list --tenant {name} --status waiting"
                ),
            )


def _floods(seen: Seen) -> Iterator[Found]:
    """Where something else explains that requests wait, their number says nothing of their sender."""
    for tenant, load in sorted(seen.tenants.items()):
        grows = load.came_per_s > 2 * load.ended_per_s > 0
        if load.urgent >= FLOOD_REQUESTS and grows and load.drained_s > FLOOD_S:
            yield _flood(tenant, load)


def _flood(tenant: str, load: Load) -> Found:
    """It wants a class that is made for backlogs, where nobody waits behind it."""
    minutes = load.drained_s / 60
    came = f"in the last {LOAD_S} s {load.came_per_s:,.1f} requests/s of these classes came"
    return Found(
        problem="tenant_floods",
        subject=tenant,
        affects=f"{load.urgent:,} requests of the classes high and medium, {minutes:,.0f} min of work or more",
        cause=f"{came}, and {load.ended_per_s:,.1f}/s end",
        action=Action(
            label="move them to the class low",
            command=f"penstock requests reprioritize --tenant {shlex.quote(tenant)} --to low",
            path="/v1/requests/reprioritize",
            body={"tenant": tenant, "priority": "low"},
        ),
    )


def _stuck(seen: Seen, waiting: _Waiting, explained: Collection[str | None]) -> Iterator[Found]:
    """Nothing explains it: requests of a pool wait, and none of its workers runs or loads anything."""
    look = Action(label="see what each waits for", command="penstock requests list --status waiting")
    for pool, waits in sorted(waiting.by_pool.items(), key=lambda one: one[0] or ""):
        workers = [one for one in seen.live if one.pool == pool]
        works = any(one.running or any(model.state in LOADING for model in one.models) for one in workers)
        reasons = {reason for one in workers for reason in one.waiting}
        is_young = waits.age_s(seen.now_ms) * 1000 < STUCK_MS
        if pool in explained or is_young or works or (reasons and reasons <= {"scheduled", "paused"}):
            continue
        said = ", ".join(sorted(reasons)) or "no reason was reported"
        yield Found(
            problem="nothing_runs",
            subject=pool,
            pool=pool,
            affects=waits.text,
            cause=f"they wait ({said}), and no worker of the pool runs any",
            action=look,
            since_ms=waits.since_ms,
        )
