"""Facts for operators: readiness, the models that workers told of, gauges for Prometheus, and `/v1/stats`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.gateway.limits.tenants import TenantWork
from penstock.gateway.metrics import Gauges
from penstock.gateway.view.entries import Entry, rfc3339
from penstock.gateway.view.follower import Follower, Readiness
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.liveness import Liveness, judge
from penstock.gateway.view.view import View
from penstock.producers.clock import now_ms
from penstock.producers.model_pools import pool_of
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.records import STATUS_RANKS, InferenceRequest, ModelInfo

RUNNING_RANK = STATUS_RANKS["running"]

_ANYWHERE = "*"
"""No pool's name: a conversation of which nothing is known yet."""

STOPPED = "stopped"
"""A worker's state in its last word."""


class Facts:
    """Reads the view; changes nothing but the count of open sockets."""

    def __init__(self, view: View, follower: Follower, hub: Hub, worker_late_s: float = 20.0) -> None:
        self._worker_late_ms = int(worker_late_s * 1000)
        self._view = view
        self._follower = follower
        self._hub = hub
        self.sockets = 0

    def models(self) -> list[ModelInfo]:
        """The models that workers have told of."""
        return list(self._view.models.values())

    def routed(self, request: InferenceRequest) -> InferenceRequest:
        """The request with the pool it goes to: its own, else its conversation's, else that of the model it names.

        Raises InvalidRequest for a conversation that is in another pool: its turns would run in no order.
        """
        home = _ANYWHERE
        if request.conversation_id is not None:
            home = self._view.pool_of_conversation(request.tenant, request.conversation_id, _ANYWHERE)
        if home is _ANYWHERE:
            if request.pool is not None or request.model is None:
                return request
            pool = pool_of(self._view.models.values(), request.task, request.model)
            return request if pool is None else replace(request, pool=pool)
        if request.pool is not None and request.pool != home:
            where = f"the pool {home}" if home is not None else "the common pool"
            raise InvalidRequest(f"the conversation {request.conversation_id} is in {where}", param="pool")
        return request if request.pool == home else replace(request, pool=home)

    def readiness(self) -> Readiness:
        return self._follower.readiness()

    def liveness(self) -> Liveness:
        """Which models no live worker moves, as of now."""
        return judge(self._view.workers.values(), self.models(), now_ms(), self._worker_late_ms)

    def waits_for_worker(self, entry: Entry) -> dict[str, Any]:
        """Fields of a request that waits for want of a live worker; nothing for any other."""
        if entry.done or entry.erased or (entry.status is not None and entry.status.rank >= RUNNING_RANK):
            return {}
        reason = self.liveness().awaits_worker(entry.task, entry.model, entry.pool)
        if reason is None:
            return {}
        position = None if entry.status is None else entry.status.position
        sizes = {"need_bytes": None, "free_bytes": None, "estimated_start_at": None}
        return {"detail": reason, "waiting_for": {"reason": "no_worker", "position": position, **sizes}}

    def gauges(self) -> Gauges:
        depths, ages = self._view.queue_depths(now_ms())
        memory: dict[tuple[str, str], int] = {}
        for worker in self._view.workers.values():
            if worker.state == STOPPED:
                continue  # its last word; its devices are others' now
            for device in worker.devices:
                sizes = {"total": device.total_bytes, "reserved": device.reserved_bytes, "used": device.used_bytes}
                for kind, size in sizes.items():
                    memory[(device.device, kind)] = memory.get((device.device, kind), 0) + size
        return Gauges(
            queue_depth=depths,
            oldest_age_s=ages,
            inflight=self._view.live_count,
            ws_clients=self.sockets,
            device_memory=memory,
            running=dict(self._view.census.running),
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

    def devices(self) -> list[dict[str, Any]]:
        """Each device of each worker, as its last report has it, in bytes; null is what it does not tell."""
        devices: list[dict[str, Any]] = []
        for worker in sorted(self._view.workers.values(), key=lambda state: state.worker_id):
            holders = [{"model": one.model, "bytes": one.memory_bytes} for one in worker.models if one.memory_bytes]
            devices += [
                {
                    "worker_id": worker.worker_id,
                    "device": device.device,
                    "kind": device.kind,
                    "limit_bytes": device.total_bytes,
                    "reserved_bytes": device.reserved_bytes,
                    "measured_bytes": device.used_bytes,
                    "foreign_bytes": None,
                    # A worker does not tell which of several devices a model is on.
                    "holders": holders if len(worker.devices) == 1 else None,
                }
                for device in worker.devices
            ]
        return devices

    def stats(self) -> dict[str, Any]:
        """What operators look at first, of all tenants. Rates are means over the last minute."""
        at_ms = now_ms()
        depths, ages = self._view.queue_depths(at_ms)
        workers = sorted(self._view.workers.values(), key=lambda state: state.worker_id)
        return {
            "object": "stats",
            "queues": {name: {"depth": depths[name], "oldest_age_s": round(ages[name], 3)} for name in depths},
            "inflight": self._view.live_count,
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
            "workers": [_with_times(worker.to_dict()) for worker in workers],
            "models": [_with_times(model.to_dict()) for model in self.models()],
        }


def _with_times(facts: dict[str, Any]) -> dict[str, Any]:
    """A record's facts with its times as RFC 3339."""
    return {name: rfc3339(value) if name.endswith("_at") else value for name, value in facts.items()}
