"""The crash journal on disk: which requests this worker's predecessors were running when they died.

An append-only file in the data folder, one line per start or end of a run. `JournalWriter` writes what has gathered,
in a thread and without fsync: it must outlive the process, not the machine. Starts are written before their engines
run. A start that has ended before the next write is never written. When a worker starts, the file is read, folded into
deaths per record and written again.

It keeps what came of failed attempts too, and of each that died the little that is known, for the request's history.

A request is in it only while it is on an engine: what has finished and waits for the broker, or waits for its next
attempt, did not run when a worker died. The deaths of earlier lives count until the broker has the request's outcome.

Only `orderly_stop` makes an end orderly. However else a life ends, by a fault or a signal, what ran then counts as a
death.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from penstock.common.background import BackgroundTasks
from penstock.common.clock import now_ms
from penstock.common.threads import DaemonThreads
from penstock.schemas.errors import EngineFailed
from penstock.schemas.histories import extended
from penstock.schemas.records import Attempt, AttemptError, AttemptHistory

logger = logging.getLogger(__name__)

Key = tuple[str, int, int]
"""(topic, partition, offset) of a request's first record. A copy that was moved to another partition has the same one:
a worker that dies before it commits moves the record again in its next life, and each copy would begin at no deaths."""
RecordId = tuple[Key, str]
"""The same record of the same topic: its key and its request_id."""
Start = tuple[int, int]
"""The number of an attempt, and when it began, in milliseconds since the epoch."""

_COMPACT_AT_BYTES = 8 << 20
_REMEMBERED = 10_000
_MOST_LINES = 100_000
"""Lines that wait for the disk. Beyond that the file is written again instead."""
DISK_S = 5.0
"""How long starts wait for the disk. Then it counts as one that refuses: it costs the journal's lines."""


class JournalWrite(NamedTuple):
    """What one write puts on the disk."""

    lines: str
    whole: str | None
    """All that the journal knows, when the file is to be written again."""


class CrashJournal:
    """Deaths per record from earlier lives, and what runs in this one.

    Not thread-safe, but for `write`, which one thread at a time may call beside the others.
    """

    def __init__(self, path: Path, worker_id: str = "") -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._worker_id = path, worker_id
        self._deaths: dict[RecordId, int] = {}
        self._attempts: dict[RecordId, AttemptHistory] = {}
        if path.exists():
            self._fold(path.read_text(errors="replace"))
        self._running: dict[RecordId, Start] = {}
        self._unwritten_starts: dict[RecordId, None] = {}
        self._lines: list[str] = []
        self._compact = False
        """Whether the next write writes the file again."""
        self._unwritten = b""
        """Taken, but not written: the disk refused it."""
        self._written_bytes = 0
        self._failed = False
        self._file = -1
        self._rewrite(self._whole())

    def deaths(self, key: Key, request_id: str) -> int:
        """How many workers died while this record ran here. Counts only this data folder's workers."""
        return self._deaths.get((key, request_id), 0) if self._deaths else 0

    def attempts(self, key: Key, request_id: str) -> AttemptHistory | None:
        """Attempts of the request that failed, or whose worker died. Knows only of this data folder's workers."""
        return self._attempts.get((key, request_id)) if self._attempts else None

    def started(self, key: Key, request_id: str, attempt: int = 1) -> None:
        record = (key, request_id)
        self._running[record] = (attempt, now_ms())
        self._unwritten_starts[record] = None

    def ended(self, key: Key, request_id: str) -> None:
        """Its run is over, however it ended. Deaths of earlier lives still count."""
        record = (key, request_id)
        if record not in self._running:
            return
        del self._running[record]
        if record in self._unwritten_starts:
            del self._unwritten_starts[record]
        else:
            self._add(_line("E", *record))

    def attempt_ended(self, key: Key, request_id: str, attempt: Attempt) -> None:
        """An attempt has failed: its request may run again in another life."""
        self._note((key, request_id), attempt)
        self._add(_attempt_line((key, request_id), attempt))

    def forget_deaths(self, key: Key, request_id: str) -> None:
        """The broker has its outcome."""
        record = (key, request_id)
        attempts = self._attempts.pop(record, None)
        if self._deaths.pop(record, None) is not None or attempts is not None:
            self._add(_line("F", *record))

    def _add(self, line: str) -> None:
        if len(self._lines) >= _MOST_LINES:
            self._lines, self._compact = [], True
        self._lines.append(line)

    @property
    def waits(self) -> bool:
        """Whether there is something to write."""
        return bool(self._lines or self._unwritten_starts or self._unwritten)

    def take(self) -> JournalWrite:
        """What has gathered, for `write`."""
        lines = [*self._lines, *(_line("S", *record, *self._running[record]) for record in self._unwritten_starts)]
        self._lines.clear()
        self._unwritten_starts.clear()
        whole, self._compact = self._whole() if self._compact else None, False
        return JournalWrite("".join(lines), whole)

    def write(self, unwritten: JournalWrite) -> None:
        """Blocks. A disk that refuses costs the journal's lines, never the worker."""
        self._unwritten += unwritten.lines.encode()
        try:
            while self._unwritten:
                count = os.write(self._file, self._unwritten)
                self._written_bytes += count
                self._unwritten = self._unwritten[count:]
            if unwritten.whole is not None:
                self._rewrite(unwritten.whole)
            self._failed = False
        except OSError as error:
            if not self._failed:
                logger.error("journal.cannot_write path=%s error=%s", self._path, error)
            self._failed = True
            if len(self._unwritten) > _COMPACT_AT_BYTES:
                self._unwritten, self._compact = b"\n", True  # ends the line that may be cut
            self._compact = self._compact or unwritten.whole is not None
        self._compact = self._compact or self._written_bytes > _COMPACT_AT_BYTES

    def flush(self) -> None:
        """Write what has gathered. Blocks."""
        if self.waits:
            self.write(self.take())

    def orderly_stop(self) -> None:
        """The worker stops in order: what still ran is handed back and is no death. Blocks."""
        self._running.clear()
        self.take()  # the file is written again
        try:
            self._rewrite(self._whole())
        except OSError as error:
            logger.error("journal.cannot_write path=%s error=%s", self._path, error)

    def close(self) -> None:
        """Write the rest. Without `orderly_stop` before it, what still runs is a death in the next life."""
        self.flush()
        os.close(self._file)

    def _fold(self, text: str) -> None:
        running: dict[RecordId, Start | None] = {}
        worker_id = None
        for line in text.split("\n"):
            if line.startswith("W "):
                worker_id = line[2:]
                continue
            parts = line.split(" ", 4)
            try:
                kind, topic, partition, offset, rest = parts
                if kind == "D":
                    count, _, request_id = rest.partition(" ")
                    self._deaths[((topic, int(partition), int(offset)), request_id)] = int(count)
                    continue
                key = (topic, int(partition), int(offset))
                if kind == "A":
                    facts = json.loads(rest)
                    self._note((key, facts.pop("request_id")), Attempt.from_dict(facts))
                    continue
            except (ValueError, TypeError, KeyError, AttributeError):
                continue  # the last line of a life can be cut
            record = (key, rest)
            if kind == "S":
                request_id, start = _start_of(rest)
                running[(key, request_id)] = start
            elif kind == "E":
                running.pop(record, None)
            elif kind == "F":  # older versions wrote this alone for an end with an outcome
                running.pop(record, None)
                self._deaths.pop(record, None)
                self._attempts.pop(record, None)
        died = AttemptError(code=EngineFailed.code, message="its worker died while it ran")
        for record, start in running.items():
            self._deaths[record] = self._deaths.get(record, 0) + 1
            number, at_ms = start or (1, None)
            self._note(record, Attempt(attempt=number, worker_id=worker_id, error=died, started_at=at_ms))
        if running:
            logger.warning("journal.died_running requests=%d", len(running))
        while len(self._deaths) > _REMEMBERED:
            del self._deaths[next(iter(self._deaths))]

    def _note(self, record: RecordId, attempt: Attempt) -> None:
        self._attempts[record] = extended(self._attempts.get(record), [attempt])
        while len(self._attempts) > _REMEMBERED:
            del self._attempts[next(iter(self._attempts))]

    def _whole(self) -> str:
        lines = [f"W {self._worker_id}\n"] if self._worker_id else []
        lines += [_line("D", key, count, request_id) for (key, request_id), count in self._deaths.items()]
        for record, history in self._attempts.items():
            lines += [_attempt_line(record, attempt) for attempt in history.attempts]
        lines += [_line("S", *record, *start) for record, start in self._running.items()]
        return "".join(lines)

    def _rewrite(self, whole: str) -> None:
        """Write the file again, beside the old one and then over it. After an OSError the old one is in use."""
        fresh = self._path.with_suffix(".new")
        fresh.write_text(whole)
        file = os.open(fresh, os.O_WRONLY | os.O_APPEND)
        try:
            fresh.replace(self._path)
        except OSError:
            os.close(file)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file, self._written_bytes, self._unwritten = file, 0, b""


class JournalWriter:
    """Writes the journal in a thread. No disk, slow or dead, holds the event loop, and none holds a start for ever.

    All calls on the event loop.
    """

    def __init__(self, journal: CrashJournal) -> None:
        self._journal = journal
        self._threads = DaemonThreads(1)
        self._tasks = BackgroundTasks()
        self._writing: asyncio.Task[None] | None = None
        self._then: list[Callable[[], None]] = []
        self.trouble: str | None = None
        """Why starts are not in the journal now; None while they are."""

    def flush(self, then: Callable[[], None] | None = None) -> None:
        """Write what has gathered. `then` is called when it is in the file, or when the disk does not answer."""
        if then is not None:
            self._then.append(then)
        if self.trouble is not None:
            _call(self._waiting())
        elif (self._writing is None or self._writing.done()) and (self._then or self._journal.waits):
            self._writing = self._tasks.start(self._write(), "crash journal")

    def _waiting(self) -> list[Callable[[], None]]:
        then, self._then = self._then, []
        return then

    async def _write(self) -> None:
        """Until nobody waits. What has gathered meanwhile is for the next flush."""
        again = True
        while again:
            then = self._waiting()
            write = asyncio.ensure_future(self._threads.run(self._journal.write, self._journal.take()))
            if not (await asyncio.wait({write}, timeout=DISK_S))[0]:
                self.trouble = f"the disk of the crash journal has not answered for {DISK_S:g} s"
                logger.error("journal.disk_hangs seconds=%g: runs start without it", DISK_S)
                then += self._waiting()
            _call(then)
            await write
            self.trouble = None
            again = bool(self._then)

    async def close(self, *, orderly: bool) -> None:
        """Write the rest. Unless the stop is orderly, what still runs is a death in the next life."""
        if self._writing is not None:
            await asyncio.wait({self._writing})
        if orderly:
            await self._threads.run(self._journal.orderly_stop)
        await self._threads.run(self._journal.close)


def _call(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _line(kind: str, key: Key, *rest: object) -> str:
    return " ".join(map(str, (kind, *key, *rest))) + "\n"


def _start_of(text: str) -> tuple[str, Start | None]:
    """The request of a start; older versions wrote its id alone."""
    match text.split(" "):
        case [request_id, attempt, at_ms] if attempt.isdecimal() and at_ms.isdecimal():
            return request_id, (int(attempt), int(at_ms))
        case _:
            return text, None


def _attempt_line(record: RecordId, attempt: Attempt) -> str:
    key, request_id = record
    return _line("A", key, json.dumps({"request_id": request_id, **attempt.to_dict()}, separators=(",", ":")))
