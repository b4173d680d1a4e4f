"""Failures that a person can mend: one line that says what is wrong and names the cure, and the exit code for it."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What `penstock` returns to the shell."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    TIMED_OUT = 4
    INTERRUPTED = 130


class CliFailure(Exception):
    """Printed as one line on stderr, without a traceback; the process then ends with `exit_code`."""

    def __init__(self, message: str, *, exit_code: ExitCode = ExitCode.FAILED) -> None:
        super().__init__(message)
        self.exit_code = exit_code

    @property
    def unreachable(self) -> bool:
        """Whether nobody answered, or not now."""
        return self.exit_code in (ExitCode.UNREACHABLE, ExitCode.TIMED_OUT)
