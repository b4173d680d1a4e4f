"""A request's entry as rows of the view's file, and back: copied on the loop, made into text on the writer's thread."""

from __future__ import annotations

import json
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from penstock.gateway.view.census import Counted, counted_as
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.filters import column_values
from penstock.gateway.view.outputs import json_at_once
from penstock.gateway.view.request_state import metadata_bytes
from penstock.schemas.labels import Labels
from penstock.schemas.records import AttemptHistory, Origin, Place, Record, StatusEvent, WaitingFor, fields_of

_ORIGIN = tuple(fields_of(Origin))
_PLACE = tuple(fields_of(Place))
_STATUS = tuple(name for name in fields_of(StatusEvent) if name != "origin")
_WAITING = tuple(fields_of(WaitingFor))
_FACTS = (
    "task",
    "priority",
    "model",
    "pool",
    "conversation_id",
    "stream",
    "metadata",
    "content",
    "deadline_ms",
    "cancelled_ms",
    "end_asked_ms",
    "partitions",
    "former_partition",
    "redriven_from",
    "changed_priority",
    "labels",
    "stored_text",
    "others",
    "waits_from_ms",
    "started_ms",
)
_facts_of = attrgetter(*_FACTS)


class Snapshot(NamedTuple):
    """What an entry held at one moment, without its text and its outcome: these stand on the result topic."""

    tenant: str
    request_id: str
    listed_ms: int
    updated_ms: int
    columns: tuple[str | None, ...]
    """As `filters.COLUMNS` has them."""
    closed: bool
    erased: bool
    facts: tuple[Any, ...]
    partition: int
    origin: Origin | None
    moved_to: Place | None
    status: StatusEvent | None
    results_origin: Origin | None
    fold: tuple[int, int, int | None, int]
    terminal_offset: int
    pieces_from: int
    ended: tuple[str, int, tuple[str, ...]]
    """As what it ended, when, and the artifacts that the outcome names."""
    must_end_ms: int
    counted: Counted | None
    """As what the census counts it while it is live."""


def snapshot(entry: Entry) -> Snapshot:
    """Copy the entry."""
    fold = entry.fold
    return Snapshot(
        entry.tenant,
        entry.request_id,
        entry.listed_ms,
        entry.updated_ms,
        column_values(entry),
        entry.closed,
        entry.erased,
        _facts_of(entry),
        entry.place,
        entry.origin,
        entry.moved_to,
        entry.status,
        fold.origin,
        (fold.epoch, fold.attempt, fold.offset, fold.token_count),
        entry.terminal_offset,
        entry.pieces_from,
        (entry.ended_as, entry.finished_ms, tuple(entry.artifact_ids)),
        entry.must_end_ms,
        None if entry.closed else counted_as(entry),
    )


def facts_text(copy: Snapshot) -> str:
    """What the file holds of it in one column, as a JSON list; `restored` reads it."""
    return json_at_once(
        [
            copy.partition,
            copy.terminal_offset,
            copy.fold,
            copy.facts,
            _values(copy.origin, _ORIGIN),
            _values(copy.results_origin, _ORIGIN),
            _status_values(copy.status),
            None if copy.status is None else _values(copy.status.origin, _ORIGIN),
            _values(copy.moved_to, _PLACE),
            copy.pieces_from,
            copy.ended,
        ]
    ).decode()


def _values(record: Record | None, names: tuple[str, ...]) -> list[Any] | None:
    return None if record is None else [getattr(record, name) for name in names]


def _status_values(status: StatusEvent | None) -> list[Any] | None:
    values = _values(status, _STATUS)
    if values is not None and status is not None:
        values[_STATUS.index("waiting_for")] = _values(status.waiting_for, _WAITING)
        values[_STATUS.index("history")] = None if status.history is None else status.history.to_dict()
    return values


def _status(values: list[Any], origin: Origin) -> StatusEvent:
    """Files of earlier releases have fewer values: fields are only ever added at the end."""
    fields = dict(zip(_STATUS, values, strict=False))
    waiting = fields.get("waiting_for")
    if waiting is not None:
        fields["waiting_for"] = WaitingFor(**dict(zip(_WAITING, waiting, strict=False)))
    if (history := fields.get("history")) is not None:
        fields["history"] = AttemptHistory.from_dict(history)
    return StatusEvent(**fields, origin=origin)


def _origin(values: list[Any] | None) -> Origin | None:
    return None if values is None else Origin(**dict(zip(_ORIGIN, values, strict=True)))


def counted_text(copy: Snapshot) -> str | None:
    """As what the census counts it, as text; `counted_of` reads it."""
    return None if copy.counted is None else json_at_once([*copy.counted]).decode()


def counted_start(klass: str) -> str:
    """What the text of every request of a class starts with."""
    return json_at_once([klass]).decode()[:-1]


@lru_cache(1_000)
def counted_of(text: str) -> Counted:
    """Many requests are counted as the same."""
    klass, kind, *rest = json.loads(text)
    return Counted(klass, None if kind is None else tuple(kind), *rest)


def restored(tenant: str, request_id: str, facts: str, *, accepted_ms: int, erased: bool, updated_ms: int = 0) -> Entry:
    """The entry again, as it was copied. Files of earlier releases have fewer facts."""
    partition, terminal_offset, fold, plain, *records, pieces_from, ended = json.loads(facts)
    origin, results_origin, status, status_origin, moved_to = records
    entry = Entry(tenant, request_id, partition)
    for name, value in zip(_FACTS, plain, strict=False):
        setattr(entry, name, value)
    entry.labels = Labels(*entry.labels)
    entry.kept_bytes += metadata_bytes(entry.metadata)
    entry.accepted_ms = accepted_ms if entry.content else 0
    entry.erased, entry.terminal_offset = erased, terminal_offset
    entry.updated_ms = updated_ms
    entry.origin = _origin(origin)
    entry.moved_to = None if moved_to is None else Place(**dict(zip(_PLACE, moved_to, strict=True)))
    if status is not None:
        event_origin = _origin(status_origin)
        assert event_origin is not None
        entry.status = _status(status, event_origin)
        entry.statuses.apply(entry.status)
    epoch, attempt, offset, tokens = fold
    entry.fold.restore(origin=_origin(results_origin), epoch=epoch, attempt=attempt, text="", token_count=tokens)
    entry.fold.offset = offset
    entry.statuses.origin = entry.fold.origin or entry.statuses.origin
    entry.pieces_from = pieces_from
    entry.passed_over = pieces_from >= 0
    entry.ended_as, entry.finished_ms, artifact_ids = ended
    entry.artifact_ids = frozenset(artifact_ids)
    entry.noted = entry.to_note
    return entry
