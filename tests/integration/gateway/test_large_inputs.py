"""Texts that are too large for a record, over real processes: an embedding of 1,000 × 1,000 characters by default."""

from __future__ import annotations

import base64
import io
import random
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from kit.assets import prepared
from penstock.producers import Client, TooLarge
from penstock.schemas.large_inputs import INLINE_BYTES
from support import wait_until
from system import NOOP, System

IMAGES = {"id": "images", "source": "pillow", "engine": "imaging"}
WORD = "x" * 120
"""One token of MiniLM: a word of so many letters is unknown. So the time of the test is not that of the model."""
TEXTS = [" ".join([str(number), *[WORD] * 9])[:1_000] for number in range(1_000)]


def SYSTEM() -> dict[str, Any]:
    minilm = str(prepared("all-minilm-l6-v2"))
    small = {"id": "minilm", "source": minilm, "engine": "embedding", "tasks": ["embedding"], "device": "cpu"}
    return {"models": [small, {**NOOP, "tasks": ["text_generation", "summarization"]}, IMAGES]}


def url_of(system: System) -> str:
    return system.process("g1").url


def records(system: System, topic: str) -> list[bytes]:
    return [message.value() or b"" for message in system.read(topic)]


@pytest.mark.timeout(700)  # a worker loads its model twice
def test_a_large_batch_of_texts_is_embedded_over_a_worker_that_is_killed(system: System) -> None:
    client = openai.OpenAI(base_url=url_of(system) + "/v1", api_key="none", max_retries=0, timeout=500)
    (few,) = client.embeddings.create(model="minilm", input=TEXTS[7]).data
    asked = httpx.post(
        url_of(system) + "/v1/requests",
        json={"task": "embedding", "model": "minilm", "payload": {"input": TEXTS}},
        headers={"idempotency-key": "all"},
        timeout=60,
    )
    assert asked.status_code == 202, asked.text
    request_id = asked.json()["request_id"]
    assert max(map(len, records(system, system.names.request("embedding", 5, None)))) < 2_000
    worker = system.process("w1")
    worker.kill9()
    system.worker("w2").wait_ready()

    def found() -> Any:
        return httpx.get(f"{url_of(system)}/v1/requests/{request_id}", params={"wait": 30}, timeout=60).json()

    wait_until(lambda: found()["done"], 500, lambda: str(found())[:500])
    done = found()
    assert done["status"] == "completed", done
    vectors = httpx.get(url_of(system) + done["result"]["artifact"]["url"], timeout=60).json()["embeddings"]
    assert len(vectors) == 1_000
    assert vectors[7] == pytest.approx(few.embedding, abs=1e-3)
    again = httpx.post(
        url_of(system) + "/v1/requests",
        json={"task": "embedding", "model": "minilm", "payload": {"input": TEXTS}},
        headers={"idempotency-key": "all"},
        timeout=60,
    )
    assert (again.json()["request_id"], again.headers["idempotency-replayed"]) == (request_id, "true")


SECRET = "secret " * (INLINE_BYTES // 5)


def kept_texts(system: System) -> list[Path]:
    store = system.folder / "artifacts"
    return [one for one in store.rglob("*") if one.is_file() and b"secret secret" in one.read_bytes()]


@pytest.mark.parametrize(
    "body",
    [
        # An engine that counts no prompts gets the text too.
        {"task": "text_generation", "model": "noop", "payload": {"messages": [{"role": "user", "content": SECRET}]}},
        {"task": "embedding", "model": "minilm", "payload": {"input": SECRET, "truncate_prompt_tokens": 8}},
        {"task": "summarization", "model": "noop", "payload": {"text": SECRET}},
    ],
    ids=["text", "embedding", "summary"],
)
def test_an_erased_request_leaves_no_text_in_the_store(system: System, body: dict[str, Any]) -> None:
    done = httpx.post(url_of(system) + "/v1/requests?wait=60", json=body, timeout=90)
    assert (done.status_code, done.json()["status"]) == (200, "completed"), done.text
    assert len(kept_texts(system)) == 1
    erase(system, done.json()["request_id"])


def erase(system: System, request_id: str) -> None:
    erased = httpx.delete(f"{url_of(system)}/v1/requests/{request_id}", timeout=60)
    assert erased.status_code == 200, erased.text
    wait_until(lambda: not kept_texts(system), 30, lambda: str(kept_texts(system)))


def test_a_client_of_kafka_puts_a_large_text_into_the_store(system: System) -> None:
    kafka = system.kafka
    asked: dict[str, Any] = {"task": "summarization", "model": "noop", "payload": {"text": 4 * SECRET}}
    with Client(kafka) as client, pytest.raises(TooLarge, match="`artifacts=`"):
        client.submit(**asked)
    with Client(kafka, artifacts=system.folder / "artifacts") as client:
        submitted = client.submit(**asked)
        assert client.result(submitted, timeout=60).status == "completed"
    sizes = {message.key(): len(message.value() or b"") for message in system.read(submitted.topic)}
    assert sizes[submitted.request_id.encode()] < 2_000
    assert len(kept_texts(system)) == 1
    erase(system, submitted.request_id)


def test_the_input_of_a_stored_response_is_shown_from_the_store(system: System) -> None:
    client = openai.OpenAI(base_url=url_of(system) + "/v1", api_key="none", max_retries=0, timeout=60)
    text = "word " * (INLINE_BYTES // 5 + 1)
    made = client.responses.create(model="noop", instructions="Be brief.", input=text)
    (item,) = client.responses.input_items.list(made.id).data
    assert item.type == "message"
    assert [part.text for part in item.content if part.type == "input_text"] == [text]
    client.responses.delete(made.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list(made.id)


def test_a_picture_of_megabytes_comes_as_json_and_one_too_large_hears_the_way(system: System) -> None:
    picture = io.BytesIO()
    Image.frombytes("RGB", (1_300, 1_300), random.Random(7).randbytes(1_300 * 1_300 * 3)).save(picture, "PNG")
    assert len(picture.getvalue()) > 5_000_000
    payload = {
        "image": {"data": base64.b64encode(picture.getvalue()).decode()},
        "operations": [{"op": "thumbnail", "width": 64, "height": 64}],
    }
    body = {"task": "image_processing", "model": "images", "payload": payload}
    done = httpx.post(url_of(system) + "/v1/requests?wait=60", json=body, timeout=120)
    assert (done.status_code, done.json()["status"]) == (200, "completed"), done.text
    assert done.json()["result"]["images"][0]["width"] == 64
    refused = httpx.post(url_of(system) + "/v1/chat/completions", content=b" " * 50_000_001, timeout=120)
    assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_large")
    for told in ("gateway.max_large_body_bytes", "/v1/artifacts"):
        assert told in refused.json()["error"]["message"]


def test_a_text_beyond_the_window_is_named_or_cut(system: System) -> None:
    client = openai.OpenAI(base_url=url_of(system) + "/v1", api_key="none", max_retries=0, timeout=120)
    texts = ["short", "long " * 2_000]
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="minilm", input=texts)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input[1]")
    for cut in ({"truncate": True}, {"truncate_prompt_tokens": -1}, {"truncate_prompt_tokens": 20}):
        found = client.embeddings.create(model="minilm", input=texts, extra_body=cut)
        assert len(found.data) == 2
        most = cut.get("truncate_prompt_tokens", -1)
        assert found.usage.prompt_tokens <= (512 if most == -1 else 20) + 10
