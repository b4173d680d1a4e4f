"""Images in a conversation, from the drawing to the erasure: over Kafka alone with a kill between, and over HTTP."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from PIL import Image

from penstock.cli.makers.tiny_vision import COLOURS
from penstock.common.artifacts import ArtifactStore
from penstock.schemas.errors import Conflict
from penstock.schemas.records import ConversationMessage
from system import Process, System, eventually
from worker_requests import command, outcome, records, send

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LOADED_S = 300
"""Three engines of images are loaded when they are asked for, on whatever machine this is."""

SMALL = {"width": 32, "height": 32, "inference_steps": 2}
CAT, EDIT = {"prompt": "a cat", "n": 2, **SMALL}, {"prompt": "make it blue", "inference_steps": 2}


@pytest.fixture
def system(make_system: Callable[..., System], tiny_vision: Path) -> System:
    return make_system(
        models=[
            _diffusers("painter", "tiny-image-generation", "image_generation"),
            _diffusers("editor", "tiny-image-editing", "image_editing"),
            {
                "id": "eyes",
                "source": str(tiny_vision),
                "engine": "vision",
                "tasks": ["image_to_text", "text_generation"],
                "preload": False,
            },
        ],
        worker_options={"session_timeout_s": 6},
    )


def _diffusers(model: str, asset: str, task: str) -> dict[str, Any]:
    folder = pytest.importorskip("penstock.cli.assets").prepare_model(asset, print)
    return {"id": model, "source": str(folder), "engine": "diffusers", "tasks": [task], "preload": False}


def store(system: System) -> ArtifactStore:
    return ArtifactStore(system.folder / "artifacts")


def turn(system: System, request_id: str, task: str, payload: dict[str, Any], conversation: str = "c1") -> None:
    send(system, {"request_id": request_id, "task": task, "conversation_id": conversation, "payload": payload})


def images(system: System, request_id: str) -> list[str]:
    event = outcome(system, request_id, LOADED_S)
    assert event.status == "completed", (event.error, system.processes[-1].tail())
    return [image["artifact_id"] for image in (event.output or {})["images"]]


def text(system: System, request_id: str) -> str:
    event = outcome(system, request_id, LOADED_S)
    assert event.status == "completed", (event.error, system.processes[-1].tail())
    return (event.output or {})["text"]


def shown(message: ConversationMessage) -> list[str]:
    return [artifact.artifact_id for artifact in message.artifacts]


def red() -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (60, 40), (220, 30, 30)).save(data, "PNG")
    return data.getvalue()


def named_colour(answer: str) -> bool:
    """Which one is not to be said of noise, which is what the untrained models draw."""
    return any(colour in answer for colour in COLOURS)


def asked(words: str, *artifact_ids: str) -> dict[str, Any]:
    parts = [{"type": "image", "image": {"artifact_id": one}} for one in artifact_ids]
    # Without a temperature its words are drawn by chance: now and then red is black.
    return {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": words}]}], "temperature": 0}


def test_draw_edit_and_talk_with_a_kill_between_and_an_erasure(system: System) -> None:
    worker = over_kafka_alone(system)
    gateway = system.gateway().wait_ready()
    over_http(system, gateway)
    assert worker.stop() == 0, worker.tail()
    assert gateway.stop() == 0, gateway.tail()


def over_kafka_alone(system: System) -> Process:
    """The second worker, whose life goes on."""
    first = system.worker(faults="kill:after_answer_append@1").wait_ready()
    turn(system, "draw", "image_generation", CAT)
    # The worker dies with the answer written and nothing said of it.
    first.wait_dead(LOADED_S)
    (standing,) = [message for key, message in records(system) if key.startswith("draw/out/")]
    assert "draw" not in system.outcomes()
    worker = system.worker().wait_ready()
    turn(system, "edit", "image_editing", EDIT)
    drawn = images(system, "draw")
    assert drawn == shown(standing), "what stood there is the outcome"
    assert len(drawn) == 2
    # "Make it blue", without naming the image.
    edited = images(system, "edit")
    assert [(m.role, m.content, shown(m)) for _, m in records(system)] == [
        ("user", "a cat", []),
        ("assistant", "", drawn),
        ("user", "make it blue", []),
        ("assistant", "", edited),
    ]
    kept = store(system)
    (image,) = (outcome(system, "edit").output or {})["images"]
    assert (image["width"], image["height"], image["sha256"]) == (32, 32, kept.describe("default", edited[0]).sha256)
    assert kept.holds.held_by("default", "c1") == sorted([*drawn, *edited])
    with pytest.raises(Conflict):
        kept.delete("default", drawn[0])

    # Talk about it, and about an image that is brought along: the next question is about that one.
    turn(system, "look", "image_to_text", {"prompt": "What colour is it?"})
    assert named_colour(text(system, "look"))
    brought = kept.put("default", red(), media_type="image/png", ttl_s=1).artifact_id
    turn(system, "talk", "text_generation", asked("What colour is it?", brought), "c2")
    assert text(system, "talk") == "It is red."
    turn(system, "again", "image_to_text", {"prompt": "What colour is it?"}, "c2")
    assert text(system, "again") == "It is red."
    turn(system, "more", "text_generation", asked("What colour is it?"), "c2")
    assert text(system, "more") == "It is red.", "the model is shown the image of two turns ago"
    over_ms = kept.describe("default", brought).expires_at_ms
    assert over_ms is not None
    eventually(lambda: time.time() * 1000 > over_ms, 30, lambda: "its time is not over")
    assert kept.get("default", brought) == red(), "it has expired, and lives as long as the conversation"

    # An erased drawing goes, with all that only it referred to; what came of it stays.
    command(system, "erase", "draw", origin=outcome(system, "draw").origin, conversation_id="c1")
    eventually(lambda: kept.peek("default", drawn[0]) is None, 60, worker.tail)
    eventually(lambda: kept.holds.held_by("default", "c1") == edited, 60, worker.tail)
    assert kept.peek("default", drawn[1]) is None
    assert kept.get("default", edited[0])
    turn(system, "nothing", "image_editing", EDIT, "c3")
    event = outcome(system, "nothing", LOADED_S)
    assert event.error is not None
    assert (event.error.code, event.error.param) == ("invalid", "payload.image")
    return worker


def over_http(system: System, gateway: Process) -> None:
    """Its deletion takes the images of a conversation along."""
    client = openai.OpenAI(api_key="none", base_url=f"{gateway.url}/v1", max_retries=0)
    trip = {"penstock": {"conversation_id": "trip", "inference_steps": 2}}
    drawn = client.images.generate(model="painter", prompt="a cat", size="32x32", extra_body=trip)
    assert drawn.data
    several = client.images.generate(
        model="painter", prompt="a cat", size="32x32", n=2, extra_body={"penstock": {"inference_steps": 2, "seed": 7}}
    )
    assert len({one.b64_json for one in several.data or ()}) == 2
    _streamed(client)
    form = {"prompt": "make it blue", "model": "editor", "penstock[conversation_id]": "trip"}
    made = _edit(gateway, {**form, "penstock[inference_steps]": "2"})
    chat = client.chat.completions.create(
        model="eyes",
        temperature=0,
        messages=[{"role": "user", "content": "What colour is it?"}],
        extra_body={"penstock": {"conversation_id": "trip"}},
    )
    assert named_colour(chat.choices[0].message.content or "")
    items = httpx.get(f"{gateway.url}/v1/conversations/trip/items?order=asc").json()["data"]
    assert [(one["role"], [part["type"] for part in one["content"]]) for one in items] == [
        ("user", ["input_text"]),
        ("assistant", ["input_image"]),
        ("user", ["input_text"]),
        ("assistant", ["input_image"]),
        ("user", ["input_text"]),
        ("assistant", ["output_text"]),
    ]
    assert items[3]["content"][0]["artifact_id"] == made
    assert httpx.get(gateway.url + items[3]["content"][0]["image_url"]).headers["content-type"] == "image/png"
    kept = store(system)
    held = kept.holds.held_by("default", "trip")
    assert made in held
    assert len(held) == 2
    assert httpx.post(f"{gateway.url}/v1/admin/artifacts/sweep").json()["data"] == []
    assert httpx.delete(f"{gateway.url}/v1/artifacts/{made}").status_code == 409
    assert httpx.delete(f"{gateway.url}/v1/conversations/trip").json()["deleted"]
    assert [kept.peek("default", one) for one in held] == [None, None]
    assert kept.holds.held_by("default", "trip") == []
    # What nobody here does is refused at once, and the tasks that are served are named.
    refused = httpx.post(f"{gateway.url}/v1/embeddings", json={"input": "x", "model": "penstock"})
    assert refused.status_code == 404, refused.text
    native = httpx.post(f"{gateway.url}/v1/requests", json={"task": "embedding", "payload": {"input": "x"}})
    assert native.status_code == 404, native.text
    assert "image_editing, image_generation, image_to_text, text_generation" in native.json()["error"]["message"]


def _streamed(client: openai.OpenAI) -> None:
    """With small images on the way."""
    more = {"penstock": {"inference_steps": 6, "seed": 1}}
    options: Any = {"model": "painter", "prompt": "a cat", "size": "32x32", "extra_body": more}
    with client.images.generate(**options, stream=True, partial_images=2) as stream:
        *partial, last = list(stream)
    assert 0 < len(partial) <= 2, "the newest takes the place of one that was not sent yet"
    assert {event.type for event in partial} == {"image_generation.partial_image"}
    assert {base64.b64decode(event.b64_json)[:3] for event in partial} == {b"\xff\xd8\xff"}
    assert (last.type, last.size) == ("image_generation.completed", "32x32")
    whole = client.images.generate(**options)
    assert whole.data is not None
    # The same seed: equal within a grey level, and here the very bytes but for what the file says of its making.
    assert pixels(last.b64_json) == pixels(whole.data[0].b64_json)


def pixels(encoded: str | None) -> bytes:
    return Image.open(io.BytesIO(base64.b64decode(encoded or ""))).tobytes()


def _edit(gateway: Process, fields: dict[str, str]) -> str:
    """As a form without a file; the artifact that was made."""
    parts = {name: (None, value) for name, value in fields.items()}
    answer = httpx.post(f"{gateway.url}/v1/images/edits", files=parts, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"][0]["penstock"]["artifact_id"]
