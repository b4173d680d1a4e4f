"""What a request costs the file of a gateway's view: bytes by table and index, processor time, rows, and its lists.

    make bench BENCHMARKS=view_rows ARGS="--requests 100000 --live 20"

Records of each kind of request go through a real view and its store, without Kafka. The outcome of a request is read
`--live` requests after its own record, and what changed is handed to the writer as a gateway that catches up does it.
Then pages of each list are read, the first and one from the middle.
"""

from __future__ import annotations

import argparse
import gc
import sqlite3
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import common  # noqa: F401  (the path of the tests' kit)

from kit.records import CODEC, NAMES
from penstock.common.reader import RawMessage
from penstock.gateway.view.filters import RequestFilter
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.selecting import UNFOLLOWED_STREAM
from penstock.gateway.view.store import Store
from penstock.gateway.view.view import View
from penstock.schemas.ids import derived_request_id, new_request_id
from penstock.schemas.records import STATUS_RANKS, Origin, Record, ResultEvent, StatusEvent, Timings, Usage
from penstock.schemas.requests import parse_request

T0 = 1_764_000_000_000
WORDS = "the quick brown fox jumps over a lazy dog "
LISTS: dict[str, dict[str, Any]] = {
    "all": {},
    "completed": {"status": "completed"},
    "failed": {"status": "failed"},
    "waiting": {"status": "waiting"},
    "model that none has": {"model": "none"},
    "id that contains": {"id_contains": "abcd"},
    "conversation": {"conversation_id": "c7"},
    "conversation, failed": {"conversation_id": "c7", "status": "failed"},
    "user": {"user_id": "user-7@example.org"},
    "user, failed": {"user_id": "user-7@example.org", "status": "failed"},
    "session": {"session_id": "session-7"},
    "correlation": {"correlation_id": "trace-7"},
}


def chat(number: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"question {number} {WORDS * 20}"}]
    return {"task": "text_generation", "model": "smollm2", "payload": {"messages": messages}, "priority": 4}


KINDS: dict[str, Callable[[int], dict[str, Any]]] = {
    "chat": chat,
    "streamed": lambda n: {**chat(n), "stream": True, "user_id": f"user-{n % 1000}@example.org"},
    "batch line": lambda n: {**chat(n), "priority": 9},
    "conversation": lambda n: {
        **chat(n),
        "conversation_id": f"c{n % 1000}",
        "session_id": f"session-{n % 1000}",
        "metadata": {"correlation_id": f"trace-{n}"},
    },
}


def records(kind: str, number: int) -> tuple[list[RawMessage], RawMessage]:
    """What is read of one request when it begins, and its outcome."""
    at_ms = T0 + number * 2
    body = KINDS[kind](number)
    topic = NAMES.request("text_generation", body["priority"])
    line = derived_request_id(topic, 0, number, at_ms)
    request = parse_request(body, request_id=line if kind == "batch line" else new_request_id(), now_ms=at_ms)
    origin = Origin(topic=topic, partition=number % 8, offset=number, append_time_ms=at_ms)
    said: dict[str, Any] = {
        "request_id": request.request_id,
        "tenant": request.tenant,
        "origin": origin,
        "attempt": 1,
        "epoch": 3,
        "worker_id": "worker-gpu-7f9c-12",
        "user_id": request.user_id,
        "session_id": request.session_id,
    }

    def raw(on: str, record: Record, behind_ms: int, headers: Any = ()) -> RawMessage:
        key = request.request_id.encode()
        return RawMessage(on, number % 8, number, at_ms + behind_ms, key, CODEC.encode(record), headers)

    running = StatusEvent(
        status="running", done=False, rank=STATUS_RANKS["running"], model="smollm2", created_at=at_ms + 9, **said
    )
    begin = [raw(topic, request, 0), raw(NAMES.status, running, 9)]
    if request.stream:
        piece = ResultEvent(
            kind="chunk", task=request.task, created_at=at_ms + 90, text="the ", text_offset=0, token_ids=[1], **said
        )
        begin.append(raw(NAMES.result, piece, 90, UNFOLLOWED_STREAM))
    failed = number % 1_000 == 0
    end = ResultEvent(
        kind="terminal",
        status="failed" if failed else "completed",
        task=request.task,
        created_at=at_ms + 900,
        text_generation={"text": WORDS * 12},
        finish_reason="stop",
        usage=Usage(prompt_tokens=180, completion_tokens=120, total_tokens=300),
        timings=Timings(queued_ms=9, run_ms=890, first_token_ms=80),
        model="smollm2",
        device="cuda:0",
        **said,
    )
    return begin, raw(NAMES.result, end, 900)


def in_order(kind: str, count: int, live: int) -> Iterator[list[RawMessage]]:
    """Parts of what is read: `live` requests have begun and not ended."""
    ends: list[RawMessage] = []
    part: list[RawMessage] = []
    for number in range(count):
        begin, end = records(kind, number)
        part += begin
        ends.append(end)
        if number >= live:
            part.append(ends[number - live])
        if len(part) >= 250:
            yield part
            part = []
    yield part + ends[max(0, count - live) :]


def fill(path: Path, kind: str, count: int, live: int) -> dict[str, float]:
    """Microseconds of processor a request, of the loop and of the writer; rows written a request."""
    with closing(Store(path, "bench")) as store:
        view = View(store, Hub(), NAMES, 8)
        view.known.catching_up = True
        gc.collect()
        gc.disable()  # as a gateway holds it off; records that wait here would be looked at again and again
        rows, submit = Counter[str](), store.submit

        def counting(batch: Any) -> None:
            rows["rows"] += len(batch.rows)
            submit(batch)

        store.submit = counting
        fold_s = writer_s = 0.0
        for part in in_order(kind, count, live):
            began, all_began = time.thread_time(), time.process_time()
            view.apply(part)
            if view.known.unwritten.is_due:
                view.flush()
            while view.known.unwritten.is_full and not view.flush():
                time.sleep(0.002)
            view.evict_to_disk(200)
            fold_s += time.thread_time() - began
            writer_s += time.process_time() - all_began - (time.thread_time() - began)
        all_began, began = time.process_time(), time.thread_time()
        written = threading.Event()
        while not view.flush(written):
            time.sleep(0.002)
        written.wait()
        writer_s += time.process_time() - all_began - (time.thread_time() - began)
        return {
            "fold µs": fold_s / count * 1e6,
            "writer µs": writer_s / count * 1e6,
            "rows": rows["rows"] / count,
        }


def sizes(path: Path, count: int) -> dict[str, float]:
    """Bytes a request, by table and index, but for what takes less than one."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        found = connection.execute("SELECT name, sum(pgsize) FROM dbstat GROUP BY name ORDER BY 2 DESC").fetchall()
    each = {name: size / count for name, size in found}
    return {"file": sum(each.values()), **{name: size for name, size in each.items() if size >= 1}}


def show_lists(path: Path) -> None:
    """Milliseconds of a page of 100: the median of three, and the first."""
    with closing(Store(path, "bench")) as store:
        everything = store.page("default", limit=100, after=None, newest_first=True) or []
        middle = everything[-1].key
        for name, where in LISTS.items():
            took: list[float] = []
            for after in (None, middle, None):
                began = time.perf_counter()
                store.page("default", limit=100, after=after, newest_first=True, where=RequestFilter(**where))
                took.append(1_000 * (time.perf_counter() - began))
            print(f"  {name:24} {statistics.median(took):8.2f} ms (first {took[0]:.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--live", type=int, default=20)
    parser.add_argument("--kinds", nargs="*", default=[*KINDS])
    parser.add_argument("--lists", action="store_true")
    options = parser.parse_args()
    for kind in options.kinds:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "view.sqlite"
            figures = fill(path, kind, options.requests, options.live)
            print(kind, {name: round(value, 2) for name, value in figures.items()})
            print(" ", {name: round(value) for name, value in sizes(path, options.requests).items()}, flush=True)
            if options.lists:
                show_lists(path)


if __name__ == "__main__":
    main()
