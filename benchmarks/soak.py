"""A soak: requests for some minutes, while workers are killed with -9, stopped in order and made to stand still.

Meanwhile the store of artifacts fails, hangs and is full, in episodes. Then every request must have one outcome by the
product's own fold, with the right output, and no stream a seam. No worker may have ended by itself, and the product's
sweeper must leave no artifact that no outcome names.

    make bench BENCHMARKS=soak ARGS="--minutes 15"
    make bench BENCHMARKS=soak ARGS="--minutes 15 --store disk"    # as root: mounts a file system of its own
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import Steal, broker, system
from small_disk import BreakableDisk
from soak_faults import FAULTS, Fleet, Outages
from soak_requests import MODELS, Inputs, expected, put_inputs, request
from soak_verdict import Judge

from load import Follower, Trickle
from s3_proxy import BreakableS3
from store_outages import BreakableStore
from system import System

RATE = 40.0
NAMES = ("w1", "w2")
STRUCK_UP = 0.8
"""Of the faults: those that wait until their worker is up. The others may strike one that starts."""
SETTLED_S = 300.0
"""So long after the last fault every request must have its outcome."""
_ERROR = re.compile(r" (?:ERROR|CRITICAL) \S+ (\S+)|^(Traceback)|exiting to be restarted", re.MULTILINE)


@contextmanager
def breakable_store(kind: str, folder: Path, seed: int) -> Iterator[BreakableStore]:
    store = BreakableDisk(folder) if kind == "disk" else BreakableS3(seed=seed, timeout="5 seconds")
    try:
        yield store
    finally:
        store.stop()


def soak(whole: System, fleet: Fleet, judge: Judge, inputs: Inputs, seconds: float, seed: int) -> dict[str, Any]:
    """Load and faults for so long, until all is settled. Returns the faults."""
    chance, faults = random.Random(seed), Counter[str]()
    for name in NAMES:
        fleet.start(name).wait_ready()
    load = Trickle(whole, lambda number: request(number, inputs), rate=RATE, count=len(judge.expected))
    give_up = time.monotonic() + seconds
    outages = Outages(fleet, seconds, random.Random(seed))
    with Follower(whole) as seen:

        def settled() -> bool:
            judge.take(seen.update().events)
            seen.events.clear()
            return judge.expected.keys() <= seen.terminals.keys()

        while time.monotonic() < give_up:
            time.sleep(chance.uniform(4, 15))
            fault, name = chance.choice(FAULTS), chance.choice(NAMES)
            if chance.random() < STRUCK_UP:
                fleet.wait_up(name)
            fleet.disturb(name, fault, chance.uniform(1, 12))
            faults[fault] += 1
            settled()
            left_s = give_up - time.monotonic()
            print(f"{left_s:.0f} s left, {len(seen.terminals)} ended, {dict(faults)}", file=sys.stderr, flush=True)
        outages.end()
        load.join()
        give_up = time.monotonic() + SETTLED_S
        while not settled() and time.monotonic() < give_up:
            fleet.look()
        whole.wait_drained(120)
        fleet.stop()
        judge.take(seen.update(1.0).events)
    return {"workers": faults, "store, calls struck": outages.struck, "without effect": outages.without_effect()}


def errors_in(logs: Iterator[Path]) -> Counter[str]:
    """Errors in the workers' logs, by their names."""
    found = Counter[str]()
    for log in logs:
        for match in _ERROR.finditer(log.read_text(errors="replace")):
            found[match.group(1) or match.group(2) or match.group(0)] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", choices=("s3", "disk"), default="s3")
    parser.add_argument("--logs", type=Path, help="copy the workers' logs to this folder")
    parser.add_argument("--rounds", type=int, help="not used: one round is the whole soak")
    parser.add_argument("--quick", action="store_true", help="two minutes")
    arguments = parser.parse_args()
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    seconds = 120.0 if arguments.quick else 60 * arguments.minutes
    judge = Judge({f"soak-{number}": expected(number) for number in range(int(seconds * RATE))})
    options = {"session_timeout_s": 6, "heartbeat_s": 1}
    with (
        Steal() as steal,
        broker() as bootstrap,
        system(bootstrap, models=MODELS, worker_options=options) as whole,
        breakable_store(arguments.store, whole.folder, arguments.seed) as store,
    ):
        fleet, direct = Fleet(whole, store), store.direct()
        inputs = put_inputs(direct)
        try:
            faults = soak(whole, fleet, judge, inputs, seconds, arguments.seed)
            judge.look_at_outcomes(direct)
            swept = judge.sweep(direct, inputs.values())
            judge.look_at_outcomes(direct)  # the sweep took nothing that an outcome names
        finally:
            if arguments.logs is not None:
                arguments.logs.mkdir(parents=True, exist_ok=True)
                for log in whole.folder.glob("*.log"):
                    shutil.copy(log, arguments.logs)
        errors = errors_in(whole.folder.glob("*.log"))
    figures = judge.figures()
    found = {
        "soak": figures,
        "faults": faults,
        "swept": swept,
        "exits": fleet.exits,
        "unexpected": fleet.unexpected,
        "errors in logs": errors,
        "seconds": round(seconds),
        "steal": round(steal.share, 3),
    }
    print(json.dumps(found, indent=1))
    if figures["faults"] or fleet.unexpected or faults["without effect"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
