"""Where a request's images come from: the tenant's artifacts, or a URL that may be fetched; decoded under guard."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from penstock.processors.images.decoded import DecodedImage
from penstock.processors.images.decoders import DecodeLimits, Decoders
from penstock.processors.images.fetching import ImageFetcher
from penstock.processors.images.url_rules import UrlRules
from penstock.processors.settings import ImagesSection
from penstock.producers.artifacts import ArtifactStore
from penstock.schemas.errors import InvalidRequest, NotFound, TooLarge


class LazyImageInputs:
    """As ImageInputs, made when the first image is asked for: opening the store blocks, and most workers need none."""

    def __init__(self, settings: ImagesSection, open_store: Callable[[], ArtifactStore]) -> None:
        self._settings, self._open_store = settings, open_store
        self._inputs: ImageInputs | None = None

    async def fetch(self, tenant: str, ref: Mapping[str, Any], *, param: str) -> DecodedImage:
        """Raises as ImageInputs."""
        if self._inputs is None:
            store = await asyncio.to_thread(self._open_store)
            self._inputs = self._inputs or image_inputs(self._settings, store)
        return await self._inputs.fetch(tenant, ref, param=param)

    def close(self) -> None:
        """End the processes that decode."""
        if self._inputs is not None:
            self._inputs.close()


class ImageInputs:
    """Gives a request's images as pixels. Used on one event loop, which it does not hold up. `close` ends it."""

    def __init__(self, artifacts: ArtifactStore, decoders: Decoders, fetcher: ImageFetcher, *, max_bytes: int) -> None:
        self._artifacts = artifacts
        self._decoders = decoders
        self._fetcher = fetcher
        self._max_bytes = max_bytes

    async def fetch(self, tenant: str, ref: Mapping[str, Any], *, param: str) -> DecodedImage:
        """The image that `ref` names: {artifact_id}, with {sha256} if its digest is to be checked, or {url}.

        Raises, naming `param`: InvalidRequest for what is no image or may not be fetched, NotFound for an artifact that
        this tenant does not have, TooLarge, and SourceUnavailable (retryable) when a URL's host did not answer.
        """
        return await self._decoders.decode(await self._bytes(tenant, ref, param), param=param)

    def close(self) -> None:
        """End the processes that decode."""
        self._decoders.close()

    async def _bytes(self, tenant: str, ref: Mapping[str, Any], param: str) -> bytes:
        artifact_id, url = ref.get("artifact_id"), ref.get("url")
        if (artifact_id is None) == (url is None):
            raise InvalidRequest(f"{param} needs artifact_id or url, one of the two", param=param)
        if url is not None:
            return await self._fetcher.fetch(url, param=f"{param}.url")
        return await asyncio.to_thread(self._kept, tenant, artifact_id, ref.get("sha256"), param)

    def _kept(self, tenant: str, artifact_id: Any, sha256: str | None, param: str) -> bytes:
        try:
            size_bytes = self._artifacts.describe(tenant, artifact_id).size_bytes
            if size_bytes > self._max_bytes:
                raise TooLarge(
                    f"{param} has {size_bytes} bytes; an image may have {self._max_bytes}",
                    param=param,
                    details={"size_bytes": size_bytes, "limit_bytes": self._max_bytes},
                )
            return self._artifacts.get(tenant, artifact_id, sha256=sha256)
        except NotFound as error:
            raise NotFound(error.message, param=f"{param}.artifact_id") from error


def image_inputs(settings: ImagesSection, artifacts: ArtifactStore) -> ImageInputs:
    """As a worker's settings say. Starts no process: the first image does."""
    limits = DecodeLimits(
        formats=tuple(settings.formats),
        max_pixels=settings.max_pixels,
        max_side=settings.max_side,
        cpu_s=settings.decode_cpu_s,
    )
    fetcher = ImageFetcher(
        UrlRules(tuple(settings.allow_hosts), tuple(settings.internal_hosts)),
        max_bytes=settings.max_bytes,
        timeout_s=settings.timeout_s,
        max_redirects=settings.max_redirects,
    )
    return ImageInputs(artifacts, Decoders(limits, processes=settings.decoders), fetcher, max_bytes=settings.max_bytes)
