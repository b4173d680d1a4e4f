"""A flow whose loads are carried out by a real `LaneShell`, `Serving` and manager; sizes and engines are a test's."""

from __future__ import annotations

from typing import Any

from flow_driver import World
from penstock.common.model_entry import ModelEntry
from penstock.processors.core import effects as ask
from penstock.processors.core.flow import Flow
from penstock.processors.lanes import LaneShell
from penstock.processors.metrics import Metrics
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.manager import ModelManager
from penstock.processors.models.serving import Serving
from penstock.processors.models.sizing import ModelSize
from penstock.processors.settings import WorkerSettings
from penstock.schemas.records import Record
from penstock.schemas.topics import TopicNames


class LanesWorld(World):
    """Subclasses say what `make` and `find_size` give, and may keep what is published."""

    def __init__(self, models: list[ModelEntry], **settings: Any) -> None:
        self.metrics = Metrics()
        self.lanes = LaneShell(self.metrics, clock=lambda: self.now)
        self.serving = Serving(
            WorkerSettings.model_validate({"models": models, **settings}),
            publish=self.publish,
            names=TopicNames(),
            reports=self.lanes,
            clock_ms=lambda: 0,
            clock=lambda: self.now,
        )
        self.serving.manager = ModelManager(self.serving.catalog, self.lanes, make=self.make, size=self.find_size)
        super().__init__(*(model.id for model in models))

    def publish(self, topic: str, key: str, record: Record | None) -> None:
        """A record of a model; None is a tombstone."""

    def make(self, config: ModelConfig, size: ModelSize, devices: tuple[str, ...], granted_bytes: int) -> Any:
        raise NotImplementedError

    async def find_size(self, config: ModelConfig, on_progress: Any) -> ModelSize:
        raise NotImplementedError

    def make_flow(self, *args: Any) -> Flow:
        flow = Flow(*args, devices=self.serving.machine.capacities, memory_error=self.metrics.memory_error)
        self.lanes.connect(self.serving, flow, self.settle)
        self.serving.connect(flow)
        return flow

    def answer(self, effect: Any) -> None:
        match effect:
            case ask.Size():
                self.lanes.size(effect)
            case ask.Load():
                self.lanes.load(effect)
            case ask.Unload():
                self.lanes.unload(effect)
            case _:
                pass
        super().answer(effect)
