"""Failures that a person can mend: one line that says what is wrong and names the cure, and the exit code for it."""

from __future__ import annotations

import errno
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

    def __init__(self, message: str, *, exit_code: ExitCode = ExitCode.FAILED, forbidden: bool = False) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.forbidden = forbidden
        """Whether a gateway refused it for want of a scope."""

    @property
    def unreachable(self) -> bool:
        """Whether nobody answered, or not now."""
        return self.exit_code in (ExitCode.UNREACHABLE, ExitCode.TIMED_OUT)


_ADVICE = {
    errno.ENOSPC: "free some space, or name another folder (--data-dir, PENSTOCK_CACHE)",
    errno.EDQUOT: "free some space, or name another folder (--data-dir, PENSTOCK_CACHE)",
    errno.EROFS: "name a folder that can be written to (--data-dir, PENSTOCK_CACHE)",
    errno.EACCES: "use a file or folder that this user may read and write",
    errno.EPERM: "use a file or folder that this user may read and write",
    errno.ENOENT: "check the name",
    errno.ENOTDIR: "check the name",
    errno.EISDIR: "name a file, not a folder",
    errno.EADDRINUSE: "stop what listens there, or choose another port",
    errno.EADDRNOTAVAIL: "choose an address of this machine",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
    errno.ENFILE: "close something: this machine has too many files open",
    errno.ENOMEM: "close something: there is no memory left",
    errno.EAGAIN: "close something: this machine can start no more processes",
}
_NOBODY_THERE = frozenset(
    {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT, errno.ECONNRESET}
)


def failure_of(error: OSError) -> CliFailure:
    """What the operating system refused, as a failure with the advice that fits."""
    what = error.strerror or str(error) or type(error).__name__
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in _NOBODY_THERE:
        return CliFailure(f"{where}{what}: check the address, and that it runs", exit_code=ExitCode.UNREACHABLE)
    advice = _ADVICE.get(error.errno or 0)
    return CliFailure(f"{where}{what}; {advice}" if advice else f"{where}{what}")
