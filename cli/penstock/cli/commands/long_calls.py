"""Commands that call a gateway until nothing is left: Ctrl-C between two calls, what was done, how to continue."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import typer

from penstock.cli.failures import CliFailure, ExitCode

WAITS = b"interrupted: waiting for the answer of this call; Ctrl-C again ends at once\n"


@contextmanager
def reporting(done: Callable[[], str]) -> Generator[None]:
    """Turn a failure or a Ctrl-C into a CliFailure that also says what was done, if `done` has a text."""
    try:
        yield
    except CliFailure as error:
        said = "; ".join(filter(None, (str(error), done())))
        raise CliFailure(said, exit_code=error.exit_code) from error
    except KeyboardInterrupt as error:
        raise CliFailure(done() or "interrupted", exit_code=ExitCode.INTERRUPTED) from error


@contextmanager
def interrupted_between_calls() -> Generator[Callable[[], None]]:
    """Delay the first Ctrl-C until the yielded function is called, after each answer. A second one is raised at once.

    So a command knows what its last call did.
    """
    interrupted = False

    def note(*_: object) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, before)
        os.write(sys.stderr.fileno(), WAITS)

    def check() -> None:
        if interrupted:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


def same_command(context: typer.Context, **changed: Any) -> str:
    """A command as it was given, with some options changed. A key is left out."""
    given: dict[str, Any] = {
        name: value
        for name, value in context.params.items()
        if (source := context.get_parameter_source(name)) and source.name == "COMMANDLINE" and name != "key"
    }
    words = ["penstock", *context.command_path.split()[1:]]
    for one in context.command.params:
        value = {**given, **changed}.get(one.name or "")
        if value is None or value is False:
            continue
        values = [str(each) for each in value] if isinstance(value, list | tuple) else [str(value)]
        if one.param_type_name == "argument":
            words += values
        else:
            words += [one.opts[0]] if value is True else [word for each in values for word in (one.opts[0], each)]
    return shlex.join(words)
