"""What one row of the fault table leaves: a file of JSON lines, each with `what` and, of what happened, `at` (Unix s).

`docs/fault-table.md` lists the lines. They hold what was seen, without a judgement; `checker.py` judges.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Entry = dict[str, Any]

WHOLE_CHARS = 2_000
"""Longer texts stand as their digests."""


def text_or_digest(text: str) -> str:
    if len(text) <= WHOLE_CHARS:
        return text
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}:{len(text)}"


class History:
    """Writes the lines of one row, from any thread, and knows which requests each kind of line has named."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", buffering=1)
        self._lock = threading.Lock()
        self.named: defaultdict[str, set[str]] = defaultdict(set)
        """Request ids by `what`; of statuses also by `status:<status>`."""

    def note(self, what: str, request_id: str | None = None, **facts: Any) -> None:
        """`at` among the facts: when it happened, if that was earlier."""
        entry = {"what": what, "at": round(time.time(), 4), "request_id": request_id, **facts}
        line = json.dumps({name: value for name, value in entry.items() if value is not None})
        with self._lock:
            self._file.write(line + "\n")
            if request_id is not None:
                self.named[what].add(request_id)
                if what == "status":
                    self.named[f"status:{facts['status']}"].add(request_id)

    def close(self) -> None:
        self._file.close()


def read(path: Path) -> Iterator[Entry]:
    with path.open() as file:
        for line in file:
            yield json.loads(line)
