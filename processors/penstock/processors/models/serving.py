"""What this worker serves: the configured models, the memory ledger of its devices, and what it tells about both."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from penstock.processors.core.admission import Ledger
from penstock.processors.engines.base import Engine, EngineInfo, EngineState
from penstock.processors.hardware import cpu, nvml
from penstock.processors.metrics import Metrics
from penstock.processors.models.manager import Catalog, Lifecycle, ModelConfig, ModelManager
from penstock.processors.settings import WorkerSettings
from penstock.schemas.errors import PenstockError
from penstock.schemas.records import DeviceState, ModelInfo, ModelState, Record, Requirements
from penstock.schemas.topics import TopicNames

logger = logging.getLogger(__name__)

Publish = Callable[[str, str, Record], None]


class Serving:
    """The models' side of the worker, as lanes and reports need it.

    Models are loaded in the background from the start on, in the order they are configured, so that the first request
    does not wait for what could have been done before it.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        metrics: Metrics,
        *,
        publish: Publish,
        names: TopicNames,
        on_change: Callable[[], None],
        clock_ms: Callable[[], int],
    ) -> None:
        self._settings = settings
        self._metrics = metrics
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
            on_change=self._changed,
            on_load=self._loaded,
            on_unload=lambda model: metrics.unloads.labels(model).inc(),
        )
        self._preload: asyncio.Task[None] | None = None
        self._used: dict[str, int] = {}

    async def start(self) -> None:
        self._changed()
        self._preload = asyncio.create_task(self._load_all(), name="preload")

    async def stop(self) -> None:
        """End all engines; their memory comes back with their processes."""
        if self._preload is not None:
            self._preload.cancel()
            await asyncio.gather(self._preload, return_exceptions=True)
        await self._manager.stop()

    async def _load_all(self) -> None:
        for config in self._manager.catalog:
            try:
                await self._manager.ensure_loaded(config.id)
            except PenstockError as error:  # told again, with a retry, to the first request that asks for it
                logger.error("serving.load_failed model=%s error=%s", config.id, error)

    # -- for lanes

    def resolve(self, task: str, model: str | None) -> ModelConfig:
        """Raises ModelNotFound."""
        return self._manager.resolve(task, model)

    def engine(self, model: str) -> Engine | None:
        return self._manager.engine(model)

    async def ensure_loaded(self, model: str) -> Engine:
        """Raises InsufficientCapacity, EngineFailed."""
        return await self._manager.ensure_loaded(model)

    def check_fits(self, model: str, requirements: Requirements | None) -> None:
        """Raises InsufficientCapacity, naming need and capacity."""
        self._manager.check_fits(model, requirements)

    # -- for reports

    def observe(self) -> None:
        """Measure the devices; what no grant explains is not granted again. Takes milliseconds: call it in a thread."""
        used = {"cpu": cpu.used_bytes(), **nvml.used_bytes()}
        granted = self._manager.granted_memory()
        for device, used_bytes in used.items():
            self._ledger.observe(device, used_bytes, by_grants_bytes=granted.get(device, 0))
        self._used = used

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
            state = self._manager.state(config.id)
            if engine is not None and engine.state is not EngineState.READY:
                state = Lifecycle.LOADING
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
                state=str(state),
                weights_bytes=self._manager.need_bytes(config.id),
                updated_at=self._clock_ms(),
                worker_id=self._settings.worker_id,
            )
            self._publish(self._names.model, config.id, record)

    def _changed(self) -> None:
        self.publish_models()
        self._on_change()

    def _loaded(self, model: str, seconds: float) -> None:
        self._metrics.loads.labels(model).inc()
        logger.info("serving.loaded model=%s seconds=%.1f", model, seconds)


def _defaults(config: ModelConfig) -> dict[str, str]:
    found: Any = config.options.get("defaults")
    return {str(name): str(value) for name, value in found.items()} if isinstance(found, dict) else {}
