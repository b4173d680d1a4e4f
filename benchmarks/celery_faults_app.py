"""The peer's application for `celery_faults.py`: a task that writes a known text in pieces. Run by the peer's Python.

Each piece is an entry of a Redis stream, with the id RUN-PIECE: Redis refuses a repeated write, and a write of an older
run once a newer one has written. A new run writes from the beginning; readers see by the ids that it is another one.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import os
import signal
import time
import uuid
from typing import Any

from celery import Celery, signals
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.exceptions import ResponseError
from redis.retry import Retry

URL = os.environ["BENCH_REDIS_URL"]
VISIBILITY_S = int(os.environ["BENCH_VISIBILITY_S"])
STOP_AT = int(os.environ.get("BENCH_STOP_AT", "0"))
"""The worker stops itself after so many results were stored, before the task is acknowledged; 0: never."""
CONNECTIONS = 2_000
"""At most, of one process: each thread of a pool of threads has its own."""

app = Celery("faults", broker=URL, backend=URL)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    # The visibility timeout has to be set in three places. Kombu then looks for abandoned tasks each second; without
    # the two other options it would look each 100 s.
    visibility_timeout=VISIBILITY_S,
    result_backend_transport_options={"visibility_timeout": VISIBILITY_S},
    broker_transport_options={
        "visibility_timeout": VISIBILITY_S,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    result_backend_always_retry=True,
    redis_max_connections=CONNECTIONS,
)
store = Redis.from_url(
    URL, decode_responses=True, retry=Retry(ConstantBackoff(0.2), 1_000), max_connections=CONNECTIONS
)
"""Asks again for as long as Redis is away."""


@app.task(name="write", bind=True)
def write(self: Any, text: str, streams: bool, piece_chars: int, delay_s: float) -> str:
    name = self.request.id
    store.sadd(f"runs:{name}", uuid.uuid4().hex)
    run = store.scard(f"runs:{name}")
    for number, offset in enumerate(range(0, len(text), piece_chars), 1):
        time.sleep(delay_s)
        if streams:
            piece = {"offset": offset, "text": text[offset : offset + piece_chars]}
            try:
                store.xadd(f"pieces:{name}", piece, id=f"{run}-{number}")
            except ResponseError as error:
                if "equal or smaller" not in str(error):
                    raise
    return text


@signals.task_postrun.connect
def stop_before_the_acknowledgement(**_: Any) -> None:
    """The result is stored, and the worker's main process has not heard of it."""
    if STOP_AT and store.incr("stored") == STOP_AT:
        os.killpg(0, signal.SIGSTOP)
