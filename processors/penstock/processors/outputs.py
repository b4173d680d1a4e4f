"""What is too large for Kafka is kept as artifacts under its tenant, images always; records refer to it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.configured import open_store
from penstock.common.artifacts.facts import Artifact
from penstock.common.artifacts.places import check_place
from penstock.common.configuration import ArtifactsSection
from penstock.processors.core.effects import ShowPreview
from penstock.processors.core.work.work import Subject
from penstock.processors.store_threads import StoreThreads
from penstock.schemas.errors import NotFound
from penstock.schemas.ids import output_artifact_id
from penstock.schemas.large_inputs import put_text_back
from penstock.schemas.records import ArtifactRef, InferenceRequest, InputArtifact, OutputSpec, Preview
from penstock.schemas.requests import validate_request

INLINE_BYTES = 256 * 1024
"""The largest output that travels inside its event."""
PREVIEW_KEPT_S = 2 * 86_400
"""Longer than any request lives."""
_FLOAT_BYTES = 4
_NESTED = frozenset({"tool_calls", "logprobs", "prompt_logprobs", "choices"})


def size_of(output: Mapping[str, Any]) -> int:
    """About how many bytes the output takes in an event."""
    vectors: list[list[float]] = output.get("embeddings") or []
    text: str = output.get("text") or ""
    size = sum(map(len, vectors)) * _FLOAT_BYTES + (
        len(text) if text.isascii() else len(text.encode(errors="surrogatepass"))
    )
    for name in _NESTED & output.keys():
        size += len(json.dumps(output[name]))
    return size


def has_images(output: Mapping[str, Any]) -> bool:
    """Whether the output holds images whose bytes are not kept yet."""
    images: list[dict[str, Any]] = output.get("images") or []
    return any("data" in image for image in images)


def pixels_of(output: Mapping[str, Any]) -> int | None:
    """Pixels of all images of an output; None for one that has none."""
    images: list[dict[str, Any]] | None = output.get("images")
    return None if images is None else sum(int(image["width"]) * int(image["height"]) for image in images)


def bytes_of(output: Mapping[str, Any]) -> int:
    """About how many bytes the output takes in memory."""
    images: list[dict[str, Any]] = output.get("images") or []
    return size_of(output) + sum(len(image.get("data") or b"") for image in images)


class Stored(NamedTuple):
    """What is left of an output whose large parts are artifacts."""

    output: dict[str, Any]
    """With references in place of its images' bytes; empty where `artifact` has all of it."""
    images: list[ArtifactRef]
    artifact: ArtifactRef | None


class Outputs:
    """Where large outputs and images go. The store is opened when the first one comes."""

    def __init__(
        self, location: str | Path, section: ArtifactsSection | None = None, threads: StoreThreads | None = None
    ) -> None:
        """`location`: as this process sees it; the rest of `[artifacts]` is in `section`.

        `threads` are for all calls of the store.
        """
        self._threads = threads or StoreThreads()
        self._location = location
        self._section = section or ArtifactsSection()
        self._store: ArtifactStore | None = None

    def check(self, output: OutputSpec | None) -> None:
        """Whether a request's output can be kept where it says. Raises InvalidRequest naming what is wrong."""
        if output is not None:
            check_place(self._section.stores, output.store, output.prefix)

    async def keep(self, subject: Subject, output: Mapping[str, Any]) -> Stored:
        """Keep what is large of an output: images where the request says, another output as one of JSON.

        Doing it again writes the same artifacts. Raises StoreUnavailable, which may pass; TooLarge and others that
        stay; and what the store raises.
        """
        if has_images(output):
            place = subject.request.output or OutputSpec()
            run = self._threads.writes(place.store).run
            kept = [
                await run(self._keep_image, subject, image, str(number), place)
                for number, image in enumerate(output["images"])
            ]
            left = {**output, "images": [_image_of(one) for one in kept]}
            return Stored(left, [reference_to(one) for one in kept], None)
        if size_of(output) > INLINE_BYTES:
            return Stored({}, [], reference_to(await self._threads.writes().run(self._keep_json, subject, output)))
        return Stored(dict(output), [], None)

    async def whole(self, request: InferenceRequest) -> InferenceRequest:
        """The request with the text that its record left in the store.

        Raises NotFound when it is gone, InvalidRequest and others for what is no valid text, and what the store raises.
        """
        if request.input_artifact is None:
            return request
        return await self._threads.reads.run(self._whole, request, request.input_artifact)

    def _whole(self, request: InferenceRequest, reference: InputArtifact) -> InferenceRequest:
        try:
            data = self.store().get(request.tenant, reference.artifact_id, sha256=reference.sha256)
        except NotFound as error:
            raise NotFound("the text of the request is not in the store any more", param="payload") from error
        whole = put_text_back(request, data)
        validate_request(whole)
        return whole

    async def images_of(self, tenant: str, references: Sequence[ArtifactRef]) -> list[dict[str, Any]]:
        """The images that an answer in a conversation refers to, as an output has them. Raises NotFound."""
        run = self._threads.reads.run
        store = await run(self.store)
        return [_image_of(await run(store.describe, tenant, one.artifact_id)) for one in references]

    async def keep_preview(self, effect: ShowPreview) -> Preview:
        """The preview with a reference in place of its bytes. Raises as the store."""
        preview: Any = effect.preview
        image = {
            "data": preview.image,
            "media_type": preview.media_type,
            "width": preview.width,
            "height": preview.height,
        }
        # Nobody refers to it once its request has ended: the sweeper takes it away, or its time is over.
        kept = await self._threads.writes().run(
            self._keep_image,
            effect.subject,
            image,
            f"preview {preview.step}",
            OutputSpec(),
            PREVIEW_KEPT_S,
        )
        return Preview(step=preview.step, steps=preview.steps, image=_image_of(kept))

    def _keep_image(
        self, subject: Subject, image: Mapping[str, Any], part: str, place: OutputSpec, ttl_s: float | None = None
    ) -> Artifact:
        return self.store().put(
            subject.tenant,
            image["data"],
            media_type=image["media_type"],
            artifact_id=output_artifact_id(subject.tenant, subject.request_id, subject.epoch, subject.attempt, part),
            width=image["width"],
            height=image["height"],
            seed=image.get("seed"),
            ttl_s=ttl_s,
            request_id=subject.request_id,
            conversation_id=subject.request.conversation_id,
            store=place.store,
            prefix=place.prefix,
        )

    def store(self) -> ArtifactStore:
        """The store, opened on first use. Blocks; raises as `open_store`."""
        self._store = self._store or open_store(self._section, str(self._location))
        return self._store

    def _keep_json(self, subject: Subject, output: Mapping[str, Any]) -> Artifact:
        request = subject.request
        return self.store().put(
            request.tenant,
            json.dumps(output, ensure_ascii=False, separators=(",", ":")).encode(),
            media_type="application/json",
            artifact_id=output_artifact_id(request.tenant, request.request_id, subject.epoch, subject.attempt),
            request_id=request.request_id,
        )


def reference_to(artifact: Artifact) -> ArtifactRef:
    """As records refer to an artifact."""
    return ArtifactRef(
        artifact_id=artifact.artifact_id,
        uri=artifact.uri,
        media_type=artifact.media_type,
        size_bytes=artifact.size_bytes,
        sha256=artifact.sha256,
    )


def _image_of(artifact: Artifact) -> dict[str, Any]:
    return {**artifact.reference(), "expires_at": artifact.expires_at_ms}
