"""Batches in the artifact store, which all gateways share. All of it blocks.

.open_batches/{tenant}/{id}            when it was made, and the id of the input file: to be run
{tenant}/.batches_by_time/…            the index for lists
{tenant}/.batches/{id}/batch.json      what was asked and how far it is; whoever has the lease writes it
                      /cancel          when its end was asked for
                      /lease/{n}       who runs it; the highest n counts, and making one succeeds for one gateway
                      /parts/{n}.out   the answers of some lines, and `.err`; `.json` is written last: the counts
                      /end.json        how it ended, written once
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import IO

from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.by_time import TimeIndex
from penstock.gateway.batches.records import Batch, Counts
from penstock.schemas.errors import InvalidRequest, NotFound, PenstockError, TenantLimit

logger = logging.getLogger(__name__)

OPEN = ".open_batches"
BY_TIME = ".batches_by_time"
_READERS = 8
MOST_OPEN = 64
"""Batches of one tenant that have not ended."""
OPEN_RETRY_S = 60
NO_PLACE = {"reason": "tenant_share", "detail": "it waits for its turn among the batches that no gateway runs yet"}
Key = tuple[str, str]
"""Tenant and id of a batch."""


@dataclass(frozen=True, slots=True)
class Lease:
    """`beat` changes while its holder lives; it is empty once that has let go."""

    number: int
    beat: str


class BatchStore:
    """Thread-safe. Every method raises StoreUnavailable."""

    def __init__(self, store: ArtifactStore) -> None:
        self._documents = store.places[None]
        self._by_time = TimeIndex(store.places[None], BY_TIME)

    # -- for callers

    def create(self, batch: Batch, most_open: int = MOST_OPEN) -> Batch:
        """What can be found is whole, and is run. Of several with one id the first stands, and is returned.

        Raises TenantLimit.
        """
        if (standing := self.find(batch.key)) is not None:
            return standing
        if self._has_open(batch.tenant, most_open):
            text = f"the tenant {batch.tenant} may have {most_open} batches that have not ended"
            details = {"limit": "open_batches", "value": most_open}
            raise TenantLimit(text, retry_after_s=OPEN_RETRY_S, details=details)
        self._mark(batch)
        self._by_time.add_id(batch.tenant, batch.created_ms, batch.batch_id)
        if not self._documents.create(_path(batch.key, "batch.json"), batch.to_json()):
            batch = self.find(batch.key) or batch
        self._mark(batch)  # the first mark was forgotten if this took long, or was of another with this id
        if self.has_ended(batch.key):
            self._documents.delete(_open(batch.key))
        return batch

    def _has_open(self, tenant: str, count: int) -> bool:
        """Whether a tenant has so many that have not ended. Of those that are marked some may just be ending."""
        marked = self._documents.names(f"{OPEN}/{tenant}")
        return len(marked) >= count and sum(self.has_ended((tenant, one)) is None for one in marked) >= count

    def _mark(self, batch: Batch) -> None:
        self._documents.put(_open(batch.key), f"{batch.created_ms} {batch.input_file_id}".encode())

    def get(self, key: Key) -> Batch:
        """As callers see it now. Raises NotFound."""
        if (ended := self.has_ended(key)) is not None:
            return ended
        batch, cancelled = self.running(key), self.cancelled_at(key)
        if batch is not None:
            lease = self.lease(key)
            if lease is None or not lease.beat:
                batch = replace(batch, in_flight=0, waiting_for=NO_PLACE)
            return batch if cancelled is None else batch.cancelling(cancelled)
        if (ended := self.has_ended(key)) is not None:  # since it was looked for
            return ended
        raise NotFound("there is no such batch")

    def list(self, tenant: str, after: str | None, limit: int) -> list[Batch]:
        """The newest first; one more than `limit` if others follow. Raises InvalidRequest for an unknown `after`."""
        behind = None
        if after is not None:
            try:
                behind = (self.get((tenant, after)).created_ms, after)
            except NotFound:
                raise InvalidRequest("`after` names no batch of this list", param="after") from None
        entries = self._by_time.entries_behind(tenant, behind, newest_first=True)
        page: list[Batch] = []
        with ThreadPoolExecutor(_READERS, "batches") as readers:
            while len(page) <= limit and (some := [*islice(entries, limit + 1 - len(page))]):
                found = readers.map(self.find, [(tenant, entry.artifact_id) for entry in some])
                # A call that was cut off has left an entry of its own, if the batch was made by its repeat.
                page += [
                    batch
                    for batch, entry in zip(found, some, strict=True)
                    if batch is not None and batch.created_ms == entry.created_at_ms
                ]
        return page

    def find(self, key: Key) -> Batch | None:
        """As `get`; None: there is none."""
        try:
            return self.get(key)
        except NotFound:
            return None

    def cancel(self, key: Key, now_s: int) -> Batch:
        """Ask for its end; the first time counts. Raises NotFound."""
        if not self.get(key).is_final:
            self._documents.create(_path(key, "cancel"), str(now_s).encode())
        return self.get(key)

    def reader_of(self, tenant: str, input_file_id: str) -> str | None:
        folder = f"{OPEN}/{tenant}"
        for batch_id in self._documents.names(folder):
            reads = (self._documents.get(f"{folder}/{batch_id}") or b"").endswith(input_file_id.encode())
            if reads and self.has_ended((tenant, batch_id)) is None:
                return batch_id
        return None

    # -- for the runner

    def open(self) -> list[Key]:
        """All that are to be run."""
        found = (name.split("/") for name in self._documents.names(OPEN))
        return [(tenant, batch_id) for tenant, batch_id in found]

    def made_ms(self, key: Key) -> int:
        made, _, file_id = (self._documents.get(_open(key)) or b"").partition(b" ")
        return int(made) if file_id else 0

    def running(self, key: Key) -> Batch | None:
        found = self._documents.get(_path(key, "batch.json"))
        return None if found is None else Batch.from_json(found)

    def cancelled_at(self, key: Key) -> int | None:
        found = self._documents.get(_path(key, "cancel"))
        return None if found is None else int(found)

    def lease(self, key: Key) -> Lease | None:
        numbers = [int(name) for name in self._documents.names(_path(key, "lease"))]
        if not numbers:
            return None
        beat = self._documents.get(_path(key, f"lease/{max(numbers)}"))
        return Lease(max(numbers), (beat or b"").decode())

    def take_lease(self, key: Key, number: int, beat: str) -> bool:
        return self._documents.create(_path(key, f"lease/{number}"), beat.encode())

    def renew(self, key: Key, lease: Lease) -> None:
        self._documents.put(_path(key, f"lease/{lease.number}"), lease.beat.encode())

    def write(self, batch: Batch) -> None:
        self._documents.put(_path(batch.key, "batch.json"), batch.to_json())

    def end(self, batch: Batch) -> None:
        """It has ended. A kill in between leaves it open: the next owner does the rest."""
        self._documents.create(_path(batch.key, "end.json"), batch.to_json())
        self.remove(batch.key, lambda name: name != "end.json")
        self._documents.delete(_open(batch.key))

    def has_ended(self, key: Key) -> Batch | None:
        found = self._documents.get(_path(key, "end.json"))
        return None if found is None else Batch.from_json(found)

    def forget_unmade(self, key: Key) -> None:
        """It was never made: its maker died, and no caller knows it. Or its end was cut off, which is finished."""
        if (ended := self.has_ended(key)) is not None:
            self.end(ended)
            return
        self._documents.delete(_open(key))
        if (batch := self.running(key)) is not None:  # made since it was looked for
            self._mark(batch)

    def remove(self, key: Key, which: Callable[[str], bool] = lambda name: True) -> None:
        for name in self._documents.names(_path(key, "")[:-1]):
            if which(name):
                self._documents.delete(_path(key, name))

    def forget_ended(self, before_ms: int) -> None:
        """Remove batches that ended and were made before this time."""
        for tenant in self._documents.folders(""):
            if tenant.startswith("."):
                continue
            for entry in self._by_time.entries_behind(tenant, None, newest_first=False):
                if entry.created_at_ms is None or entry.created_at_ms >= before_ms:
                    break
                key = (tenant, entry.artifact_id)
                try:
                    batch = self.find(key)
                except PenstockError:
                    raise
                except Exception:  # the others are forgotten all the same
                    logger.exception("batch.unreadable batch=%s", entry.artifact_id)
                    continue
                if batch is None or batch.is_final:
                    self.remove(key)
                    self._by_time.remove_id(tenant, entry.created_at_ms, entry.artifact_id)

    # -- parts

    def put_part(self, key: Key, number: int, answers: IO[bytes], errors: IO[bytes], counts: Counts) -> None:
        """In the place of what somebody wrote of it before: a line may have ended otherwise then."""
        for name, content in (("out", answers), ("err", errors)):
            if content.seek(0, os.SEEK_END):
                content.seek(0)
                self._documents.put(_part(key, number, name), content)
            else:
                self._documents.delete(_part(key, number, name))
        self._documents.put(_part(key, number, "json"), json.dumps(asdict(counts)).encode())

    def parts(self, key: Key) -> dict[int, Counts]:
        """Those that are whole."""
        names = [name for name in self._documents.names(_path(key, "parts")) if name.endswith(".json")]
        found: dict[int, Counts] = {}
        for name in names:
            content = self._documents.get(_path(key, f"parts/{name}"))
            if content is not None:
                found[int(name.removesuffix(".json"))] = Counts.of(json.loads(content))
        return found

    def lines_of(self, key: Key, kind: str, numbers: int) -> Iterator[bytes]:
        """The contents of the parts, `out` or `err`, one after the other, in pieces."""
        for number in range(numbers):
            yield from self._documents.pieces(_part(key, number, kind))


def _open(key: Key) -> str:
    return f"{OPEN}/{key[0]}/{key[1]}"


def _path(key: Key, name: str) -> str:
    return f"{key[0]}/.batches/{key[1]}/{name}"


def _part(key: Key, number: int, name: str) -> str:
    return _path(key, f"parts/{number:05}.{name}")
