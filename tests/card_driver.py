"""A flow with one simulated card and models that take memory of it. Time moves by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flow_driver import World
from penstock.processors.core import effects as ask
from penstock.processors.core.fleet.ledger import DeviceCapacity
from penstock.processors.core.fleet.residents import ModelSpec, Needs
from penstock.processors.core.flow import Flow

GB = 1 << 30


class Card(World):
    """A flow with one simulated card. Sizes and loads are answered at once, loads unless `slow_loads`."""

    def __init__(self, total_gb: int, models: dict[str, Needs], *, slots: int = 1, **settings: Any) -> None:
        self.needs, self.slots = models, slots
        self.specs = {model: ModelSpec(model=model, devices=("simulated",)) for model in models}
        self.total_gb = total_gb
        self.unloads: list[tuple[str, int, str]] = []
        self.slow_loads: list[tuple[str, int]] | None = None
        self.inline = True
        super().__init__(*models, **settings)

    def make_flow(self, *args: Any) -> Flow:
        return Flow(*args, devices=[DeviceCapacity(device="sim", kind="simulated", total_bytes=self.total_gb * GB)])

    def observe(self, foreign_gb: int = 0) -> None:
        held = self.flow.ledger.reserved_bytes("sim")
        self.flow.measurements.observed({"sim": (held + foreign_gb * GB, held)}, self.now)
        self.settle()

    def configure(self, **changes: ModelSpec) -> None:
        self.specs |= changes
        self.flow.orders.configure(self.specs, self.now)
        self.settle()

    def answer(self, effect: Any) -> None:
        super().answer(effect)
        match effect:
            case ask.Size(model):
                self.flow.replicas.sized(model, self.needs[model], self.now)
            case ask.Load(model, replica):
                if self.slow_loads is None:
                    self.loaded(model, replica)
                else:
                    self.slow_loads.append((model, replica))
            case ask.Unload(model, replica, reason):
                self.unloads.append((model, replica, reason))
                self.flow.replicas.gone(model, replica, self.now)
            case _:
                pass

    def loaded(self, model: str, replica: int) -> None:
        self.flow.replicas.up(model, replica, self.slots, None, self.now, inline=self.inline)

    def ready(self, model: str) -> list[int]:
        return [replica.number for replica in self.flow.lane(model).ready]

    @property
    def free_gb(self) -> float:
        return self.flow.ledger.free_bytes("sim") / GB

    def pass_steps(self, seconds: float, step_s: float = 0.1, each: Callable[[], None] = lambda: None) -> None:
        for _ in range(round(seconds / step_s)):
            self.pass_time(step_s)
            each()


def gb(load: float, run: float = 0) -> Needs:
    return Needs(load_bytes=round(load * GB), run_bytes=round(run * GB), exact=True)


def card(total_gb: int, slots: int = 1, **models: Needs) -> Card:
    world = Card(total_gb, models, slots=slots)
    world.configure()
    world.observe()
    return world
