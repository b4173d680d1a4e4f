"""A flow with one simulated card and models that take memory of it. Time moves by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from flow_driver import World
from penstock.processors.core import effects as ask
from penstock.processors.core.fleet.ledger import DeviceCapacity
from penstock.processors.core.fleet.residents import ModelSpec, Needs
from penstock.processors.core.flow import Flow

GB = 1 << 30


class Card(World):
    """A flow with one simulated card. Sizes and loads are answered at once, loads unless `slow_loads` (`by_hand`).

    `specs`: of models that have more than a size. Without `seen` a test configures and observes by itself.
    """

    device, kind = "sim", "simulated"

    def __init__(
        self,
        total_gb: int,
        models: dict[str, Needs],
        *,
        specs: Sequence[ModelSpec] = (),
        slots: int = 1,
        by_hand: bool = False,
        inline: bool = True,
        seen: bool = True,
        **settings: Any,
    ) -> None:
        self.needs, self.slots = models, slots
        self.specs = {model: spec(model, devices=(self.kind,)) for model in models} | {one.model: one for one in specs}
        self.total_gb = total_gb
        self.unloads: list[tuple[str, int, str]] = []
        self.memory_errors: list[tuple[int, int]] = []
        """(peak, booked) of each life that has ended."""
        self.slow_loads: list[tuple[str, int]] | None = [] if by_hand else None
        self.inline = inline
        super().__init__(*models, **settings)
        if seen:
            self.configure()
            self.observe()

    def make_flow(self, *args: Any) -> Flow:
        card = DeviceCapacity(device=self.device, kind=self.kind, total_bytes=self.total_gb * GB)
        heard = self.memory_errors
        return Flow(*args, deaths=self.deaths, devices=[card], memory_error=lambda *sizes: heard.append(sizes))

    def observe(self, foreign_gb: int = 0) -> None:
        held = self.flow.ledger.reserved_bytes(self.device)
        self.flow.measurements.observed({self.device: (held + foreign_gb * GB, held)}, self.now)
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
        return self.flow.ledger.free_bytes(self.device) / GB

    def pass_steps(self, seconds: float, step_s: float = 0.1, each: Callable[[], None] = lambda: None) -> None:
        for _ in range(round(seconds / step_s)):
            self.pass_time(step_s)
            each()


def gb(load: float, run: float = 0) -> Needs:
    return Needs(load_bytes=round(load * GB), run_bytes=round(run * GB), exact=True)


def spec(model: str, *, devices: tuple[str, ...] = ("simulated",), **fields: Any) -> ModelSpec:
    return ModelSpec(model=model, devices=devices, **fields)


def card(total_gb: int, slots: int = 1, **models: Needs) -> Card:
    return Card(total_gb, models, slots=slots)
