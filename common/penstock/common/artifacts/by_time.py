"""The index by time: a page of a tenant's artifacts costs a page of the store, however many the tenant has.

Ids are no times: those of outputs and inputs follow from what they are of. So each artifact has an empty object
`{tenant}/.by_time/{folder}/{rest}-{artifact_id}`. Folder and rest are the digits of a time that counts down, since
stores list names upwards and the newest artifacts come first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.common.artifacts.facts import Artifact, is_artifact_id
from penstock.common.artifacts.places import OpenPlace
from penstock.schemas.ids import check_tenant

FOLDER, FILES = ".by_time", ".files"
"""The index of all artifacts, and that of those that are files of `/v1/files`."""
COMPLETE = ".indexed_by_time"
"""There when all artifacts of the store are in the index: releases without one wrote some that were not."""
_LAST_MS = 10**13 - 1
_FOLDER_DIGITS = 5
"""So a folder spans 10**8 ms, about 28 hours. The oldest come first by reading the last folder whole."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An artifact in the order of time. If its facts have another time, it was written again since.

    The time is None where it is not known.
    """

    created_at_ms: int | None
    artifact_id: str


class TimeIndex:
    """The index in the default place of a store. All methods block and are thread-safe; they raise as the store."""

    def __init__(self, place: OpenPlace, folder: str = FOLDER) -> None:
        """`folder`: other kinds of things than artifacts have indexes of their own."""
        self._place = place
        self._folder = folder
        self._complete = False

    def add(self, artifact: Artifact) -> None:
        """Before its facts are written: what can be found is in the index."""
        self.add_id(artifact.tenant, artifact.created_at_ms, artifact.artifact_id)

    def add_id(self, tenant: str, created_at_ms: int, id_: str) -> None:
        """The same for anything that has a UUID and a time."""
        self._place.put(self.path(tenant, created_at_ms, id_), b"")

    def remove(self, artifact: Artifact) -> None:
        """Remove its entry; one that is not there is no error."""
        self.remove_id(artifact.tenant, artifact.created_at_ms, artifact.artifact_id)

    def remove_id(self, tenant: str, created_at_ms: int, id_: str) -> None:
        """The same for anything that has a UUID and a time."""
        self._place.delete(self.path(tenant, created_at_ms, id_))

    def path(self, tenant: str, created_at_ms: int, id_: str) -> str:
        return f"{check_tenant(tenant)}/{self._folder}/{_key(created_at_ms, id_)}"

    def entries(self, tenant: str, after: Artifact | None, *, newest_first: bool) -> Iterator[Entry]:
        """In the order of their making, behind `after`. Reads on only as far as it is iterated."""
        behind = None if after is None else (after.created_at_ms, after.artifact_id)
        return self.entries_behind(tenant, behind, newest_first=newest_first)

    def entries_behind(self, tenant: str, after: tuple[int, str] | None, *, newest_first: bool) -> Iterator[Entry]:
        """The same; `after` is a time in milliseconds and an id."""
        root = f"{check_tenant(tenant)}/{self._folder}"
        start = None if after is None else _key(*after)
        if newest_first and self._place.lists_in_order:
            offset = None if start is None else f"{root}/{start}"
            yield from _found(item["path"].removeprefix(f"{root}/") for item in self._place.items(root, offset))
            return
        for folder in sorted(self._place.folders(root), reverse=not newest_first):
            if start is not None and folder != (first := start[:_FOLDER_DIGITS]) and (folder < first) == newest_first:
                continue
            keys = (item["path"].removeprefix(f"{root}/") for item in self._place.items(f"{root}/{folder}"))
            behind = (key for key in keys if start is None or (key != start and (key > start) == newest_first))
            yield from _found(sorted(behind, reverse=not newest_first))

    def is_complete(self) -> bool:
        """Whether all artifacts of the store are in it. Once they are, they stay so."""
        if not self._complete:
            try:
                with self._place.as_store_unavailable():
                    self._place.client.head(COMPLETE)
            except FileNotFoundError:
                return False
            self._complete = True
        return True

    def complete(self) -> None:
        """All artifacts of the store are in it now."""
        self._place.put(COMPLETE, b"")


def path_of(artifact: Artifact, folder: str = FOLDER) -> str:
    return f"{check_tenant(artifact.tenant)}/{folder}/{_key(artifact.created_at_ms, artifact.artifact_id)}"


def _key(created_at_ms: int, artifact_id: str) -> str:
    digits = f"{_LAST_MS - created_at_ms:013}"
    return f"{digits[:_FOLDER_DIGITS]}/{digits[_FOLDER_DIGITS:]}-{artifact_id}"


def _found(keys: Iterator[str] | list[str]) -> Iterator[Entry]:
    for key in keys:
        digits, _, artifact_id = key.replace("/", "", 1).partition("-")
        if digits.isdecimal() and is_artifact_id(artifact_id):
            yield Entry(_LAST_MS - int(digits), artifact_id)
