"""Which models a worker serves: those of its configuration, with the desired state of its pool over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Protocol

from penstock.common.desired import WITHDRAWN, DesiredRecord
from penstock.common.model_entry import ModelEntry, served_by
from penstock.common.orders import effective_entries
from penstock.processors.models.catalog import ModelConfig
from penstock.schemas.desired import CLASS, MODEL
from penstock.schemas.records import DesiredState
from penstock.schemas.topics import CLASSES

NO_UNLOAD = -1
"""The revision that goes with a model of which no unload is wanted."""


class OrderTarget(Protocol):
    """What carries orders out: the flow and the models' side of the worker. Each call may come twice."""

    def configure(self, models: Sequence[ModelConfig], removed: Set[str]) -> None:
        """These models are served from now on, in this order. `removed`: names of those that operators have removed."""
        ...

    def desire(self, model: str, loaded: bool | None, pinned: bool | None, revision: int) -> None:
        """`revision` is that of the newest order to unload the model; it has a meaning only if `loaded` is False."""
        ...

    def preload(self, model: str) -> None:
        """Load the model now if its entry says so, though nobody asks for it."""
        ...

    def pause(self, kind: str, name: str, paused: bool) -> None: ...


class DesiredModels:
    """Applies the records of one pool to the configured entries. Pure: records in, calls of `target` out."""

    def __init__(self, configured: Sequence[ModelEntry], pool: str | None, target: OrderTarget) -> None:
        self._configured = served_by(configured, pool)
        self._pool = pool
        self._target = target
        self._states: dict[str, DesiredState] = {}
        self._unload_revisions: dict[str, int] = {}
        """By key, of the states that want a model unloaded."""
        self._entries = list(self._configured)
        self._removed_names: Set[str] = frozenset()
        self.observed_revision: int | None = None
        """The revision of the newest record that was followed, whatever it was about; None before the first."""
        self.observed_topic_id: str | None = None
        """Kafka's id of the topic that `observed_revision` is an offset of."""
        self._unloads_from = 0
        """Added to the revisions of unloads: above all those of the topics that were replaced."""
        self.on_observed: Callable[[], None] = lambda: None
        """Called when `observed_revision` or `observed_topic_id` has changed."""

    @property
    def models(self) -> list[ModelConfig]:
        """What is served now."""
        return [ModelConfig.of(entry) for entry in self._entries]

    def on_topic(self, topic_id: str | None) -> None:
        """A topic is read from its beginning. Its offsets say nothing of a former one, which may have had the same."""
        if self.observed_revision is not None:
            self._unloads_from += self.observed_revision + 1
        self.observed_topic_id, self.observed_revision = topic_id, None
        self.on_observed()

    def on_records(self, records: Sequence[DesiredRecord]) -> None:
        """Follow records, in log order. Those of other pools and of kinds that are not known are only observed."""
        try:
            for record in records:
                self._follow(record)
                if record.revision != WITHDRAWN:
                    self.observed_revision = record.revision
        finally:
            self.on_observed()

    def _removed(self, entries: Sequence[ModelEntry]) -> Set[str]:
        """Ids and aliases of models that no worker of the pool is to serve, whatever its file says."""
        removed = {state.name for state in self._states.values() if state.kind == MODEL and state.removed}
        aliases = {alias for entry in self._configured if entry.id in removed for alias in entry.aliases}
        return (removed | aliases).difference(name for one in entries for name in (one.id, *one.aliases))

    def _follow(self, record: DesiredRecord) -> None:
        former = self._states.pop(record.key, None)
        state = record.state
        if state is not None and state.pool == self._pool and _known(state):
            self._states[record.key] = state
        self._note_unload(record, former)
        about = self._states.get(record.key) or former
        if about is not None:
            self._apply(about.kind, about.name, record.key)

    def _note_unload(self, record: DesiredRecord, former: DesiredState | None) -> None:
        """A later order of another kind repeats `loaded`; it does not mean the unload once more."""
        state = self._states.get(record.key)
        if state is None or state.loaded is not False:
            self._unload_revisions.pop(record.key, None)
        elif state.action == "unload" or former is None or former.loaded is not False:
            self._unload_revisions[record.key] = self._unloads_from + record.revision

    def _apply(self, kind: str, name: str, key: str) -> None:
        state = self._states.get(key)
        paused = state is not None and state.paused
        if kind == CLASS:
            self._target.pause(CLASS, name, paused)
            return
        former = self._entries
        entries = effective_entries(self._configured, self._states)
        removed = self._removed(entries)
        if entries != former or removed != self._removed_names:
            self._entries, self._removed_names = entries, removed
            self._target.configure(self.models, removed)
        if not any(entry.id == name for entry in entries):
            if any(entry.id == name for entry in former):
                self._target.pause(MODEL, name, False)
            return
        self._target.pause(MODEL, name, paused)
        loaded, pinned = (None, None) if state is None else (state.loaded, state.pinned)
        self._target.desire(name, loaded, pinned, self._unload_revisions.get(key, NO_UNLOAD))
        if state is not None and state.action == "add":
            self._target.preload(name)


def _known(state: DesiredState) -> bool:
    return state.kind == MODEL or (state.kind == CLASS and state.name in CLASSES)
