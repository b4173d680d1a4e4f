"""What a worker serves: the models of its configuration, and what operators added, changed or took away since."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock.common.model_entry import ModelEntry, check_names, parse_entry, served_by
from penstock.processors.kafka.desired import Wished
from penstock.processors.models.catalog import ModelConfig
from penstock.schemas.desired import CLASS, MODEL
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.records import DesiredState
from penstock.schemas.topics import CLASSES

logger = logging.getLogger(__name__)


class Obeys(Protocol):
    """What carries out wishes: the flow and the models' side of the worker. All of it may be told twice."""

    def configure(self, models: Sequence[ModelConfig]) -> None:
        """These models are served from now on, in this order."""
        ...

    def desire(self, model: str, loaded: bool | None, pinned: bool | None) -> None: ...
    def pause(self, kind: str, name: str, paused: bool) -> None: ...


class WishedModels:
    """The wishes of one pool over the configured entries. Pure: wishes in, calls of `obeys` out."""

    def __init__(self, configured: Sequence[ModelEntry], pool: str | None, obeys: Obeys) -> None:
        self._configured = served_by(configured, pool)
        self._pool = pool
        self._obeys = obeys
        self._wishes: dict[str, DesiredState] = {}
        self._entries = list(self._configured)

    @property
    def models(self) -> list[ModelConfig]:
        """What is served now."""
        return [ModelConfig.of(entry) for entry in self._entries]

    def on_wishes(self, news: Sequence[Wished]) -> None:
        """Records of the topic, in its order. Those of other pools and of kinds that are not known are passed over."""
        for item in news:
            former = self._wishes.pop(item.key, None)
            if item.wish is not None and item.wish.pool == self._pool and _known(item.wish):
                self._wishes[item.key] = item.wish
            about = self._wishes.get(item.key) or former
            if about is not None:
                self._obey(about.kind, about.name, self._wishes.get(item.key))

    def _obey(self, kind: str, name: str, wish: DesiredState | None) -> None:
        paused = wish is not None and wish.paused
        if kind == CLASS:
            self._obeys.pause(CLASS, name, paused)
            return
        entries = effective_entries(self._configured, self._wishes)
        if entries != self._entries:
            self._entries = entries
            self._obeys.configure(self.models)
        if any(entry.id == name for entry in entries):
            self._obeys.pause(MODEL, name, paused)
            self._obeys.desire(name, *((None, None) if wish is None else (wish.loaded, wish.pinned)))


def _known(wish: DesiredState) -> bool:
    return wish.kind == MODEL or (wish.kind == CLASS and wish.name in CLASSES)


def effective_entries(configured: Sequence[ModelEntry], wishes: Mapping[str, DesiredState]) -> list[ModelEntry]:
    """Configured models with their changes, less those that were removed, then the added ones, oldest order first.

    An entry that cannot be served, or whose names are taken, is left out with a log line: no record ends a worker.
    """
    of_models = {wish.name: wish for wish in wishes.values() if wish.kind == MODEL}
    entries: list[ModelEntry] = []
    for entry in configured:
        wish = of_models.pop(entry.id, None)
        if wish is None or not wish.removed:
            entries = _with(entries, (None if wish is None else _entry(wish)) or entry)
    for wish in sorted(of_models.values(), key=lambda one: (one.created_at, one.name)):
        added = None if wish.removed else _entry(wish)
        if added is not None:
            entries = _with(entries, added)
    return entries


def _with(entries: list[ModelEntry], added: ModelEntry) -> list[ModelEntry]:
    try:
        check_names([*entries, added])
    except ValueError as error:
        logger.error("model.not_added model=%s reason=%s", added.id, error)
        return entries
    return [*entries, added]


def _entry(wish: DesiredState) -> ModelEntry | None:
    if wish.entry is None:
        return None
    try:
        fields: Any = json.loads(wish.entry)
        return parse_entry({**fields, "id": wish.name, "pool": wish.pool})
    except (InvalidRequest, ValueError, TypeError) as error:
        logger.error("model.not_added model=%s reason=%s", wish.name, error)
        return None
