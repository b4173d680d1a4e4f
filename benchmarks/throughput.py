"""Throughput of one worker on the no-op engine: topic to result topic beside a bare echo and Celery on Redis, and the
main thread's time for each request."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from backlog import WARM, encoded_requests, produce, rate, run_backlog, warm
from common import Figures, Row, broker, options, rotate, save, system
from overhead import NOOP, Echo
from peers import CeleryPeer, PeerMissing, celery_peer

from system import Process, System

COUNT = 10_000
CELERY_COUNT = 2_000


def echo_rate(echo: Echo, count: int) -> Figures:
    """The same backlog through the bare echo."""
    pairs = encoded_requests(count)
    produce(echo.bootstrap, echo.source, pairs, 4)
    times: list[int] = []
    give_up = time.monotonic() + 60
    wanted = {key for key, _ in pairs}
    while len(times) < count:
        assert time.monotonic() < give_up, f"the echo gave {len(times)} of {count}"
        message = echo.consumer.poll(1)
        if message is not None and message.key() in wanted:
            times.append(message.timestamp()[1])
    return {"rate": rate(times)}


def peer_or_none(stack: ExitStack) -> CeleryPeer | None:
    try:
        return stack.enter_context(celery_peer())
    except PeerMissing as error:
        print(f"  without Celery: {error}", file=sys.stderr, flush=True)
        return None


def topic_to_result(found: System, worker: Process, *, rounds: int, quick: bool) -> list[Row]:
    count = 2_000 if quick else COUNT
    with ExitStack() as stack:
        echo = Echo(found.bootstrap)
        stack.callback(echo.close)
        sides: dict[str, Callable[[], Figures]] = {
            "penstock": lambda: run_backlog(found, worker, encoded_requests(count)),
            "echo": lambda: echo_rate(echo, count),
        }
        peer = peer_or_none(stack)
        if peer is not None:
            peer.measure(200)
            sides["celery"] = lambda: peer.measure(500 if quick else CELERY_COUNT)
        warm(found, worker, 2_000 if quick else WARM)
        results, steals = rotate(rounds, sides)
    ours, celery = results["penstock"], results.get("celery", {}).get("rate", [])
    return [
        Row(
            "no-op, topic to result topic (floor: Celery on Redis)", "requests/s", ours["rate"], celery, steals, "≥ 8×"
        ),
        Row(
            "no-op, topic to result topic (floor: bare echo)",
            "requests/s",
            ours["rate"],
            results["echo"]["rate"],
            steals,
            "4,000/s",
        ),
        Row("worker's main thread, a request", "µs", ours["main_us"], [], steals, "≤ 150"),
        Row("worker's process, a request", "µs", ours["process_us"], [], steals, "reported"),
    ]


def main() -> None:
    chosen = options(__doc__, rounds=5)
    with broker() as bootstrap, system(bootstrap, models=[NOOP]) as found:
        worker = found.worker().wait_ready()
        rows = topic_to_result(found, worker, rounds=chosen.rounds, quick=chosen.quick)
    save("throughput", rows)


if __name__ == "__main__":
    main()
