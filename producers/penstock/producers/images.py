"""Requests about images, made easily: images go in as bytes, files or URLs, and what was made is fetched.

Bytes never ride on Kafka: the client puts them among its tenant's artifacts, so it is made with `artifacts=`, the place
that workers have too.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

from penstock.common.artifacts import TenantArtifacts
from penstock.producers.core import Submitted
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.image_formats import MEDIA_TYPES, sniff
from penstock.schemas.records import ResultEvent

ImageSource: TypeAlias = bytes | Path | str | Mapping[str, Any]
"""The bytes of an image, a file with them, a URL that workers may fetch, or a reference: {artifact_id} or {url}."""

Payload = dict[str, Any]


class _Submits(Protocol):
    def submit(self, *, task: str, payload: Mapping[str, Any], **fields: Any) -> Submitted: ...
    @property
    def artifacts(self) -> TenantArtifacts: ...


class _SubmitsAsync(Protocol):
    async def submit(self, *, task: str, payload: Mapping[str, Any], **fields: Any) -> Submitted: ...


R_co = TypeVar("R_co", covariant=True)


class ImageRequests(ABC, Generic[R_co]):
    """Each method submits and raises as `Client.submit`; `fields` are those beside the payload.

    `options` are the payload's own: width, height, negative_prompt, inference_steps, guidance_scale, seed, sampler, n,
    previews; max_tokens of a caption.
    """

    def generate(self, prompt: str, *, fields: Mapping[str, Any] | None = None, **options: Any) -> R_co:
        """Make images from a prompt."""
        return self._submit("image_generation", {"prompt": prompt, **options}, fields)

    def edit(
        self,
        image: ImageSource | None,
        prompt: str,
        *,
        mask: ImageSource | None = None,
        fields: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> R_co:
        """Change an image by a prompt; `mask` is white where it may change, `strength` says how far it may go.

        None with a conversation_id among the `fields`: the conversation's newest image, as for `describe`.
        """
        return self._submit("image_editing", {"prompt": prompt, "image": image, "mask": mask, **options}, fields)

    def describe(
        self,
        image: ImageSource | None,
        prompt: str | None = None,
        *,
        fields: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> R_co:
        """Have an image described, or a question about it answered."""
        return self._submit("image_to_text", {"image": image, "prompt": prompt, **options}, fields)

    def process(
        self,
        image: ImageSource,
        operations: Sequence[Mapping[str, Any]],
        *,
        fields: Mapping[str, Any] | None = None,
    ) -> R_co:
        """Process an image, as {"op": "resize", "width": 640}; images in operations may be sources too."""
        payload = {"image": image, "operations": [dict(one) for one in operations]}
        return self._submit("image_processing", payload, fields)

    @abstractmethod
    def _submit(self, task: str, payload: Payload, fields: Mapping[str, Any] | None) -> R_co: ...


class Images(ImageRequests[Submitted]):
    """`client.images` of the blocking client."""

    def __init__(self, client: _Submits) -> None:
        self._client = client

    def fetch(self, outcome: ResultEvent) -> list[bytes]:
        """The images of a completed outcome, their digests compared. Raises NotFound for one that has expired."""
        return _fetched(self._client.artifacts, outcome)

    def _submit(self, task: str, payload: Payload, fields: Mapping[str, Any] | None) -> Submitted:
        payload = with_references(payload, lambda: self._client.artifacts)
        return self._client.submit(task=task, payload=payload, **(fields or {}))


class AsyncImages(ImageRequests[Coroutine[Any, Any, Submitted]]):
    """`client.images` on an event loop."""

    def __init__(self, client: _SubmitsAsync, artifacts: Callable[[], TenantArtifacts]) -> None:
        self._client = client
        self._artifacts = artifacts

    async def fetch(self, outcome: ResultEvent) -> list[bytes]:
        """See `Images.fetch`."""
        return await asyncio.to_thread(lambda: _fetched(self._artifacts(), outcome))

    async def _submit(self, task: str, payload: Payload, fields: Mapping[str, Any] | None) -> Submitted:
        payload = await asyncio.to_thread(with_references, payload, self._artifacts)
        return await self._client.submit(task=task, payload=payload, **(fields or {}))


def with_references(payload: Payload, artifacts: Callable[[], TenantArtifacts]) -> Payload:
    """The payload with its images put among the artifacts (`artifacts()` gives them) and referred to; no nulls."""
    found = {name: value for name, value in payload.items() if value is not None}
    for name in ("image", "mask"):
        if name in found:
            found[name] = _reference(found[name], artifacts, f"payload.{name}")
    for number, operation in enumerate(found.get("operations", ())):
        if operation.get("image") is not None:
            operation["image"] = _reference(operation["image"], artifacts, f"payload.operations[{number}].image")
    return found


def _reference(source: ImageSource, artifacts: Callable[[], TenantArtifacts], param: str) -> Mapping[str, Any]:
    if isinstance(source, Mapping):
        return source
    if isinstance(source, str) and source.startswith(("http://", "https://")):
        return {"url": source}
    data = source if isinstance(source, bytes) else Path(source).read_bytes()
    found = sniff(data)
    if found is None:
        raise InvalidRequest(f"{param} is not an image of a known format ({', '.join(MEDIA_TYPES)})", param=param)
    return {"artifact_id": artifacts().put(data, media_type=MEDIA_TYPES[found]).artifact_id}


def _fetched(artifacts: TenantArtifacts, outcome: ResultEvent) -> list[bytes]:
    output: dict[str, Any] = outcome.output or {}
    images: list[dict[str, Any]] = output.get("images") or []
    return [artifacts.get(image["artifact_id"], sha256=image.get("sha256")) for image in images]
