"""Facts for operators: readiness, the models that workers report, gauges for Prometheus, and `/v1/stats`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from penstock.common.clock import now_ms
from penstock.common.model_pools import pool_of
from penstock.gateway.limits.limits import Limits
from penstock.gateway.limits.tenants import TenantWork
from penstock.gateway.metrics import Gauges
from penstock.gateway.service.model_queues import model_queues, paused_queues
from penstock.gateway.service.models import public_models
from penstock.gateway.service.open_transactions import Brokers, OpenTransactions
from penstock.gateway.service.planning import plan
from penstock.gateway.service.problems import LOAD_S, Load, Seen
from penstock.gateway.service.run_times import RunTimes
from penstock.gateway.service.tenant_shares import tenants_json
from penstock.gateway.service.waiting import all_waiting_json
from penstock.gateway.view.census import Waiting
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.filters import WaitsFor
from penstock.gateway.view.fleet import SERVING, STOPPED, KnownModels
from penstock.gateway.view.follower import Follower, Readiness
from penstock.gateway.view.gateways import is_alive
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.liveness import Liveness, judge
from penstock.gateway.view.public import waiting_json
from penstock.gateway.view.usage import Amounts, RowKey
from penstock.gateway.view.view import View
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.records import STATUS_RANKS, DeviceState, InferenceRequest, ModelInfo, WaitingFor, WorkerState
from penstock.schemas.times import rfc3339

RUNNING_RANK = STATUS_RANKS["running"]
RUNS_IN = frozenset({"ready", "draining"})
"""States of a replica that may run requests."""

_ANYWHERE = "*"
"""No pool's name: a conversation of which nothing is known yet."""

MOST_KINDS = 1_000
"""So many kinds of waiting requests are looked at for a probe: any model may be named on the topics."""


class Facts:
    """Reads the view; changes nothing but the count of open sockets."""

    def __init__(
        self,
        view: View,
        follower: Follower,
        hub: Hub,
        worker_late_s: float = 8.0,
        run_times: RunTimes | None = None,
        transactions: OpenTransactions | None = None,
    ) -> None:
        self.worker_late_ms = int(worker_late_s * 1000)
        """So long after its last report a worker counts as alive."""
        self._view = view
        self._follower = follower
        self._hub = hub
        self._run_times = run_times or RunTimes()
        self._transactions = transactions
        self.sockets = 0

    def known_models(self) -> KnownModels:
        return self._view.fleet.known(self._judged_ms(), self.worker_late_ms)

    def models(self) -> Sequence[ModelInfo]:
        return self.known_models().models

    def routed(self, request: InferenceRequest) -> InferenceRequest:
        """The request with the pool it goes to: its own, else its conversation's, else that of the model it names.

        Raises InvalidRequest for a conversation that is in another pool: its turns would run in no order.
        """
        home = _ANYWHERE
        if request.conversation_id is not None:
            home = self._view.pool_of_conversation(request.tenant, request.conversation_id, _ANYWHERE)
            if (
                home is _ANYWHERE
                and self._view.backfill is not None
                and any(one.pool is not None for one in self.models())
            ):
                self._follower.check_whole()  # a turn of it may wait in any pool
        if home is _ANYWHERE:
            if request.pool is not None or request.model is None:
                return request
            pool = pool_of(self.models(), request.task, request.model)
            return request if pool is None else replace(request, pool=pool)
        if request.pool is not None and request.pool != home:
            where = f"the pool {home}" if home is not None else "the common pool"
            raise InvalidRequest(f"the conversation {request.conversation_id} is in {where}", param="pool")
        return request if request.pool == home else replace(request, pool=home)

    def catching_up(self) -> str | None:
        return self._follower.catching_up()

    def lacks(self) -> str | None:
        return self._follower.lacks()

    def history_until_ms(self) -> int | None:
        """Up to when this gateway knows the history; None once it knows all."""
        return None if self._view.uncounted is None else self._view.uncounted.until_ms

    def readiness(self) -> Readiness:
        return self._follower.readiness()

    def liveness(self) -> Liveness:
        """Which models no live worker moves, as of now."""
        return judge(self._view.fleet.workers.values(), self.models(), self._judged_ms(), self.worker_late_ms)

    def _judged_ms(self) -> int:
        """The moment as of which others are silent."""
        return self._view.gateways.judged_ms(now_ms())

    def live_workers(self) -> list[WorkerState]:
        """The workers that have not gone, and not fallen silent."""
        since_ms = self._judged_ms() - self.worker_late_ms
        return [one for one in self._view.fleet.workers.values() if one.state != STOPPED and one.updated_at >= since_ms]

    def public_models(self) -> list[dict[str, Any]]:
        """The models as all callers see them."""
        return public_models(self.models(), self.liveness().without_worker, self.live_workers())

    def waits_unseen(self, entry: Entry, liveness: Liveness | None = None) -> dict[str, Any]:
        """Fields of a request that no worker sees, in place of its own; nothing for any other.

        A worker says what a request waits for. That no worker is there, or can read its record, only others can say.
        """
        if entry.done or entry.erased or (entry.status is not None and entry.status.rank >= RUNNING_RANK):
            return {}
        if now_ms() < entry.waits_from_ms > entry.accepted_ms:
            waiting = WaitingFor(reason="scheduled", estimated_start_at=entry.waits_from_ms)
            return {"waiting_for": waiting_json(waiting)}
        word, reason = "no_worker", (liveness or self.liveness()).awaits_worker(entry.task, entry.model, entry.pool)
        if reason is None and entry.status is None and self._transactions is not None:
            word, reason = "transaction", self._transactions.holds(entry)
        if reason is None:
            return {}
        position = None if entry.status is None else entry.status.position
        return {"detail": reason, "waiting_for": waiting_json(WaitingFor(reason=word, position=position))}

    def waiting_without_worker(self, liveness: Liveness) -> list[tuple[Waiting, str]]:
        """What waits for want of a live worker, by kind, each with the reason."""
        kinds = itertools.islice(self._view.census.waiting(now_ms()), MOST_KINDS)
        found = ((kind, liveness.awaits_worker(kind.task, kind.model, kind.pool)) for kind in kinds)
        return [(kind, reason) for kind, reason in found if reason is not None]

    def waits_for(self, reason: str) -> WaitsFor:
        """The requests that wait for it, judged at one moment."""
        liveness = self.liveness()

        def reason_of(entry: Entry) -> str | None:
            stated = None if entry.done or entry.status is None else waiting_json(entry.status.waiting_for)
            shown = self.waits_unseen(entry, liveness).get("waiting_for", stated)
            return None if shown is None else shown["reason"]

        unserved = [kind.kind for kind, _ in self.waiting_without_worker(liveness)]
        held = () if self._transactions is None else [tp for tp, _ in self._transactions.held()]
        return WaitsFor(reason=reason, reason_of=reason_of, unserved=unserved, held=held)

    def requests(self, entries: Iterable[Entry]) -> list[dict[str, Any]]:
        """Requests as callers see them, judged at one moment."""
        liveness = self.liveness()
        return [{**entry.to_json(), **self.beside(entry, liveness)} for entry in entries]

    def beside(self, entry: Entry, liveness: Liveness | None = None) -> dict[str, Any]:
        """Fields in place of a request's own: why it waits if no worker sees it, and the device on which it runs."""
        if entry.status_name != "running" or (status := entry.status) is None:
            return self.waits_unseen(entry, liveness)
        if (worker := self._view.fleet.workers.get(status.worker_id)) is None:
            return {}
        devices = {one.device for one in worker.models if one.model == status.model and one.state in RUNS_IN}
        if None in devices:  # a replica without reserved memory
            devices = {one.device for one in worker.devices}
        return {"device": devices.pop()} if len(devices) == 1 else {}

    def plan(self, request: InferenceRequest, turns_before: int) -> dict[str, Any]:
        """What would become of the request, as callers see it. Raises ModelNotFound, InsufficientCapacity.

        `turns_before`: turns of its conversation that go first.
        """
        at_ms = now_ms()
        workers = [worker for worker in self.live_workers() if worker.state == SERVING]
        found = plan(request, self.models(), workers, self._run_times.run_ms, at_ms, turns_before=turns_before)
        waiting_for, estimated_wait_ms = found.waiting_for, found.estimated_wait_ms
        if request.start_after is not None and request.start_after > at_ms:
            waiting_for = WaitingFor(reason="scheduled", estimated_start_at=request.start_after)
            estimated_wait_ms = request.start_after - at_ms
        return {
            "object": "request.plan",
            "task": request.task,
            "pool": request.pool,
            "model": found.model,
            "model_reason": found.model_reason,
            "class": found.klass,
            "worker_id": found.worker_id,
            "device": found.device,
            "need_bytes": found.need_bytes,
            "free_bytes": found.free_bytes,
            "waiting_for": waiting_json(waiting_for),
            "estimated_wait_ms": estimated_wait_ms,
            "estimated_run_ms": found.estimated_run_ms,
        }

    def moment(self) -> Seen:
        """What problems are looked for in, less what is not in memory."""
        at_ms, judged_ms = now_ms(), self._judged_ms()
        readiness = self._follower.readiness()
        return Seen(
            now_ms=at_ms,
            judged_ms=judged_ms,
            liveness=self.liveness(),
            behind=None if readiness.ready else readiness.reason,
            lacks=readiness.lacks,
            workers=[one for one in self._view.fleet.workers.values() if one.state != STOPPED],
            late_ms=self.worker_late_ms,
            gateways=self._view.gateways.known(judged_ms),
            own_id=self._view.gateways.own_id,
            waiting=list(itertools.islice(self._view.census.waiting(at_ms), MOST_KINDS)),
            running=sum(self._view.census.running.values()),
            depths=self._view.census.depths_by_pool(at_ms),
            ended_per_s=self._view.endings.per_s(at_ms),
            unwritten=self._follower.cannot_keep(),
            brokers=Brokers("") if self._transactions is None else self._transactions.brokers(),
            held=() if self._transactions is None else self._transactions.held(),
            tenants=self._loads(at_ms),
        )

    def history(self, range_minutes: int, step: int) -> Callable[[], dict[str, Any]]:
        """What gives the history of so many minutes by steps of so many. Call it on a thread."""
        return self._view.history(now_ms(), range_minutes, step)

    def usage(self, first: str, last: str) -> Callable[[], Iterable[tuple[RowKey, Amounts]]]:
        """As `Usage.rows`."""
        return self._view.known.usage.rows(first, last)

    def _loads(self, at_ms: int) -> dict[str, Load]:
        live = self._view.census.live
        return {
            tenant: Load(
                outstanding=work.outstanding,
                urgent=live("high", tenant) + live("medium", tenant),
                came_per_s=work.urgent.per_s(at_ms, LOAD_S),
                ended_per_s=max(work.ended.per_s(at_ms, LOAD_S), work.ended.per_s(at_ms)),
            )
            for tenant, work in self._view.tenants.known().items()
            if work.outstanding
        }

    def gauges(self) -> Gauges:
        """Without depths and ages while the past is read: what waits is not known, and 0 would scale workers in."""
        memory: dict[tuple[str, str], int] = {}
        for worker in self._view.fleet.workers.values():
            if worker.state == STOPPED:
                continue  # its last word; its devices are others' now
            for device in worker.devices:
                for name, size in _sizes(device).items():
                    if size is not None:
                        kind = name.removesuffix("_bytes")
                        memory[(device.device, kind)] = memory.get((device.device, kind), 0) + size
        known = Gauges(
            inflight=self._view.census.live_count,
            streams=self._hub.connected,
            ws_clients=self.sockets,
            device_memory=memory,
            running=dict(self._view.census.running),
        )
        if self._view.uncounted is not None:
            return known
        at_ms = now_ms()
        depths, ages = self._view.census.queue_depths(at_ms)
        by_model, ages_by_model = model_queues(self.models(), self._view.census.waiting_by_class(at_ms), at_ms)
        return replace(
            known,
            queue_depth=depths,
            oldest_age_s=ages,
            model_depth=by_model,
            model_oldest_age_s=ages_by_model,
            paused=paused_queues(by_model, self._view.fleet.orders),
        )

    def tenant_stats(self, tenant: str) -> dict[str, Any]:
        """What one tenant has under way, and how its requests go. Rates are means over the last minute."""
        work, at_ms = self._view.tenants.known().get(tenant) or TenantWork(), now_ms()
        return {
            "object": "stats",
            "tenant": tenant,
            "inflight": work.outstanding,
            "rates": {
                "accepted_per_s": round(work.accepted.per_s(at_ms), 3),
                "ended_per_s": round(work.ended.per_s(at_ms), 3),
            },
            "outcomes": dict(work.outcomes),
            "conversations": len(work.conversations),
        }

    def waiting(self, tenant: str | None) -> dict[str, Any]:
        """What waits, of one tenant or of all, by tenant, class and model."""
        return all_waiting_json(self._view.census.lines.waiting(tenant), self.liveness(), now_ms())

    def tenants(self, limits_of: Callable[[str], Limits]) -> dict[str, Any]:
        """What each tenant has under way, and how near it is to its limits."""
        return tenants_json(self._view.tenants, self._view.census.lines, limits_of, now_ms())

    def model_events(self, model: str | None, limit: int) -> list[dict[str, Any]]:
        """The newest loads, unloads and evictions, of one model or of all."""
        found = (one for one in self._view.fleet.model_events.newest() if model in (None, one.model))
        return [one.to_json() for one in itertools.islice(found, limit)]

    def devices(self) -> list[dict[str, Any]]:
        """Each device of each worker, as its last report has it, in bytes; null is what it does not tell."""
        workers = sorted(self._view.fleet.workers.values(), key=lambda state: state.worker_id)
        return [
            {
                "worker_id": worker.worker_id,
                "device": device.device,
                "kind": device.kind,
                **_sizes(device),
                "holders": _holders(worker, device),
            }
            for worker in workers
            if worker.state != STOPPED
            for device in worker.devices
        ]

    def gateways(self) -> list[dict[str, Any]]:
        """Gateways and the processes beside them, as each last reported."""
        at_ms = self._judged_ms()
        known = self._view.gateways.known(at_ms)
        return [{**_with_times(one.to_dict()), "alive": is_alive(one, at_ms)} for one in known]

    def _processes(self) -> dict[str, dict[str, int]]:
        """By kind, how many gateways and processes beside them are alive, and how many are known."""
        counts: dict[str, dict[str, int]] = {}
        at_ms = self._judged_ms()
        for one in self._view.gateways.known(at_ms):
            count = counts.setdefault(one.kind, {"alive": 0, "known": 0})
            count["alive"] += is_alive(one, at_ms)
            count["known"] += 1
        return counts

    def stats(self) -> dict[str, Any]:
        """What operators look at first, of all tenants. Rates are means over the last minute."""
        at_ms = now_ms()
        depths, ages = self._view.census.queue_depths(at_ms)
        workers = sorted(self._view.fleet.workers.values(), key=lambda state: state.worker_id)
        return {
            "object": "stats",
            "queues": {name: {"depth": depths[name], "oldest_age_s": round(ages[name], 3)} for name in depths},
            "inflight": self._view.census.live_count,
            "rates": {
                "accepted_per_s": round(self._view.arrivals.per_s(at_ms), 3),
                "ended_per_s": round(self._view.endings.per_s(at_ms), 3),
            },
            "outcomes": dict(self._view.outcomes),
            "clients": {
                "connected": self._hub.connected,
                "dropped_slow": self._hub.dropped_slow,
                "sockets": self.sockets,
            },
            "workers": [_worker_json(worker) for worker in workers],
            "worker_late_s": self.worker_late_ms / 1000,
            "processes": self._processes(),
            "models": [_with_times(model.to_dict()) for model in self.models()],
        }


def _worker_json(worker: WorkerState) -> dict[str, Any]:
    """The record with its offsets by topic/partition."""
    committed = {place: at for place, at in zip(worker.assigned, worker.committed, strict=False) if at >= 0}
    lag = {place: records for place, records in zip(worker.assigned, worker.lag, strict=False) if records > 0}
    return {**_with_times(worker.to_dict()), "committed": committed, "lag": lag}


def _sizes(device: DeviceState) -> dict[str, int | None]:
    """A worker of an earlier release reports neither its limit nor the owners of memory."""
    measured, limit = device.measured_bytes, device.limit_bytes
    return {
        "limit_bytes": device.total_bytes if limit is None else limit,
        "reserved_bytes": device.reserved_bytes,
        "measured_bytes": device.used_bytes if measured is None else measured,
        "foreign_bytes": device.foreign_bytes,
    }


def _holders(worker: WorkerState, device: DeviceState) -> list[dict[str, Any]] | None:
    if device.holders or device.limit_bytes is not None:
        return [one.to_dict() for one in device.holders]
    if len(worker.devices) > 1:
        return None  # such a worker does not tell which of several devices a model is on
    held = ((one.model, one.memory_bytes) for one in worker.models if one.memory_bytes)
    return [{"model": model, "bytes": held_bytes, "measured_bytes": held_bytes} for model, held_bytes in held]


def _with_times(facts: dict[str, Any]) -> dict[str, Any]:
    """A record's facts with its times as RFC 3339."""
    return {name: rfc3339(value) if value and name.endswith("_at") else value for name, value in facts.items()}
