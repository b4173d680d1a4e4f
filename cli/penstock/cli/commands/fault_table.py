"""`penstock bench faults`: what callers see when parts of Penstock are killed, as a table that anybody can run."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.commands.common import AsJson, print_json, print_table
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.faults.checker import Row, check
from penstock.cli.faults.histories import read
from penstock.cli.faults.matrix import plans

WHOLE, QUICK = 1_000, 60
COLUMNS = (
    *("row", "moment", "control", "proven", "in_flight", "acknowledged", "outcomes", "lost", "visible_twice", "seams"),
    *("restarted", "wrong_tokens", "repeated", "longest_wait_s", "recovery_s", "recovery_max_s", "verdict"),
)


def faults(
    quick: Annotated[bool, typer.Option("--quick", help="A few rows with 60 requests in flight each.")] = False,
    rows: Annotated[
        list[str] | None,
        typer.Option(help="Only these rows, as PART:MOMENT or a control's name; * stands for any; may be given again."),
    ] = None,
    in_flight: Annotated[int | None, typer.Option(min=20, help="Requests of each row (1000; 60 with --quick).")] = None,
    seed: Annotated[int, typer.Option(help="Chooses the passages at which fault points strike.")] = 1,
    histories: Annotated[
        Path | None, typer.Option(file_okay=False, help="Keep the histories here (default: a temporary folder).")
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
    if checked is not None:
        found = [check(read(path)) for path in sorted(checked.glob("*.jsonl"))]
    else:
        with tempfile.TemporaryDirectory(prefix="penstock-faults-") as scratch:
            folder = histories or Path(scratch) / "histories"
            found = _run(rows or [], quick, in_flight or (QUICK if quick else WHOLE), seed, folder, Path(scratch))
    if not found:
        what = "no such row" if checked is None else f"no history in {checked}"
        raise CliFailure(f"there is {what}", exit_code=ExitCode.USAGE)
    _show(found, as_json)
    if png is not None:
        from penstock.cli.faults.plot import plot

        plot(found, png)
    if wrong := [row for row in found if not row.as_expected]:
        names = ", ".join(f"{row.row}:{row.moment} is {row.verdict}, not {row.expected}" for row in wrong)
        raise CliFailure(names)


def _run(patterns: Sequence[str], quick: bool, count: int, seed: int, folder: Path, scratch: Path) -> list[Row]:
    from penstock.cli.faults.runner import Run, run_row
    from penstock.cli.faults.site import broker

    chosen = plans(quick=quick, patterns=patterns)
    run = Run(folder=folder, count=count, seed=seed, commit=_commit())
    found: list[Row] = []
    if not chosen:
        return found
    with broker(scratch / "kafka") as shared:
        for number, plan in enumerate(chosen, 1):
            typer.echo(f"{number}/{len(chosen)} {plan.name}", err=True)
            row = run_row(plan, run, shared, scratch)
            typer.echo(f"  {row.verdict}: {'; '.join(row.how) or 'no fault'}", err=True)
            found.append(row)
    return found


def _show(found: Sequence[Row], as_json: bool) -> None:
    told = [row.to_json() for row in found]
    if as_json:
        print_json({"rows": told})
    else:
        print_table(COLUMNS, [[row[column] for column in COLUMNS] for row in told], "no row")


def _commit() -> str:
    """The commit of a checkout, else the version of the installed package."""
    here = Path(__file__).parent
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return asked.stdout.strip()[:12] if asked.returncode == 0 else version("penstock")
