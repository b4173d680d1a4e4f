"""Where a request's images come from."""

from __future__ import annotations

import uuid
from collections.abc import Generator
from pathlib import Path
from random import Random
from unittest.mock import AsyncMock

import pytest

from hostile_images import picture
from kit.refusals import refused
from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.inputs import erase_inputs
from penstock.processors.images.fetching import ImageFetcher
from penstock.processors.images.inputs import ImageInputs, image_inputs
from penstock.processors.settings import ImagesSection
from penstock.schemas.errors import InternalError, InvalidRequest, NotFound, TooLarge

PARAM = "payload.image"


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path)


@pytest.fixture
def inputs(store: ArtifactStore) -> Generator[ImageInputs]:
    made = image_inputs(ImagesSection(max_bytes=50_000), lambda: store)
    yield made
    made.close()


async def test_an_artifact_of_the_tenant(store: ArtifactStore, inputs: ImageInputs) -> None:
    kept = store.put("acme", picture(Random(1), size=(20, 10)))
    found = await inputs.fetch("acme", {"artifact_id": kept.artifact_id, "sha256": kept.sha256}, param=PARAM)
    assert (found.width, found.height, found.source_sha256) == (20, 10, kept.sha256)
    with refused(NotFound, param="payload.image.artifact_id"):
        await inputs.fetch("other", {"artifact_id": kept.artifact_id}, param=PARAM)
    with pytest.raises(NotFound):
        await inputs.fetch("acme", {"artifact_id": str(uuid.uuid4())}, param=PARAM)
    with pytest.raises(InternalError, match="digest"):
        await inputs.fetch("acme", {"artifact_id": kept.artifact_id, "sha256": "0" * 64}, param=PARAM)


async def test_what_is_too_large_or_no_image(store: ArtifactStore, inputs: ImageInputs) -> None:
    large, text = store.put("acme", bytes(50_001)), store.put("acme", b"hello", media_type="image/png")
    with refused(TooLarge, "50001 bytes; an image may have 50000", param=PARAM):
        await inputs.fetch("acme", {"artifact_id": large.artifact_id}, param=PARAM)
    with pytest.raises(InvalidRequest, match=r"payload\.image is not an image of an accepted format"):
        await inputs.fetch("acme", {"artifact_id": text.artifact_id}, param=PARAM)


@pytest.mark.parametrize("ref", [{}, {"artifact_id": "x", "url": "y"}, {"artifact_id": "../etc"}, {"data": "AA=="}])
async def test_a_reference_must_name_one_place(inputs: ImageInputs, ref: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest):
        await inputs.fetch("acme", ref, param=PARAM)


async def test_urls_are_off_unless_allowed(inputs: ImageInputs) -> None:
    with refused(InvalidRequest, "not fetched from URLs here", param="payload.image.url"):
        await inputs.fetch("acme", {"url": "https://example.com/a.png"}, param=PARAM)


async def test_what_lies_at_a_url_is_kept_as_an_input_of_its_request(
    store: ArtifactStore, inputs: ImageInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFetcher, "fetch", AsyncMock(return_value=picture(Random(1))))
    url = {"url": "https://example.com/a.png"}
    first, second = [await inputs.kept("acme", request_id, url, param=PARAM) for request_id in ("first", "second")]
    uploaded = await inputs.kept("acme", "third", {"artifact_id": first.artifact_id}, param=PARAM)
    assert first.artifact_id == second.artifact_id == uploaded.artifact_id
    for request_id in ("third", "first", "second"):
        assert store.peek("acme", first.artifact_id) is not None
        erase_inputs(store, "acme", request_id, None)
    assert store.peek("acme", first.artifact_id) is None
