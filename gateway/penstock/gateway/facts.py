"""Facts for operators: readiness, the models that workers told of, gauges for Prometheus, and `/v1/stats`."""

from __future__ import annotations

from typing import Any

from penstock.gateway.entries import rfc3339
from penstock.gateway.follower import Follower, Readiness
from penstock.gateway.hub import Hub
from penstock.gateway.metrics import Gauges
from penstock.gateway.view import View
from penstock.producers.clock import now_ms
from penstock.schemas.records import ModelInfo

STOPPED = "stopped"
"""A worker's state in its last word."""


class Facts:
    """Reads the view; changes nothing but the count of open sockets."""

    def __init__(self, view: View, follower: Follower, hub: Hub) -> None:
        self._view = view
        self._follower = follower
        self._hub = hub
        self.sockets = 0

    def models(self) -> list[ModelInfo]:
        """The models that workers have told of."""
        return list(self._view.models.values())

    def readiness(self) -> Readiness:
        return self._follower.readiness()

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

    def stats(self) -> dict[str, Any]:
        """What operators look at first. Rates are means over the last minute."""
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
