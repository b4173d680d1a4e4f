"""Between the flow and the models: carries out sizes, loads and unloads, and reports engine states to the flow."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence, Set

from penstock.common.background import reporting
from penstock.processors.core.effects import Load, Size, Unload
from penstock.processors.core.fleet.ledger import OutOfMemory
from penstock.processors.core.fleet.residents import Needs
from penstock.processors.core.flow import Flow
from penstock.processors.engines.base import Engine, Limits
from penstock.processors.metrics import Metrics
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.manager import ModelManager
from penstock.processors.models.serving import Serving
from penstock.processors.models.sizing import ModelSize
from penstock.schemas.errors import PenstockError

logger = logging.getLogger(__name__)


class LaneShell:
    """Carries out `Size`, `Load` and `Unload`, and takes the manager's reports."""

    def __init__(self, metrics: Metrics, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._loads: dict[tuple[str, int], float] = {}
        self._reasons: dict[tuple[str, int], str] = {}
        self._last_facts: dict[tuple[str, int], tuple[str | None, int | None]] = {}
        """Of replicas, as reported when they came up, or with an outcome after that."""
        """Why replicas are being unloaded."""
        self._reported_tenths: dict[str, int] = {}
        self._serving: Serving
        self._manager: ModelManager
        self._flow: Flow
        self._wake: Callable[[], None]

    def connect(self, serving: Serving, flow: Flow, changed: Callable[[], None]) -> None:
        """Give it the parts that are made after it, since they need its callbacks."""
        self._serving, self._manager, self._flow = serving, serving.manager, flow
        self._wake = changed

    def load_all(self) -> None:
        """Have the models that are to be preloaded loaded, so that the first request does not wait for it."""
        self._preload(self._serving.models)
        self._changed()

    def _preload(self, models: Iterable[str]) -> None:
        """A model that an operator ordered to be unloaded is not loaded before somebody asks for it."""
        specs = self._serving.specs()
        for model in models:
            if specs[model].preload and self._flow.lane(model).desired is not False:
                self._flow.orders.want(model)

    def _changed(self) -> None:
        self._serving.publish_models()
        self._wake()

    def configure(self, models: Sequence[ModelConfig], removed: Set[str]) -> None:
        """These models are served from now on; new ones are preloaded, if they are to be."""
        former = set(self._serving.models)
        self._flow.peers.removed = removed
        self._serving.configure(models)
        self._preload(config.id for config in models if config.id not in former)
        self._changed()

    def desire(self, model: str, loaded: bool | None, pinned: bool | None, revision: int) -> None:
        self._flow.orders.desire(model, loaded, pinned, revision)
        self._changed()

    def preload(self, model: str) -> None:
        self._preload([model])
        self._changed()

    def pause(self, kind: str, name: str, paused: bool) -> None:
        self._flow.orders.pause(kind, name, paused)
        self._changed()

    def size(self, effect: Size) -> None:
        self._manager.size(effect.model)

    def load(self, effect: Load) -> None:
        self._loads[(effect.model, effect.replica)] = self._clock()
        self._manager.load(effect.model, effect.replica, effect.devices, effect.bytes)
        self._serving.publish_models()

    def unload(self, effect: Unload) -> None:
        logger.info("replica.unloads model=%s replica=%d reason=%s", effect.model, effect.replica, effect.reason)
        self._reasons[(effect.model, effect.replica)] = effect.reason
        if effect.for_model is not None:
            self._metrics.evictions.labels(effect.model, effect.reason).inc()
        self._manager.unload(effect.model, effect.replica)
        self._serving.publish_models()

    def sized(self, model: str, size: ModelSize) -> None:
        told = self._serving.catalog.get(model).vram_bytes
        needs = Needs(
            load_bytes=size.need_bytes if told is None else told,
            host_bytes=size.host_bytes,
            exact=told is not None,
            shape=size.shape,
        )
        parts = " ".join(f"{part.name.replace(' ', '_')}={part.bytes}" for part in size.parts)
        logger.info("model.sized model=%s bytes=%d %s", model, needs.load_bytes, parts)
        self._serving.sized(model, needs.load_bytes)  # before the flow hears of it: for too large a one requests fail
        self._flow.replicas.sized(model, needs, self._clock())
        self._changed()

    def progressed(self, model: str, fraction: float) -> None:
        """A download: who waits for it, and who looks at the model, hear of each tenth of it."""
        tenths = int(fraction * 10)
        if self._reported_tenths.get(model) != tenths:
            self._reported_tenths[model] = tenths
            self._flow.placing.loading_progressed(model, fraction, self._clock())
            self._changed()

    def size_failed(self, model: str, error: PenstockError) -> None:
        logger.warning("model.size_failed model=%s error=%s", model, error)
        self._flow.replicas.size_failed(model, error, self._clock())
        self._changed()

    def up(self, model: str, replica: int, engine: Engine) -> None:
        engine.on_busy = reporting(lambda seconds: self._flow.replicas.busy(model, replica, seconds, self._clock()))
        engine.on_limits = reporting(lambda limits: self._limits(model, replica, limits))
        engine.on_out_of_memory = reporting(lambda: self._out_of_memory(model, replica))
        self._note_facts(model, replica)
        limits, now = engine.limits(), self._clock()
        self._metrics.loads.labels(model).inc()
        seconds = now - self._loads.pop((model, replica), now)
        self._metrics.load_seconds.labels(model).observe(seconds)
        logger.info("replica.loaded model=%s replica=%d seconds=%.1f", model, replica, seconds)
        self._flow.replicas.up(
            model,
            replica,
            limits.slots,
            limits.tokens,
            now,
            inline=engine.prepares_inline,
            measured_bytes=self._serving.measured_memory(model, replica),
            peak_bytes=self._serving.peak_memory(model, replica) or 0,
        )
        self._changed()

    def _out_of_memory(self, model: str, replica: int) -> None:
        self._metrics.out_of_memory.labels(model).inc()
        self._flow.measurements.out_of_memory(model, replica, self._clock())
        self._wake()

    def _limits(self, model: str, replica: int, limits: Limits) -> None:
        self._flow.replicas.limits(model, replica, limits.slots, self._clock())
        self._wake()

    def load_failed(self, model: str, replica: int, error: PenstockError) -> None:
        self._loads.pop((model, replica), None)
        self._reasons.pop((model, replica), None)
        if isinstance(error, OutOfMemory):
            self._metrics.out_of_memory.labels(model).inc()
        logger.warning("replica.load_failed model=%s replica=%d error=%s", model, replica, error)
        self._flow.replicas.load_failed(model, replica, error, self._clock())
        self._changed()

    def down(self, model: str, replica: int, code: int) -> None:
        self._reasons.pop((model, replica), None)
        self._metrics.unloads.labels(model, "died").inc()
        logger.error("replica.died model=%s replica=%d exitcode=%s", model, replica, code)
        self._flow.replicas.down(model, replica, self._clock())
        self._changed()

    def gone(self, model: str, replica: int) -> None:
        loaded = self._loads.pop((model, replica), None) is None  # else its load was given up
        reason = self._reasons.pop((model, replica), "unknown")
        if loaded:
            self._metrics.unloads.labels(model, reason).inc()
        self._flow.replicas.gone(model, replica, self._clock())
        self._changed()

    def engine(self, model: str, replica: int) -> Engine | None:
        return self._manager.engine(model, replica)

    def engine_facts(self, model: str, number: int) -> tuple[str | None, int | None]:
        """Device and measured bytes of a replica's engine; as it last was when it has been given up since the run.

        A process that sees one card calls that the first.
        """
        self._note_facts(model, number)
        return self._last_facts.get((model, number), (None, None))

    def _note_facts(self, model: str, number: int) -> None:
        engine = self._manager.engine(model, number)
        if engine is not None:
            replica = self._flow.lane(model).replicas.get(number)
            granted = None if replica is None else replica.device
            self._last_facts[(model, number)] = granted or engine.info().device, engine.measured_memory()
