"""The crash journal on disk: which requests this worker's predecessors were running when they died.

An append-only file in the data folder, one line per start or finish. `flush` writes what has gathered, without fsync:
it must outlive the process, not the machine; starts are flushed before their engines run. When a worker starts, the
file is read, folded into deaths per record and written anew.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger(__name__)

Place = tuple[str, int, int, str]
"""(topic, partition, offset, request_id): the same record of the same topic."""

_COMPACT_AT_BYTES = 8 << 20
_REMEMBERED = 10_000


class CrashJournal:
    """Deaths per record from earlier lives, and the starts and finishes of this one."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._deaths: dict[Place, int] = {}
        self._running: set[Place] = set()
        if path.exists():
            self._fold(path.read_text(errors="replace"))
        self._file = -1
        self._written = 0
        self._lines: list[str] = []
        self._rewrite()

    def deaths(self, key: tuple[str, int, int], request_id: str) -> int:
        """How many workers died while this record ran here. Counts only this data folder's workers."""
        return self._deaths.get((*key, request_id), 0) if self._deaths else 0

    def started(self, key: tuple[str, int, int], request_id: str) -> None:
        self._running.add((*key, request_id))
        self._lines.append(f"S {key[0]} {key[1]} {key[2]} {request_id}\n")

    def finished(self, key: tuple[str, int, int], request_id: str) -> None:
        place = (*key, request_id)
        if place not in self._running:
            return
        self._running.discard(place)
        self._deaths.pop(place, None)
        self._lines.append(f"F {key[0]} {key[1]} {key[2]} {request_id}\n")

    def dropped(self, key: tuple[str, int, int], request_id: str) -> None:
        """It runs here no more, without an outcome: no death, but earlier ones still count."""
        place = (*key, request_id)
        deaths = self._deaths.get(place)
        self.finished(key, request_id)
        if deaths is not None and place not in self._deaths:
            self._deaths[place] = deaths
            self._lines.append(f"D {key[0]} {key[1]} {key[2]} {deaths} {request_id}\n")

    def close(self, *, orderly: bool) -> None:
        """An orderly end is no death: what still ran is handed back and not counted against it."""
        if orderly:
            self._running.clear()
            self._rewrite()
        else:
            self.flush()
        os.close(self._file)

    def flush(self) -> None:
        """Write the gathered lines in one call."""
        if self._lines:
            self._written += os.write(self._file, "".join(self._lines).encode())
            self._lines.clear()
            if self._written > _COMPACT_AT_BYTES:
                self._rewrite()

    def _fold(self, text: str) -> None:
        running: set[Place] = set()
        for line in text.splitlines():
            parts = line.split(" ", 4)
            try:
                kind, topic, partition, offset, rest = parts
                if kind == "D":
                    count, _, request_id = rest.partition(" ")
                    self._deaths[(topic, int(partition), int(offset), request_id)] = int(count)
                    continue
                place = (topic, int(partition), int(offset), rest)
            except ValueError:
                continue  # the last line of a life can be cut
            if kind == "S":
                running.add(place)
            elif kind == "F":
                running.discard(place)
                self._deaths.pop(place, None)
        for place in running:
            self._deaths[place] = self._deaths.get(place, 0) + 1
        if running:
            logger.warning("journal.died_running requests=%d", len(running))
        while len(self._deaths) > _REMEMBERED:
            del self._deaths[next(iter(self._deaths))]

    def _rewrite(self) -> None:
        """Write what is known anew, beside the old file and then over it."""
        self._lines.clear()
        lines = [f"D {t} {p} {o} {count} {r}\n" for (t, p, o, r), count in self._deaths.items()]
        lines += [f"S {t} {p} {o} {r}\n" for t, p, o, r in self._running]
        fresh = self._path.with_suffix(".new")
        fresh.write_text("".join(lines))
        if self._file >= 0:
            os.close(self._file)
        fresh.replace(self._path)
        self._file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._written = 0
