"""A request's entry as rows of the view's file, and back: copied on the loop, made into text on the writer's thread."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

from penstock.gateway.view.census import Counted, counted_as
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.filters import column_values
from penstock.gateway.view.outputs import json_at_once
from penstock.gateway.view.request_state import NOT_KNOWN, metadata_bytes
from penstock.schemas.labels import Labels
from penstock.schemas.records import AttemptHistory, Origin, Place, Record, StatusEvent, WaitingFor, fields_of

_ORIGIN = tuple(fields_of(Origin))
_PLACE = tuple(fields_of(Place))
_WAITING = tuple(fields_of(WaitingFor))
_ELSEWHERE = ("request_id", "tenant", "done", "origin", "user_id", "session_id", "correlation_id")
_STATUS = tuple(name for name in fields_of(StatusEvent) if name not in _ELSEWHERE)
_FACTS = (
    "partitions",
    "priority",
    "deadline_ms",
    "started_ms",
    "waits_from_ms",
    "content",
    "stream",
    "metadata",
    "pool",
    "cancelled_ms",
    "end_asked_ms",
    "former_partition",
    "redriven_from",
    "changed_priority",
    "stored_text",
    "others",
    "first_piece_ms",
)
"""What is rarely set stands last: the last values that are as by default are not written."""
_facts_of = attrgetter(*_FACTS)
_BY_DEFAULT = _facts_of(Entry("", "", NOT_KNOWN))
_NULLS = (None,) * len(_STATUS)


class Row(NamedTuple):
    """A row of the table of requests, without its number."""

    tenant: str
    request_id: str
    accepted_ms: int
    updated_ms: int
    done: bool
    erased: bool
    must_end_ms: int
    counted: str | None
    status: str
    conversation_id: str | None
    user_id: str | None
    session_id: str | None
    correlation_id: str | None
    task: str
    model: str | None
    klass: str
    facts: str
    """The rest, as a JSON list."""


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


def row_of(copy: Snapshot) -> Row:
    """What the file holds of it; `restored` reads it."""
    origin, status = _values(copy.origin, _ORIGIN), copy.status
    facts = [
        copy.partition,
        copy.terminal_offset,
        copy.fold,
        _without_defaults(copy.facts, _BY_DEFAULT),
        origin,
        _unless_same(_values(copy.results_origin, _ORIGIN), origin),
        _status_values(status),
        None if status is None else _unless_same(_values(status.origin, _ORIGIN), origin),
        _values(copy.moved_to, _PLACE),
        copy.pieces_from,
        copy.ended,
    ]
    counted = None if copy.counted is None else json_at_once([*copy.counted]).decode()
    state = (copy.listed_ms, copy.updated_ms, copy.closed, copy.erased, copy.must_end_ms)
    return Row._make((copy.tenant, copy.request_id, *state, counted, *copy.columns, json_at_once(facts).decode()))


def _without_defaults(values: Sequence[Any], by_default: Sequence[Any]) -> Sequence[Any]:
    """The values, but for the last ones that are as by default."""
    count = len(values)
    while count and values[count - 1] == by_default[count - 1]:
        count -= 1
    return values[:count]


def _unless_same(origin: list[Any] | None, known: list[Any] | None) -> list[Any] | bool | None:
    """True for the same place as the known one."""
    return True if origin is not None and origin == known else origin


def _values(record: Record | None, names: tuple[str, ...]) -> list[Any] | None:
    return None if record is None else [getattr(record, name) for name in names]


def _status_values(status: StatusEvent | None) -> Sequence[Any] | None:
    values = _values(status, _STATUS)
    if values is None or status is None:
        return None
    values[_STATUS.index("waiting_for")] = _values(status.waiting_for, _WAITING)
    values[_STATUS.index("history")] = None if status.history is None else status.history.to_dict()
    return _without_defaults(values, _NULLS)


def _status(tenant: str, request_id: str, values: list[Any], origin: Origin) -> StatusEvent:
    fields = dict(zip(_STATUS, values, strict=False))
    if (waiting := fields.get("waiting_for")) is not None:
        fields["waiting_for"] = WaitingFor(**dict(zip(_WAITING, waiting, strict=True)))
    if (history := fields.get("history")) is not None:
        fields["history"] = AttemptHistory.from_dict(history)
    return StatusEvent(request_id=request_id, tenant=tenant, done=False, origin=origin, **fields)


def _origin(values: list[Any] | bool | None, known: Origin | None = None) -> Origin | None:
    if isinstance(values, list):
        return Origin(**dict(zip(_ORIGIN, values, strict=True)))
    return known if values else None


def counted_start(klass: str) -> str:
    """What the text of every request of a class starts with."""
    return json_at_once([klass]).decode()[:-1]


@lru_cache(1_000)
def counted_of(text: str) -> Counted:
    """Many requests are counted as the same."""
    klass, kind, *rest = json.loads(text)
    return Counted(klass, None if kind is None else tuple(kind), *rest)


def restored(row: Row) -> Entry:
    """The entry again, as it was copied."""
    partition, terminal_offset, fold, plain, *records, pieces_from, ended = json.loads(row.facts)
    origin, results_origin, status, status_origin, moved_to = records
    entry = Entry(row.tenant, row.request_id, partition)
    for name, value in zip(_FACTS, plain, strict=False):
        setattr(entry, name, value)
    entry.task, entry.model, entry.conversation_id = row.task, row.model, row.conversation_id
    entry.labels = Labels(row.user_id, row.session_id, row.correlation_id)
    entry.kept_bytes += metadata_bytes(entry.metadata)
    entry.accepted_ms, entry.updated_ms = row.accepted_ms if entry.content or row.erased else 0, row.updated_ms
    entry.erased, entry.terminal_offset = bool(row.erased), terminal_offset
    entry.origin = _origin(origin)
    entry.moved_to = None if moved_to is None else Place(**dict(zip(_PLACE, moved_to, strict=True)))
    if (event_origin := _origin(status_origin, entry.origin)) is not None:
        entry.status = _status(row.tenant, row.request_id, status, event_origin)
        entry.statuses.apply(entry.status)
    epoch, attempt, offset, tokens = fold
    followed = _origin(results_origin, entry.origin)
    entry.fold.restore(origin=followed, epoch=epoch, attempt=attempt, text="", token_count=tokens)
    entry.fold.offset = offset
    entry.statuses.origin = followed or entry.statuses.origin
    entry.pieces_from = pieces_from
    entry.passed_over = pieces_from >= 0
    entry.ended_as, entry.finished_ms, artifact_ids = ended
    entry.artifact_ids = frozenset(artifact_ids)
    entry.noted = entry.to_note
    return entry
