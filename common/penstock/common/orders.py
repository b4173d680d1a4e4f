"""What operators ordered: the models that are served because of it, and the orders that are in force. Pure."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock.common.desired import Desired
from penstock.common.model_entry import ModelEntry, check_names, parse_entry
from penstock.schemas.desired import MODEL
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.records import DesiredState
from penstock.schemas.times import rfc3339

logger = logging.getLogger(__name__)


def entry_of(state: DesiredState) -> ModelEntry | None:
    """The entry that was ordered; None when there is none, or none that can be read."""
    if state.entry is None:
        return None
    try:
        fields: Any = json.loads(state.entry)
        return parse_entry({**fields, "id": state.name, "pool": state.pool})
    except (InvalidRequest, ValueError, TypeError) as error:
        logger.warning("model.unreadable_entry model=%s reason=%s", state.name, error)
        return None


def effective_entries(configured: Sequence[ModelEntry], states: Mapping[str, DesiredState]) -> list[ModelEntry]:
    """Configured models with their changes, less those that were removed, then the added ones, oldest order first.

    An entry that cannot be served, or whose names are taken, is left out with a log line: no record ends a worker.
    """
    of_models = {state.name: state for state in states.values() if state.kind == MODEL}
    entries: list[ModelEntry] = []
    for entry in configured:
        state = of_models.pop(entry.id, None)
        if state is None or not state.removed:
            entries = _with(entries, (None if state is None else entry_of(state)) or entry)
    for state in sorted(of_models.values(), key=lambda one: (one.created_at, one.name)):
        added = None if state.removed else entry_of(state)
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


def in_force(desired: Mapping[str, Desired]) -> list[Desired]:
    """The orders that make models and classes other than they are configured, classes first, by name."""
    found = [one for one in desired.values() if changes(one.state)]
    return sorted(found, key=lambda one: (one.state.kind, one.state.pool or "", one.state.name))


def changes(state: DesiredState) -> list[str]:
    """What is ordered, in words: `paused`, `removed`, `pinned`, …; nothing where all is as configured."""
    words = {
        "paused": state.paused,
        "removed": state.removed,
        "kept loaded": state.loaded is True,
        "unloaded until somebody asks": state.loaded is False,
        "pinned": state.pinned is True,
        "not pinned": state.pinned is False,
        "added or replaced": state.entry is not None,
    }
    return [word for word, holds in words.items() if holds]


def order_lines(orders: Iterable[Desired]) -> list[str]:
    """One line an order: `class low: paused (since 2026-11-25T10:00:00Z, by the key 3f9c)`."""
    return [
        f"{_subject(state)}: {', '.join(changes(state))} (since {rfc3339(state.created_at)}{_by(state)})"
        for state in (one.state for one in orders)
    ]


def _subject(state: DesiredState) -> str:
    return f"{state.kind} {state.name}" + ("" if state.pool is None else f" in the pool {state.pool}")


def _by(state: DesiredState) -> str:
    return "" if state.created_by in (None, "anybody") else f", by the key {state.created_by}"
