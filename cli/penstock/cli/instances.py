"""Which `penstock up` of this machine a command is about if no option and no variable names one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping

import typer

from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.paths import default_data_dir
from penstock.cli.state import Home, SystemState, running_homes


def found() -> SystemState | None:
    """The state of `found_home`. Raises CliFailure (usage)."""
    home = found_home()
    return None if home is None else home.running()


def serving() -> SystemState | None:
    """As `found`; None only if no instance is meant. Raises CliFailure (unreachable) if one is that does not serve."""
    state = found()
    if state is not None:
        return state
    usual = Home(default_data_dir())
    if usual.held():
        raise CliFailure(
            f"Penstock is only beginning to start on {usual.data_dir}: try again in a second",
            exit_code=ExitCode.UNREACHABLE,
        )
    if os.environ.get("PENSTOCK_DATA"):
        raise CliFailure(
            f"Penstock is not running on {usual.data_dir}, which PENSTOCK_DATA names: start it with `penstock up`,"
            f" or name a gateway by --url{elsewhere_text()}",
            exit_code=ExitCode.UNREACHABLE,
        )
    return None


def found_home() -> Home | None:
    """PENSTOCK_DATA, if one runs on it; without that variable the default folder, else that of the only one that runs.

    Raises CliFailure (usage) if several run and none of them on the default folder.
    """
    usual = Home(default_data_dir())
    if usual.running() is not None:
        return usual
    others = {} if os.environ.get("PENSTOCK_DATA") else running_elsewhere()
    if len(others) > 1:
        names = ", ".join(f"{state.url} ({home.data_dir})" for home, state in others.items())
        cure = "name one by --url, PENSTOCK_URL or PENSTOCK_DATA"
        raise CliFailure(f"several `penstock up` run here: {names}; {cure}", exit_code=ExitCode.USAGE)
    for home, state in others.items():
        typer.echo(f"[the `penstock up` on {home.data_dir}: {state.url}]", err=True)
        return home
    return None


def running_elsewhere() -> Mapping[Home, SystemState]:
    return {home: state for home in running_homes() if (state := home.running()) is not None}


def elsewhere_text() -> str:
    """Where others run, to be put behind a message that none runs on a folder."""
    folders = ", ".join(f"--data-dir {shlex.quote(str(home.data_dir))}" for home in running_elsewhere())
    return f"; one runs elsewhere: {folders}" if folders else ""
