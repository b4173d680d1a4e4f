"""The peer's client: one backlog of tasks for each number on standard input; its figures as a line of JSON.

The queue is filled while the workers do not consume, so that the client's own work is not in the figure.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import json
import sys
import time

from celery.result import ResultSet
from celery_app import app, noop

BODY = {"prompt": "x" * 200, "max_tokens": 16}


def backlog(count: int) -> float:
    """Tasks per second between the end of the first task and that of the last."""
    app.control.cancel_consumer("celery", reply=True)
    with app.producer_or_acquire() as producer:
        results = [noop.apply_async((BODY,), producer=producer) for _ in range(count)]
    app.control.add_consumer("celery", reply=True)
    began = time.monotonic()
    answers = ResultSet(results).join_native(timeout=120)
    assert len(answers) == count, f"{len(answers)} of {count} after {time.monotonic() - began:.0f} s"
    times = [answer["ended_at"] for answer in answers]
    return (count - 1) / max(0.001, max(times) - min(times))


def main() -> None:
    for line in sys.stdin:
        print(json.dumps({"rate": backlog(int(line))}), flush=True)


if __name__ == "__main__":
    main()
