"""After kill -9 of a worker under load: requests that run again, beside those that must: running or just ended."""

from __future__ import annotations

from typing import Any

from common import Row, Steal, broker, options, save, system

from load import COMMIT_INTERVAL_S, KILL_OPTIONS, kill_under_load

NOOP: dict[str, Any] = {
    "id": "noop",
    "source": "noop",
    "engine": "noop",
    "tasks": ["text_generation"],
    "options": KILL_OPTIONS,
}
WORKER = {"session_timeout_s": 6, "heartbeat_s": 1, "aging_s": 600, "commit_interval_s": COMMIT_INTERVAL_S}


def main() -> None:
    chosen = options(__doc__, rounds=3)
    again: list[float] = []
    due: list[float] = []
    steals: list[float] = []
    with broker() as bootstrap:
        for _ in range(chosen.rounds):
            with Steal() as steal, system(bootstrap, models=[NOOP], worker_options=WORKER) as found:
                figures = kill_under_load(found, finished=500 if chosen.quick else 2_000)
            again.append(figures["again"])
            due.append(figures["running"] + figures["recent"])
            steals.append(steal.share)
    name = "after kill -9: requests run again (floor: running + finished since the last commit)"
    save("after_kill", [Row(name, "requests", again, due, steals, "≤ 1.1×")])


if __name__ == "__main__":
    main()
