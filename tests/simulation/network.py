"""What lies between a worker's process and the broker: latency, order, lost and late answers, cuts, outages."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.workers import Life

Reply = Callable[..., None]
LATE_ACK_S = (0.3, 2.0)


class Network:
    """One process's connection. What is sent on one channel arrives in the order of sending, once."""

    def __init__(self, cluster: Cluster, life: Life) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._life = life
        self._rng = cluster.world.stream(f"network/{life.name}")
        self._sent_until: dict[str, float] = {}
        self._heard_until: dict[str, float] = {}
        self._unsent: list[tuple[str, str, Callable[[], Any], Reply | None]] = []
        self._unheard: list[tuple[str, str, Reply, tuple[Any, ...]]] = []
        self._held: dict[str, list[tuple[str, Callable[[], Any], Reply | None]]] = {}
        """By channel, what has come to a broker that is down."""
        self.cut = False
        self.flushes_until = 0.0
        """What a killed or stopped process has handed to its socket still arrives until then."""

    @property
    def reachable(self) -> bool:
        return not (self.cut or self._life.paused or self._life.gone)

    @property
    def unacknowledged(self) -> bool:
        return bool(self._unsent)

    def latency(self) -> float:
        return self._cluster.plan.latency_s * self._rng.uniform(0.2, 2.0)

    def ask(self, channel: str, label: str, at_broker: Callable[[], Any], reply: Reply | None) -> None:
        """`at_broker` runs where the log is; its value comes back to `reply`, in the process that asked."""
        delay = self.latency()
        if self._cluster.happens("slow_broker", self._rng, 0.08):
            delay += self._rng.uniform(*LATE_ACK_S)
        at = max(self._world.now + delay, self._sent_until.get(channel, 0.0))
        self._sent_until[channel] = at
        self._world.on(
            at,
            None,
            f"{self._life.name} {label} arrives",
            self._arrive,
            channel,
            label,
            at_broker,
            reply,
        )

    def _arrive(self, channel: str, label: str, at_broker: Callable[[], Any], reply: Reply | None) -> None:
        down_until = self._cluster.broker_down_until
        if not self.reachable and self._world.now > self.flushes_until:
            if self._life.gone:
                self._world.note("is lost with its process")
            else:
                self._unsent.append((channel, label, at_broker, reply))
        elif self._world.now < down_until or self._held.get(channel):
            held = self._held.setdefault(channel, [])
            held.append((label, at_broker, reply))
            if len(held) == 1:
                self._world.on(down_until, None, f"{self._life.name} {channel} goes on", self._go_on, channel)
        else:
            value = at_broker()
            if reply is not None:
                self.hear(channel, label, reply, value)

    def _go_on(self, channel: str) -> None:
        """The broker may be back: what waited for it on a channel arrives in the order of sending."""
        down_until = self._cluster.broker_down_until
        if self._world.now < down_until:
            self._world.on(down_until, None, f"{self._life.name} {channel} goes on", self._go_on, channel)
            return
        for label, at_broker, reply in self._held.pop(channel):
            self._world.note(f"{self._life.name} {label} arrives at last")
            self._arrive(channel, label, at_broker, reply)

    def hear(self, channel: str, label: str, reply: Reply, *values: Any) -> None:
        """Something comes from the broker."""
        if self.cut:
            self._unheard.append((channel, label, reply, values))
            return
        delay = self.latency()
        if self._cluster.happens("late_ack", self._rng, 0.05):
            delay += self._rng.uniform(*LATE_ACK_S)
        at = max(self._world.now + delay, self._heard_until.get(channel, 0.0))
        self._heard_until[channel] = at
        self._world.on(at, self._life, f"{self._life.name} hears {label}", reply, *values)

    def heal(self) -> None:
        """The process and the broker reach each other again."""
        unsent, self._unsent = self._unsent, []
        for channel, label, at_broker, reply in unsent:
            self.ask(channel, label, at_broker, reply)
        unheard, self._unheard = self._unheard, []
        for channel, label, reply, values in unheard:
            self.hear(channel, label, reply, *values)
