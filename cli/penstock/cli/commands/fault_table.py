"""`penstock bench faults`: what callers see when parts of Penstock are killed, as a table that anybody can run."""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from penstock.cli.commands.common import AsJson, print_json, print_table
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.faults.checker import Row, check
from penstock.cli.faults.histories import read
from penstock.cli.faults.matrix import Plan, plans

WHOLE, QUICK = 1_000, 60
COLUMNS = (
    *("row", "moment", "control", "proven", "in_flight", "acknowledged", "outcomes", "lost", "visible_twice", "seams"),
    *("restarted", "wrong_tokens", "repeated", "longest_wait_s", "recovery_s", "recovery_max_s", "verdict"),
)
SHOWN_IF_ANY = ("not_completed", "webhooks_missing", "leaked_grants", "lag")
"""Columns that are shown only if they are not 0 in some row."""


def faults(
    quick: Annotated[bool, typer.Option("--quick", help="A few rows with 60 requests in flight each.")] = False,
    rows: Annotated[
        list[str] | None,
        typer.Option(help="Only these rows, as PART:MOMENT or a control's name; * stands for any; may be given again."),
    ] = None,
    in_flight: Annotated[int | None, typer.Option(min=20, help="Requests of each row (1000; 60 with --quick).")] = None,
    seed: Annotated[int, typer.Option(help="Chooses the passages at which fault points strike.")] = 1,
    histories: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Keep the histories and logs here (default: a temporary folder)."),
    ] = None,
    checked: Annotated[
        Path | None,
        typer.Option("--check", file_okay=False, help="Run nothing: check the histories in this folder."),
    ] = None,
    png: Annotated[Path | None, typer.Option("--plot", help="Write a PNG of waits and recoveries.")] = None,
    as_json: AsJson = False,
) -> None:
    """Strike parts of a system at chosen moments, and show what its clients saw: lost, twice, torn or wrong.

    It starts systems of its own, with a real Kafka, and needs no network. Beside the rows stand controls: no fault, a
    fault at the wrong target, and a planted defect. Ends with 0 only if each row is as it must be, the controls too.
    docs/fault-table.md explains the rows, the columns and the histories.

    Example: penstock bench faults --quick

    Example: penstock bench faults --rows 'worker:*' --rows no-fault --histories found --json

    Example: penstock bench faults --check found
    """
    if png is not None:
        require_matplotlib()
    if checked is not None:
        place = {plan.name.replace(":", "."): number for number, plan in enumerate(plans(quick=False))}
        paths = sorted(checked.glob("*.jsonl"), key=lambda path: (place.get(path.stem, len(place)), path.stem))
        found = [_checked(path) for path in paths]
        if not found:
            raise CliFailure(f"there is no history in {checked}", exit_code=ExitCode.USAGE)
        _show(found, as_json, png)
    else:
        chosen = plans(quick=quick, patterns=rows or [])
        if not chosen:
            raise CliFailure("there is no such row", exit_code=ExitCode.USAGE)
        found = []
        with _folder(histories, found, len(chosen)) as folder, _signals_interrupt():
            try:
                _run(chosen, in_flight or (QUICK if quick else WHOLE), seed, folder, found)
            finally:
                _show(found, as_json, png)
    if wrong := [row for row in found if not row.as_expected]:
        names = ", ".join(f"{row.row}:{row.moment} is {row.verdict}, not {row.expected}" for row in wrong)
        raise CliFailure(names)


def _checked(path: Path) -> Row:
    try:
        return check(read(path))
    except (ValueError, LookupError, StopIteration, TypeError) as error:
        what = f"{path} is no whole history of a row: {type(error).__name__} {error}".rstrip()
        raise CliFailure(what, exit_code=ExitCode.USAGE) from error


@contextmanager
def _folder(asked: Path | None, found: Sequence[Row], count: int) -> Generator[Path]:
    """The folder of histories and logs. One that nobody asked for stays only if not all rows are as they must be."""
    folder = asked or Path(tempfile.mkdtemp(prefix="penstock-faults-histories-"))
    try:
        yield folder
    finally:
        if len(found) < count or not all(row.as_expected for row in found):
            typer.echo(f"histories and logs: {folder}", err=True)
        elif asked is None:
            shutil.rmtree(folder)


@contextmanager
def _signals_interrupt() -> Generator[None]:
    """SIGTERM and SIGHUP clear up as Ctrl-C does."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        signal.raise_signal(signal.SIGINT)

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    # A shell starts what runs in its background with SIGINT ignored.
    before[signal.SIGINT] = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run(chosen: Sequence[Plan], count: int, seed: int, folder: Path, found: list[Row]) -> None:
    """Append a row to `found` for each plan."""
    from penstock.cli.faults.disks import why_no_disk
    from penstock.cli.faults.runner import Run, keep_logs, run_row
    from penstock.cli.faults.site import broker

    run = Run(folder=folder, count=count, seed=seed, commit=current_commit())
    if any(plan.row == "disk" for plan in chosen) and (reason := why_no_disk()):
        typer.echo(f"the rows of disk will be broken: {reason}", err=True)
    with tempfile.TemporaryDirectory(prefix="penstock-faults-") as name:
        scratch = Path(name)
        try:
            with broker(scratch / "kafka") as shared:
                for number, plan in enumerate(chosen, 1):
                    typer.echo(f"{number}/{len(chosen)} {plan.name}", err=True)
                    row = run_row(plan, run, shared, scratch)
                    typer.echo(f"  {row.verdict}: {'; '.join(row.how) or 'no fault'}", err=True)
                    found.append(row)
        finally:
            keep_logs(scratch / "kafka", folder / "logs")


def _show(found: Sequence[Row], as_json: bool, png: Path | None) -> None:
    told = [row.to_json() for row in found]
    if as_json:
        print_json({"rows": told})
    else:
        shown = (*COLUMNS, *(column for column in SHOWN_IF_ANY if any(row[column] for row in told)))
        print_table(shown, [[row[column] for column in shown] for row in told], "no row")
        for row in found:
            if not row.as_expected:
                why = "; ".join([*row.how, *row.missing_evidence]) or "no fault"
                typer.echo(f"{row.row}:{row.moment} is {row.verdict}: {why}")
    if png is not None and found:
        plot(found, png)


def current_commit() -> str:
    """The commit of a checkout, else the version of the installed package."""
    here = Path(__file__)
    try:
        # A virtual environment may lie in a repository of something else, which does not track this file.
        subprocess.run(
            ["git", "ls-files", "--error-unmatch", here.name], cwd=here.parent, capture_output=True, check=True
        )
        asked = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here.parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return version("penstock")
    return asked.stdout.strip()[:12]


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
