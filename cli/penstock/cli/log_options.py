"""Options of commands that run for long: the form of their log and its levels."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

import typer

from penstock.cli.config import load
from penstock.cli.failures import CliFailure, ExitCode
from penstock.common.configuration import LogSection, LogSettings
from penstock.common.log_setup import levels_of, set_up


class LogFormat(StrEnum):
    text = "text"
    json = "json"


@dataclass
class LogOptions:
    """They go before variables and the file, here and in processes that this one starts."""

    log_format: Annotated[
        LogFormat | None, typer.Option("--log-format", help="text, or json: one object a line (default: [log], text).")
    ] = None
    log_level: Annotated[
        str | None,
        typer.Option(
            "--log-level", help="As info, or by module as info,penstock.gateway=debug (default: [log], info)."
        ),
    ] = None

    def log_section(self) -> LogSection:
        """The settings in force. Call it when the file is known. Raises CliFailure for a level that there is not."""
        if self.log_level is not None:
            try:
                levels_of(self.log_level)
            except ValueError as error:
                raise CliFailure(f"--log-level: {error}", exit_code=ExitCode.USAGE) from error
        for name, value in (("FORMAT", self.log_format), ("LEVEL", self.log_level)):
            if value is not None:
                os.environ[f"PENSTOCK_LOG__{name}"] = str(value)
        return load(LogSettings).log

    def set_up_logging(self) -> None:
        """Raises CliFailure."""
        set_up(self.log_section().config)
