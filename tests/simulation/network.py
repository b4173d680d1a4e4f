"""What lies between a worker's process and the broker: latency, order, lost and late answers, cuts, outages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.workers import Life

Reply = Callable[..., None]
LATE_ACK_S = (0.3, 2.0)


@dataclass(frozen=True, slots=True)
class _Sent:
    """`number` grows with what the process sends."""

    number: int
    channel: str
    label: str
    at_broker: Callable[[], Any]
    reply: Reply | None


class Network:
    """One process's connection. What is sent on one channel arrives in the order of sending, once."""

    def __init__(self, cluster: Cluster, life: Life) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._life = life
        self._rng = cluster.world.stream(f"network/{life.name}")
        self._sent_until: dict[str, float] = {}
        self._heard_until: dict[str, float] = {}
        self._unsent: list[_Sent] = []
        self._numbers = itertools.count()
        self._late: dict[str, set[int]] = {}
        """By channel, what could not be sent when its time came, until it has arrived."""
        self._behind: dict[str, list[_Sent]] = {}
        """By channel, what was sent after such, and would overtake it."""
        self._unheard: list[tuple[str, str, Reply, tuple[Any, ...]]] = []
        self._held: dict[str, list[_Sent]] = {}
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
        self._send(_Sent(next(self._numbers), channel, label, at_broker, reply))

    def _send(self, sent: _Sent) -> None:
        delay = self.latency()
        if self._cluster.happens("slow_broker", self._rng, 0.08):
            delay += self._rng.uniform(*LATE_ACK_S)
        at = max(self._world.now + delay, self._sent_until.get(sent.channel, 0.0))
        self._sent_until[sent.channel] = at
        self._world.on(at, None, f"{self._life.name} {sent.label} arrives", self._arrive, sent)

    def _arrive(self, sent: _Sent) -> None:
        down_until = self._cluster.broker_down_until
        late = self._late.get(sent.channel, set())
        if any(number < sent.number for number in late):
            self._behind.setdefault(sent.channel, []).append(sent)
        elif not self.reachable and self._world.now > self.flushes_until:
            if self._life.gone:
                self._world.note("is lost with its process")
            else:
                self._unsent.append(sent)
                self._late.setdefault(sent.channel, set()).add(sent.number)
        elif self._world.now < down_until or self._held.get(sent.channel):
            held = self._held.setdefault(sent.channel, [])
            held.append(sent)
            if len(held) == 1:
                self._world.on(down_until, None, f"{self._life.name} {sent.channel} goes on", self._go_on, sent.channel)
        else:
            value = sent.at_broker()
            if sent.reply is not None:
                self.hear(sent.channel, sent.label, sent.reply, value)
            late.discard(sent.number)
            for other in self._behind.pop(sent.channel, []):
                self._arrive(other)

    def _go_on(self, channel: str) -> None:
        """The broker may be back: what waited for it on a channel arrives in the order of sending."""
        down_until = self._cluster.broker_down_until
        if self._world.now < down_until:
            self._world.on(down_until, None, f"{self._life.name} {channel} goes on", self._go_on, channel)
            return
        for sent in self._held.pop(channel):
            self._world.note(f"{self._life.name} {sent.label} arrives at last")
            self._arrive(sent)

    def hear(self, channel: str, label: str, reply: Reply, *values: Any) -> None:
        """Something comes from the broker."""
        if self.cut or self._unheard:  # what comes later does not overtake what could not be heard yet
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
        for sent in unsent:
            self._send(sent)
        unheard, self._unheard = self._unheard, []
        for channel, label, reply, values in unheard:
            self.hear(channel, label, reply, *values)
