"""The attempts of a request: a bounded history, and its JSON form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.schemas.records import Attempt, AttemptHistory
from penstock.schemas.times import rfc3339

MOST_ATTEMPTS = 16
"""Of a longer history the newest are kept, and the others are counted."""


def extended(history: AttemptHistory | None, newer: Sequence[Attempt], dropped: int = 0) -> AttemptHistory:
    """A history with more attempts behind it. `dropped` were left out between the two."""
    attempts = [*(() if history is None else history.attempts), *newer]
    left_out = max(0, len(attempts) - MOST_ATTEMPTS)
    dropped += left_out + (0 if history is None else history.dropped)
    return AttemptHistory(attempts=attempts[left_out:], dropped=dropped)


def history_json(history: AttemptHistory | None) -> dict[str, Any]:
    """`history`, and `history_dropped` if some were left out; nothing where there is none."""
    if history is None:
        return {}
    shown: dict[str, Any] = {"history": [_attempt_json(attempt) for attempt in history.attempts]}
    if history.dropped:
        shown["history_dropped"] = history.dropped
    return shown


def _attempt_json(attempt: Attempt) -> dict[str, Any]:
    started, ended = rfc3339(attempt.started_at or 0), rfc3339(attempt.ended_at or 0)
    return {**attempt.to_dict(), "started_at": started, "ended_at": ended}
