"""The peer's application: a task that does nothing. Run by the Python of the peer's own environment (see peers.py)."""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import time

from celery import Celery

URL = os.environ["BENCH_REDIS_URL"]
app = Celery("bench", broker=URL, backend=URL)
app.conf.update(
    task_serializer="json",
    result_serializer="json",
    accept_content=["json"],
    worker_prefetch_multiplier=int(os.environ.get("BENCH_PREFETCH", "64")),
    worker_send_task_events=False,
    task_send_sent_event=False,
    broker_connection_retry_on_startup=True,
)


@app.task(name="noop")
def noop(body: dict[str, object]) -> dict[str, object]:
    """Answers with a text of the size that Penstock's no-op engine gives."""
    return {"text": "word0 ", "prompt": len(str(body["prompt"])), "ended_at": time.time()}
