"""What operators want of models and classes, kept outside of workers as on the compacted topic `inference.desired`."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from penstock.common.desired import DesiredRecord
from penstock.common.model_entry import ModelEntry, parse_entry
from penstock.schemas.desired import CLASS, MODEL, desired_key, ordered
from penstock.schemas.records import DesiredState
from simulation.plan import LaneSpec

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.workers import Life

ORDERS = frozenset({"load_unload", "pin", "pause_model", "pause_class", "change_models", "pause_suspects"})
"""Kinds of operators that write orders."""


def entry_of(lane: LaneSpec) -> dict[str, Any]:
    """The `[[models]]` table of a simulated model. Its source says which one of the plan it is."""
    return {"id": lane.name, "engine": "noop", "source": lane.source, "preload": False}


def configured(lanes: Sequence[LaneSpec]) -> list[ModelEntry]:
    return [parse_entry(entry_of(lane)) for lane in lanes]


class Orders:
    """The topic. A record holds all that is wanted of its key; the newest of a key is kept, in the order of writing."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._kept: dict[str, DesiredState | None] = {}
        self._log: list[DesiredRecord] = []
        self._revisions: dict[str, int] = {}

    @property
    def used(self) -> bool:
        return not ORDERS.isdisjoint(self._cluster.plan.operators)

    def give(self, kind: str, name: str, action: str, lane: LaneSpec | None = None) -> None:
        """An operator orders something. `lane`: the model to add, or to put in the place of one."""
        key = desired_key(kind, name, None)
        entry = None if lane is None else json.dumps(entry_of(lane))
        now_ms = self._cluster.world.wall_ms
        wish = ordered(self._kept.get(key), kind=kind, name=name, pool=None, action=action, now_ms=now_ms, entry=entry)
        self._write(key, wish)

    def withdraw(self, key: str) -> None:
        """Nothing is wanted of it any more: it is as configured."""
        self._write(key, None)

    def standing(self) -> list[tuple[str, DesiredState]]:
        """What is wanted, by key."""
        return [(key, wish) for key, wish in self._kept.items() if wish is not None]

    def _write(self, key: str, wish: DesiredState | None) -> None:
        self._kept.pop(key, None)
        self._kept[key] = wish
        self._revisions[key] = len(self._log)
        self._log.append(DesiredRecord(key, wish, len(self._log)))
        for life in self._cluster.lives():
            life.hear_orders([self._log[-1]])

    def replay(self) -> tuple[list[DesiredRecord], int]:
        """The topic from its start, compacted; and how much of it that is."""
        return [DesiredRecord(key, wish, self._revisions[key]) for key, wish in self._kept.items()], len(self._log)

    def since(self, known: int) -> list[DesiredRecord]:
        return self._log[known:]


@dataclass(slots=True)
class Told:
    """What one life of a worker has been told, and has asked for. The checks compare what it says with this."""

    served: dict[str, LaneSpec] = field(default_factory=dict[str, LaneSpec])
    removed: Set[str] = frozenset()
    paused_models: set[str] = field(default_factory=set[str])
    paused_classes: set[str] = field(default_factory=set[str])
    loaded: dict[str, bool | None] = field(default_factory=dict[str, bool | None])

    loading: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """Replicas whose load, or whose end, was asked for and is not told yet."""
    sizing: set[str] = field(default_factory=set[str])
    failed_at: dict[str, float] = field(default_factory=dict[str, float])
    """When the last load of a model failed, or its engine died."""
    busy_until: dict[tuple[str, int], float] = field(default_factory=dict[tuple[str, int], float])

    def pauses(self, model: str, klass: str) -> bool:
        return model in self.paused_models or klass in self.paused_classes

    def is_changing(self, model: str) -> bool:
        """It is being sized, loaded or unloaded."""
        return model in self.sizing or any(name == model for name, _ in self.loading)

    def pause(self, kind: str, name: str, paused: bool) -> None:
        names = {CLASS: self.paused_classes, MODEL: self.paused_models}[kind]
        (names.add if paused else names.discard)(name)


def follow(life: Life) -> None:
    """Read the orders to the end, then go on with those that come; `life.joins` follows."""
    orders = life.cluster.orders

    def replayed(found: tuple[list[DesiredRecord], int]) -> None:
        wishes, known = found
        life.on_orders(wishes)
        life.follows_orders = True
        for item in orders.since(known):
            life.hear_orders([item])
        life.joins()

    life.network.ask("desired", "reads orders", orders.replay, replayed)
