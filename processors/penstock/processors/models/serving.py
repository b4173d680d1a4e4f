"""What this worker serves: the configured models, its devices, and what it reports about both."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from penstock.common.model_entry import served_by
from penstock.processors.core.fleet.lane import Lane
from penstock.processors.core.fleet.ledger import CannotLoad
from penstock.processors.core.fleet.replica import Replica, ReplicaState
from penstock.processors.core.fleet.residents import ModelSpec
from penstock.processors.core.fleet.views import HOST
from penstock.processors.core.flow import Flow
from penstock.processors.engines.base import Engine, EngineInfo
from penstock.processors.engines.process.loading import dtype_name
from penstock.processors.hardware.simulated import KIND as SIMULATED
from penstock.processors.models.auto_device import AutoDevice, torch_has_cuda
from penstock.processors.models.calibration import Calibration
from penstock.processors.models.catalog import ITEMS, Catalog, ModelConfig, engine_identity, entry_digest
from penstock.processors.models.factory import make_engine
from penstock.processors.models.machine import Machine, Resident
from penstock.processors.models.manager import ModelManager, Reports
from penstock.processors.models.remembered import RememberedEstimates
from penstock.processors.models.sizing import size_model
from penstock.processors.settings import WorkerSettings
from penstock.schemas.abilities import READ_IMAGES, Need
from penstock.schemas.choosing import Candidate, Choice, choose, only
from penstock.schemas.desired import model_key
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.records import DeviceHolder, DeviceState, ModelInfo, ModelState, Record
from penstock.schemas.topics import CLASSES, TopicNames

logger = logging.getLogger(__name__)

ESTIMATES_FILE = "memory.json"
"""In the worker's folder: what engines were measured to take."""
Publish = Callable[[str, str, Record | None], None]
"""(topic, key, record); None is a tombstone."""


def open_estimates(folder: Path) -> RememberedEstimates:
    """Blocks."""
    return RememberedEstimates(folder / ESTIMATES_FILE)


class Serving:
    """The models' side of the worker, as its shell and reports need it. `reports` hears of its engines."""

    def __init__(
        self,
        settings: WorkerSettings,
        *,
        publish: Publish,
        names: TopicNames,
        reports: Reports,
        clock_ms: Callable[[], int],
        clock: Callable[[], float],
        machine: Machine | None = None,
        remembered: RememberedEstimates | None = None,
    ) -> None:
        """`machine`: in place of the one that the settings tell. `remembered`: in place of a file that is opened here.

        Raises UnknownDevice.
        """
        self._settings = settings
        self._publish = publish
        self._names = names
        self._clock_ms, self._clock = clock_ms, clock
        memory = settings.memory
        self.machine = machine or Machine(
            settings.devices,
            cpu_reserve_bytes=memory.cpu_reserve_bytes,
            gpu_reserve_bytes=memory.gpu_reserve_bytes,
        )
        self._auto_device = AutoDevice(self.machine.capacities, has_cuda=torch_has_cuda())
        entries = served_by(settings.models, settings.worker.pool)
        self._configured = [*map(ModelConfig.of, entries), ITEMS]
        """As their entries have them; the catalog has them with the devices that were chosen."""
        self.catalog = Catalog(self._auto_device.place(config) for config in self._configured)
        logs = settings.worker.data_dir / "logs"
        make = partial(make_engine, facts=self.machine.facts, logs=logs, images=settings.images)
        size = partial(size_model, process_bytes=Calibration().process_bytes)
        self.manager = ModelManager(self.catalog, reports, make=make, size=size)
        self.remembered = remembered or open_estimates(settings.worker.data_dir)
        self._flow: Flow
        self.on_change: Callable[[], None] = lambda: None
        """Called when the facts of a model have changed."""

    def connect(self, flow: Flow) -> None:
        """The flow decides what is loaded of these models; it hears of them here."""
        self._flow = flow
        flow.orders.configure(self.specs(), self._clock())

    async def stop(self) -> None:
        """End all engines and all loading at once; their memory comes back with their processes."""
        self._flow.replicas.lives_end()
        await self.manager.stop()
        await self.remembered.keep()

    @property
    def models(self) -> list[str]:
        """In the order they are configured."""
        return [config.id for config in self.catalog]

    @property
    def _shown(self) -> list[ModelConfig]:
        """Those that reports have: what each worker has by itself concerns nobody."""
        return [config for config in self.catalog if not config.kind.built_in]

    @property
    def shown(self) -> list[str]:
        """The models that reports name."""
        return [config.id for config in self._shown]

    def specs(self) -> dict[str, ModelSpec]:
        """The configured models as the flow takes them."""
        return {config.id: self._spec(config) for config in self.catalog}

    def _spec(self, config: ModelConfig) -> ModelSpec:
        return ModelSpec(
            model=config.id,
            devices=self._devices(config),
            count=config.devices,
            min_replicas=config.min_replicas,
            max_replicas=config.max_replicas,
            priority=config.keep_weight,
            pinned=config.pinned,
            preload=config.preload,
            keep_alive_s=config.keep_alive_s,
            max_execution_s=config.max_execution_s,
            max_attempts=config.max_attempts,
            retries=config.retries,
            dtype=_dtype(config),
            source=f"{config.source}@{config.revision}" if config.revision else config.source,
            options=engine_identity(config),
        )

    def _devices(self, config: ModelConfig) -> tuple[str, ...]:
        if not config.local and config.vram_bytes is None:
            return ()
        told = config.device or config.options.get("device")
        return (str(told),) if told else (HOST,)

    def resolve(self, task: str, model: str | None, need: Need | None = None) -> Choice:
        """The model that a request gets, and why when it names none. Raises ModelNotFound, UnsupportedParameter."""
        if model is not None:
            return Choice(self.catalog.named(task, model, need).id)
        able = self.catalog.serving(task, need)
        if len(able) == 1:
            return only(able[0].id)
        choice = choose(self._candidate(config, order) for order, config in enumerate(able))
        assert choice is not None
        return choice

    def _candidate(self, config: ModelConfig, order: int) -> Candidate:
        lane = self._flow.lane(config.id)
        running = sum(len(replica.holders) for replica in lane.replicas.values())
        return Candidate(
            model=config.id,
            state=lane.state,
            order=order,
            priority=config.priority,
            queued=running + sum(self._flow.scheduler.fronts.depth(config.id, klass) for klass in CLASSES),
            slots=sum(replica.slots for replica in lane.ready) or 1,
            load_s=self._flow.forecast.load_s(config.id),
            paused=lane.paused,
        )

    def configure(self, models: Sequence[ModelConfig]) -> None:
        """Serve these models from now on; those that are gone leave the listing too."""
        self._configured = [*(config for config in models if not config.kind.built_in), ITEMS]
        gone = set(self.models) - {config.id for config in self._configured}
        placed = [self._auto_device.place(config) for config in self._configured]
        self.catalog.replace(placed)
        self.manager.configure(placed)
        self._flow.orders.configure(self.specs(), self._clock())
        for model in gone:
            self._publish(self._names.model, model_key(model, self._settings.worker.pool), None)

    def sized(self, model: str, need_bytes: int) -> None:
        """So much an engine of it takes. A model that no card can hold runs in main memory, and is sized for that."""
        config = next((one for one in self._configured if one.id == model), None)
        if config is not None and self._auto_device.is_too_large(config, need_bytes):
            self.configure(self._configured)

    def engine(self, model: str) -> Engine | None:
        """The engine of one of the model's replicas that take runs."""
        for replica in self._flow.lane(model).ready:
            engine = self.manager.engine(model, replica.number)
            if engine is not None:
                return engine
        return None

    def devices(self, model: str) -> list[str]:
        """Where its engines are that take runs; none for one that takes no memory of this machine."""
        return sorted({device for replica in self._flow.lane(model).ready for device in replica.devices})

    def defaults(self, model: str) -> Mapping[str, Any]:
        """The parameters of its runs where a request leaves them out."""
        return self.catalog.get(model).defaults

    def sees(self, model: str) -> bool:
        """Whether it reads images among messages."""
        return READ_IMAGES in self.catalog.get(model).abilities

    def opens(self, model: str) -> bool:
        """Whether it opens images itself, under guard: it is given files rather than pixels."""
        return self.catalog.get(model).kind.opens_images

    async def observe(self) -> None:
        """Measure the devices; what no grant explains is not granted again."""
        found = await self.machine.observe(list(self._residents()))
        self._flow.measurements.observed(found.observed, self._clock(), found.measured, self._peaks())
        self._flow.measurements.unread(found.unread)
        await self.remembered.keep()

    def _residents(self) -> Iterator[Resident]:
        """Who holds memory, by what the flow has granted and the manager has made."""
        held = self.manager.held()
        for lane in self._flow.lanes.values():
            for replica in lane.replicas.values():
                yield from self._places(lane.name, replica, held.get((lane.name, replica.number)))

    def _places(self, model: str, replica: Replica, engine: Engine | None) -> Iterator[Resident]:
        grant = replica.grant
        for device in () if grant is None else grant.needs:
            granted = 0 if grant is None else self._flow.ledger.held_bytes(grant, device)
            if not granted and device not in replica.devices:
                continue  # main memory that its weights have passed through
            yield Resident(
                key=(model, replica.number),
                device=device,
                granted_bytes=granted,
                loading=replica.state is ReplicaState.LOADING,
                pid=None if engine is None else engine.pid,
                # What it says, it says of the one device that it runs on.
                reported_bytes=None if engine is None or replica.devices != (device,) else engine.measured_memory(),
            )

    def measured_memory(self, model: str, number: int) -> int | None:
        """What a replica's engine says that it holds of the device that it was granted."""
        engine = self._saying(model, number)
        return None if engine is None else engine.measured_memory()

    def peak_memory(self, model: str, number: int) -> int | None:
        """The most that it says it has held of that device."""
        engine = self._saying(model, number)
        return None if engine is None else engine.peak_memory()

    def _saying(self, model: str, number: int) -> Engine | None:
        """The engine of a replica, when what it says of its memory is said of the one device that it was granted."""
        engine, replica = self.manager.engine(model, number), self._flow.lane(model).replicas.get(number)
        if replica is None or replica.device is None or len(replica.devices) > 1:
            return None
        facts = self.machine.facts(replica.device)
        return None if facts is None or facts.kind == SIMULATED else engine

    def _peaks(self) -> dict[tuple[str, int], int]:
        places = [(lane.name, number) for lane in self._flow.lanes.values() for number in lane.replicas]
        return {place: self.peak_memory(*place) or 0 for place in places}

    def model_states(self) -> list[ModelState]:
        """One for each replica, and one for each model that has none."""
        states: list[ModelState] = []
        for config in self._shown:
            lane = self._flow.lane(config.id)
            queued = sum(self._flow.scheduler.fronts.depth(lane.name, klass) for klass in CLASSES)
            replicas: list[Replica | None] = list(lane.replicas.values()) or [None]
            for replica in replicas:
                state = lane.state if replica is None else replica.state.value
                states.append(
                    ModelState(
                        model=lane.name,
                        state=state,
                        memory_bytes=None if replica is None else replica.measured_bytes,
                        replica=0 if replica is None else replica.number,
                        device=None if replica is None else replica.device,
                        reserved_bytes=None if replica is None or replica.grant is None else replica.bytes,
                        pinned=lane.is_pinned,
                        reason=lane.why_not_ready if replica is None else self._reason(lane.name, replica),
                        load_seconds=self._flow.forecast.load_s(lane.name),
                        progress=self.manager.progress(lane.name),
                        queued=queued,
                        running=0 if replica is None else len(replica.holders),
                        cause=_cause(lane, state),
                        tasks=list(config.tasks),
                        aliases=list(config.aliases),
                        abilities=sorted(config.abilities),
                        entry=entry_digest(config),
                        code=_code(lane, state),
                        peak_bytes=None if replica is None else replica.peak_bytes or None,
                    )
                )
        return states

    def _reason(self, model: str, replica: Replica) -> str | None:
        """Why a replica is in its state; of one that serves, what its engine says that operators should know."""
        engine = self.manager.engine(model, replica.number) if replica.state is ReplicaState.READY else None
        return replica.reason or (None if engine is None else engine.info().note)

    def device_states(self) -> list[DeviceState]:
        ledger = self._flow.ledger
        return [
            DeviceState(
                device=device.device,
                kind=device.kind,
                total_bytes=device.total_bytes,
                reserved_bytes=ledger.reserved_bytes(device.device),
                used_bytes=self.machine.used_bytes(device.device),
                limit_bytes=device.limit_bytes,
                foreign_bytes=ledger.foreign_bytes(device.device),
                measured_bytes=ledger.measured_bytes(device.device),
                holders=[
                    DeviceHolder(model=holder.owner, bytes=holder.bytes, measured_bytes=holder.measured_bytes)
                    for holder in ledger.holders(device.device)
                ],
            )
            for device in ledger.devices()
        ]

    def publish_models(self) -> None:
        """Tell every model's facts; the topic is compacted, the latest of each counts."""
        for config in self._shown:
            engine, lane = self.engine(config.id), self._flow.lane(config.id)
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
                defaults={name: json.dumps(value, ensure_ascii=False) for name, value in config.defaults.items()},
                state=lane.state,
                weights_bytes=self.manager.need_bytes(config.id),
                updated_at=self._clock_ms(),
                worker_id=self._settings.worker_id,
                priority=config.priority,
                pinned=lane.is_pinned,
                max_batch_size=config.max_batch_size,
                reason=lane.why_not_ready,
                load_seconds=self._flow.forecast.load_s(config.id),
                progress=self.manager.progress(config.id),
                replicas_ready=len(lane.ready),
                revision=config.revision,
                cause=_cause(lane, lane.state),
            )
            self._publish(self._names.model, model_key(config.id, self._settings.worker.pool), record)
        self.on_change()


def _cause(lane: Lane, state: str) -> str | None:
    """What made the newest load fail; None for a replica that is ready, which did not fail."""
    return None if state == ReplicaState.READY.value or lane.last_error is None else lane.last_error.cause


def _code(lane: Lane, state: str) -> str | None:
    """The code of the error for which it is not there, `invalid` if its entry or its files are; None when nothing has
    failed."""
    error = lane.never_fits or lane.last_error
    if state != "failed" or error is None:
        return None
    return InvalidRequest.code if isinstance(error, CannotLoad) else error.code


def _dtype(config: ModelConfig) -> str:
    """What its numbers are in memory; peaks are remembered by it."""
    if not config.local:
        return ""
    quantization = config.options.get("quantization")
    return dtype_name(config.options) + ("" if quantization is None else f" {quantization}")
