"""Sweeping: looks at all that lies in a store, and takes away what `sweep.plan` says."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from penstock.common.artifacts import by_time
from penstock.common.artifacts.facts import Artifact, is_artifact_id
from penstock.common.artifacts.holds import CONVERSATIONS, REQUESTS
from penstock.common.artifacts.inputs import take_expired
from penstock.common.artifacts.places import data_path, modified_ms
from penstock.common.artifacts.store import ArtifactStore
from penstock.common.artifacts.sweep import GRACE_MS, Doomed, Key, Listing, Seen, Sweep, listing_of, unindexed
from penstock.schemas.errors import Conflict, InternalError

_READERS = 8
RESOLUTION_MS = 1_000
"""Some stores list times in milliseconds, and tell them in seconds of a single object."""
_MARKS = frozenset({CONVERSATIONS.at_artifact, REQUESTS.at_artifact})
_OURS = frozenset({CONVERSATIONS.by_holder, REQUESTS.by_holder, by_time.FOLDER, by_time.FILES})


class Stopped(Exception):
    """The sweeper is to stop."""


class Sweeper:
    """One store's sweeper. All methods but `stop` block; for one thread at a time. After `stop` they raise Stopped."""

    def __init__(self, store: ArtifactStore, clock: Callable[[], float] = time.time) -> None:
        self._store = store
        self._clock = clock
        self._known: dict[Key, tuple[int, Artifact]] = {}
        """Facts that were read, with the time of their object: a look reads only what is new."""
        self._looked_ms = 0
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Begin no more calls of the store. Thread-safe."""
        self._stopped.set()

    def now_ms(self) -> int:
        return int(self._clock() * 1000)

    def look(self) -> tuple[Listing, dict[Key, Artifact]]:
        """All objects, and the facts that can be read. Raises as the store."""
        self._looked_ms = self.now_ms()
        listing = listing_of(self._objects())
        known = {
            key: (seen.modified_ms, self._known[key][1])
            for key, seen in listing.facts.items()
            if key in self._known and self._known[key][0] == seen.modified_ms
        }
        missing = [key for key in listing.facts if key not in known]
        with ThreadPoolExecutor(_READERS, "artifact-facts") as readers:
            for key, artifact in zip(missing, readers.map(self._facts, missing), strict=True):
                if artifact is not None:
                    known[key] = (listing.facts[key].modified_ms, artifact)
        self._known = known
        return listing, {key: artifact for key, (_, artifact) in known.items()}

    def apply(self, sweep: Sweep) -> list[Doomed]:
        """Do it; what was taken away. What has changed since the look stays."""
        for key in sweep.released:
            self._release(*key)
        for one in sweep.stale:
            self._remove(one)
        self._add_to_index(sweep.unindexed)
        taken = [one for one in sweep.doomed if self._take(one)]
        for folder in self._store.places.folders():
            clear_folder(folder, self._clock() - GRACE_MS / 1000)
        return taken

    def index(self) -> int:
        """Complete the store's index by time, if it is not complete; how many artifacts were added.

        That reads the facts of all artifacts, once.
        """
        if self._store.by_time.is_complete():
            return 0
        missing = unindexed(*self.look())
        self._add_to_index(missing)
        return len(missing)

    def _add_to_index(self, artifacts: Sequence[Artifact]) -> None:
        def add(artifact: Artifact) -> None:
            self._check()
            self._store.by_time.add(artifact)

        with ThreadPoolExecutor(_READERS, "artifact-index") as writers:
            list(writers.map(add, artifacts))
        if not self._store.by_time.is_complete():
            self._store.by_time.complete()

    def _release(self, tenant: str, conversation_id: str) -> None:
        """What it held, unless it was begun again since the look, and has made a mark."""
        marks = self._store.holds.marks_of(tenant, conversation_id)
        if max(marks.values(), default=0) <= self._old_ms():
            self._store.holds.let_go(tenant, conversation_id, marks)

    def _remove(self, seen: Seen) -> bool:
        """Remove an object, unless it was written again since it was seen."""
        written_ms = self._store.places[seen.store].modified_ms(seen.path)
        if written_ms is None or written_ms >= seen.modified_ms + RESOLUTION_MS:
            return False
        self._store.remove(seen.store, seen.path)
        return True

    def _take(self, one: Doomed) -> bool:
        found = self._facts((one.tenant, one.artifact_id))
        if one.artifact is None:
            return self._take_partial(one, found)
        if found != one.artifact:
            return False
        try:
            if one.artifact.marked_since_ms is not None:
                return take_expired(self._store, one.artifact, self._old_ms())
            self._store.delete(one.tenant, one.artifact_id)
        except Conflict:  # a conversation holds it meanwhile
            return False
        return True

    def _take_partial(self, one: Doomed, found: Artifact | None) -> bool:
        """Bytes that were on their way have their facts by now, perhaps: then they are no partial ones.

        Others may be on their way to the same place.
        """
        named = None if found is None else (found.store, data_path(found))
        removed = [self._remove(seen) for seen in one.objects if (seen.store, seen.path) != named]
        return any(removed)

    def _old_ms(self) -> int:
        """What was written later was not there at the look, or may belong to something that is under way."""
        return self._looked_ms - GRACE_MS

    def _check(self) -> None:
        if self._stopped.is_set():
            raise Stopped

    def _facts(self, key: Key) -> Artifact | None:
        self._check()
        try:
            return self._store.peek(*key)
        except InternalError:  # not readable: somebody must look at it
            return None

    def _objects(self) -> Iterator[Seen]:
        for name in self._store.places.names:
            for item in self._store.places[name].items(None):
                self._check()
                yield Seen(
                    store=name,
                    path=item["path"],
                    size_bytes=int(item["size"]),
                    modified_ms=modified_ms(item),
                )


def clear_folder(folder: Path, older_than_s: float) -> None:
    """What no listing of a local place shows: files of writes that broke off, and empty folders of artifacts.

    Batches lie there too.

    `older_than_s`, in seconds since the epoch: what was changed later may be in use. The folders of tenants stay: a put
    that makes one of its own within would fail if the tenant's went meanwhile.
    """
    for path, _, files in os.walk(folder, topdown=False):
        within = Path(path)
        for file in files:
            if _broke_off((within / file).relative_to(folder)) and _is_old(within / file, older_than_s):
                (within / file).unlink(missing_ok=True)
        ours = is_artifact_id(within.name) or is_artifact_id(within.parent.name) or within.parent.name in _OURS
        if ours and _is_old(within, older_than_s):
            with suppress(OSError):  # it is not empty
                within.rmdir()


def _broke_off(path: Path) -> bool:
    """Whether it is what a write of ours left, by its path within the place. Names with a dot are all ours."""
    name, sign, number = path.name.partition("#")
    is_ours = name in ("data", "about.json") or path.parent.name in _MARKS or any(one[0] == "." for one in path.parts)
    return bool(sign) and number.isdigit() and is_ours


def _is_old(path: Path, older_than_s: float) -> bool:
    try:
        return path.stat().st_mtime <= older_than_s
    except OSError:  # it is gone meanwhile
        return False
