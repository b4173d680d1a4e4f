"""Models: the catalog of what is configured, and the manager that brings engines to life with memory granted first."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from penstock.processors.core.admission import CannotLoad, Grant, Ledger, MemoryShort
from penstock.processors.engines import loading
from penstock.processors.engines.base import Engine
from penstock.processors.engines.noop import NoopEngine
from penstock.schemas.errors import EngineFailed, InsufficientCapacity, InvalidRequest, ModelNotFound, PenstockError
from penstock.schemas.records import ModelState, Requirements

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A configured model. `source`: hub id, folder, GGUF file, URL of a server (remote) or anything (noop)."""

    id: str
    source: str
    engine: str
    tasks: tuple[str, ...] = ("text_generation",)
    aliases: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Catalog:
    """Which model serves a request. The first configured model of a task is the best for it."""

    def __init__(self, configs: Iterable[ModelConfig]) -> None:
        self._configs = list(configs)
        self._names: dict[str, ModelConfig] = {}
        for config in self._configs:
            for name in (config.id, *config.aliases):
                if name in self._names:
                    raise InvalidRequest(f"two models are called {name}; names and aliases must differ", param="models")
                self._names[name] = config

    def __iter__(self) -> Any:
        return iter(self._configs)

    def get(self, model: str) -> ModelConfig:
        """By id or alias. Raises ModelNotFound."""
        config = self._names.get(model)
        if config is None:
            raise ModelNotFound(f"the model {model} is not served here", param="model")
        return config

    def resolve(self, task: str, model: str | None) -> ModelConfig:
        """The model for a request; None means the best for the task. Raises ModelNotFound."""
        if model is None:
            for config in self._configs:
                if task in config.tasks:
                    return config
            raise ModelNotFound(f"no model here serves {task}", param="model")
        config = self.get(model)
        if task not in config.tasks:
            raise ModelNotFound(f"the model {model} does not serve {task}", param="model")
        return config


class Lifecycle(StrEnum):
    """A model's state on this worker."""

    CONFIGURED = "configured"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"
    UNLOADING = "unloading"


_ALLOWED: dict[Lifecycle, frozenset[Lifecycle]] = {
    Lifecycle.CONFIGURED: frozenset({Lifecycle.LOADING}),
    Lifecycle.LOADING: frozenset({Lifecycle.READY, Lifecycle.FAILED, Lifecycle.CONFIGURED}),
    Lifecycle.READY: frozenset({Lifecycle.UNLOADING}),
    Lifecycle.FAILED: frozenset({Lifecycle.LOADING}),
    Lifecycle.UNLOADING: frozenset({Lifecycle.CONFIGURED}),
}


class IllegalTransition(RuntimeError):
    """A model was asked to go where it cannot go from its state."""


class _Loaded:
    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.state = Lifecycle.CONFIGURED
        self.engine: Engine | None = None
        self.grant: Grant | None = None
        self.need_bytes: int | None = None
        self.error: PenstockError | None = None
        self.lock = asyncio.Lock()

    def go(self, state: Lifecycle) -> None:
        if state not in _ALLOWED[self.state]:
            raise IllegalTransition(f"{self.config.id}: {self.state} cannot become {state}")
        logger.info("model.%s model=%s", state, self.config.id)
        self.state = state


def make_engine(config: ModelConfig) -> Engine:
    """The engine of a configured model, not started. Raises InvalidRequest, and what reading its size raises."""
    options = dict(config.options)
    match config.engine:
        case "noop":
            return NoopEngine(config.id, options)
        case "remote":
            from penstock.processors.engines.remote import RemoteEngine

            return RemoteEngine(config.id, config.source, options)
        case "text" | "embedding":
            from penstock.processors.engines.host import ChildEngine

            # Looked up once, here: the child opens what was sized.
            source = str(loading.resolve_source(config.source))
            if config.engine == "text":
                options["cache_tokens"] = loading.cache_tokens(options)
            options["granted_bytes"] = loading.memory_need(source, config.engine, options)
            return ChildEngine(
                config.id,
                config.engine,
                source,
                options,
                memory_need_bytes=options["granted_bytes"],
                slots=int(options.get("slots", 64 if config.engine == "text" else 256)),
            )
        case _:
            raise InvalidRequest(f"{config.id}: there is no engine {config.engine}", param="models")


def share_cores(configs: Sequence[ModelConfig], cores: int) -> dict[str, ModelConfig]:
    """By id, with `threads` for each local engine that names none: two that want all cores slow each other sevenfold.

    One core is left to Kafka, the worker and the gateway where there are more than two.
    """
    local = [config for config in configs if config.engine in ("text", "embedding")]
    threads = max(1, (cores - 1) // max(1, len(local)))
    return {
        config.id: replace(config, options={"threads": threads, **config.options}) if config in local else config
        for config in configs
    }


class ModelManager:
    """Loads models when they are asked for: memory is granted by the ledger before a process is started.

    `on_change` is called after each change of a model's state, `on_load(model, seconds)` after each load,
    `on_unload(model)` when its process has ended, asked or not.
    """

    def __init__(
        self,
        catalog: Catalog,
        ledger: Ledger,
        *,
        make: Callable[[ModelConfig], Engine] = make_engine,
        on_change: Callable[[], None] = lambda: None,
        on_load: Callable[[str, float], None] = lambda model, seconds: None,
        on_unload: Callable[[str], None] = lambda model: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.catalog = catalog
        self._ledger = ledger
        self._make = make
        self._on_change = on_change
        self._on_load = on_load
        self._on_unload = on_unload
        self._clock = clock
        shared = share_cores(list(catalog), loading.usable_cores())
        self._loaded = {model: _Loaded(config) for model, config in shared.items()}

    def resolve(self, task: str, model: str | None) -> ModelConfig:
        return self.catalog.resolve(task, model)

    def engine(self, model: str) -> Engine | None:
        """The engine of a ready model, else None."""
        found = self._loaded.get(model)
        return found.engine if found is not None and found.state is Lifecycle.READY else None

    def state(self, model: str) -> Lifecycle:
        return self._loaded[model].state

    def check_fits(self, model: str, requirements: Requirements | None) -> None:
        """Raises InsufficientCapacity for a model, or a request's own requirements, that no device here could hold."""
        known = self._loaded[model].error
        if isinstance(known, InsufficientCapacity):
            raise known
        if requirements is None:
            return
        for need, kind in ((requirements.vram_bytes, "cuda"), (requirements.cpu_memory_bytes, "cpu")):
            devices = [found.device for found in self._ledger.devices() if found.kind == kind]
            if need and not any(self._ledger.fits_ever(need, device) for device in devices):
                raise self._ledger.insufficient("the request", need, devices[0] if devices else "")

    async def ensure_loaded(self, model: str) -> Engine:
        """The model's engine, loaded if need be; concurrent calls share one load.

        Raises InsufficientCapacity when it can never fit, EngineFailed (call again later) when loading failed or memory
        is short now.
        """
        found = self._loaded[self.catalog.get(model).id]
        async with found.lock:
            if found.state is Lifecycle.READY and found.engine is not None:
                return found.engine
            return await self._load(found)

    async def _load(self, found: _Loaded) -> Engine:
        config = found.config
        found.go(Lifecycle.LOADING)
        self._on_change()
        began = self._clock()
        engine: Engine | None = None
        try:
            engine = await asyncio.to_thread(self._make, config)
            engine.on_died = lambda _code: self._on_unload(config.id)
            found.need_bytes = engine.memory_need()
            found.grant = self._grant(config, found.need_bytes)
            await engine.start()
        except BaseException as error:
            if engine is not None:
                await engine.stop()  # first: what it holds is free only when its process has ended
            found.go(Lifecycle.FAILED)
            if found.grant is not None:
                self._ledger.release(found.grant)
                found.grant = None
            self._on_change()
            if isinstance(error, EngineFailed | InsufficientCapacity):
                found.error = error
                raise
            if isinstance(error, Exception):
                logger.exception("model.load_failed model=%s", config.id)
                # Callers are told no more: the rest may name places on this machine.
                known = CannotLoad if isinstance(error, PenstockError) else EngineFailed
                found.error = known(f"{config.id} could not be loaded, the worker's log says why")
                raise found.error from error
            raise
        found.engine, found.error = engine, None
        found.go(Lifecycle.READY)
        self._on_load(config.id, self._clock() - began)
        self._on_change()
        return engine

    def _grant(self, config: ModelConfig, need_bytes: int) -> Grant | None:
        if need_bytes == 0:
            return None
        device = loading.device_name(config.options)
        if not self._ledger.fits_ever(need_bytes, device):
            raise self._ledger.insufficient(config.id, need_bytes, device)
        grant = self._ledger.grant(config.id, need_bytes, device, self._clock())
        if grant is None:
            free = self._ledger.free_bytes(device)
            raise MemoryShort(
                f"{config.id} needs {need_bytes / 2**20:.0f} MiB on {device}; {free / 2**20:.0f} MiB are free now"
            )
        return grant

    async def unload(self, model: str) -> None:
        """End the model's process; all its memory comes back."""
        found = self._loaded[self.catalog.get(model).id]
        async with found.lock:
            if found.state is not Lifecycle.READY:
                return
            found.go(Lifecycle.UNLOADING)
            engine, found.engine = found.engine, None
            if engine is not None:
                await engine.stop()
            if found.grant is not None:
                self._ledger.release(found.grant)
                found.grant = None
            found.go(Lifecycle.CONFIGURED)
        self._on_unload(found.config.id)
        self._on_change()

    async def stop(self) -> None:
        """End all engines at once."""
        await asyncio.gather(*(self.unload(config.id) for config in self.catalog), return_exceptions=True)

    def states(self) -> Sequence[ModelState]:
        return [
            ModelState(
                model=config.id,
                state=found.state.value,
                memory_bytes=None if found.engine is None else found.engine.measured_memory(),
            )
            for config in self.catalog
            for found in [self._loaded[config.id]]
        ]

    def need_bytes(self, model: str) -> int | None:
        return self._loaded[model].need_bytes

    def error(self, model: str) -> PenstockError | None:
        return self._loaded[model].error

    def granted_memory(self) -> dict[str, int]:
        """Measured bytes by device of the holders of grants, for the ledger's observation."""
        found: dict[str, int] = {}
        for loaded in self._loaded.values():
            if loaded.grant is not None and loaded.engine is not None:
                # What it uses beyond its grant is nobody's grant: it counts as foreign, and is not granted again.
                measured = min(loaded.engine.measured_memory() or 0, loaded.grant.bytes)
                found[loaded.grant.device] = found.get(loaded.grant.device, 0) + measured
        return found
