"""A view's file changes to one that was made from a snapshot, while requests come: how long their rows wait.

    make bench BENCHMARKS=change_over ARGS="--requests 300000 --young 100000"

The snapshot has `--requests` ended requests, and the young file `--young`. While the young file is copied, a batch is
handed to its writer every 0.05 s. Printed are the seconds of the change, and the longest wait of a batch until it was
written, in a second before the change and meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from snapshot import fill_up

from kit.records import REQUESTS, RESULTS, outcome, request
from kit.view_gateway import ViewGateway
from penstock.common.clock import now_ms
from penstock.gateway.view.backfill import Backfill
from penstock.gateway.view.rows import Snapshot, snapshot
from penstock.gateway.view.snapshot_file import make_view, take
from penstock.gateway.view.store import Batch, Store
from penstock.gateway.view.view_file import imported_path

ROWS, EVERY_S = 150, 0.05
WRITTEN = 2_000


def filled(path: Path, count: int) -> ViewGateway:
    """A view whose file has so many ended requests."""
    view = ViewGateway(path)
    for number in range(WRITTEN):
        made = request(f"{path.stem}{number}", created_at=now_ms())
        view.read(REQUESTS, made)
        view.read(RESULTS, outcome(made.request_id, "ab", created_at=now_ms()))
    view.flush()
    fill_up(path, count)
    return view


def longest_wait_s(store: Store, row: Snapshot, is_over: Callable[[], bool]) -> float:
    """Hand over batches of new rows, one after the other or every `EVERY_S`, until it is over."""
    longest_s = 0.0
    while not is_over():
        written, began = threading.Event(), time.monotonic()
        store.submit(Batch([row._replace(request_id=uuid.uuid4().hex) for _ in range(ROWS)], {}, written))
        while not written.wait(0.005) and not is_over():
            pass
        longest_s = max(longest_s, time.monotonic() - began)
        time.sleep(max(0.0, began + EVERY_S - time.monotonic()))
    return round(longest_s, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300_000)
    parser.add_argument("--young", type=int, default=100_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with filled(folder / "old.sqlite", arguments.requests):
            take(folder / "old.sqlite", folder / "snapshot", "cluster")
        with filled(folder / "young.sqlite", arguments.young) as young:
            store, row = young.store, snapshot(young.entry(("default", "young0")))
            path = (folder / "snapshot").replace(imported_path(young.path))
            imported = make_view(path, "cluster", {}, Backfill({}, {}, 0, 0))
            over_s = time.monotonic() + 1
            before_s = longest_wait_s(store, row, lambda: time.monotonic() > over_s)
            began, over = time.monotonic(), store.begin_change_over(imported)
            meanwhile_s = longest_wait_s(store, row, over.copied.is_set)
            took_s = time.monotonic() - began
            assert over.failure is None
            store.switch(imported)
            over.decide(switched=True)
    told = {"requests": arguments.requests, "young": arguments.young, "seconds": round(took_s, 1)}
    waits = {"before": before_s, "meanwhile": meanwhile_s}
    print(json.dumps({"change_over": {**told, "longest_wait_s": waits, "load": round(os.getloadavg()[0], 1)}}))


if __name__ == "__main__":
    main()
