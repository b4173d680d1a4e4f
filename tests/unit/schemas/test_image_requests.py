"""Requests with images: what is read, in which form it goes on, and how what is wrong is named."""

from __future__ import annotations

from typing import Any

import pytest

from kit.refusals import refused
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import InvalidRequest, PenstockError, TooLarge, UnsupportedParameter
from penstock.schemas.image_payloads import image_references
from penstock.schemas.message_parts import image_parts
from penstock.schemas.records import InferenceRequest
from penstock.schemas.requests import content_hash, parse_request, request_to_json, validate_request

NOW_MS = 1_700_000_000_000
ID = "0b0c7a2e-2a4b-4f0e-9a55-3f6f5d0f5a10"
IMAGE = {"artifact_id": ID}
PART = "payload.messages[0].content[1]"
TEXT = {"type": "text", "text": "What is this? "}


def parse(task: str, payload: dict[str, Any], **fields: Any) -> InferenceRequest:
    return parse_request({"task": task, "payload": payload, **fields}, request_id="r", now_ms=NOW_MS)


def chat(*content: Any, role: str = "user", **fields: Any) -> InferenceRequest:
    return parse("text_generation", {"messages": [{"role": role, "content": list(content)}]}, **fields)


def through_avro(request: InferenceRequest) -> InferenceRequest:
    read = default_codec().decode(default_codec().encode(request), InferenceRequest)
    validate_request(read)
    return read


MASK = {"url": "https://a.example/m.png"}


@pytest.mark.parametrize(
    ("task", "payload"),
    [
        ("image_generation", {"prompt": "a dam", "width": 64, "height": 64, "seed": -1, "n": 2}),
        ("image_editing", {"prompt": "snow", "image": IMAGE, "mask": MASK, "strength": 0.5}),
        ("image_to_text", {"image": IMAGE, "prompt": "What is it?", "max_tokens": 20}),
    ],
)
def test_a_request_is_the_same_through_json_and_avro(task: str, payload: dict[str, Any]) -> None:
    request = parse(task, payload)
    assert request_to_json(request)["payload"] == request_to_json(through_avro(request))["payload"] == payload


CAT: dict[str, Any] = {"prompt": "a cat"}
STRIP: dict[str, Any] = {"image": IMAGE, "operations": [{"op": "strip_metadata"}]}
TURN: dict[str, Any] = {"conversation_id": "c"}
LIMITED: dict[str, Any] = {**TURN, "context": {"last_turns": 1}}
MEDIUM = {"url": "u", "detail": "medium"}


@pytest.mark.parametrize(
    ("task", "payload", "kind", "param"),
    [
        ("image_generation", {**CAT, **LIMITED}, UnsupportedParameter, "context"),
        ("image_processing", {**STRIP, **TURN}, UnsupportedParameter, "conversation_id"),
        ("image_generation", {}, InvalidRequest, "payload.prompt"),
        ("image_generation", {"prompt": "x", "width": 0}, InvalidRequest, "payload.width"),
        ("image_generation", {"prompt": "x", "width": 60_000, "height": 60_000}, TooLarge, "payload.width"),
        ("image_generation", {"prompt": "x", "n": 17}, InvalidRequest, "payload.n"),
        ("image_generation", {"prompt": "x", "inference_steps": 1_001}, InvalidRequest, "payload.inference_steps"),
        ("image_generation", {"prompt": "x" * 4_000_001}, TooLarge, "payload.prompt"),
        ("image_generation", {"prompt": "x", "image": IMAGE}, UnsupportedParameter, "payload.image"),
        ("image_editing", {"prompt": "x"}, InvalidRequest, "payload.image"),
        ("image_editing", {"prompt": "x", "image": {}}, InvalidRequest, "payload.image"),
        ("image_editing", {"prompt": "x", "image": {**IMAGE, "url": "u"}}, InvalidRequest, "payload.image"),
        ("image_editing", {"prompt": "x", "image": {"data": "AA=="}}, UnsupportedParameter, "payload.image.data"),
        ("image_editing", {"prompt": "x", "image": IMAGE, "strength": 0}, InvalidRequest, "payload.strength"),
        ("image_to_text", {"prompt": "x"}, InvalidRequest, "payload.image"),
        ("image_to_text", {"image": IMAGE, "max_tokens": 0}, InvalidRequest, "payload.max_tokens"),
        *(
            ("text_generation", {"messages": [{"role": "user", "content": [TEXT, part]}]}, kind, param)
            for part, kind, param in (
                ({"type": "input_audio"}, UnsupportedParameter, PART),
                ({"type": "image"}, InvalidRequest, PART + ".image"),
                ({"type": "image", "image": {"artifact_id": 1}}, InvalidRequest, PART + ".image"),
                ({"type": "image", "image": {"artifact_id": ID, "url": "x"}}, InvalidRequest, PART + ".image"),
                ({"type": "image_url", "image_url": {}}, InvalidRequest, PART + ".image_url"),
                ({"type": "image_url", "image_url": "data:image/png;base64,AA"}, InvalidRequest, PART),
                ({"type": "image_url", "image_url": MEDIUM}, UnsupportedParameter, PART + ".image_url.detail"),
                ({"type": "text"}, InvalidRequest, PART),
            )
        ),
    ],
)
def test_what_is_wrong_is_named(task: str, payload: dict[str, Any], kind: type[PenstockError], param: str) -> None:
    """`payload` may hold fields of the request too."""
    fields = {name: payload[name] for name in ("conversation_id", "context") if name in payload}
    with pytest.raises(kind) as caught:
        parse(task, {name: value for name, value in payload.items() if name not in fields}, **fields)
    assert caught.value.param == param
    assert fields or param in caught.value.message


def test_images_of_a_chat_stand_in_parts_and_its_text_in_content() -> None:
    other = {"type": "image_url", "image_url": {"url": "https://a.example/b.png", "detail": "auto"}}
    request = chat(TEXT, {"type": "image", "image": IMAGE}, {"type": "text", "text": "And this?"}, other)
    (message,) = request.payload["messages"]
    assert message["content"] == "What is this? And this?"
    assert message["parts"][1] == {"type": "image", "image": IMAGE}
    assert message["parts"][3] == {"type": "image", "image": {"url": "https://a.example/b.png"}}
    read = through_avro(request)
    places = [f"messages[0].parts[{number}].image" for number in (1, 3)]
    assert [place for place, _ in image_references(read.payload)] == places
    assert list(image_parts(read.payload)) == [PART, "payload.messages[0].content[3]"]


def test_text_alone_has_no_parts() -> None:
    (message,) = chat(TEXT, {"type": "text", "text": "Hm"}).payload["messages"]
    assert message == {"role": "user", "content": "What is this? Hm"}


def test_images_go_with_those_who_show_them_in_conversations_too() -> None:
    with pytest.raises(InvalidRequest, match="only user and system"):
        chat({"type": "image", "image": IMAGE}, role="assistant")
    assert chat({"type": "image", "image": IMAGE}, conversation_id="c").conversation_id == "c"
    assert parse("image_generation", CAT, **TURN).conversation_id == "c"


@pytest.mark.parametrize("task", ["image_editing", "image_to_text"])
@pytest.mark.parametrize("left_out", [{}, {"image": None}, {"image": {}}, {"image": {"artifact_id": None}}])
def test_an_image_may_be_left_out_in_a_conversation_alone(task: str, left_out: dict[str, Any]) -> None:
    body = {"task": task, "payload": {"prompt": "make it blue", **left_out}}
    turn = parse_request({**body, "conversation_id": "c"}, now_ms=1)
    assert turn.payload["image"] == {}
    assert list(image_references(turn.payload)) == []
    again = through_avro(turn)
    assert again.payload["image"] == {}
    assert content_hash(again) == content_hash(turn)
    with refused(InvalidRequest, param="payload.image"):
        parse_request(body, now_ms=1)
