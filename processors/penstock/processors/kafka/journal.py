"""The crash journal on disk: which requests this worker's predecessors were running when they died.

An append-only file in the data folder, one line per start or end of a run. `flush` writes what has gathered, without
fsync: it must outlive the process, not the machine; starts are flushed before their engines run. A start that has ended
before the next flush is never written. When a worker starts, the file is read, folded into deaths per record and
written anew.

A request stands in it only while it is on an engine: what has finished and waits for the broker, or waits for its next
attempt, did not run when a worker died. The deaths of earlier lives count until the broker has the request's outcome.

Only `orderly_stop` makes an end orderly. However else a life ends, by a fault or a signal, what ran then counts as a
death.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

Key = tuple[str, int, int]
"""(topic, partition, offset) of a request's first record. A copy that was moved to another partition has the same one:
a worker that dies before it commits moves the record again in its next life, and each copy would begin at no deaths."""
RecordId = tuple[Key, str]
"""The same record of the same topic: its key and its request_id."""

_COMPACT_AT_BYTES = 8 << 20
_REMEMBERED = 10_000


class CrashJournal:
    """Deaths per record from earlier lives, and what runs in this one."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._deaths: dict[RecordId, int] = {}
        if path.exists():
            self._fold(path.read_text(errors="replace"))
        self._running: set[RecordId] = set()
        self._unwritten_starts: dict[RecordId, None] = {}
        self._lines: list[str] = []
        self._unwritten = b""
        self._written_bytes = 0
        self._failed = False
        self._file = -1
        self._rewrite()

    def deaths(self, key: Key, request_id: str) -> int:
        """How many workers died while this record ran here. Counts only this data folder's workers."""
        return self._deaths.get((key, request_id), 0) if self._deaths else 0

    def started(self, key: Key, request_id: str) -> None:
        record = (key, request_id)
        self._running.add(record)
        self._unwritten_starts[record] = None

    def ended(self, key: Key, request_id: str) -> None:
        """Its run is over, however it ended. Deaths of earlier lives still count."""
        record = (key, request_id)
        if record not in self._running:
            return
        self._running.discard(record)
        if record in self._unwritten_starts:
            del self._unwritten_starts[record]
        else:
            self._lines.append(_line("E", record))

    def forget_deaths(self, key: Key, request_id: str) -> None:
        """The broker has its outcome."""
        record = (key, request_id)
        if self._deaths.pop(record, None) is not None:
            self._lines.append(_line("F", record))

    def flush(self) -> None:
        """Write what has gathered. A disk that refuses costs the journal's lines, never the worker."""
        if self._unwritten_starts:
            self._lines += [_line("S", record) for record in self._unwritten_starts]
            self._unwritten_starts.clear()
        if self._lines:
            self._unwritten += "".join(self._lines).encode()
            self._lines.clear()
        if self._unwritten:
            self._write()

    def orderly_stop(self) -> None:
        """The worker stops in order: what still ran is handed back and is no death."""
        self._running.clear()
        try:
            self._rewrite()
        except OSError as error:
            logger.error("journal.cannot_write path=%s error=%s", self._path, error)

    def close(self) -> None:
        """Write the rest. Without `orderly_stop` before it, what still runs is a death in the next life."""
        self.flush()
        os.close(self._file)

    def _write(self) -> None:
        try:
            while self._unwritten:
                count = os.write(self._file, self._unwritten)
                self._written_bytes += count
                self._unwritten = self._unwritten[count:]
            if self._written_bytes > _COMPACT_AT_BYTES:
                self._rewrite()
            self._failed = False
        except OSError as error:
            if not self._failed:
                logger.error("journal.cannot_write path=%s error=%s", self._path, error)
            self._failed = True
            if len(self._unwritten) > _COMPACT_AT_BYTES:
                self._unwritten = b"\n"  # ends the line that may be cut
                self._written_bytes = _COMPACT_AT_BYTES  # so that all is written anew when the disk takes it again

    def _fold(self, text: str) -> None:
        running: set[RecordId] = set()
        for line in text.split("\n"):
            parts = line.split(" ", 4)
            try:
                kind, topic, partition, offset, rest = parts
                if kind == "D":
                    count, _, request_id = rest.partition(" ")
                    self._deaths[((topic, int(partition), int(offset)), request_id)] = int(count)
                    continue
                record = ((topic, int(partition), int(offset)), rest)
            except ValueError:
                continue  # the last line of a life can be cut
            if kind == "S":
                running.add(record)
            elif kind == "E":
                running.discard(record)
            elif kind == "F":  # older versions wrote this alone for an end with an outcome
                running.discard(record)
                self._deaths.pop(record, None)
        for record in running:
            self._deaths[record] = self._deaths.get(record, 0) + 1
        if running:
            logger.warning("journal.died_running requests=%d", len(running))
        while len(self._deaths) > _REMEMBERED:
            del self._deaths[next(iter(self._deaths))]

    def _rewrite(self) -> None:
        """Write what is known anew, beside the old file and then over it. After an OSError the old one is in use."""
        lines = [_deaths_line(record, count) for record, count in self._deaths.items()]
        lines += [_line("S", record) for record in self._running]
        fresh = self._path.with_suffix(".new")
        fresh.write_text("".join(lines))
        file = os.open(fresh, os.O_WRONLY | os.O_APPEND)
        try:
            fresh.replace(self._path)
        except OSError:
            os.close(file)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file, self._written_bytes, self._unwritten = file, 0, b""
        self._lines.clear()
        self._unwritten_starts.clear()


def _line(kind: str, record: RecordId) -> str:
    (topic, partition, offset), request_id = record
    return f"{kind} {topic} {partition} {offset} {request_id}\n"


def _deaths_line(record: RecordId, deaths: int) -> str:
    (topic, partition, offset), request_id = record
    return f"D {topic} {partition} {offset} {deaths} {request_id}\n"
