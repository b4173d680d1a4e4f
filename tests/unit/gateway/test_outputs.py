"""Large outputs: bytes in the view, decoded and encoded on a thread, and the same for every reader."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.gateway_records import outcome
from penstock.gateway.service.subscriptions import Subscription
from penstock.gateway.view import frames as frames_module
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.frames import ResultFrame
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.outputs import LARGE_BYTES, LONG_LIST, OutcomeReader, encode_json, held_bytes, result_json
from penstock.gateway.view.request_state import ENTRY_BYTES
from penstock.schemas.codec import default_codec

VECTORS = [[float(number + at) / 8 for number in range(512)] for at in range(32)]
EVENT = outcome(task="embedding", embedding={"embeddings": VECTORS, "dimensions": 512})
RECORD = default_codec().encode(EVENT)


def entry_of(record: bytes) -> Entry:
    entry = Entry("default", "r", 0)
    event, large = OutcomeReader(default_codec())(record)
    entry.on_result(event, 5, large)
    return entry


TEXT = {"text": "x", "tool_calls": None, "logprobs": None, "choices": None}
TOKEN = {"token": "abc", "logprob": -0.25, "bytes": [97, 98, 99]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


LARGE_TEXT = {**TEXT, "text": "x" * 20_000, "logprobs": [{**TOKEN, "top_logprobs": None}] * 500}


@pytest.mark.parametrize(
    ("fields", "held"),
    [
        ({}, {"embedding": None}),
        ({"embedding": {"embeddings": [[0.5]], "dimensions": 1}}, None),
        ({"status": "failed", "embedding": None, "metadata": {"note": "x" * 20_000}}, None),
        # Streams need the text; log probabilities and other answers take ten times their bytes.
        (
            {"embedding": None, "task": "text_generation", "text_generation": LARGE_TEXT},
            {"text_generation": LARGE_TEXT | dict.fromkeys(("logprobs", "prompt_logprobs", "covers_through"))},
        ),
    ],
    ids=["large", "small", "a large record without an output", "of a large text the text alone"],
)
def test_what_is_held_of_an_output(fields: dict[str, Any], held: dict[str, Any] | None) -> None:
    event = replace(EVENT, **fields)
    record = default_codec().encode(event)
    assert (len(record) > LARGE_BYTES) == (fields.get("embedding", "large") in ("large", None))
    entry = entry_of(record)
    assert entry.terminal == replace(event, **(held or {}))
    assert (entry.large is None) == (held is None)
    public = entry.to_json()
    assert public["status"] == event.status
    assert entry.to_json(whole=True)["result"] == result_json(event)
    assert public["result"] == (result_json(event) if held is None else None)
    assert public.get("result_omitted", False) == (held is not None)


@pytest.mark.parametrize(
    ("task", "output"),
    [
        ("embedding", {"embeddings": [[0.5] * 384], "dimensions": 384}),
        ("embedding", {"embeddings": [[0.5] * 1024], "dimensions": 1024}),
        ("embedding", {"embeddings": [[0.5] * 8] * 200, "dimensions": 8}),
        ("embedding", {"embeddings": [[0.5]] * 1_500, "dimensions": 1}),
        ("embedding", {"embeddings": VECTORS, "dimensions": 512}),
        ("text_generation", {**TEXT, "text": "x" * 10_000}),
        ("text_generation", {**TEXT, "text": "x" * 10_000 + "😀"}),
        ("text_generation", {**TEXT, "text": "x" * 100_000}),
        ("text_generation", {**TEXT, "logprobs": [{**TOKEN, "top_logprobs": None}] * 300}),
        ("text_generation", {**TEXT, "logprobs": [{**TOKEN, "top_logprobs": [TOKEN] * 20}] * 20}),
        ("text_generation", {**TEXT, "tool_calls": [CALL] * 100}),
    ],
)
def test_what_an_outcome_takes_in_memory_is_counted(task: str, output: dict[str, Any]) -> None:
    """Decoded numbers take many times their bytes on the wire; the room for ended requests is a bound on memory."""
    record = default_codec().encode(replace(EVENT, task=task, **{"embedding": None, task: output}))
    read = OutcomeReader(default_codec())
    read(record)
    tracemalloc.start()
    held = [read(bytes(bytearray(record))) for _ in range(4)]
    taken = tracemalloc.get_traced_memory()[0] / len(held)
    tracemalloc.stop()
    counted = ENTRY_BYTES + held_bytes(*held[0], len(record))
    assert taken <= counted <= 3 * taken + 2 * ENTRY_BYTES


async def test_readers_wait_for_one_thread_and_get_the_same_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []
    encode = frames_module.encode_json

    def noted(value: Any) -> str:
        threads.append(threading.current_thread().name)
        return encode(value)

    monkeypatch.setattr(frames_module, "encode_json", noted)
    hub = Hub()
    readers = [Subscription(hub, single=True) for _ in range(20)]
    frame = entry_of(RECORD).result_frame()
    for reader in readers:
        reader.push([frame])
    assert readers[0].take_nowait() == [], "a frame that is not ready is to be waited for"
    got = await asyncio.gather(*(reader.next_frame() for reader in readers))
    assert all(one is frame for one in got)
    assert frame.result == result_json(EVENT)
    assert json.loads(frame.encoded())["result"] == result_json(EVENT)
    assert len(threads) == 1
    assert threads[0] != threading.main_thread().name


async def test_a_reader_that_gives_up_takes_the_frame_from_nobody() -> None:
    reader = Subscription(Hub(), single=True)
    frame = entry_of(RECORD).result_frame()
    reader.push([frame])
    waiting = asyncio.ensure_future(reader.next_frame())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    found = await reader.next_frame()
    assert isinstance(found, ResultFrame)
    assert found.large is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(JSON)
def test_json_in_steps_is_json(value: Any) -> None:
    for some in (value, [value] * (LONG_LIST + 1)):
        assert json.loads(encode_json(some)) == json.loads(json.dumps(some))
    assert encode_json({"embeddings": [[math.nan, math.inf, 0.5]]}) == '{"embeddings":[[null,null,0.5]]}'
