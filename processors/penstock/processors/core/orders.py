"""What operators and the configuration want of models and classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.processors.core.agenda import Agenda
from penstock.processors.core.lane import Lanes
from penstock.processors.core.lifecycle import Lifecycle
from penstock.processors.core.residents import ModelSpec
from penstock.processors.core.scheduler import Scheduler
from penstock.processors.core.work import Work
from penstock.schemas.topics import CLASSES


@dataclass(eq=False)
class Orders:
    """Takes orders. Placement reads what follows from them."""

    _scheduler: Scheduler[Work]
    _lanes: Lanes
    _lifecycle: Lifecycle
    _agenda: Agenda

    def configure(self, models: Mapping[str, ModelSpec], now: float) -> None:
        """The models that are served from now on; those that are not named any more are unloaded, and take no more."""
        for name, spec in models.items():
            lane = self._lanes[name]
            if lane.spec != spec:
                if _sized_by(lane.spec) != _sized_by(spec):
                    lane.size_due = True
                lane.spec, lane.never_fits = spec, None
                lane.too_small.clear()
            lane.served = True
        for lane in self._lanes.values():
            if lane.name not in models and lane.served:
                lane.served, lane.wanted = False, False
        self._agenda.look_at_all(self._lanes.values())
        self._agenda.plan_soon()

    def want(self, name: str) -> None:
        """Load the model when there is room for it, whether somebody waits for it or not."""
        lane = self._lanes[name]
        lane.wanted = True
        self._agenda.plan_soon()
        self._agenda.look_at(lane)

    def desire(self, model: str, loaded: bool | None, pinned: bool | None) -> None:
        """What an operator wants: loaded, or unloaded until somebody asks for it; pinned or not. None: no matter."""
        lane = self._lanes[model]
        lane.unload_due = loaded is False and lane.desired is not False
        lane.desired, lane.pinned = loaded, pinned
        if loaded:
            for number in list(lane.replicas):
                self._lifecycle.undo_drain(model, number)
        if loaded is False:
            lane.wanted = False
        self._agenda.plan_soon()
        self._agenda.look_at(lane)

    def pause(self, kind: str, name: str, paused: bool) -> None:
        """Nothing new starts of a model, or of a class, until it is resumed. Raises ValueError for another kind."""
        if kind == "model":
            self._lanes[name].paused = paused
        elif kind == "class" and name in CLASSES:
            others = self._scheduler.paused - {name}
            self._scheduler.paused = others | {name} if paused else others
        else:
            raise ValueError(f"neither a model nor a class: {kind} {name}")
        self._agenda.look_at_all(self._lanes.values())
        self._agenda.plan_soon()


def _sized_by(spec: ModelSpec) -> tuple[object, ...]:
    return spec.devices, spec.count, spec.source, spec.dtype, spec.options
