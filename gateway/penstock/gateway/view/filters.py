"""Which requests of a tenant are meant: one declaration for the view's file and for requests in memory."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.gateway.view.wait_counts import Kind
from penstock.schemas.records import STATUS_RANKS
from penstock.schemas.topics import TP, priority_class

if TYPE_CHECKING:
    from penstock.gateway.view.entries import Entry

_LIVE = frozenset(name for name, rank in STATUS_RANKS.items() if rank < STATUS_RANKS["completed"])
STATUS_GROUPS = {
    "waiting": tuple(name for name in STATUS_RANKS if name in _LIVE and name != "running"),
    "unsuccessful": ("failed", "dead_lettered", "expired"),
}
"""In place of a status: any of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitsFor:
    """Requests that wait for one reason, as callers read it: some reasons only the gateway knows."""

    reason: str
    reason_of: Callable[[Entry], str | None]
    """Why a request waits, judged when the call began."""
    unserved: Collection[Kind] = ()
    """The kinds of requests that wait and that no live worker serves."""
    held: Collection[TP] = ()
    """Partitions that open transactions hold back."""

    def condition(self) -> tuple[str, Any]:
        """True of all rows of the view's file that wait for it, and perhaps of others; `counted` is a `Counted`."""
        match self.reason:
            case "no_worker":
                kinds = [json.dumps(kind, ensure_ascii=False, separators=(",", ":")) for kind in self.unserved]
                return "json_extract(counted, '$[1]') IN (SELECT value FROM json_each(?))", json.dumps(kinds)
            case "scheduled":
                return "json_extract(counted, '$[3]') > ?", 0
            case "transaction":
                held = json.dumps([f"{topic}/{partition}" for topic, partition in self.held])
                place = "json_extract(facts, '$[4][0]') || '/' || json_extract(facts, '$[4][1]')"
                return f"status = 'accepted' AND {place} IN (SELECT value FROM json_each(?))", held
            case _:
                return "json_extract(counted, '$[5]') = ?", self.reason


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestFilter:
    """What is None chooses nothing; the rest must all be so. `klass` is high, medium or low."""

    status: str | None = None
    conversation_id: str | None = None
    user_id: str | None = None
    session_id: str | None = None
    correlation_id: str | None = None
    task: str | None = None
    model: str | None = None
    klass: str | None = None
    id_contains: str | None = None
    accepted_until_ms: int | None = None
    waits_for: WaitsFor | None = None

    def matches(self, entry: Entry) -> bool:
        """Whether a request is as this filter wants it, as far as is known of it now."""
        return (
            (self.status is None or entry.status_name in self.statuses)
            and all(wanted == _value(entry, name) for name, wanted in self._wanted())
            and (self.id_contains is None or self.id_contains in entry.request_id)
            and (self.accepted_until_ms is None or entry.listed_ms <= self.accepted_until_ms)
            and (self.waits_for is None or self.waits_for.reason_of(entry) == self.waits_for.reason)
        )

    @property
    def statuses(self) -> tuple[str | None, ...]:
        """Those of which one must be so; None is any."""
        implied = "" if self.waits_for is None else "waiting"
        return STATUS_GROUPS.get(self.status or implied, (self.status,))

    @property
    def live_alone(self) -> bool:
        """Whether it matches only requests that have not ended."""
        return _LIVE.issuperset(self.statuses)

    def conditions(self) -> Iterator[tuple[str, Any]]:
        """What must be true of a row of the view's file beside its status, as SQL, each with its value."""
        for name, value in self._wanted():
            yield f"{name} = ?", value
        if self.id_contains is not None:
            yield "instr(request_id, ?) > 0", self.id_contains
        if self.accepted_until_ms is not None:
            yield "accepted_ms <= ?", self.accepted_until_ms
        if self.waits_for is not None:
            yield self.waits_for.condition()

    def _wanted(self) -> Iterator[tuple[str, str]]:
        """The columns that must have a value, and which, but for the status."""
        for name in COLUMNS[1:]:
            if (value := getattr(self, name)) is not None:
                yield name, value

    @property
    def index(self) -> str:
        """The index of the view's file that leaves the fewest rows to look at."""
        for name in ("correlation_id", "session_id", "conversation_id", "user_id"):
            if getattr(self, name) is not None:
                return f"by_{name.removesuffix('_id')}"
        return "by_time" if {None, "completed"}.issuperset(self.statuses) else "by_status"


ALL = RequestFilter()
COLUMNS = ("status", "conversation_id", "user_id", "session_id", "correlation_id", "task", "model", "klass")
"""Those of the view's file, in their order."""


def column_values(entry: Entry) -> tuple[str | None, ...]:
    """What the view's file holds of a request in the columns that lists are filtered by."""
    return tuple(_value(entry, name) for name in COLUMNS)


def _value(entry: Entry, name: str) -> str | None:
    match name:
        case "status":
            return entry.status_name
        case "klass":
            return priority_class(entry.priority)
        case "user_id" | "session_id" | "correlation_id":
            return getattr(entry.labels, name)
        case _:
            return getattr(entry, name)
