"""Artifacts and the log: what an outcome does not name is swept, what a request or a conversation had goes with it."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.common.artifacts import Artifact, ArtifactStore
from penstock.schemas.errors import NotFound
from penstock.schemas.records import ArtifactRef

TENANT = "default"
SWEEP = "/v1/admin/artifacts/sweep"
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def store(place: Any) -> ArtifactStore:
    return ArtifactStore(place.folder / "artifacts")


def reference_to(artifact: Artifact) -> ArtifactRef:
    return ArtifactRef(
        artifact_id=artifact.artifact_id,
        uri=artifact.uri,
        media_type=artifact.media_type,
        size_bytes=artifact.size_bytes,
        sha256=artifact.sha256,
    )


def make_old(folder: Path, *parts: str) -> None:
    """All that lies there was written an hour and more ago."""
    for file in folder.joinpath(*parts).rglob("*"):
        if file.is_file():
            os.utime(file, (1, 1))


def there_is(store: ArtifactStore, artifact: Artifact) -> bool:
    try:
        store.describe(TENANT, artifact.artifact_id)
    except NotFound:
        return False
    return True


def test_an_output_whose_worker_died_before_its_event_is_swept(
    place: Any, gateway: Any, scribe: Any, store: ArtifactStore
) -> None:
    ended, running = scribe.request(), scribe.request()
    first, preview, second = (store.put(TENANT, b"output", request_id=ended.id) for _ in range(3))
    under_way, unknown = (store.put(TENANT, b"output", request_id=name) for name in (running.id, "nobody-knows-it"))
    ended.end("", attempt=2, output_artifact=reference_to(second))
    gateway.wait_for(ended.id, "completed")
    assert gateway.http.post(SWEEP).json()["data"] == [], "they are young"
    for artifact in (first, preview, second, under_way, unknown):
        make_old(place.folder, "artifacts", TENANT, artifact.artifact_id)
    expected = {(one.artifact_id, "orphan") for one in (first, preview)}
    for query in ("?dry_run=true", ""):
        swept = gateway.http.post(f"{SWEEP}{query}").json()
        assert {(one["artifact_id"], one["reason"]) for one in swept["data"]} == expected
        assert swept["artifacts"] == {"expired": 0, "orphan": 2, "partial": 0}
        assert swept["dry_run"] == bool(query)
        assert there_is(store, first) == bool(query)
    assert all(there_is(store, one) for one in (second, under_way, unknown))
    running.end("done")


def test_erasing_a_request_takes_its_output_along(gateway: Any, scribe: Any, store: ArtifactStore, place: Any) -> None:
    job = scribe.request()
    output, preview = (store.put(TENANT, b"secret", request_id=job.id) for _ in range(2))
    store.holds.hold(TENANT, output.artifact_id, "trip")
    job.end("", output_artifact=reference_to(output))
    gateway.wait_for(job.id, "completed")
    assert gateway.http.delete(f"/v1/requests/{job.id}").status_code == 200
    assert not there_is(store, output)
    make_old(place.folder, "artifacts", TENANT, preview.artifact_id)
    swept = gateway.http.post(SWEEP).json()["data"]
    assert (preview.artifact_id, "orphan") in {(one["artifact_id"], one["reason"]) for one in swept}
    assert not there_is(store, preview)


def test_what_a_conversation_held_is_released_with_it(gateway: Any, store: ArtifactStore, place: Any) -> None:
    for name in ("ends", "goes-on"):
        assert gateway.http.post("/v1/conversations", json={"id": name}).status_code == 200
    ends, goes_on, forgotten = (store.put(TENANT, b"image", ttl_s=0.001) for _ in range(3))
    for artifact, name in ((ends, "ends"), (goes_on, "goes-on"), (forgotten, "deleted-elsewhere")):
        store.holds.hold(TENANT, artifact.artifact_id, name)
    make_old(place.folder, "artifacts", TENANT, ".holds")
    assert all(gateway.get(f"/v1/artifacts/{one.artifact_id}").status_code == 200 for one in (ends, goes_on, forgotten))
    assert gateway.http.delete("/v1/conversations/ends").status_code == 200
    assert gateway.get(f"/v1/artifacts/{ends.artifact_id}").status_code == 404
    swept = gateway.http.post(SWEEP).json()
    assert swept["released_conversations"] == 1
    assert {one["artifact_id"] for one in swept["data"]} == {ends.artifact_id, forgotten.artifact_id}
    assert gateway.get(f"/v1/artifacts/{goes_on.artifact_id}").status_code == 200


def picture(number: int) -> dict[str, Any]:
    """A request that brings an image of its own bytes."""
    data = base64.b64encode(PNG + bytes([number])).decode()
    return {"task": "image_editing", "payload": {"prompt": "snow", "image": {"data": data}}}


def bring(gateway: Any, number: int) -> str:
    return gateway.http.post("/v1/requests", json=picture(number)).raise_for_status().json()["request_id"]


def images(store: ArtifactStore) -> dict[int, Artifact]:
    """By number: the images that are kept of those that requests brought."""
    found = store.list(TENANT, limit=100).artifacts
    return {store.get(TENANT, one.artifact_id)[-1]: one for one in found if one.size_bytes == len(PNG) + 1}


@pytest.mark.parametrize(("number", "status"), [(1, "completed"), (2, "cancelled"), (3, "failed")])
def test_erasing_a_request_takes_the_images_along_that_it_brought(
    gateway: Any, scribe: Any, store: ArtifactStore, number: int, status: str
) -> None:
    """They stayed for three days after a DELETE that had answered success."""
    request_id = bring(gateway, number)
    assert number in images(store)
    scribe.job(request_id).end("", status=status)
    gateway.wait_for(request_id, status)
    assert gateway.http.delete(f"/v1/requests/{request_id}").status_code == 200
    assert number not in images(store)
    assert gateway.http.delete(f"/v1/requests/{request_id}").status_code == 410
