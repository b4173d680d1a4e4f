"""The snapshot of a view in the store of artifacts: gateways write it by turns, and a new one begins from it."""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from penstock.common import log_copies
from penstock.common.artifacts.places import OpenPlace
from penstock.gateway.view import snapshot_file, view_file
from penstock.gateway.view.backfill import Backfill
from penstock.gateway.view.change_over import Imported
from penstock.gateway.view.gateways import is_alive
from penstock.gateway.view.snapshot_file import Unusable
from penstock.schemas.records import GatewayState
from penstock.schemas.topics import TP

FOLDER = ".views"
"""No tenant has this name, so that no list, sweep or route of artifacts comes to it."""
_PIECE_BYTES = 2**20
_GZIP, _FAST = 31, 1
TURN_S = 30.0
"""A gateway writes so much later than the one before it would have."""
OLD_MS = 3_600_000
"""A snapshot of another version that nobody has written for so long is deleted: it may hold what was erased since."""


class Snapshots:
    """That of the views of one cluster, prefix and version. All methods block and are thread-safe."""

    def __init__(self, place: OpenPlace, cluster: str, view: Path) -> None:
        self._place, self._cluster = place, cluster
        self._group = f"{FOLDER}/{_digest(cluster.partition(' ')[0])}"
        self._path = f"{self._group}/{_digest(view_file.identity_of(cluster))}.sqlite.gz"
        self._begun = f"{self._path}.begun"
        self._taken = view.with_name(f"{view.name}.snapshot")
        self._imported = view_file.imported_path(view)
        log_copies.remove(self._taken)  # of a process that was killed

    def written_ms(self) -> int | None:
        """When it was written; None if there is none. Raises StoreUnavailable."""
        return self._place.modified_ms(self._path)

    def begun_ms(self) -> int | None:
        """When a gateway began to write it last; None if none did. Raises StoreUnavailable."""
        return self._place.modified_ms(self._begun)

    def write(self, read: Path) -> int:
        """Write the view of a file, in place of the snapshot that there is; its size in bytes.

        If another gateway writes one meanwhile, that one stays: this one may hold what was erased since.

        Raises Unusable, sqlite3.Error, OSError, StoreUnavailable.
        """
        if shutil.disk_usage(read.parent).free < read.stat().st_size:
            raise Unusable("the disk of the view has no room for a copy of it")
        self._place.put(self._begun, b"begun")
        before_ms = self.written_ms()
        try:
            snapshot_file.take(read, self._taken, self._cluster)
            size_bytes = 0

            def counted() -> Iterator[bytes]:
                nonlocal size_bytes
                for piece in _compressed(self._taken):
                    size_bytes += len(piece)
                    yield piece

            if self.written_ms() != before_ms:
                raise Unusable("another gateway has written one meanwhile")
            self._place.put(self._path, counted())
        finally:
            log_copies.remove(self._taken)
        return size_bytes

    def delete_old(self, now_ms: int) -> None:
        """Delete those of other versions that are not written any more. Raises StoreUnavailable."""
        for name in self._place.names(self._group):
            path = f"{self._group}/{name}"
            written_ms = self._place.modified_ms(path)
            if path not in (self._path, self._begun) and written_ms is not None and now_ms - written_ms > OLD_MS:
                self._place.delete(path)

    def read(self, heard: Callable[[int], None]) -> Path | None:
        """Store it in the file that becomes the view's; None if there is none.

        `heard` is called with each number of bytes that came; it may raise.

        Raises Unusable, OSError, StoreUnavailable.
        """
        log_copies.remove(self._imported)
        with self._imported.open("wb") as file:
            try:
                return self._imported if self._download(file, heard) else None
            except BaseException:
                with suppress(FileNotFoundError):
                    # Where a later reading has begun meanwhile, the file is that one's.
                    if os.path.samestat(os.fstat(file.fileno()), self._imported.stat()):
                        log_copies.remove(self._imported)
                raise

    def _download(self, file: IO[bytes], heard: Callable[[int], None]) -> bool:
        """Whether there is one."""
        inflate = zlib.decompressobj(_GZIP)
        try:
            for piece in self._place.pieces(self._path):
                heard(len(piece))
                file.write(inflate.decompress(piece))
        except zlib.error as error:
            raise Unusable(f"it cannot be read: {error}") from error
        heard(0)
        if file.tell() and not inflate.eof:
            raise Unusable("it is cut short")
        return file.tell() > 0

    def make_view(self, begin: Mapping[TP, int], backfill: Backfill) -> Imported:
        """As `snapshot_file.make_view`, of the file that `read` made."""
        return snapshot_file.make_view(self._imported, self._cluster, begin, backfill)

    def drop(self) -> None:
        """Remove what `read` and `make_view` made."""
        log_copies.remove(self._imported)


def turn_of(own_id: str, version: str, states: Iterable[GatewayState], now_ms: int) -> int:
    """How many gateways of this version write before this one."""
    return sum(
        one.kind == "gateway" and one.version == version and one.id < own_id and is_alive(one, now_ms) for one in states
    )


def is_due(begun_ms: int | None, whole_since_ms: int, now_ms: int, *, interval_s: float, turn: int) -> bool:
    """Whether a gateway that knows the whole history since a time is to write the snapshot.

    `begun_ms`: when the last one was begun. Who is before it in turn may not know the history, or have no store. Two
    that write at once do no harm.
    """
    due_ms = whole_since_ms if begun_ms is None else begun_ms + int(1000 * interval_s)
    return now_ms >= due_ms + int(1000 * turn * TURN_S)


def _compressed(file: Path) -> Iterator[bytes]:
    deflate = zlib.compressobj(_FAST, wbits=_GZIP)
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE_BYTES):
            yield deflate.compress(piece)
    yield deflate.flush()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
