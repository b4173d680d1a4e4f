"""A problem, what an operator does about it, and since when it is there. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.schemas.texts import in_one_direction
from penstock.schemas.times import rfc3339


@dataclass(frozen=True, kw_only=True, slots=True)
class Action:
    """What an operator does about it: a command, and the call that does the same if there is one."""

    label: str
    command: str
    path: str | None = None
    """POST this."""
    body: Mapping[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        call = None if self.path is None else {"method": "POST", "path": self.path, "body": self.body}
        return {"label": self.label, "command": self.command, "call": call}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One problem. `problem` is its stable code; `subject` names the model, class, worker, tenant or reason."""

    problem: str
    subject: str | None = None
    affects: str
    cause: str
    action: Action
    since_ms: int | None = None
    """None: not known, so it counts from when it was first seen."""
    pool: str | None = None
    settles_ms: int = 0
    """It is reported once it has lasted for so long: what ends by itself within that time is no problem."""

    @property
    def key(self) -> tuple[str, str, str]:
        """By this it is the same problem at the next look."""
        return self.problem, self.cause if self.subject is None else self.subject, self.pool or ""

    def to_json(self, seen_ms: int) -> dict[str, Any]:
        return {
            "object": "problem",
            "problem": self.problem,
            "subject": self.subject,
            "pool": self.pool,
            "since": rfc3339(seen_ms if self.since_ms is None else self.since_ms),
            "affects": in_one_direction(self.affects),
            "cause": in_one_direction(self.cause),
            "action": self.action.to_json(),
        }


class SinceBook:
    """Since when each problem is seen; one that has gone begins anew when it comes back."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str, str], int] = {}

    def note(self, found: Iterable[Found], now_ms: int) -> list[tuple[Found, int]]:
        """The problems of now that have settled, each with the time when it was first seen."""
        found = list(found)
        self._since = {one.key: self._since.get(one.key, now_ms) for one in found}
        seen = [(one, self._since[one.key]) for one in found]
        return [(one, since_ms) for one, since_ms in seen if now_ms - since_ms >= one.settles_ms]
