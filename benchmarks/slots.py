"""One partition, 20 keys, no-op work of 1 to 5 ms: an engine of 20 slots beside an engine of one slot in one worker."""

from __future__ import annotations

from typing import Any

from backlog import WARM, encoded_requests, lengths, run_backlog, warm
from common import Figures, Row, broker, options, rotate, save, system

from penstock.schemas.topics import partition_for
from system import Process, System

KEYS, PARTITION, LONGEST_MS = 20, 0, 5


def model(slots: int) -> dict[str, Any]:
    """A token takes a millisecond."""
    engine = {"tokens": LONGEST_MS, "delay_ms": 1, "slots": slots}
    return {"id": f"slots-{slots}", "source": "noop", "engine": "noop", "tasks": ["text_generation"], "options": engine}


def backlog(found: System, worker: Process, slots: int, count: int) -> Figures:
    records = encoded_requests(count, lengths(count, LONGEST_MS, seed=slots), model=f"slots-{slots}")
    return run_backlog(found, worker, records, keys=keys_of_one_partition(), deadline_s=240)


def keys_of_one_partition(partitions: int = 4) -> list[bytes]:
    names = (b"key-%d" % number for number in range(1_000))
    return [name for name in names if partition_for(name, partitions) == PARTITION][:KEYS]


def main() -> None:
    chosen = options(__doc__, rounds=5)
    many, one = (1_000, 200) if chosen.quick else (10_000, 1_000)
    with broker() as bootstrap, system(bootstrap, models=[model(20), model(1)]) as found:
        worker = found.worker().wait_ready()
        warm(found, worker, 2_000 if chosen.quick else WARM, model="slots-20")
        results, steals = rotate(
            chosen.rounds,
            {"many": lambda: backlog(found, worker, 20, many), "one": lambda: backlog(found, worker, 1, one)},
        )
    name = f"one partition, {KEYS} keys, 1 to {LONGEST_MS} ms of no-op work: 20 slots (floor: 1 slot)"
    save("slots", [Row(name, "requests/s", results["many"]["rate"], results["one"]["rate"], steals, "≥ 15×")])


if __name__ == "__main__":
    main()
