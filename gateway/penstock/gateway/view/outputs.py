"""Outputs: what an outcome shows to callers. Large ones stay bytes until somebody asks for them, then a thread decodes.

Decoded vectors and log probabilities take ten times their bytes, and tens of milliseconds to decode and to encode: too
much for a view of many thousands and for the event loop.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, cast

import orjson

from penstock.schemas.codec import Codec
from penstock.schemas.errors import error_record_body
from penstock.schemas.records import ResultEvent
from penstock.schemas.times import rfc3339

LARGE_BYTES = 16_384
"""The output of a record over this size is decoded and encoded on a thread, when somebody asks for it."""
LEFT_OUT = (
    "embedding",
    *(f"text_generation.{name}" for name in ("logprobs", "prompt_logprobs", "choices", "tool_calls")),
)
"""What takes much more memory and time decoded than encoded; the text itself is needed by streams."""

VECTOR_BYTES, NUMBER_BYTES = 128, 32
"""What a vector takes at least, and what each of its numbers takes: it is an object, and has a place in the list."""
DECODED_TIMES = {"logprobs": 24, "prompt_logprobs": 24, "choices": 24, "tool_calls": 32}
"""So many times its bytes in the record takes what is made of many small texts and dictionaries."""
LONG_LIST = 16
"""Each item of a longer list is encoded in one step: it is a small part of the whole."""

T = TypeVar("T")

_threads = ThreadPoolExecutor(2, "large-outputs")


class LargeOutput:
    """The output of one outcome, as its record has it."""

    __slots__ = ("_codec", "_record")

    def __init__(self, record: bytes, codec: Codec) -> None:
        self._record = record
        self._codec = codec

    def result(self) -> dict[str, Any] | None:
        """As `result_json`. Takes tens of milliseconds: for a thread."""
        return result_json(self._codec.decode(self._record, ResultEvent))


class OutcomeReader:
    """Decodes result events; of large ones only what the fold and lists need."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._lean = codec.decoder(ResultEvent, without=LEFT_OUT)

    def __call__(self, record: bytes) -> tuple[ResultEvent, LargeOutput | None]:
        """The event, and its output if that was left out of it. Raises as `Codec.decode`."""
        if len(record) <= LARGE_BYTES:
            return self._codec.decode(record, ResultEvent), None
        event = self._lean(record)
        has_output = event.status == "completed" and event.output_artifact is None
        return event, LargeOutput(record, self._codec) if has_output else None


def held_bytes(event: ResultEvent, large: LargeOutput | None, record_bytes: int) -> int:
    """About the memory that a decoded outcome takes, with the record that its large output keeps."""
    output: dict[str, Any] = event.output or {}
    if len(output) == 1 and "text" in output:  # most of all
        return record_bytes + sys.getsizeof(output["text"])
    vectors: list[list[float]] = output.get("embeddings") or []
    text = sys.getsizeof(output.get("text") or "")
    if vectors:
        return record_bytes + len(vectors) * (VECTOR_BYTES + NUMBER_BYTES * len(vectors[0]))
    growth = max((times for name, times in DECODED_TIMES.items() if output.get(name)), default=1)
    return record_bytes * growth + text


def artifact_ids_of(event: ResultEvent) -> frozenset[str]:
    """The artifacts that an outcome names: a large output, and the images of an output."""
    images: list[dict[str, Any]] = (event.output or {}).get("images") or []
    ids = {str(image["artifact_id"]) for image in images if image.get("artifact_id")}
    if event.output_artifact is not None:
        ids.add(event.output_artifact.artifact_id)
    return frozenset(ids)


def result_json(event: ResultEvent) -> dict[str, Any] | None:
    """Output, finish_reason and usage of a completed request."""
    if event.status != "completed":
        return None
    usage = None if event.usage is None else {k: v for k, v in event.usage.to_dict().items() if v is not None}
    if usage is not None and event.cached_tokens is not None:
        usage["cached_tokens"] = event.cached_tokens
    shown: dict[str, Any] = dict(event.output or {})
    if "images" in shown:
        shown["images"] = [image_json(image) for image in shown["images"]]
    if event.output_artifact is not None:
        reference = event.output_artifact
        shown["artifact"] = {**reference.to_dict(), "url": f"/v1/artifacts/{reference.artifact_id}/content"}
    if event.finish_reason is not None:
        shown["finish_reason"] = event.finish_reason
    shown["usage"] = usage
    if event.context is not None:
        shown["context"] = event.context.to_dict()
    return shown


def image_json(image: dict[str, Any]) -> dict[str, Any]:
    """An image that was made, as callers see it: where the gateway gives it out, not where it lies."""
    shown = {name: value for name, value in image.items() if value is not None}
    if (at_ms := image.get("expires_at")) is not None:
        shown["expires_at"] = rfc3339(at_ms)
    return {**shown, "url": f"/v1/artifacts/{image['artifact_id']}/content"}


def error_json(event: ResultEvent, request_id: str) -> dict[str, Any] | None:
    return None if event.error is None else error_record_body(event.error, request_id)["error"]


async def on_output_thread(work: Callable[[], T]) -> T:
    """Run what decodes or encodes a large output beside the event loop."""
    return await asyncio.get_running_loop().run_in_executor(_threads, work)


def encode_json(value: Any) -> str:
    """As `json_bytes`, as text. Over a few megabytes that is one long step more."""
    return json_bytes(value).decode()


def json_bytes(value: Any) -> bytes:
    """Compact JSON, encoded in steps: within one step no other thread has its turn. NaN and infinities are null."""
    return b"".join(_steps(value))


def _steps(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict) and value:
        for number, (name, item) in enumerate(cast("dict[str, Any]", value).items()):
            yield (b"," if number else b"{") + json_at_once(name) + b":"
            yield from _steps(item)
        yield b"}"
    elif isinstance(value, list) and value and isinstance(value[0], list | dict):
        for number, item in enumerate(items := cast("list[Any]", value)):
            yield b"," if number else b"["
            yield from _steps(item) if len(items) <= LONG_LIST else (json_at_once(item),)
        yield b"]"
    else:
        yield json_at_once(value)


def json_at_once(value: Any) -> bytes:
    """Compact JSON, encoded in one step."""
    try:
        return orjson.dumps(value)
    except TypeError:  # an integer beyond 64 bits
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
