"""The artifact store: put, describe, read, list and delete artifacts in a folder or an object store."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.common.artifacts import facts
from penstock.common.artifacts.by_time import FILES, Entry, TimeIndex
from penstock.common.artifacts.digests import checked, missing, read_pieces
from penstock.common.artifacts.facts import Artifact, is_artifact_id
from penstock.common.artifacts.holds import CONVERSATIONS, REQUESTS, Holds
from penstock.common.artifacts.places import (
    OpenPlace,
    Places,
    StorePlace,
    about_path,
    check_prefix,
    data_path,
    data_path_of,
)
from penstock.schemas.errors import Conflict, InternalError, InvalidRequest, TooLarge
from penstock.schemas.ids import check_tenant

UPLOAD_BYTES = 5 * 1024 * 1024
"""The parts of a streamed upload; object stores take none that is smaller."""
MAX_BYTES = 100 * 1024 * 1024
_READERS = 8


@dataclass(frozen=True, slots=True)
class Listed:
    """One page of a tenant's artifacts; `has_more` when others follow."""

    artifacts: list[Artifact]
    has_more: bool


class ArtifactStore:
    """A folder, or an object store given as a URL (s3://bucket/prefix), and others beside it by name.

    All methods block and are thread-safe, but for `put_stream`. Beside what they name they raise StoreUnavailable when
    a store cannot be reached, or refuses.
    """

    def __init__(
        self,
        location: str | Path,
        *,
        max_bytes: int = MAX_BYTES,
        ttl_s: float | None = None,
        options: Mapping[str, str] | None = None,
        presigned: bool = True,
        stores: Mapping[str, StorePlace] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`ttl_s`: how long what comes without a time of its own is kept, in seconds; None: until it is deleted.

        Raises InvalidRequest for a location or options that cannot be, StoreUnavailable for a folder that cannot be
        made now.
        """
        self.max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        first = StorePlace(location=str(location), options=dict(options or {}), presigned=presigned)
        self.places = Places(first, stores or {})
        self._main = self.places[None]
        self.holds = Holds(self._main, CONVERSATIONS)
        self.request_holds = Holds(self._main, REQUESTS)
        """Marks of requests at their inputs; see `inputs.py`."""
        self.by_time = TimeIndex(self._main)
        self.files = TimeIndex(self._main, FILES)
        """The artifacts that are files of `/v1/files`."""

    def now_ms(self) -> int:
        return int(self._clock() * 1000)

    def put(
        self,
        tenant: str,
        data: bytes,
        *,
        media_type: str = "application/octet-stream",
        artifact_id: str | None = None,
        width: int | None = None,
        height: int | None = None,
        seed: int | None = None,
        ttl_s: float | None = None,
        store: str | None = None,
        prefix: str | None = None,
        request_id: str | None = None,
        conversation_id: str | None = None,
        marked_since_ms: int | None = None,
    ) -> Artifact:
        """Keep `data` under a new id, or under one that the caller made (a UUID), overwriting it.

        `width` and `height` in pixels and `seed` are facts of an image. `ttl_s`: seconds until it expires, in place of
        the store's own. `store` and `prefix` choose where the bytes lie. `request_id`: the request whose output it is;
        if that ends without naming the artifact, the sweeper takes it away. `conversation_id`: the conversation in
        which it was made; the artifact goes when that is deleted. `marked_since_ms` is for `inputs.keep_input`.

        Raises TooLarge naming the limit, InvalidRequest for an impossible id, an unknown store or a wrong prefix.
        """
        self._check_size(len(data))
        place, artifact = self._begin(tenant, artifact_id, media_type, ttl_s, store, prefix)
        artifact = replace(
            artifact,
            size_bytes=len(data),
            sha256=hashlib.sha256(data).hexdigest(),
            width=width,
            height=height,
            seed=seed,
            request_id=request_id,
            conversation_id=conversation_id,
            marked_since_ms=marked_since_ms,
        )
        # The bytes first: an artifact that can be found is whole.
        place.put(data_path(artifact), data, place.attributes(artifact))
        self.by_time.add(artifact)
        self._main.put(about_path(tenant, artifact.artifact_id), facts.to_json(artifact))
        return artifact

    async def put_stream(
        self,
        tenant: str,
        pieces: AsyncIterator[bytes],
        *,
        media_type: str = "application/octet-stream",
        ttl_s: float | None = None,
        store: str | None = None,
        prefix: str | None = None,
        artifact_id: str | None = None,
        purpose: str | None = None,
        filename: str | None = None,
        max_bytes: int | None = None,
        uploader_user_id: str | None = None,
        uploader_conversation_id: str | None = None,
    ) -> Artifact:
        """Keep what comes in pieces, with a few parts of UPLOAD_BYTES in memory. Raises as `put`.

        What `pieces` raises passes through, and then nothing is kept. `purpose` and `filename` make it a file of
        `/v1/files`. `max_bytes`: a limit of its own.
        """
        import obstore

        place, artifact = self._begin(tenant, artifact_id, media_type, ttl_s, store, prefix)
        digest, size = hashlib.sha256(), 0

        async def counted() -> AsyncIterator[bytes]:
            nonlocal size
            async for piece in pieces:
                size += len(piece)
                self._check_size(size, max_bytes)
                digest.update(piece)
                yield piece

        with place.writing():
            await obstore.put_async(
                place.client,
                data_path(artifact),
                counted(),
                attributes=place.attributes(artifact),
                chunk_size=UPLOAD_BYTES,
                max_concurrency=2,
            )
        artifact = replace(
            artifact,
            size_bytes=size,
            sha256=digest.hexdigest(),
            purpose=purpose,
            filename=filename,
            uploader_user_id=uploader_user_id,
            uploader_conversation_id=uploader_conversation_id,
        )
        with self._main.writing():
            for index in (self.by_time, self.files) if purpose is not None else (self.by_time,):
                path = index.path(tenant, artifact.created_at_ms, artifact.artifact_id)
                await obstore.put_async(self._main.client, path, b"")
            await obstore.put_async(
                self._main.client, about_path(tenant, artifact.artifact_id), facts.to_json(artifact)
            )
        return artifact

    def check_place(self, store: str | None, prefix: str | None) -> None:
        """Whether `output {store, prefix}` can be followed here. Raises InvalidRequest naming what is wrong."""
        self.places.check(store, prefix)

    def describe(self, tenant: str, artifact_id: str) -> Artifact:
        """The reference. Raises NotFound for an id that this tenant does not have, or has no more."""
        artifact = self.peek(tenant, artifact_id)
        if artifact is None or self.is_over(artifact):
            raise missing(artifact_id)
        return artifact

    def peek(self, tenant: str, artifact_id: str) -> Artifact | None:
        """The reference, expired or not; None when there is none."""
        if (found := self._main.get(about_path(tenant, artifact_id))) is None:
            return None
        try:
            return facts.from_json(found)
        except (ValueError, TypeError) as error:
            raise InternalError(f"the facts of artifact {artifact_id} cannot be read") from error

    def is_over(self, artifact: Artifact) -> bool:
        if artifact.expires_at_ms is None or artifact.expires_at_ms > self._clock() * 1000:
            return False
        return not self.holds.any_of(artifact.tenant, artifact.artifact_id)

    def get(self, tenant: str, artifact_id: str, *, sha256: str | None = None) -> bytes:
        """The bytes, after their digest was compared with the stored one and with `sha256` when given.

        Raises NotFound; InternalError when the digests differ.
        """
        artifact = self.describe(tenant, artifact_id)
        if (data := self.places[artifact.store].get(data_path(artifact))) is None:
            raise missing(artifact_id)
        return checked(data, artifact, sha256)

    def pieces(self, artifact: Artifact, start: int = 0, end: int | None = None) -> Iterator[bytes]:
        return read_pieces(self.places[artifact.store], artifact, start, end)

    def list(self, tenant: str, *, after: str | None = None, limit: int = 20, newest_first: bool = True) -> Listed:
        """A page of a tenant's references, by the time of their making.

        Raises InvalidRequest for an `after` that is not there.
        """
        first = None
        if after is not None:
            first = self.peek(tenant, after) if is_artifact_id(after) else None
            if first is None:
                raise InvalidRequest("`after` names no artifact of this list", param="after")
        indexed = self.by_time.is_complete()
        entries = iter((self.by_time.entries if indexed else self._listed)(tenant, first, newest_first=newest_first))
        return self._page(tenant, entries, limit, lambda artifact: True)

    def list_files(
        self,
        tenant: str,
        *,
        after: str | None = None,
        limit: int = 20,
        newest_first: bool = True,
        purpose: str | None = None,
    ) -> Listed:
        """The same of the files of `/v1/files`, all or those of one purpose."""
        first = None
        if after is not None and (first := self.peek(tenant, after)) is None:
            raise InvalidRequest("`after` names no file of this list", param="after")
        entries = self.files.entries(tenant, first, newest_first=newest_first)
        return self._page(tenant, entries, limit, lambda artifact: purpose in (None, artifact.purpose))

    def _page(self, tenant: str, entries: Iterator[Entry], limit: int, is_wanted: Callable[[Artifact], bool]) -> Listed:
        page: list[Artifact] = []
        with ThreadPoolExecutor(_READERS, "artifact-facts") as readers:
            # One more, to know whether others follow.
            while len(page) <= limit and (now := [*islice(entries, max(limit + 1 - len(page), _READERS))]):
                found = readers.map(partial(self._entered, tenant), now)
                page += [one for one in found if one is not None and is_wanted(one)]
        return Listed(page[:limit], len(page) > limit)

    def _listed(self, tenant: str, after: Artifact | None, *, newest_first: bool) -> list[Entry]:
        """What the index would have, in a store that is not indexed yet. Lists all that the tenant has."""
        found = sorted(
            ((item["last_modified"], item["path"].split("/")[1]) for item in self._items(tenant) if _is_facts(item)),
            reverse=newest_first,
        )
        ids = [artifact_id for _, artifact_id in found]
        behind = 0 if after is None or after.artifact_id not in ids else ids.index(after.artifact_id) + 1
        return [Entry(None, artifact_id) for artifact_id in ids[behind:]]

    def _entered(self, tenant: str, entry: Entry) -> Artifact | None:
        """The artifact of an entry of the index; None if it is gone, expired or was written again since."""
        artifact = self.peek(tenant, entry.artifact_id)
        if artifact is None or entry.created_at_ms not in (None, artifact.created_at_ms) or self.is_over(artifact):
            return None
        return artifact

    def used_bytes(self, tenant: str) -> int:
        """Bytes of all that is kept under a tenant; lists it, so remember the answer for a while."""
        return sum(int(item["size"]) for name in self.places.names for item in self._items(tenant, name))

    def presigned_url(self, artifact: Artifact, ttl_s: float) -> str | None:
        """A URL at which the store itself gives the bytes for `ttl_s` seconds; None when it cannot or may not."""
        return self.places[artifact.store].presigned_url(data_path(artifact), ttl_s)

    def keep_until(self, artifact: Artifact, until_ms: int) -> None:
        """Put its expiry off to this time at least."""
        if artifact.expires_at_ms is not None and artifact.expires_at_ms < until_ms:
            later = replace(artifact, expires_at_ms=until_ms)
            self._main.put(about_path(artifact.tenant, artifact.artifact_id), facts.to_json(later))

    def delete(self, tenant: str, artifact_id: str, *, even_held: bool = False) -> None:
        """Remove it; one that is not there is no error. Raises Conflict when a conversation holds it."""
        if not even_held and (held := self.holds.of(tenant, artifact_id)):
            raise Conflict(
                f"the artifact belongs to conversation {held[0]}: delete that first",
                param="artifact_id",
                details={"conversations": held},
            )
        artifact = self.peek(tenant, artifact_id)
        named, prefix = (None, None) if artifact is None else (artifact.store, artifact.prefix)
        # The facts last: they say where all else lies, so that a deletion that failed can be done again.
        self.remove(named, data_path_of(tenant, artifact_id, prefix))
        if artifact is not None:
            self.by_time.remove(artifact)
            if artifact.purpose is not None:
                self.files.remove(artifact)
        self.remove(None, about_path(tenant, artifact_id))
        self.holds.forget(tenant, artifact_id)

    def conversation_gone(self, tenant: str, conversation_id: str, marks: Mapping[str, int]) -> None:
        """What it held goes, if it was made in it, unless another conversation holds that.

        `marks`: what `holds.marks_of` said before it went. What was marked since, or again, another one of its name
        holds, which was begun meanwhile.
        """
        now = self.holds.marks_of(tenant, conversation_id)
        held = [artifact_id for artifact_id, marked_ms in marks.items() if now.get(artifact_id) == marked_ms]
        self.holds.let_go(tenant, conversation_id, held)
        for artifact_id in held:
            artifact = self.peek(tenant, artifact_id)
            if artifact is not None and artifact.conversation_id == conversation_id:
                with suppress(Conflict):
                    self.delete(tenant, artifact_id)

    def remove(self, store: str | None, path: str) -> None:
        """Remove one object of a place; one that is not there is no error."""
        self.places[store].delete(path)

    def _items(self, tenant: str, store: str | None = None) -> Iterator[Mapping[str, Any]]:
        return self.places[store].items(check_tenant(tenant))

    def _begin(
        self,
        tenant: str,
        artifact_id: str | None,
        media_type: str,
        ttl_s: float | None,
        store: str | None,
        prefix: str | None,
    ) -> tuple[OpenPlace, Artifact]:
        """Where it will lie, and what is known of it before its bytes are."""
        self.check_place(store, prefix)
        place, now_ms = self.places[store], self.now_ms()
        ttl_s = self._ttl_s if ttl_s is None else ttl_s
        made = artifact_id or str(uuid.uuid4())
        return place, Artifact(
            artifact_id=made,
            tenant=tenant,
            uri=f"{place.root}/{data_path_of(tenant, made, prefix)}",
            media_type=media_type,
            size_bytes=0,
            sha256="",
            created_at_ms=now_ms,
            expires_at_ms=None if ttl_s is None else now_ms + int(ttl_s * 1000),
            store=store,
            prefix=check_prefix(prefix),
        )

    def _check_size(self, size: int, max_bytes: int | None = None) -> None:
        limit = self.max_bytes if max_bytes is None else max_bytes
        if size > limit:
            raise TooLarge(
                f"an artifact of {size} bytes is over the limit of {limit}",
                details={"size_bytes": size, "limit_bytes": limit},
            )


def _is_facts(item: Mapping[str, Any]) -> bool:
    return item["path"].count("/") == 2 and item["path"].endswith("/about.json")
