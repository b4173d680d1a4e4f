"""Requests about images by the client library: how images are passed and what is submitted."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from kit.records import outcome
from penstock.common.artifacts import ArtifactStore, TenantArtifacts
from penstock.producers.images import AsyncImages, Images, ImageSource
from penstock.schemas.errors import InternalError, InvalidRequest
from penstock.schemas.records import ResultEvent
from penstock.schemas.requests import parse_request

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


class FakeClient:
    """Checks what is submitted as the real one does."""

    def __init__(self, folder: Path) -> None:
        self.artifacts = TenantArtifacts(ArtifactStore(folder), "acme")
        self.asked: list[Any] = []

    def submit(self, **body: Any) -> Any:
        self.asked.append(parse_request(body, tenant="acme", now_ms=1))


class FakeAsyncClient(FakeClient):
    async def submit(self, **body: Any) -> Any:
        super().submit(**body)


@pytest.fixture
def client(tmp_path: Path) -> FakeClient:
    return FakeClient(tmp_path / "artifacts")


def test_each_source_becomes_a_reference(client: FakeClient, tmp_path: Path) -> None:
    file = tmp_path / "a.png"
    file.write_bytes(PNG)
    sources: list[ImageSource] = [PNG, file, str(file)]
    for source in sources:
        Images(client).edit(source, "snow", mask="https://a.example/m.png", strength=0.5)
        asked = client.asked[-1]
        assert client.artifacts.get(asked.payload["image"]["artifact_id"]) == PNG
        assert client.artifacts.describe(asked.payload["image"]["artifact_id"]).media_type == "image/png"
        assert asked.payload["mask"] == {"url": "https://a.example/m.png"}
        assert asked.payload["strength"] == 0.5


def test_bytes_that_are_no_image_are_refused(client: FakeClient) -> None:
    with pytest.raises(InvalidRequest, match=r"payload\.mask is not an image"):
        Images(client).edit(PNG, "snow", mask=b"text")
    assert client.asked == []


def test_requests_and_their_fields(client: FakeClient) -> None:
    images = Images(client)
    images.generate("a dam", width=64, height=32, seed=7, fields={"priority": 2, "model": "tiny"})
    images.describe({"url": "https://a.example/a.png"}, "What is it?", max_tokens=20)
    drawn, described = client.asked
    assert drawn.payload == {"prompt": "a dam", "width": 64, "height": 32, "seed": 7}
    assert (drawn.task, drawn.priority, drawn.model) == ("image_generation", 2, "tiny")
    assert described.task == "image_to_text"


async def test_the_same_on_an_event_loop(tmp_path: Path) -> None:
    client = FakeAsyncClient(tmp_path)
    images = AsyncImages(client, lambda: client.artifacts)
    await images.edit(PNG, "snow")
    await images.generate("a dam")
    assert [one.task for one in client.asked] == ["image_editing", "image_generation"]
    assert await images.fetch(made(client.asked[0].payload["image"]["artifact_id"])) == [PNG]


def made(artifact_id: str, **facts: Any) -> ResultEvent:
    images = {"images": [{"artifact_id": artifact_id, **facts}]}
    return outcome(tenant="acme", task="image_generation", image_generation=images)


def test_images_are_fetched_and_their_digest_is_compared(client: FakeClient) -> None:
    kept = client.artifacts.put(PNG)
    assert Images(client).fetch(made(kept.artifact_id, sha256=kept.sha256)) == [PNG]
    with pytest.raises(InternalError, match="digest"):
        Images(client).fetch(made(kept.artifact_id, sha256="0" * 64))
