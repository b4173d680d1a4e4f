"""The manager brings engines to life, with memory granted first, and says when one has died.

It does what it is told and reports: when to load, how often, and when to give up is the caller's to decide.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from penstock.processors.core.ledger import CannotLoad, Grant, Ledger, MemoryShort
from penstock.processors.engines.base import Engine, EngineState, Limits
from penstock.processors.engines.loading import device_name
from penstock.processors.engines.threads import in_daemon_thread
from penstock.processors.models import sizing
from penstock.processors.models.catalog import Catalog, ModelConfig, share_cores
from penstock.processors.models.factory import make_engine
from penstock.processors.models.lifecycle import Lifecycle, ServedModel
from penstock.processors.models.sizing import Estimate, ModelSize
from penstock.schemas.errors import EngineFailed, InsufficientCapacity, PenstockError
from penstock.schemas.records import ModelState, Requirements

logger = logging.getLogger(__name__)

Probe = Callable[[], Mapping[str, int]]
"""Device → bytes in use by all programs. It may block."""


class ModelManager:
    """The configured models on this worker.

    `on_up(model, limits)`: it is ready. `on_down(model, exit code)`: its process has ended and its memory is back; the
    code is None when `unload` ended it. `on_change()`: some state changed. Nothing is called once `stop` has begun.
    """

    def __init__(
        self,
        catalog: Catalog,
        ledger: Ledger,
        *,
        probe: Probe | None = None,
        on_up: Callable[[str, Limits], None] = lambda model, limits: None,
        on_down: Callable[[str, int | None], None] = lambda model, code: None,
        on_change: Callable[[], None] = lambda: None,
        make: Callable[[ModelConfig, ModelSize], Engine] = make_engine,
        size: Callable[[ModelConfig], Awaitable[ModelSize]] = sizing.size_model,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.catalog = catalog
        self._ledger = ledger
        self._probe = probe
        self._on_up, self._on_down, self._on_change = on_up, on_down, on_change
        self._make, self._size = make, size
        self._clock = clock
        self._stopping = False
        shared = share_cores(list(catalog), sizing.usable_cores())
        self._models = {model: ServedModel(config) for model, config in shared.items()}

    # -- what is known

    def resolve(self, task: str, model: str | None) -> ModelConfig:
        """Raises ModelNotFound."""
        return self.catalog.resolve(task, model)

    def engine(self, model: str) -> Engine | None:
        """The engine of a model that is ready or draining, else None."""
        served = self._models.get(model)
        return None if served is None else served.usable_engine

    def state(self, model: str) -> Lifecycle:
        return self._models[model].shown_state

    def states(self) -> Sequence[ModelState]:
        return [
            ModelState(
                model=model,
                state=served.shown_state.value,
                memory_bytes=None if served.engine is None else served.engine.measured_memory(),
            )
            for model, served in self._models.items()
        ]

    def error(self, model: str) -> PenstockError | None:
        """Why it is FAILED."""
        return self._models[model].error

    def need_bytes(self, model: str) -> int | None:
        size = self._models[model].size
        return None if size is None else size.need_bytes

    def estimate(self, model: str) -> Estimate:
        """What its runs will need, before it is loaded."""
        return sizing.estimate(self._models[model].config)

    def check_fits(self, model: str, requirements: Requirements | None) -> None:
        """Raises InsufficientCapacity for a model, or a request's own requirements, that no device here could hold."""
        known = self._models[model].error
        if isinstance(known, InsufficientCapacity):
            raise known
        if requirements is None:
            return
        for need, kind in ((requirements.vram_bytes, "cuda"), (requirements.cpu_memory_bytes, "cpu")):
            devices = [capacity.device for capacity in self._ledger.devices() if capacity.kind == kind]
            if need and not any(self._ledger.fits_ever({device: need}) for device in devices):
                largest = max(devices, key=self._ledger.limit_bytes, default="")
                raise self._ledger.insufficient("the request", {largest: need})

    async def observe(self) -> Mapping[str, int]:
        """Measure the devices, so that what no grant explains is not granted; the bytes in use by device."""
        if self._probe is None:
            return {}
        used = await in_daemon_thread(self._probe)
        granted = self._granted_memory()
        for device, used_bytes in used.items():
            self._ledger.observe(device, used_bytes, by_grants_bytes=granted.get(device, 0))
        return used

    def _granted_memory(self) -> dict[str, int]:
        """Measured bytes by device of the holders of grants."""
        total: dict[str, int] = {}
        for model in self._models.values():
            if model.grant is not None and model.engine is not None:
                # What it uses beyond its grant is nobody's grant: it counts as foreign, and is not granted again.
                measured = min(model.engine.measured_memory() or 0, model.grant.bytes)
                total[model.grant.device] = total.get(model.grant.device, 0) + measured
        return total

    # -- loading

    async def load(self, model: str) -> Engine:
        """The model's engine, loaded if need be; who asks together shares one load. A draining model is ready again.

        Raises MemoryShort (it would fit, but not now), InsufficientCapacity (it never fits), CannotLoad (somebody has
        to mend its configuration or files), EngineFailed. The load goes on when the caller is cancelled: `unload` and
        `stop` end it.
        """
        served = self._models[self.catalog.get(model).id]
        if self._stopping:
            raise EngineFailed("the worker is stopping")
        if served.shown_state is Lifecycle.DRAINING:
            served.go(Lifecycle.READY)
            self._up(served)
        loading = served.loading
        if loading is None:
            if served.usable_engine is not None:
                return served.usable_engine
            loading = served.loading = asyncio.create_task(self._load(served), name=f"load {served.config.id}")
            loading.add_done_callback(lambda task: self._load_ended(served, task))
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            if loading.cancelled():
                raise EngineFailed(f"loading {served.config.id} was given up") from None
            raise

    def _load_ended(self, served: ServedModel, task: asyncio.Task[Engine]) -> None:
        if served.loading is task:
            served.loading = None
        if not task.cancelled():
            task.exception()  # retrieved: perhaps nobody waits any more

    async def _load(self, served: ServedModel) -> Engine:
        if served.alive:
            await served.dead.wait()  # its engine is dying: the memory is back when its process has ended
        async with served.ending:
            try:
                return await self._grant_and_start(served)
            except BaseException as error:
                await self._clear(served)
                known = self._known_error(served, error)
                short = known is None or isinstance(known, MemoryShort)
                if served.state is Lifecycle.LOADING:
                    served.go(Lifecycle.ABSENT if short else Lifecycle.FAILED)
                    served.error = None if short else known
                    self._changed()
                if not short:
                    served.size = None  # perhaps its files are mended before the next try
                if known is None or known is error:
                    raise
                raise known from error

    async def _grant_and_start(self, served: ServedModel) -> Engine:
        config = served.config
        if served.size is None:
            self._go_loading(served)
            served.size = await self._size(config)
        await self.observe()
        served.grant = self._grant(config, served.size.need_bytes)
        self._go_loading(served)
        engine = self._make(config, served.size)
        served.engine = engine
        served.dead.clear()
        engine.on_died = lambda code: self._died(served, engine, code)
        await engine.start()
        if engine.state is not EngineState.READY:
            raise EngineFailed(f"{config.id} died as soon as it was loaded")
        served.error = None
        served.go(Lifecycle.READY)
        self._up(served)
        return engine

    def _go_loading(self, served: ServedModel) -> None:
        if served.state is not Lifecycle.LOADING:
            served.go(Lifecycle.LOADING)
            self._changed()

    def _grant(self, config: ModelConfig, need_bytes: int) -> Grant | None:
        if need_bytes == 0:
            return None
        device = device_name(config.options)
        if not self._ledger.fits_ever({device: need_bytes}):
            raise self._ledger.insufficient(config.id, {device: need_bytes})
        grant = self._ledger.grant(config.id, {device: need_bytes}, self._clock())
        if grant is None:
            free = self._ledger.free_bytes(device)
            raise MemoryShort(
                f"{config.id} needs {need_bytes / 2**20:.0f} MiB on {device}; {free / 2**20:.0f} MiB are free now"
            )
        return grant

    def _known_error(self, served: ServedModel, error: BaseException) -> PenstockError | None:
        """What callers are told; None for a load that was cancelled."""
        if not isinstance(error, Exception):
            return None
        if isinstance(error, EngineFailed | InsufficientCapacity):
            return error
        logger.error("model.load_failed model=%s", served.config.id, exc_info=error)
        # They are told no more: the rest may name places on this machine.
        kind = CannotLoad if isinstance(error, PenstockError) else EngineFailed
        return kind(f"{served.config.id} could not be loaded, the worker's log says why")

    # -- ending

    def drain(self, model: str) -> None:
        """Say that nothing new starts on a ready model; `unload` follows when what runs has finished."""
        served = self._models[self.catalog.get(model).id]
        if served.shown_state is Lifecycle.READY:
            served.go(Lifecycle.DRAINING)
            self._changed()

    async def unload(self, model: str) -> None:
        """End the model's process, or its loading; then its memory is back. What runs on it ends silently."""
        served = self._models[self.catalog.get(model).id]
        await self._give_up_loading(served)
        async with served.ending:
            if served.alive:
                served.go(Lifecycle.UNLOADING)
                self._changed()
                await self._clear(served)
                served.go(Lifecycle.ABSENT)
                if not self._stopping:
                    self._on_down(served.config.id, None)
            elif served.state is Lifecycle.FAILED:
                served.error = None
                served.go(Lifecycle.ABSENT)
            self._changed()

    async def stop(self) -> None:
        """End all engines and all loading, at once and silently. A model that has died meanwhile stays as it is."""
        self._stopping = True
        results = await asyncio.gather(*(self.unload(model) for model in self._models), return_exceptions=True)
        for error in results:
            if isinstance(error, BaseException):
                logger.error("model.stop_failed", exc_info=error)

    async def _give_up_loading(self, served: ServedModel) -> None:
        loading = served.loading
        if loading is not None:
            if not loading.cancelling():  # a second time would interrupt its clearing up
                loading.cancel()
            await asyncio.wait([loading])

    async def _clear(self, served: ServedModel) -> None:
        """End the engine, then give its memory back: it is free only when the process has ended."""
        engine = served.engine
        if engine is not None:
            await engine.stop()
        served.engine = None
        self._release(served)

    def _release(self, served: ServedModel) -> None:
        grant, served.grant = served.grant, None
        if grant is not None:
            self._ledger.release(grant)

    def _died(self, served: ServedModel, engine: Engine, code: int) -> None:
        """The engine's process has ended unasked."""
        if served.engine is not engine or not served.alive:
            return  # `unload` was faster
        served.go(Lifecycle.UNLOADING)
        served.engine = None
        self._release(served)
        served.error = EngineFailed(f"the engine process of {served.config.id} died")
        served.go(Lifecycle.FAILED)
        served.dead.set()
        if not self._stopping:
            self._on_down(served.config.id, code)
        self._changed()

    # -- telling

    def _up(self, served: ServedModel) -> None:
        if served.engine is not None and not self._stopping:
            self._on_up(served.config.id, served.engine.limits())
        self._changed()

    def _changed(self) -> None:
        if not self._stopping:
            self._on_change()
