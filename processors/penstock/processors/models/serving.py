"""What this worker serves: the configured models, the memory ledger of its devices, and what it tells about both."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from penstock.processors.core.ledger import Ledger
from penstock.processors.engines.base import Engine, EngineInfo, Limits
from penstock.processors.hardware import cpu, nvml
from penstock.processors.models.catalog import Catalog, ModelConfig
from penstock.processors.models.manager import ModelManager
from penstock.processors.models.sizing import Estimate
from penstock.processors.settings import WorkerSettings
from penstock.schemas.records import DeviceState, ModelInfo, ModelState, Record, Requirements
from penstock.schemas.topics import TopicNames

logger = logging.getLogger(__name__)

Publish = Callable[[str, str, Record], None]


class Serving:
    """The models' side of the worker, as its shell and reports need it. What is loaded when is the flow's to decide.

    `on_up`, `on_down` and `on_change` are the manager's.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        publish: Publish,
        names: TopicNames,
        on_up: Callable[[str, Limits], None],
        on_down: Callable[[str, int | None], None],
        on_change: Callable[[], None],
        clock_ms: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._publish = publish
        self._names = names
        self._on_change = on_change
        self._clock_ms = clock_ms
        memory = settings.memory
        self._ledger = Ledger(
            [cpu.capacity(memory.cpu_bytes, memory.cpu_reserve_bytes), *nvml.capacities(memory.gpu_reserve_bytes)]
        )
        self._manager = ModelManager(
            Catalog(
                ModelConfig(
                    id=model.id,
                    source=model.source,
                    engine=model.engine,
                    tasks=tuple(model.tasks),
                    aliases=tuple(model.aliases),
                    options=dict(model.options),
                )
                for model in settings.models
            ),
            self._ledger,
            probe=used_bytes,
            on_up=on_up,
            on_down=on_down,
            on_change=self._changed,
        )
        self._used: dict[str, int] = {}

    async def stop(self) -> None:
        """End all engines and all loading at once; their memory comes back with their processes."""
        await self._manager.stop()

    # -- for the shell

    @property
    def models(self) -> list[str]:
        """In the order they are configured."""
        return [config.id for config in self._manager.catalog]

    def resolve(self, task: str, model: str | None) -> ModelConfig:
        """Raises ModelNotFound."""
        return self._manager.resolve(task, model)

    def engine(self, model: str) -> Engine | None:
        return self._manager.engine(model)

    def estimate(self, model: str) -> Estimate:
        return self._manager.estimate(model)

    async def load(self, model: str) -> Engine:
        """Raises MemoryShort, InsufficientCapacity, CannotLoad, EngineFailed."""
        return await self._manager.load(model)

    async def unload(self, model: str) -> None:
        await self._manager.unload(model)

    def check_fits(self, model: str, requirements: Requirements | None) -> None:
        """Raises InsufficientCapacity, naming need and capacity."""
        self._manager.check_fits(model, requirements)

    # -- for reports

    async def observe(self) -> None:
        """Measure the devices; what no grant explains is not granted again."""
        self._used = dict(await self._manager.observe())

    def model_states(self) -> list[ModelState]:
        return list(self._manager.states())

    def device_states(self) -> list[DeviceState]:
        return [
            DeviceState(
                device=device.device,
                kind=device.kind,
                total_bytes=device.total_bytes,
                reserved_bytes=self._ledger.reserved_bytes(device.device),
                used_bytes=self._used.get(device.device, 0),
            )
            for device in self._ledger.devices()
        ]

    def publish_models(self) -> None:
        """Tell every model's facts; the topic is compacted, the latest of each counts."""
        for config in self._manager.catalog:
            engine = self._manager.engine(config.id)
            info = EngineInfo() if engine is None else engine.info()
            record = ModelInfo(
                model=config.id,
                tasks=list(config.tasks),
                aliases=list(config.aliases),
                pool=self._settings.worker.pool,
                engine=config.engine,
                context_window=info.context_window,
                max_output_tokens=info.max_output_tokens,
                dimensions=info.dimensions,
                defaults=_defaults(config),
                state=str(self._manager.state(config.id)),
                weights_bytes=self._manager.need_bytes(config.id),
                updated_at=self._clock_ms(),
                worker_id=self._settings.worker_id,
            )
            self._publish(self._names.model, config.id, record)

    def _changed(self) -> None:
        self.publish_models()
        self._on_change()


def used_bytes() -> dict[str, int]:
    """Bytes in use on each device, by all programs."""
    return {"cpu": cpu.used_bytes(), **nvml.used_bytes()}


def _defaults(config: ModelConfig) -> dict[str, str]:
    defaults: Any = config.options.get("defaults")
    return {str(name): str(value) for name, value in defaults.items()} if isinstance(defaults, dict) else {}
