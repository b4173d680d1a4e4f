"""A soak: requests for some minutes, while workers are killed with -9, stopped in order and made to stand still.

Then every request must have one outcome by the product's own fold, and no stream a seam.

    make bench BENCHMARKS=soak ARGS="--minutes 15"
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from typing import Any

from common import broker, system

from load import Follower, Trickle
from penstock.schemas.fold import ResultFold, Terminal
from system import Process, System

ENGINES: tuple[dict[str, Any], ...] = (
    {"id": "quick", "source": "noop", "engine": "noop", "tasks": ["text_generation"], "options": {"tokens": 2}},
    {
        "id": "slow",
        "source": "noop",
        "engine": "noop",
        "tasks": ["text_generation"],
        "options": {"tokens": 40, "delay_ms": 25, "slots": 16},
    },
)
RATE = 25.0


def request(number: int) -> dict[str, Any]:
    """Every fourth is slow and streams, every tenth is a turn of one of thirty conversations."""
    body: dict[str, Any] = {
        "request_id": f"soak-{number}",
        "priority": number % 10,
        "model": "slow" if number % 4 == 0 else "quick",
        "stream": number % 4 == 0,
        "tenant": f"t{number % 3}",
    }
    if number % 10 == 1:
        body |= {
            "conversation_id": f"c{number // 10 % 30}",
            "tenant": "default",
            "payload": {"messages": [{"role": "user", "content": f"turn {number}"}]},
        }
    return body


def disturb(found: System, workers: dict[str, Process], names: list[str], chance: random.Random) -> str:
    """One fault; the killed and the stopped are started again at once, under their own name and data folder."""
    name = chance.choice(names)
    worker = workers[name]
    kind = chance.choice(["kill", "kill", "term", "still"])
    if kind == "still":
        os.kill(worker.popen.pid, signal.SIGSTOP)
        time.sleep(chance.uniform(1, 12))
        os.kill(worker.popen.pid, signal.SIGCONT)
        return kind
    if kind == "kill":
        worker.kill9()
    else:
        worker.stop()
    workers[name] = found.worker(name)
    return kind


def verdict(seen: Follower, ids: list[str]) -> dict[str, int]:
    """What a reader of the whole result topic sees."""
    folds: dict[str, ResultFold] = {}
    ends: Counter[str] = Counter()
    seams = 0
    for event in seen.events:
        fold = folds.get(event.request_id)
        if fold is None:
            fold = folds[event.request_id] = ResultFold(event.request_id, event.tenant)
        before, place = fold.text, (fold.epoch, fold.attempt)
        step = fold.apply(event)
        if isinstance(step, Terminal) and (event.epoch, event.attempt) == place:
            seams += not (event.output_text or "").startswith(before)
        ends[event.request_id] += event.is_terminal
    outcomes = Counter(str(fold.terminal.status) for fold in folds.values() if fold.terminal is not None)
    return {
        "requests": len(ids),
        "lost": sum(i not in folds or folds[i].terminal is None for i in ids),
        "not_completed": sum(outcomes.values()) - outcomes["completed"],
        "seams": seams,
        "ended_more_than_once": sum(count > 1 for count in ends.values()),
        "restarted_streams": sum(fold.restarts > 0 for fold in folds.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, help="not used: one round is the whole soak")
    parser.add_argument("--quick", action="store_true", help="one minute")
    arguments = parser.parse_args()
    seconds = 60.0 if arguments.quick else 60 * arguments.minutes
    chance, faults = random.Random(arguments.seed), Counter[str]()
    options = {"session_timeout_s": 6, "heartbeat_s": 1}
    with broker() as bootstrap, system(bootstrap, models=ENGINES, worker_options=options) as found:
        names = ["w1", "w2"]
        workers = {name: found.worker(name) for name in names}
        for worker in workers.values():
            worker.wait_ready()
        load = Trickle(found, request, rate=RATE, count=int(seconds * RATE))
        give_up = time.monotonic() + seconds
        with Follower(found) as seen:
            while time.monotonic() < give_up:
                time.sleep(chance.uniform(4, 15))
                faults[disturb(found, workers, names, chance)] += 1
                dead = [name for name, worker in workers.items() if not worker.alive()]
                for name in dead:
                    faults["ended by itself"] += 1
                    print(f"{name} ended by itself:\n{workers[name].tail(15)}", file=sys.stderr)
                    workers[name] = found.worker(name)
                ended = len(seen.update().terminals)
                print(
                    f"{give_up - time.monotonic():.0f} s left, {ended} ended, {dict(faults)}",
                    file=sys.stderr,
                    flush=True,
                )
            load.join()
            seen.wait(load.ids, 180, workers["w1"].tail)
            found.wait_drained(120)
            result = verdict(seen.update(1.0), load.ids)
    print(json.dumps({"soak": result, "faults": dict(faults), "seconds": round(seconds)}))
    if result["lost"] or result["seams"] or result["not_completed"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
