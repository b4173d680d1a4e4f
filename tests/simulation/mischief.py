"""Faults of processes, networks and the log, at random times; and the end of all faults."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

from penstock.processors.core.work.states import Stage

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.workers import Life

MOST_TIMES = 3
OFTEN = ("markers", "rewind", "unload", "lost_records", "foreign_memory", "pause_and_desire", "cancel")


class Mischief:
    """Each kind of fault has a stream of its own."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._kinds: dict[str, Callable[[Random, Life], None]] = {
            "crash": lambda rng, life: self._cluster.kill_worker(life, "a fault"),
            "pause": lambda rng, life: self._cluster.pause(life, rng.uniform(1.2, 4.0)),
            "short_pause": lambda rng, life: self._cluster.pause(life, rng.uniform(0.05, 0.8)),
            "cut": lambda rng, life: self._cluster.cut(life, rng.uniform(0.2, 4.0)),
            "restart": lambda rng, life: life.stop() if not (life.paused or life.gone) else None,
            "outage": self._outage,
            "rewind": lambda rng, life: life.consumer.rewind(),
            "markers": self._markers,
            "lost_records": self._lose,
            "unload": self._unload,
            "engine_death": self._engine_death,
            "foreign_memory": self._foreign_memory,
            "pause_and_desire": self._operator,
            "cancel": self._cancel,
        }

    def start(self, until_s: float) -> None:
        for name, do in self._kinds.items():
            rng = self._world.stream(f"fault/{name}")
            times = rng.randint(1, MOST_TIMES) * (6 if name in OFTEN else 1)
            for _ in range(times):
                at = rng.uniform(0.0, until_s)
                if self._cluster.plan.has(name):
                    self._world.at(at, None, name, self._happens, name, do, rng)

    def _happens(self, name: str, do: Callable[[Random, Life], None], rng: Random) -> None:
        lives = self._cluster.lives()
        if lives and not self._cluster.calm:
            life = rng.choice(lives)
            self._world.fault(name, life.name)
            do(rng, life)

    def _outage(self, rng: Random, life: Life) -> None:
        self._cluster.broker_down_until = self._world.now + rng.uniform(0.2, 3.0)

    def _markers(self, rng: Random, life: Life) -> None:
        partitions = self._cluster.log.partitions
        tp = rng.choice(sorted(partitions))
        partitions[tp].marker()
        self._cluster.wake_consumers()

    def _lose(self, rng: Random, life: Life) -> None:
        """Retention takes a record whose bytes a worker does not hold any more."""
        away = [work for work in life.inside.works() if work.stage in (Stage.PARKED, Stage.FETCHING)]
        if away:
            work = rng.choice(away)
            record = self._cluster.truth.records.get((work.tp, work.key[2]))
            if record is not None:  # else the log has lost its end
                self._cluster.truth.lose(record)

    def _unload(self, rng: Random, life: Life) -> None:
        if life.engines:
            engine = life.engines[rng.choice(sorted(life.engines))]
            self._world.at(0.0, life, f"{life.name} unloads {engine.name}", life.unload, engine)

    def _engine_death(self, rng: Random, life: Life) -> None:
        if life.engines:
            life.engines[rng.choice(sorted(life.engines))].die()

    def _foreign_memory(self, rng: Random, life: Life) -> None:
        """Other programs use a device, more or less than before."""
        devices = life.host.devices
        capacity = rng.choice(devices.capacities)
        devices.foreign[capacity.device] = round(capacity.total_bytes * rng.choice([0.0, 0.1, 0.3, 0.6]))

    def _cancel(self, rng: Random, life: Life) -> None:
        """A request of a stage is cancelled: each stage is met, however short it is."""
        works = {str(work.stage): work for work in life.inside.works() if work.request_id}
        if works and self._cluster.clients is not None:
            work = works[rng.choice(sorted(works))]
            self._cluster.clients.cancel(work.tenant, work.request_id)

    def _operator(self, rng: Random, life: Life) -> None:
        """Somebody pauses a class or a model for a while, or has a model loaded, unloaded or pinned."""
        model = rng.choice(self._cluster.plan.lanes).name
        if model not in life.told.served:
            return
        if rng.random() < 0.5:
            kind, name = rng.choice([("class", rng.choice(["high", "medium", "low"])), ("model", model)])
            self._world.at(0.0, life, f"{life.name} pauses {name}", life.pause, kind, name, True)
            self._world.at(rng.uniform(0.1, 1.0), life, f"{life.name} resumes {name}", life.pause, kind, name, False)
        else:
            loaded, pinned = rng.choice([True, False, None]), rng.choice([True, None])
            self._world.at(
                0.0,
                life,
                f"{life.name} desires {model} {loaded}",
                life.desire,
                model,
                loaded,
                pinned,
                self._cluster.world.steps,
            )
            self._world.at(1.0, life, f"{life.name} desires {model} no more", life.desire, model, None, None, 0)
