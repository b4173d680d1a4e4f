"""Where a request's images come from: the tenant's artifacts, or a URL that may be fetched; decoded under guard."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.facts import Artifact
from penstock.common.artifacts.inputs import keep_input
from penstock.processors.images.decoded import DecodedImage
from penstock.processors.images.decoders import Decoders, decoders_of
from penstock.processors.images.encoded import EncodedImage
from penstock.processors.images.fetching import ImageFetcher, fetcher_of
from penstock.processors.images.folders import ImageFolders
from penstock.processors.outputs import reference_to
from penstock.processors.settings import ImagesSection
from penstock.processors.store_threads import StoreThreads
from penstock.schemas.errors import InvalidRequest, NotFound, TooLarge
from penstock.schemas.ids import input_artifact_id
from penstock.schemas.image_formats import MEDIA_TYPES, sniff
from penstock.schemas.records import ArtifactRef


class ImageInputs:
    """Gives a request's images as pixels. Used on one event loop, which it does not hold up. `close` ends it."""

    def __init__(
        self,
        store: Callable[[], ArtifactStore],
        decoders: Decoders,
        fetcher: ImageFetcher,
        *,
        max_bytes: int,
        threads: StoreThreads | None = None,
        folders: Mapping[str, Path] | None = None,
    ) -> None:
        """`store` opens the store when it is first asked, and blocks. `threads` are for all calls of it, and for files
        of `folders`.
        """
        self._folders = ImageFolders(folders or {}, max_bytes=max_bytes)
        self._threads = threads or StoreThreads()
        self._store = store
        self._decoders = decoders
        self._fetcher = fetcher
        self._max_bytes = max_bytes

    async def fetch(self, tenant: str, ref: Mapping[str, Any], *, param: str) -> DecodedImage:
        """The image that `ref` names: {artifact_id}, with {sha256} if its digest is to be checked, or {url}.

        Raises, naming `param`: InvalidRequest for what is no image or may not be fetched, NotFound for an artifact that
        this tenant does not have, TooLarge, and SourceUnavailable (retryable) when a URL's host did not answer.
        """
        return await self._decoders.decode(await self._bytes(tenant, ref, param), param=param)

    async def look(self, tenant: str, ref: Mapping[str, Any], *, param: str) -> EncodedImage:
        """As `fetch`, but not decoded: what only decoding shows is not found here."""
        return await self._decoders.look(await self._bytes(tenant, ref, param), param=param)

    async def kept(self, tenant: str, request_id: str, ref: Mapping[str, Any], *, param: str) -> ArtifactRef:
        """The artifact behind `ref`. What lies at a URL becomes an input of the request: it may change tomorrow.

        Raises as `fetch`.
        """
        if ref.get("url") is None:
            return reference_to(await self._threads.reads.run(self._described, tenant, ref, param))
        data = await self._bytes(tenant, ref, param)
        found = sniff(data)
        if found is None:
            raise InvalidRequest(f"{param} is not an image of a known format ({', '.join(MEDIA_TYPES)})", param=param)
        artifact_id = input_artifact_id(tenant, hashlib.sha256(data).hexdigest())
        media_type = MEDIA_TYPES[found]
        kept = await self._threads.writes().run(
            lambda: keep_input(self._store(), tenant, request_id, data, artifact_id=artifact_id, media_type=media_type)
        )
        return reference_to(kept)

    def close(self) -> None:
        """End the processes that decode."""
        self._decoders.close()

    async def _bytes(self, tenant: str, ref: Mapping[str, Any], param: str) -> bytes:
        artifact_id, url = ref.get("artifact_id"), ref.get("url")
        if (artifact_id is None) == (url is None):
            raise InvalidRequest(f"{param} needs artifact_id or url, one of the two", param=param)
        if url is not None and url[:5].lower() == "file:":
            return await self._threads.reads.run(lambda: self._folders.read(url, param=f"{param}.url"))
        if url is not None:
            return await self._fetcher.fetch(url, param=f"{param}.url")
        return await self._threads.reads.run(self._kept, tenant, artifact_id, ref.get("sha256"), param)

    def _described(self, tenant: str, ref: Mapping[str, Any], param: str) -> Artifact:
        try:
            return self._store().describe(tenant, ref.get("artifact_id") or "")
        except NotFound as error:
            raise NotFound(error.message, param=f"{param}.artifact_id") from error

    def _kept(self, tenant: str, artifact_id: Any, sha256: str | None, param: str) -> bytes:
        try:
            store = self._store()
            size_bytes = store.describe(tenant, artifact_id).size_bytes
            if size_bytes > self._max_bytes:
                raise TooLarge(
                    f"{param} has {size_bytes} bytes; an image may have {self._max_bytes}",
                    param=param,
                    details={"size_bytes": size_bytes, "limit_bytes": self._max_bytes},
                )
            return store.get(tenant, artifact_id, sha256=sha256)
        except NotFound as error:
            raise NotFound(error.message, param=f"{param}.artifact_id") from error


def image_inputs(
    settings: ImagesSection, store: Callable[[], ArtifactStore], threads: StoreThreads | None = None
) -> ImageInputs:
    """As a worker's settings say. Starts no process: the first image does."""
    return ImageInputs(
        store,
        decoders_of(settings),
        fetcher_of(settings),
        max_bytes=settings.max_bytes,
        threads=threads,
        folders=settings.folders,
    )
