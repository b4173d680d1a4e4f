"""The manager brings engines to life, ends them and measures them, by (model, replica). It decides nothing.

Memory is granted, and loads and unloads are planned, by the flow: `penstock.processors.core.fleet`.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from penstock.common.background import BackgroundTasks, reporting
from penstock.processors.core.fleet.ledger import CannotLoad
from penstock.processors.engines.base import Engine, EngineState
from penstock.processors.engines.process.causes import cause_of
from penstock.processors.models import sizing
from penstock.processors.models.catalog import ModelConfig, engine_identity, share_cores
from penstock.processors.models.factory import make_engine
from penstock.processors.models.sizing import ModelSize, OnProgress
from penstock.schemas.errors import EngineFailed, InsufficientCapacity, ModelNotFound, PenstockError

logger = logging.getLogger(__name__)

ReplicaKey = tuple[str, int]
"""(model, replica)"""


Size = Callable[[ModelConfig, OnProgress], Awaitable[ModelSize]]


class Reports(Protocol):
    """Gets the results of what the manager was asked to do. It is not called once `stop` has begun."""

    def sized(self, model: str, size: ModelSize) -> None: ...
    def size_failed(self, model: str, error: PenstockError) -> None: ...

    def progressed(self, model: str, fraction: float) -> None:
        """So much of its download is there, from 0 to 1."""
        ...

    def up(self, model: str, replica: int, engine: Engine) -> None: ...

    def load_failed(self, model: str, replica: int, error: PenstockError) -> None:
        """Its process has ended and its memory is back."""
        ...

    def down(self, model: str, replica: int, code: int) -> None:
        """Its process has ended unasked, with this exit code."""
        ...

    def gone(self, model: str, replica: int) -> None:
        """Its process has ended as it was asked to."""
        ...


class Make(Protocol):
    """Makes an engine, not started, for devices (none: it takes no memory) and so many granted bytes of each."""

    def __call__(
        self, config: ModelConfig, size: ModelSize, devices: tuple[str, ...], granted_bytes: int
    ) -> Engine: ...


@dataclass(eq=False, slots=True)
class _Held:
    """A replica's engine, from the beginning of its load to its end."""

    model: str
    replica: int
    engine: Engine | None = None
    loading: asyncio.Task[None] | None = None
    ending: bool = False


class ModelManager:
    """The engines of this worker."""

    def __init__(
        self,
        configs: Iterable[ModelConfig],
        reports: Reports,
        *,
        make: Make = make_engine,
        size: Size = sizing.size_model,
    ) -> None:
        self._reports = reports
        self._make, self._size = make, size
        self._configs: Mapping[str, ModelConfig] = {}
        self._sizes: dict[str, ModelSize] = {}
        self._progress: dict[str, float] = {}
        self._held: dict[ReplicaKey, _Held] = {}
        self._left: list[Engine] = []
        self._tasks = BackgroundTasks()
        self._stopping = False
        self.configure(configs)

    def configure(self, configs: Iterable[ModelConfig]) -> None:
        """The models from now on. What is loaded of others stays until it is unloaded."""
        before, self._configs = self._configs, share_cores(list(configs), len(os.sched_getaffinity(0)))
        for model in list(self._sizes):
            former, config = before.get(model), self._configs.get(model)
            if former is None or config is None or engine_identity(former) != engine_identity(config):
                del self._sizes[model]

    def engine(self, model: str, replica: int) -> Engine | None:
        """The engine of a replica that takes runs, else None."""
        held = self._held.get((model, replica))
        engine = None if held is None or held.loading is not None else held.engine
        return engine if engine is not None and engine.state is EngineState.READY else None

    def held(self) -> dict[ReplicaKey, Engine]:
        """All engines, those that load and those that end among them."""
        return {key: held.engine for key, held in self._held.items() if held.engine is not None}

    def left(self) -> list[Engine]:
        """Engines that were given up and whose processes SIGKILL has not ended yet."""
        self._left = [engine for engine in self._left if engine.left_pid is not None]
        return self._left

    def need_bytes(self, model: str) -> int | None:
        """What it takes on a device: what its entry says, else what was estimated; None before it was sized."""
        config, size = self._configs.get(model), self._sizes.get(model)
        if config is not None and config.vram_bytes is not None:
            return config.vram_bytes
        return None if size is None else size.need_bytes

    def size(self, model: str) -> None:
        """Find out how large a model is. → sized, size_failed"""
        self._tasks.start(self._find_size(model), f"size {model}")

    async def _find_size(self, model: str) -> None:
        try:
            _, size = await self._sized_now(model, anew=True)
            self._sizes[model] = size
        except Exception as error:
            if not self._stopping:
                self._reports.size_failed(model, load_error(model, self._source(model), error))
        else:
            if not self._stopping:
                self._reports.sized(model, size)

    async def _sized_now(self, model: str, *, anew: bool = False) -> tuple[ModelConfig, ModelSize]:
        """Its entry, and the size that belongs to it: the entry may change while it is sized. Raises ModelNotFound.

        With `again` a known size is not used: the files may have changed.
        """
        while True:
            config = self._config(model)
            known = None if anew else self._sizes.get(model)
            size = known or await self._size_telling(config)
            current = self._config(model)
            if engine_identity(current) == engine_identity(config):
                return current, size

    async def _size_telling(self, config: ModelConfig) -> ModelSize:
        """Its size; a download reports its progress."""
        model = config.id

        def tell(fraction: float) -> None:
            self._progress[model] = fraction
            self._reports.progressed(model, fraction)

        try:
            return await self._size(config, tell)
        finally:
            self._progress.pop(model, None)

    def progress(self, model: str) -> float | None:
        """How much of a download is there, from 0 to 1; None when none is under way."""
        return self._progress.get(model)

    def load(self, model: str, replica: int, devices: tuple[str, ...], granted_bytes: int) -> None:
        """Start an engine in the memory that was granted. → up, load_failed"""
        if self._stopping:
            return
        held = self._held[(model, replica)] = _Held(model, replica)
        held.loading = self._tasks.start(self._load(held, devices, granted_bytes), f"load {model}#{replica}")

    async def _load(self, held: _Held, devices: tuple[str, ...], granted_bytes: int) -> None:
        model = held.model
        try:
            config, size = await self._sized_now(model)
            engine = held.engine = self._make(config, size, devices, granted_bytes)
            engine.on_died = reporting(lambda code: self._died(held, code))
            await engine.start()
            if engine.state is not EngineState.READY:
                raise EngineFailed(f"{model} died as soon as it was loaded")
        except BaseException as error:
            if held.engine is not None:
                await held.engine.stop()
            held.loading = None
            if not isinstance(error, Exception):
                raise
            if not held.ending:
                self._sizes.pop(model, None)  # perhaps its files are mended before the next try
                self._forget(held)
                if not self._stopping:
                    self._reports.load_failed(model, held.replica, load_error(model, self._source(model), error))
        else:
            held.loading = None
            if not (held.ending or self._stopping):
                self._reports.up(model, held.replica, engine)

    def unload(self, model: str, replica: int) -> None:
        """End an engine, or its loading. What runs on it ends silently. → gone"""
        held = self._held.get((model, replica))
        if held is None:
            if not self._stopping:
                self._reports.gone(model, replica)
        elif not held.ending:
            held.ending = True
            self._tasks.start(self._end(held), f"unload {model}#{replica}")

    async def stop(self) -> None:
        """End all engines and all loading, at once and silently."""
        self._stopping = True
        for held in self._held.values():
            held.ending = True
        results = await asyncio.gather(*(self._end(held) for held in list(self._held.values())), return_exceptions=True)
        await self._tasks.cancel()
        for error in results:
            if isinstance(error, BaseException):
                logger.error("model.stop_failed", exc_info=error)

    async def _end(self, held: _Held) -> None:
        """Its memory is back only when its process has ended."""
        loading = held.loading
        if loading is not None:
            if not loading.cancelling():  # a second time would interrupt its clearing up
                loading.cancel()
            await asyncio.wait([loading])
        if held.engine is not None:
            await held.engine.stop()
        self._forget(held)
        if not self._stopping:
            self._reports.gone(held.model, held.replica)

    def _died(self, held: _Held, code: int) -> None:
        """The engine's process has ended unasked."""
        if held.ending or held.loading is not None or self._held.get((held.model, held.replica)) is not held:
            return
        self._forget(held)
        if not self._stopping:
            self._reports.down(held.model, held.replica, code)

    def _forget(self, held: _Held) -> None:
        if self._held.get((held.model, held.replica)) is held:
            del self._held[(held.model, held.replica)]
            if held.engine is not None:
                self._left = [*self.left(), held.engine]

    def _source(self, model: str) -> str:
        config = self._configs.get(model)
        return "" if config is None else config.source

    def _config(self, model: str) -> ModelConfig:
        """Raises ModelNotFound."""
        config = self._configs.get(model)
        if config is None:
            raise ModelNotFound(f"the model {model} is not served here", param="model")
        return config


def load_error(model: str, source: str, error: Exception) -> PenstockError:
    """The error of a failed load: its message is for callers, who hear no paths, its `cause` for operators."""
    cause = cause_of(error, source)
    if isinstance(error, EngineFailed | InsufficientCapacity):
        error.cause = error.cause or cause
        return error
    logger.error("model.load_failed model=%s", model, exc_info=error)
    kind = CannotLoad if isinstance(error, PenstockError) else EngineFailed
    return kind(f"{model} could not be loaded, the worker's log says why", cause=cause)
