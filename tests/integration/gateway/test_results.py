"""`GET /v1/requests/{id}/result`: what a request made, at one call, as its kind is."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from penstock.common.artifacts import ArtifactStore
from penstock.schemas.records import ArtifactRef

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CHOICES = [
    {"index": at, "text": text, "finish_reason": "stop", "tool_calls": None, "logprobs": None}
    for at, text in enumerate(["a", "b"])
]
PAYLOADS = {
    "image_to_text": {"image": {"url": "https://example.com/a.png"}},
    "embedding": {"input": "x"},
    "summarization": {"text": "x"},
}


@pytest.fixture(scope="module")
def store(place: Any) -> ArtifactStore:
    return ArtifactStore(place.folder / "artifacts")


def url_of(job: Any, query: str = "") -> str:
    return f"/v1/requests/{job.id}/result{query}"


@pytest.mark.parametrize(
    ("task", "output", "media_type", "expected"),
    [
        ("text_generation", {"text": "höher\n"}, "text/plain", "höher\n"),
        ("text_generation", {"text": ""}, "text/plain", ""),
        ("summarization", {"text": "short"}, "text/plain", "short"),
        ("image_to_text", {"text": "a cat"}, "text/plain", "a cat"),
        ("text_generation", {"text": "", "tool_calls": [CALL]}, "application/json", {"text": "", "tool_calls": [CALL]}),
        ("embedding", {"embeddings": [[0.5, 1.0]], "dimensions": 2}, "application/json", [0.5, 1.0]),
        ("embedding", {"embeddings": [[0.5], [1.0]], "dimensions": 1}, "application/json", [[0.5], [1.0]]),
        ("embedding", {"embeddings": [[0.5] * 9_000], "dimensions": 9_000}, "application/json", [0.5] * 9_000),
    ],
    ids=["text", "empty", "summary", "caption", "calls", "vector", "vectors", "large"],
)
def test_an_output_is_answered_as_it_is(
    gateway: Any, scribe: Any, task: str, output: dict[str, Any], media_type: str, expected: Any
) -> None:
    payload = PAYLOADS.get(task)
    job = scribe.request() if payload is None else scribe.request(task=task, payload=payload, stream=False)
    job.end("", **{"text_generation": None, task: output})
    answer = gateway.get(url_of(job, "?wait=20"))
    assert (answer.status_code, answer.headers["content-type"].split(";")[0]) == (200, media_type), answer.text
    assert answer.headers["x-request-id"] == job.id
    assert (answer.text if media_type == "text/plain" else answer.json()) == expected


def test_several_texts_are_a_list(gateway: Any, scribe: Any) -> None:
    job = scribe.request(payload={"prompt": "p", "n": 2})
    job.end("", text_generation={"text": "a", "choices": CHOICES})
    assert [one["text"] for one in gateway.get(url_of(job, "?wait=20")).json()] == ["a", "b"]


def test_one_image_is_its_bytes_and_several_are_a_list(gateway: Any, scribe: Any, store: ArtifactStore) -> None:
    made = [store.put("default", PNG + bytes([at]), media_type="image/png") for at in range(2)]
    sides = {"width": 1, "height": 1}
    images = [
        {"artifact_id": one.artifact_id, "url": one.uri, "media_type": "image/png", "sha256": one.sha256, **sides}
        for one in made
    ]
    jobs = [
        scribe.request(task="image_generation", payload={"prompt": "p"}, stream=False).end(
            "", text_generation=None, image_generation={"images": images[:count]}
        )
        for count in (1, 2)
    ]
    answer = gateway.get(url_of(jobs[0], "?wait=20"))
    assert (answer.status_code, answer.headers["content-type"]) == (200, "image/png"), answer.text
    assert answer.content == PNG + bytes([0])
    again = {"If-None-Match": answer.headers["etag"]}
    assert gateway.get(url_of(jobs[0]), headers=again).status_code == 304
    part = gateway.get(url_of(jobs[0]), headers={"Range": "bytes=1-3"})
    assert (part.status_code, part.content) == (206, b"PNG")
    several = gateway.get(url_of(jobs[1], "?wait=20")).json()
    assert [gateway.get(one["url"]).content for one in several] == [PNG + bytes([0]), PNG + bytes([1])]
    store.delete("default", made[0].artifact_id)
    assert gateway.get(url_of(jobs[0])).status_code == 404


def test_a_text_that_is_an_artifact_is_answered_whole(gateway: Any, scribe: Any, store: ArtifactStore) -> None:
    text = "long " * 60_000
    kept = store.put("default", json.dumps({"text": text}).encode(), media_type="application/json")
    reference = ArtifactRef(
        artifact_id=kept.artifact_id,
        uri=kept.uri,
        media_type=kept.media_type,
        size_bytes=kept.size_bytes,
        sha256=kept.sha256,
    )
    job = scribe.request().end("", text_generation=None, output_artifact=reference)
    answer = gateway.get(url_of(job, "?wait=20"))
    assert (answer.headers["content-type"].split(";")[0], answer.text) == ("text/plain", text)


def test_what_has_no_output_yet_or_ever_says_so(gateway: Any, scribe: Any) -> None:
    job = scribe.request()
    running = gateway.get(url_of(job))
    assert (running.status_code, running.json()["request_id"], running.json()["done"]) == (202, job.id, False)
    job.end("", status="cancelled")
    ended = gateway.get(url_of(job, "?wait=20"))
    assert (ended.status_code, ended.json()["error"]["code"]) == (409, "cancelled"), ended.text
    assert ended.headers["x-should-retry"] == "false"
    assert gateway.http.delete(f"/v1/requests/{job.id}").status_code == 200
    assert gateway.get(url_of(job)).status_code == 410
    assert gateway.get("/v1/requests/nobody/result").status_code == 404
