"""What models and workers last said of themselves, and the models that follow from it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.common.model_entry import ModelEntry
from penstock.common.orders import effective_entries
from penstock.common.reader import RawMessage
from penstock.gateway.view.declared import declared_model
from penstock.gateway.view.model_events import ModelEvents
from penstock.schemas.codec import Codec
from penstock.schemas.desired import MODEL, key_of, model_key
from penstock.schemas.records import DesiredState, ModelInfo, ModelState, WorkerState
from penstock.schemas.topics import HORIZON_MS

SERVING, STOPPED = "running", "stopped"
"""States of a worker; the second stands in its last word."""
ABSENT_MS = 60_000
"""A model that its workers gave up in order is forgotten after so long, as workers do (`worker.model_absent_s`)."""
MISSED_S = 3_600.0
KEPT_MS = 500
"""What follows from the records is worked out again after so long, and whenever one comes."""
ModelKey = tuple[str, str]
"""(id, pool or "")"""


@dataclass(frozen=True, slots=True)
class KnownModels:
    """`unsure`: those that live workers serve by different entries. What they can do, the engine decides."""

    models: Sequence[ModelInfo] = ()
    unsure: frozenset[tuple[str, str | None]] = frozenset()


class Fleet:
    """Fed with the records of the model and worker topics. Nothing is changed in place: other threads may read."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._configured: Sequence[ModelEntry] = ()
        self.orders: Sequence[DesiredState] = ()
        """What operators ordered, as far as it was read."""
        self._declared: dict[ModelKey, ModelEntry] = {}
        self.models: dict[ModelKey, ModelInfo] = {}
        self.workers: dict[str, WorkerState] = {}
        """`updated_at` is when this process heard the report: the clocks of workers differ from its own."""
        self.model_events = ModelEvents()
        self._had: dict[ModelKey, tuple[int, str]] = {}
        """When a worker last reported the model, and which."""
        self._gone: frozenset[str] = frozenset()
        """Workers that stopped in order."""
        self._kept: tuple[float, KnownModels] = (float("-inf"), KnownModels())

    def declare(self, entries: Iterable[ModelEntry]) -> None:
        """The models of this process' configuration, which are known while no worker of their pool lives."""
        self._configured = list(entries)
        self._declare()

    def follow(self, orders: Sequence[DesiredState]) -> None:
        """Orders remove models from the configuration, and add some."""
        if orders != self.orders:
            self.orders = orders
            self._declare()

    def _declare(self) -> None:
        entries: list[ModelEntry] = []
        for pool in {one.pool for one in (*self._configured, *self.orders)}:
            ordered = {key_of(one): one for one in self.orders if one.pool == pool}
            entries += effective_entries([one for one in self._configured if one.pool == pool], ordered)
        self._declared = {(entry.id, entry.pool or ""): entry for entry in entries}
        self._kept = (float("-inf"), KnownModels())

    def on_model(self, message: RawMessage) -> None:
        self._kept = (float("-inf"), KnownModels())
        if message.value is None:
            self.models = {k: m for k, m in self.models.items() if model_key(m.model, m.pool).encode() != message.key}
            return
        model = self._codec.decode(message.value, ModelInfo)
        self.models = {**self.models, (model.model, model.pool or ""): model}

    def on_worker(self, message: RawMessage, heard_ms: int) -> WorkerState | None:
        """The report as the worker wrote it; None if its record was taken away. `heard_ms`: see `Arrivals`."""
        self._kept = (float("-inf"), KnownModels())
        if message.value is None:
            worker_id = (message.key or b"").decode(errors="replace")
            self.workers = {name: state for name, state in self.workers.items() if name != worker_id}
            self._gone |= {worker_id}
            self.model_events.on_lost(worker_id)
            return None
        state = self._codec.decode(message.value, WorkerState)
        self.model_events.on_report(state, heard_ms)
        self.workers = {**self.workers, state.worker_id: replace(state, updated_at=heard_ms)}
        self._gone = self._gone | {state.worker_id} if state.state == STOPPED else self._gone - {state.worker_id}
        here = (heard_ms, state.worker_id)
        keys = {(one.model, state.pool or "") for one in state.models}
        self._had = {**self._had, **{key: max(self._had.get(key, here), here) for key in keys}}
        return state

    def forget_stale_workers(self, older_than_s: float) -> None:
        """A silent worker whose partitions nobody has taken over is missed for an hour.

        What was heard later than now, before the clock was set back, counts as heard now.
        """
        now_s = time.time()
        now_ms, limit, longest = int(now_s * 1000), (now_s - older_than_s) * 1000, (now_s - MISSED_S) * 1000
        self.workers = {
            name: replace(state, updated_at=now_ms) if state.updated_at > now_ms else state
            for name, state in self.workers.items()
        }
        self._had = {key: (min(had_ms, now_ms), name) for key, (had_ms, name) in self._had.items()}
        heard = {name: state for name, state in self.workers.items() if state.updated_at >= limit}
        owned = {place for one in heard.values() if one.state != STOPPED for place in one.assigned}
        before = self.workers
        self.workers = {
            name: state
            for name, state in before.items()
            if name in heard
            or (state.state != STOPPED and state.updated_at >= longest and not owned.issuperset(state.assigned))
        }
        for name in before.keys() - self.workers.keys():
            self.model_events.on_lost(name)
        self._gone &= {name for _, name in self._had.values()} | {one.worker_id for one in self.models.values()}

    def known(self, now_ms: int, late_ms: int) -> KnownModels:
        """The models that workers reported within a day, with what all live workers of their pool can do together.

        The topic has one record a model, by whichever worker wrote last. What that one lacks the pool may have.
        Declared models of pools without a live worker are known too: a request for one is what starts a worker.
        """
        made_at, kept = self._kept
        if time.monotonic() - made_at > KEPT_MS / 1000:
            kept = self._work_out(now_ms, late_ms)
            self._kept = (time.monotonic(), kept)
        return kept

    def _work_out(self, now_ms: int, late_ms: int) -> KnownModels:
        live = [one for one in self.workers.values() if one.state == SERVING and now_ms - one.updated_at <= late_ms]
        pools = {one.pool or "" for one in live}
        served: defaultdict[ModelKey, list[ModelState]] = defaultdict(list)
        for worker in live:
            for state in worker.models:
                served[state.model, worker.pool or ""].append(state)
        models: list[ModelInfo] = []
        unsure: set[tuple[str, str | None]] = set()
        for key, info in self.models.items():
            if key in served:
                models.append(_together(info, served[key]))
                if len({one.entry for one in served[key]}) > 1:
                    unsure.add((info.model, info.pool))
                continue
            recent = info.updated_at >= now_ms - HORIZON_MS
            if key[1] not in pools:
                is_known = recent or not self._declared.keys().isdisjoint((key, (info.model, "")))
            else:
                is_known = recent and not self._has_left(key, info, {one.worker_id for one in live}, now_ms)
            models += [info] if is_known else []
        reported = {(one.model, one.pool or "") for one in models}
        models += [declared_model(entry, now_ms) for entry in self._unreported(pools, reported)]
        return KnownModels(models, frozenset(unsure))

    def _unreported(self, pools: Container[str], reported: Collection[ModelKey]) -> Iterator[ModelEntry]:
        """Declared models without a record, unless their pool has workers: these serve other files.

        An entry without a pool is served in any: with a record of it, that one says where. Without one, an order
        that removed it from a pool says that it was there.
        """
        somewhere = {model for model, _ in reported}
        somewhere |= {one.name for one in self.orders if one.kind == MODEL and one.removed}
        for (model, pool), entry in self._declared.items():
            if pool not in pools and (model, pool) not in reported and (pool or model not in somewhere):
                yield entry

    def _has_left(self, key: ModelKey, info: ModelInfo, live: Container[str], now_ms: int) -> bool:
        """Whether no live worker has it because its workers stopped in order, or go on without it."""
        had_ms, worker_id = max(self._had.get(key, (0, "")), (info.updated_at, info.worker_id))
        return now_ms - had_ms > ABSENT_MS and (worker_id in self._gone or worker_id in live)


def _together(info: ModelInfo, states: Iterable[ModelState]) -> ModelInfo:
    """The record with the tasks and aliases that any of these has.

    Workers of earlier releases do not tell theirs: where there is one, what the record has counts too.
    """
    told = [(one.tasks, one.aliases) for one in states]
    if not all(tasks for tasks, _ in told):
        told.append((info.tasks, info.aliases))
    tasks = dict.fromkeys(task for tasks, _ in told for task in tasks)
    aliases = dict.fromkeys(alias for _, aliases in told for alias in aliases)
    return replace(info, tasks=list(tasks), aliases=list(aliases))
