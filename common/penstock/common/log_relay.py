"""Run as a script by `log_setup`: copies lines from its input to its output, each as one JSON object.

Lines that are JSON pass as they are. The others, as of a native library or of a crash, become the `message` of a line.
It imports nothing of Penstock, ignores signals and ends with the last process that can write to its input.
"""

from __future__ import annotations

import json
import os
import signal
from datetime import UTC, datetime

LONGEST = 1 << 18
"""Bytes of a line without an end that are kept."""
DRAIN = b"\0drain"
"""A line that is not written: stderr gets a byte when all before it is."""


def as_json(line: bytes) -> bytes:
    if line.startswith(b'{"time":'):
        try:
            json.loads(line)
        except ValueError:
            pass
        else:
            return line
    text = line.decode(errors="replace")
    found = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        # What a process prints as it refuses to start begins so.
        "level": "ERROR" if text.startswith("penstock") else "WARNING",
        "logger": "output",
        "message": text,
    }
    return json.dumps(found, ensure_ascii=False).encode(errors="backslashreplace")


def relay(source: int, target: int) -> None:
    """Until the end of `source`. A target that takes nothing, as a full disk, loses lines and ends nothing."""
    rest = b""
    while chunk := os.read(source, 1 << 16):
        *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
        if len(rest) > LONGEST:
            lines, rest = [*lines, rest], b""
        _write(target, lines)
        if DRAIN in lines:
            os.write(2, b"\n")
    _write(target, [rest])


def _write(target: int, lines: list[bytes]) -> None:
    left = b"".join(as_json(line) + b"\n" for line in lines if line.strip() and line != DRAIN)
    try:
        while left:
            left = left[os.write(target, left) :]
    except OSError:
        pass


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    relay(0, 1)
