"""What waits, by tenant, class and model: how much, since when, why, and when it will be empty. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

from penstock.gateway.view.liveness import Liveness
from penstock.gateway.view.wait_counts import OTHERS, Line, LineId
from penstock.schemas.records import TIMELESS_REASONS

MOST_LINES = 100
"""Lines in one answer: the longest."""

HALTS = TIMELESS_REASONS - {"memory"}
"""Nothing starts while all of a line wait for one of these. Memory comes back as others end."""

Json = dict[str, Any]


def all_waiting_json(lines: Iterable[tuple[LineId, Line]], liveness: Liveness, now_ms: int) -> Json:
    """The lines of which something may start now, the longest first."""
    due = [(line.waiting.due(now_ms), line_id, line) for line_id, line in lines]
    shown = heapq.nlargest(MOST_LINES, (one for one in due if one[0]), key=lambda one: one[0])
    return {
        "object": "waiting",
        "depth": sum(depth for depth, _, _ in due),
        "data": [_line_json(*one, liveness, now_ms) for one in shown],
        "omitted": sum(1 for depth, _, _ in due if depth) - len(shown),
    }


def _line_json(depth: int, line_id: LineId, line: Line, liveness: Liveness, now_ms: int) -> Json:
    tenant, klass, (task, model, pool) = line_id
    since_ms = line.waiting.since_ms
    unserved = line_id[2] != OTHERS and liveness.awaits_worker(task, model, pool) is not None
    reasons = {"no_worker": depth} if unserved else dict(line.reasons.most_common())
    # What leaves such a line has expired or was cancelled: no rate says when the others start.
    stands_still = bool(reasons) and reasons.keys() <= HALTS
    empty_in_s = None if stands_still else line.empty_in_s(now_ms)
    return {
        "object": "waiting.line",
        "tenant": tenant,
        "class": klass,
        "task": task,
        "model": model,
        "pool": pool,
        "depth": depth,
        "oldest_age_s": None if since_ms is None else round(max(0, now_ms - since_ms) / 1000, 3),
        "rates": {
            "accepted_per_s": round(line.came.per_s(now_ms), 3),
            "left_per_s": round(line.left.per_s(now_ms), 3),
        },
        "empty_in_s": None if empty_in_s is None else round(empty_in_s, 1),
        "reasons": reasons,
    }
