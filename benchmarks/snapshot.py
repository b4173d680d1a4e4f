"""A gateway with an empty disk that begins from a snapshot of many ended requests, and what writing one costs.

    make bench BENCHMARKS=snapshot ARGS="--requests 1000000"

A few thousand requests and outcomes are written onto the topics, and a gateway reads them. Its file is then filled up
with copies of their rows, so that it knows `--requests`. It writes the snapshot while a client asks it for chats: the
bytes, the seconds, and the times of the chats meanwhile and before. Then a new gateway begins, as in `backfill.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
from backfill import chat_ms, client, is_whole, reading, skip
from common import broker, percentile, system
from gateway_many import fill

from penstock.gateway.view.rows import Row
from system import Process, System, eventually

WRITTEN = 20_000
"""Requests that stand in the log."""
INTERVAL = "PENSTOCK_GATEWAY__VIEW_SNAPSHOT_S"
SAID = re.compile(r"snapshot\.(?:written bytes=(\d+)|used rows=\d+) seconds=([\d.]+)")


def fill_up(view: Path, count: int) -> None:
    """Copy rows under ids of their own."""
    rest = ", ".join(name for name in Row._fields if name != "request_id")
    with closing(sqlite3.connect(view, isolation_level=None)) as file:
        indices = file.execute("SELECT name, sql FROM sqlite_schema WHERE type = 'index' AND sql NOT NULL").fetchall()
        file.execute("PRAGMA synchronous=OFF")
        for name, _ in indices:
            file.execute(f"DROP INDEX {name}")
        ((known,),) = file.execute("SELECT count(*) FROM requests WHERE done = 1")
        for at in range(known, count, known):
            file.execute(
                f"INSERT INTO requests (request_id, {rest}) SELECT lower(hex(randomblob(16))), {rest} FROM requests"
                " WHERE done = 1 AND number <= ? LIMIT ?",
                (known, count - at),
            )
        for _, sql in indices:
            file.execute(sql)


def chats(http: httpx.Client, until_s: float) -> list[float]:
    times: list[float] = []
    while time.monotonic() < until_s:
        if (took_ms := chat_ms(http)) is not None:
            times.append(took_ms)
    return times


def figures(times: list[float]) -> list[float]:
    return [round(percentile(times, share), 1) for share in (0.5, 0.99)]


def writing(old: Process, http: httpx.Client) -> dict[str, Any]:
    """Figures of the first snapshot of a gateway that was just started."""
    before, meanwhile = chats(http, time.monotonic() + 5), list[float]()
    while (said := SAID.search(old.log.read_text())) is None:
        meanwhile += chats(http, time.monotonic() + 1)
    return {
        "bytes": int(said[1]),
        "seconds": float(said[2]),
        "chat_ms_p50_p99": {"before": figures(before), "meanwhile": figures(meanwhile or before)},
    }


def start(whole: System, interval_s: int) -> Process:
    return whole.gateway("old", env={INTERVAL: str(interval_s)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=300_000)
    arguments = parser.parse_args()
    with broker() as bootstrap, system(bootstrap) as whole:
        fill(whole, WRITTEN, 0)
        skip(whole)
        whole.worker().wait_ready()
        first = start(whole, 0)
        with client(first) as http:
            eventually(lambda: is_whole(http), 900, first.tail)
        first.stop()
        fill_up(whole.folder / "old.sqlite", arguments.requests)
        old = start(whole, 120)
        with client(old) as http:
            eventually(lambda: is_whole(http), 300, old.tail)
            written = writing(old, http)
            os.environ[INTERVAL] = "3600"
            read = reading(whole, "young", http)
            used = SAID.search((whole.folder / "young.log").read_text())
    read["snapshot_used_s"] = None if used is None else float(used[2])
    load = [round(one, 1) for one in os.getloadavg()]
    told = {"requests": arguments.requests, "written": written, "read": read, "load": load}
    print(json.dumps({"snapshot": told}, indent=1))


if __name__ == "__main__":
    main()
