"""Large texts: taken out of a request for the store, put back before its run, and the same request all the way."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.schemas.codec import default_codec
from penstock.schemas.costs import estimated_cost
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.large_inputs import INLINE_BYTES, put_text_back, take_text
from penstock.schemas.records import InferenceRequest, InputArtifact
from penstock.schemas.requests import content_hash, parse_request, validate_request

LONG = "word " * 60_000


def request(task: str, payload: dict[str, Any], **fields: Any) -> InferenceRequest:
    return parse_request({"task": task, "payload": payload, **fields}, now_ms=0)


def chat(content: Any, **fields: Any) -> InferenceRequest:
    return request("text_generation", {"messages": [{"role": "user", "content": content}]}, **fields)


LARGE = [
    request("embedding", {"input": ["a" * 1_000] * 1_000, "dimensions": 8}),
    request("embedding", {"input_token_ids": [[12_345, 2, 30_001] * 50] * 800}),
    request("text_generation", {"messages": [{"role": "user", "content": LONG}], "max_tokens": 7}),
    request("text_generation", {"prompt": "ä\n" * 100_000, "temperature": 0}, stream=True),
    request("summarization", {"text": LONG}),
]


@pytest.mark.parametrize("asked", LARGE, ids=lambda one: one.task)
def test_a_large_text_comes_back_as_it_was(asked: InferenceRequest) -> None:
    left, text = take_text(asked)
    assert text is not None
    assert left.input_artifact.size_bytes == len(text) > INLINE_BYTES
    carried = default_codec().encode(left)
    assert len(carried) < 1_000
    arrived = default_codec().decode(carried, InferenceRequest)
    validate_request(arrived)
    whole = put_text_back(arrived, text)
    validate_request(whole)
    assert content_hash(whole) == content_hash(asked)
    assert estimated_cost(arrived) == pytest.approx(estimated_cost(asked), rel=0.7)


@pytest.mark.parametrize("asked", LARGE, ids=lambda one: one.task)
def test_a_repeat_is_the_same_request_and_another_text_another(asked: InferenceRequest) -> None:
    once, twice = take_text(asked)[0], take_text(dataclasses.replace(asked, request_id="another"))[0]
    assert content_hash(once) == content_hash(twice)
    foreign = take_text(dataclasses.replace(asked, tenant="other"))[0]
    assert foreign.input_artifact != once.input_artifact, "no tenant can name what another one keeps"


@pytest.mark.parametrize(
    "asked",
    [
        chat("hello"),
        chat(LONG, conversation_id="c"),
        chat([{"type": "text", "text": LONG}, {"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}]),
        request("image_generation", {"prompt": LONG}),
    ],
)
def test_what_a_record_carries_or_a_turn_says_stays_where_it_is(asked: InferenceRequest) -> None:
    assert take_text(asked) == (asked, None)


@given(size=st.integers(1, 3_300), character=st.sampled_from("a\nä\U0001f600\x01"), count=st.integers(1, 300))
def test_no_text_beyond_the_bound_stays(size: int, character: str, count: int) -> None:
    """However many bytes its characters have in JSON."""
    left, text = take_text(request("embedding", {"input": [character * size] * count}))
    written = len(json.dumps(left.payload, ensure_ascii=False, separators=(",", ":")).encode())
    assert written <= INLINE_BYTES
    assert (text is None) == (left.input_artifact is None)


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"dimensions": 4}', b"[" * 100_000])
def test_what_the_store_gives_must_be_texts(data: bytes) -> None:
    with pytest.raises(InvalidRequest):
        put_text_back(take_text(LARGE[0])[0], data)


def test_a_record_that_refers_to_a_text_is_held_to_all_other_rules() -> None:
    reference = InputArtifact(artifact_id="a", size_bytes=1, sha256="0" * 64)
    bad: list[InferenceRequest] = [
        chat("x", conversation_id="c"),
        request("image_generation", {"prompt": "x"}),
        dataclasses.replace(request("embedding", {"input": ["x"]}), embedding={"input": [], "dimensions": -1}),
    ]
    for one in bad:
        with pytest.raises(InvalidRequest):
            validate_request(dataclasses.replace(one, input_artifact=reference))
