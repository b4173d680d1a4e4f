"""Large answers of the OpenAI routes: made beside the loop, and the same as small ones."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from gateway_parts import service_with
from kit.gateway_frames import subscribed as subscribed_to
from kit.gateway_http import no_body
from penstock.gateway.openai.chat_answers import ChunkWriter, Json
from penstock.gateway.openai.chat_bodies import EmbeddingBody
from penstock.gateway.openai.endpoints import EMBEDDING, Made
from penstock.gateway.openai.exchange import stream_events
from penstock.gateway.openai.routes import Exchange
from penstock.gateway.service.large_answers import decode_json, is_large
from penstock.gateway.service.subscriptions import Subscription
from penstock.gateway.view.frames import ResultFrame
from penstock.schemas.records import InferenceRequest

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=20,
)
LOGPROBS = [{"token": "a", "logprob": -1.0, "top_logprobs": [{"token": "b", "logprob": -2.0}] * 20} for _ in range(200)]
VECTORS = [[0.5] * 1_024] * 4


@given(VALUES, st.sampled_from([None, 1]), st.sampled_from([None, (",", ":"), (" , ", "\t:\r\n")]))
def test_decoding_gives_what_json_gives(value: Any, indent: int | None, separators: Any) -> None:
    assert decode_json(json.dumps(value, indent=indent, separators=separators)) == value


@pytest.mark.parametrize("output", [{"embeddings": [[0.5] * 1_000] * 500}, {"logprobs": LOGPROBS * 20}])
def test_other_threads_have_their_turns_while_one_decodes(output: Json) -> None:
    text = json.dumps(output)
    turns, done, interval = 0, False, sys.getswitchinterval()

    def count() -> None:
        nonlocal turns
        while not done:
            turns += 1
            time.sleep(0)

    sys.setswitchinterval(0.0001)
    gc.disable()  # collections, of which Hypothesis is told, give turns too
    thread = threading.Thread(target=count)
    thread.start()
    try:
        before = turns
        decode_json(text)
        had = turns - before
    finally:
        sys.setswitchinterval(interval)
        gc.enable()
        done = True
        thread.join()
    assert had > 20


@pytest.mark.parametrize(
    ("result", "large"),
    [
        ({"text": "a"}, False),
        ({"embeddings": [[0.5] * 384]}, False),
        ({"embeddings": VECTORS}, True),
        ({"artifact": {}}, True),
        ({"text": "a", "logprobs": LOGPROBS[:5]}, False),
        ({"text": "a", "choices": [{"index": 0, "logprobs": LOGPROBS}]}, True),
    ],
)
def test_what_counts_as_large(result: Json, *, large: bool) -> None:
    assert is_large(result) is large


def subscribed(result: Json) -> Subscription:
    return subscribed_to(ResultFrame(request_id="r1", cursor="c", status="completed", result=result, error=None))


def exchange_of(result: Json, stored: Json, answer: Callable[[Any, Any, Json], Json]) -> Exchange:
    part = Mock(**{"await_outcome.side_effect": lambda *_, **__: subscribed(result)})  # type: ignore[reportUnknownLambdaType]
    store = Mock(**{"get.return_value": json.dumps(stored).encode()})
    asked = InferenceRequest(request_id="r1", task="embedding", tenant="default", created_at=1)
    request = Request({"type": "http"}, no_body)
    return Exchange(request, service_with(part, artifacts=store), asked, "m", replace(EMBEDDING, answer=answer))


ARTIFACT = {"artifact": {"artifact_id": "a", "sha256": "s"}, "finish_reason": None, "usage": None}


@pytest.mark.parametrize(
    ("result", "thread"),
    [(ARTIFACT, "large-outputs"), ({"embeddings": VECTORS}, "large-outputs"), ({"embeddings": [[0.5]]}, "MainThread")],
)
async def test_a_large_answer_is_shaped_on_a_thread(result: Json, thread: str) -> None:
    threads: list[str] = []

    def shape(body: EmbeddingBody, made: Made, told: Json) -> Json:
        threads.append(threading.current_thread().name)
        return {"vectors": told["embeddings"]}

    body = EmbeddingBody(model="m", input="text")
    answer = await exchange_of(result, {"embeddings": VECTORS}, shape).answer(body)
    assert json.loads(bytes(answer.body)) == {"vectors": result.get("embeddings", VECTORS)}
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"] == "r1"
    (name,) = threads
    assert name.startswith(thread)


class WatchedWriter(ChunkWriter):
    thread = ""

    def ending(self, result: Json) -> list[Json]:
        self.thread = threading.current_thread().name
        return super().ending(result)


@pytest.mark.parametrize(
    ("logprobs", "thread"), [(LOGPROBS, "large-outputs"), (LOGPROBS[:2], "MainThread")], ids=["large", "small"]
)
async def test_the_end_of_a_stream_is_made_on_a_thread_when_it_is_large(logprobs: list[Json], thread: str) -> None:
    writer = WatchedWriter("r1", 1, "m", chat=True, includes_usage=False, tier=None)
    subscription = subscribed({"text": "ab", "logprobs": logprobs})
    text = b"".join([event async for event in stream_events(subscription, writer)])
    assert text.count(b'"token":"a"') == len(logprobs)
    assert text.endswith(b"data: [DONE]\n\n")
    assert writer.thread.startswith(thread)
