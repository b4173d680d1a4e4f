"""A gateway's view with its file, its hub and its subscribers, fed record by record."""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, cast

from kit.records import KEY, NAMES
from penstock.common.reader import RawMessage
from penstock.gateway.service.subscriptions import Subscriptions
from penstock.gateway.service.turns import Turns
from penstock.gateway.threads import Threads
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.request_state import Key
from penstock.gateway.view.store import Store
from penstock.gateway.view.view import View
from penstock.schemas.codec import Codec, default_codec
from penstock.schemas.records import Record
from penstock.schemas.topics import TP


def flush(view: View) -> None:
    """Write to the file, and wait until it is written."""
    written = threading.Event()
    assert view.flush(written)
    assert written.wait(60)


def execute(path: Path, script: str) -> list[tuple[Any, ...]]:
    """By another hand, as the file's owner could."""
    with closing(sqlite3.connect(path, isolation_level=None, timeout=10)) as connection:
        return connection.execute(script).fetchall()


class ViewGateway:
    """`options` are the view's."""

    def __init__(self, path: Path, codec: Codec | None = None, **options: Any) -> None:
        self.path, self.codec, self.options = path, codec or default_codec(), options
        self.threads = Threads()
        self.next = Counter[TP]()
        """The offset of the next record of each partition."""
        self.start()

    def start(self, **options: Any) -> None:
        self.options |= options
        self.store = Store(self.path, "cluster")
        self.hub = Hub()
        self.view = View(self.store, self.hub, NAMES, 1, **{"codec": self.codec, **self.options})
        self.turns = Turns(self.view, self.threads)
        self.subscriptions = Subscriptions(self.view, cast("Any", None), self.hub, NAMES, self.turns)

    def restart(self, **options: Any) -> None:
        """Kill -9, and a new process on the same file."""
        self.store.close()
        self.start(**options)

    def reopen(self) -> None:
        """A new process on what this one has written."""
        self.flush()
        self.restart()

    def close(self) -> None:
        self.store.close()
        self.threads.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def message(self, tp: TP, value: Record | bytes | None, **fields: Any) -> RawMessage:
        offset = self.next[tp]
        self.next[tp] += 1
        raw = self.codec.encode(value) if isinstance(value, Record) else value
        return replace(RawMessage(*tp, offset, 1_000, None, raw), **fields)

    def read(self, tp: TP, *values: Record | bytes | None, **fields: Any) -> None:
        self.view.apply([self.message(tp, value, **fields) for value in values])

    def flush(self) -> None:
        flush(self.view)

    def evict_to_disk(self) -> None:
        """All live requests leave memory, if they may: they are in the file."""
        self.flush()
        self.view.evict_to_disk(1_000)

    def entry(self, key: Key = KEY) -> Entry:
        found = self.view.find(key)
        assert found is not None
        return found
