"""Where the files of workers differ that serve one pool, from what the workers report. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.schemas.records import WorkerState


def file_differences(live: Iterable[WorkerState]) -> list[str]:
    """A line for each model that not all live workers of a pool serve, or that they serve by different entries.

    Workers that have observed different orders of operators differ for a moment, and are not compared.
    """
    pools: dict[str, list[WorkerState]] = {}
    for worker in sorted(live, key=lambda one: one.worker_id):
        pools.setdefault(worker.pool or "", []).append(worker)
    found: list[str] = []
    for pool, workers in sorted(pools.items()):
        if len({worker.observed_revision for worker in workers}) == 1:
            found += _in_pool(workers, f" of the pool {pool}" if pool else "")
    return found


def _in_pool(workers: list[WorkerState], where: str) -> list[str]:
    entries = {worker.worker_id: {one.model: one.entry for one in worker.models} for worker in workers}
    lines: list[str] = []
    for model in sorted({model for served in entries.values() for model in served}):
        lacking = [worker for worker, served in entries.items() if model not in served]
        if lacking:
            lines.append(f"the model {model}{where} is missing on {', '.join(lacking)}")
        by_entry: dict[str, list[str]] = {}
        for worker, served in entries.items():
            if (entry := served.get(model)) is not None:  # workers of earlier releases do not report it
                by_entry.setdefault(entry, []).append(worker)
        if len(by_entry) > 1:
            sides = " and ".join(", ".join(one) for one in by_entry.values())
            lines.append(f"the model {model}{where} is configured differently on {sides}")
    return lines
