"""What is not well, whom it affects, why, and what mends it: `GET /v1/admin/problems`. Pure; times are passed in."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from penstock.common.desired import Desired
from penstock.gateway.dead_letters.letters import LetterCount
from penstock.gateway.service.dependencies import Tried
from penstock.gateway.view.census import Waiting
from penstock.gateway.view.liveness import Liveness, ModelId
from penstock.schemas.desired import CLASS
from penstock.schemas.records import WorkerState
from penstock.schemas.times import rfc3339

SILENT_SHOWN_MS = 60_000
"""A silent worker whose partitions others have is shown for so long."""
NEAR_LIMIT = 0.95
"""The share of its outstanding requests from which on a tenant is near its limit."""
STUCK_MS = 30_000
"""The oldest request waits for so long while nothing runs."""
FOREIGN_SHARE = 0.1
"""The share of a device's limit that other processes may hold before they count as the cause of a lack of memory."""

_DEPENDENCIES = {
    "artifacts": ("artifacts_unusable", "inputs and outputs that are too large for Kafka", "penstock doctor"),
    "orders": ("orders_unusable", "orders about models and classes", "penstock workers list"),
    "rights": ("rights_missing", "what the missing rights are for", "penstock doctor"),
    "transactions": ("transaction_open", "every record behind it on these partitions", "penstock doctor"),
    "keys": ("keys_file_broken", "changes of keys, revocations among them", "penstock keys list"),
}
"""By dependency: the problem's code, what it affects, and the command that says more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """What an operator does about it: a command, and the call that does the same if there is one."""

    label: str
    command: str
    path: str | None = None
    """POST this."""
    body: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        call = None if self.path is None else {"method": "POST", "path": self.path, "body": self.body}
        return {"label": self.label, "command": self.command, "call": call}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One problem. `problem` is its stable code; `subject` names the model, class, worker, tenant or reason."""

    problem: str
    subject: str | None = None
    affects: str
    cause: str
    action: Action
    since_ms: int | None = None
    """None: not known, so it counts from when it was first seen."""

    def to_json(self, seen_ms: int) -> dict[str, Any]:
        return {
            "object": "problem",
            "problem": self.problem,
            "subject": self.subject,
            "since": rfc3339(seen_ms if self.since_ms is None else self.since_ms),
            "affects": self.affects,
            "cause": self.cause,
            "action": self.action.to_json(),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The facts of one moment. `orders`: None while they cannot be read. `outstanding`: by tenant (requests, limit)."""

    now_ms: int
    liveness: Liveness
    behind: str | None = None
    """Why this gateway does not show the newest records; None if it does."""
    workers: Sequence[WorkerState] = ()
    late_ms: int = 20_000
    waiting: Sequence[Waiting] = ()
    depths: Mapping[str, int] = field(default_factory=dict[str, int])
    ages_s: Mapping[str, float] = field(default_factory=dict[str, float])
    ended_per_s: float = 0.0
    tried: Sequence[Tried] = ()
    orders: Sequence[Desired] | None = None
    letters: Sequence[LetterCount] = ()
    outstanding: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    @property
    def live(self) -> list[WorkerState]:
        return [one for one in self.workers if self.now_ms - one.updated_at <= self.late_ms]

    def waiting_for(self, fits: Callable[[Waiting], bool]) -> tuple[str, int | None]:
        """In words how many requests of these kinds wait, and since when the oldest does."""
        found = [one for one in self.waiting if fits(one)]
        since = min((one.since_ms for one in found if one.since_ms is not None), default=None)
        return _requests(sum(one.requests for one in found)), since


def problems(seen: Seen) -> list[Found]:
    """All of them, the gravest first."""
    found = [
        *_behind(seen.behind),
        *_workers(seen),
        *_models(seen),
        *_dependencies(seen.tried),
        *_paused(seen),
        *_devices(seen),
        *_letters(seen.letters),
        *_tenants(seen.outstanding),
    ]
    return found or list(_stuck(seen))


def summary(seen: Seen, found: Sequence[Found]) -> str:
    """One sentence: that all is well, with the figures that show it, or how many problems there are."""
    if found:
        return "1 problem" if len(found) == 1 else f"{len(found)} problems"
    depth, oldest_s = sum(seen.depths.values()), max(seen.ages_s.values(), default=0.0)
    waits = f"nothing waits longer than {oldest_s:.1f} s" if depth else "nothing waits"
    return f"All well: {seen.ended_per_s:.1f} requests/s, {waits}"


class SinceBook:
    """Since when each problem is seen; one that has gone begins anew when it comes back."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str | None, str], int] = {}

    def note(self, found: Iterable[Found], now_ms: int) -> list[tuple[Found, int]]:
        """The problems of now, each with the time when it was first seen."""
        keyed = [((one.problem, one.subject, _key_cause(one)), one) for one in found]
        self._since = {key: self._since.get(key, now_ms) for key, _ in keyed}
        return [(one, self._since[key]) for key, one in keyed]


def _key_cause(found: Found) -> str:
    return found.cause if found.subject is None else ""


def _requests(count: int) -> str:
    return f"{count:,} request waits" if count == 1 else f"{count:,} requests wait"


def _behind(reason: str | None) -> Iterator[Found]:
    if reason is not None:
        look = Action(label="see what it waits for", command="penstock status")
        affects = "this gateway shows an older state, and accepts requests late or not at all"
        yield Found(problem="gateway_behind", affects=affects, cause=reason, action=look)


def _in_pool(pool: str | None) -> tuple[str, str]:
    """The option of a command and the query of a path that name a pool."""
    return ("", "") if pool is None else (f" --pool {shlex.quote(pool)}", f"?pool={quote(pool)}")


def _workers(seen: Seen) -> Iterator[Found]:
    live = seen.live
    if seen.liveness.live_workers == 0:
        waits, since = seen.waiting_for(lambda one: True)
        newest = max((one.updated_at for one in seen.workers), default=since)
        start = Action(label="start a worker", command="penstock worker")
        cause = seen.liveness.degraded_for_operators or ""
        yield Found(problem="no_worker", affects=waits, cause=cause, action=start, since_ms=newest)
        return
    held = {place for one in live for place in one.assigned}
    for one in sorted(seen.workers, key=lambda state: state.worker_id):
        if one in live:
            if one.reason is not None:
                look = Action(label="look at its log", command="penstock logs worker")
                waits = _requests(sum(one.queued.values()))
                yield Found(
                    problem="worker_unwell", subject=one.worker_id, affects=waits, cause=one.reason, action=look
                )
            continue
        left = [place for place in one.assigned if place not in held]
        if not left and seen.now_ms - one.updated_at > SILENT_SHOWN_MS:
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


def _models(seen: Seen) -> Iterator[Found]:
    liveness = seen.liveness
    if liveness.live_workers == 0:
        return
    for model, pool in sorted(liveness.without_worker, key=lambda one: (one[0], one[1] or "")):
        waits, since = seen.waiting_for(lambda one, of=(model, pool): (one.model, one.pool) == of)
        yield _lost_model(liveness, (model, pool), waits, since)
    for pool in sorted({one.pool or "" for one in seen.waiting if liveness.empty_pool(one.pool)}):
        named = pool or None
        waits, since = seen.waiting_for(lambda one, pool=named: one.pool == pool)
        setting = f"PENSTOCK_WORKER__POOL={shlex.quote(pool)} " if pool else ""
        start = Action(label="start a worker of this pool", command=f"{setting}penstock worker")
        cause = liveness.empty_pool(named) or ""
        yield Found(problem="pool_without_worker", subject=named, affects=waits, cause=cause, action=start)
    names = {(name, one.pool) for one in liveness.models for name in (one.model, *one.aliases)}
    unknown = {(one.model, one.pool) for one in seen.waiting if one.model is not None} - names
    for model, pool in sorted(unknown, key=lambda one: (one[0] or "", one[1] or "")):
        waits, since = seen.waiting_for(lambda one, of=(model, pool): (one.model, one.pool) == of)
        look = Action(label="see which models there are", command="penstock models list")
        cause = "no worker serves a model of this name" + (f" in the pool {pool}" if pool else "")
        yield Found(problem="model_unknown", subject=model, affects=waits, cause=cause, action=look, since_ms=since)
    for line in liveness.file_differences:
        look = Action(label="compare the models", command="penstock models list")
        affects = "some requests wait or take a detour"
        yield Found(problem="files_differ", affects=affects, cause=line, action=look)


def _lost_model(liveness: Liveness, of: ModelId, waits: str, since_ms: int | None) -> Found:
    model, pool = of
    name, (option, query) = shlex.quote(model), _in_pool(pool)
    if of not in liveness.lost:
        return Found(
            problem="model_without_worker",
            subject=model,
            affects=waits,
            cause="no live worker serves it",
            action=Action(label="see which workers serve what", command=f"penstock models show {name}{option}"),
            since_ms=since_ms,
        )
    why = ": ".join(filter(None, (liveness.lost[of], liveness.causes.get(of))))
    again = Action(
        label="load it again",
        command=f"penstock models load {name}{option}",
        path=f"/v1/admin/models/{quote(model)}/load{query}",
    )
    return Found(problem="model_failed", subject=model, affects=waits, cause=why or "its load failed", action=again)


def _dependencies(tried: Iterable[Tried]) -> Iterator[Found]:
    for one in tried:
        if one.problem is None:
            continue
        code, affects, command = _DEPENDENCIES[one.name]
        cause = one.problem.text if one.problem.cause is None else f"{one.problem.text}: {one.problem.cause}"
        action = Action(label="find out more", command=command)
        yield Found(problem=code, subject=one.name, affects=affects, cause=cause, action=action)


def _paused(seen: Seen) -> Iterator[Found]:
    for state in (one.state for one in seen.orders or () if one.state.paused):
        of_class = state.kind == CLASS
        option, query = _in_pool(state.pool)
        if of_class:
            waits = _requests(seen.depths.get(state.name, 0))
            command, path = f"penstock models resume --class {state.name}", f"/v1/admin/classes/{state.name}"
        else:
            waits, _ = seen.waiting_for(lambda one, model=state.name: one.model == model)
            command, path = f"penstock models resume {shlex.quote(state.name)}", f"/v1/admin/models/{quote(state.name)}"
        by = "" if state.created_by in (None, "anybody") else f" by the key {state.created_by}"
        yield Found(
            problem="class_paused" if of_class else "model_paused",
            subject=state.name,
            affects=waits,
            cause=f"it was paused by an order{by}",
            action=Action(label="resume", command=command + option, path=f"{path}/resume{query}"),
            since_ms=state.created_at,
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
            problem="device_short", subject=worker.worker_id, affects=_requests(short), cause=shown, action=look
        )


def _letters(letters: Iterable[LetterCount]) -> Iterator[Found]:
    for one in letters:
        affects = f"{one.letters:,} request{'' if one.letters == 1 else 's'} ended as dead letters within an hour"
        again = Action(
            label="run them again",
            command=f"penstock dlq redrive --reason {shlex.quote(one.reason)}",
            path="/v1/admin/dlq/redrive",
            body={"filter": {"reason": one.reason}},
        )
        yield Found(
            problem="dead_letters",
            subject=one.reason,
            affects=affects,
            cause=one.reason,
            action=again,
            since_ms=one.since_ms,
        )


def _tenants(outstanding: Mapping[str, tuple[int, int]]) -> Iterator[Found]:
    for tenant, (requests, limit) in sorted(outstanding.items()):
        if requests < NEAR_LIMIT * limit:
            continue
        look = Action(
            label="see its requests", command=f"penstock requests list --tenant {shlex.quote(tenant)} --status waiting"
        )
        yield Found(
            problem="tenant_near_limit",
            subject=tenant,
            affects="its further requests are refused with 429 at the limit",
            cause=f"{requests:,} of {limit:,} outstanding requests",
            action=look,
        )


def _stuck(seen: Seen) -> Iterator[Found]:
    """Nothing explains it: requests wait, and nothing runs."""
    oldest_ms = max(seen.ages_s.values(), default=0.0) * 1000
    if oldest_ms < STUCK_MS or any(one.running for one in seen.live):
        return
    reasons = ", ".join(sorted({reason for one in seen.live for reason in one.waiting}))
    look = Action(label="see what each waits for", command="penstock requests list --status waiting")
    yield Found(
        problem="nothing_runs",
        affects=_requests(sum(seen.depths.values())),
        cause=f"requests wait ({reasons or 'no reason was reported'}), and no worker runs any",
        action=look,
        since_ms=seen.now_ms - int(oldest_ms),
    )
