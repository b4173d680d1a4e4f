"""What operators and the configuration want of models and classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.processors.core.fleet.dirty_set import DirtySet
from penstock.processors.core.fleet.lane import Lane, Lanes
from penstock.processors.core.fleet.residents import ModelSpec
from penstock.processors.core.loading.lifecycle import Lifecycle
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.work.work import Work
from penstock.schemas.topics import CLASSES

BY_ORDER = frozenset({"desired", "removed", "replaced"})
"""Reasons for which replicas are drained by order."""


@dataclass(eq=False)
class Orders:
    """Takes orders. Placement reads what follows from them."""

    _scheduler: Scheduler[Work]
    _lanes: Lanes
    _lifecycle: Lifecycle
    _dirty: DirtySet

    def configure(self, models: Mapping[str, ModelSpec], now: float) -> None:
        """The models that are served from now on; those that are not named any more are unloaded, and take no more."""
        for name, spec in models.items():
            lane = self._lanes[name]
            if lane.spec != spec:
                if lane.spec.made_of != spec.made_of:
                    lane.size_due, lane.never_fits = True, None
                    lane.forget_failures()
                lane.spec = spec
                lane.too_small.clear()
            if not lane.served:
                lane.forget_failures()
            lane.served = True
            self._take_back(lane)
            self._lifecycle.end_ordered(lane)
        for lane in self._lanes.values():
            if lane.name not in models and lane.served:
                lane.served, lane.wanted = False, False
                self._lifecycle.end_ordered(lane)
        self._dirty.look_at_all(self._lanes.values())
        self._dirty.plan_soon()

    def want(self, name: str) -> None:
        """Load the model when there is room for it, whether somebody waits for it or not."""
        lane = self._lanes[name]
        lane.wanted = True
        self._dirty.plan_soon()
        self._dirty.look_at(lane)

    def desire(self, model: str, loaded: bool | None, pinned: bool | None, unload_revision: int | None = None) -> None:
        """What an operator wants: loaded, or unloaded until somebody asks for it; pinned or not. None: no matter.

        `unload_revision`: the revision of the newest order to unload it (None: this is the first one since it was
        wanted otherwise). Replicas whose load began before are ended. What is loaded later for who asks stays.
        """
        lane = self._lanes[model]
        if unload_revision is None:
            unload_revision = lane.unload_revision + (loaded is False and lane.desired is not False)
        if loaded and lane.desired is not True:
            lane.forget_failures()
        elif loaded is False and unload_revision != lane.unload_revision:  # from now on it is absent, not failed
            lane.forget_failures()
            lane.size_due, lane.never_fits = True, None
        lane.desired, lane.pinned, lane.unload_revision = loaded, pinned, unload_revision
        if loaded is False:
            lane.wanted = False
        self._take_back(lane, all_drains=loaded is True)
        self._lifecycle.end_ordered(lane)
        self._dirty.plan_soon()
        self._dirty.look_at(lane)

    def _take_back(self, lane: Lane, *, all_drains: bool = False) -> None:
        """Replicas that were drained by an order which does not hold any more take runs again."""
        for number, replica in list(lane.replicas.items()):
            if (all_drains or replica.reason in BY_ORDER) and lane.reason_to_end(replica) is None:
                self._lifecycle.undo_drain(lane.name, number)

    def pause(self, kind: str, name: str, paused: bool) -> None:
        """Nothing new starts of a model, or of a class, until it is resumed. Raises ValueError for another kind."""
        if kind == "model":
            self._lanes[name].paused = paused
        elif kind == "class" and name in CLASSES:
            others = self._scheduler.fronts.paused - {name}
            self._scheduler.fronts.paused = others | {name} if paused else others
        else:
            raise ValueError(f"neither a model nor a class: {kind} {name}")
        self._dirty.look_at_all(self._lanes.values())
        self._dirty.plan_soon()

    def paused(self) -> list[str]:
        """Classes and models of which nothing new starts."""
        classes = [f"class/{klass}" for klass in CLASSES if klass in self._scheduler.fronts.paused]
        return classes + [f"model/{lane.name}" for lane in self._lanes.values() if lane.paused]
