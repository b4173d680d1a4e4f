"""The fault table as a picture: of each row the recovery and the longest wait. Needs the extra `bench`."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.faults.checker import Row


def require_matplotlib() -> None:
    if find_spec("matplotlib") is None:
        raise CliFailure("the plot needs matplotlib: install penstock[bench]", exit_code=ExitCode.USAGE)


def plot(rows: Sequence[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    names = [row.control or f"{row.row}: {row.moment}" for row in rows]
    figure, axes = pyplot.subplots(figsize=(9, 1.2 + 0.32 * len(rows)), layout="constrained")
    places = range(len(rows))
    axes.barh(places, [row.longest_wait_s or 0 for row in rows], color="#d5dbdf", label="longest wait")
    known = [place for place in places if rows[place].recovery_s is not None]
    medians = [rows[place].recovery_s or 0 for place in known]
    longest = [rows[place].recovery_max_s or 0 for place in known]
    axes.scatter(medians, known, color="#2471a3", zorder=3, label="recovery, median")
    axes.scatter(longest, known, color="#c0392b", marker="|", zorder=3, label="recovery, max")
    axes.set_yticks(list(places), names)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set(xlabel="seconds", title="Faults: waits and recoveries")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
