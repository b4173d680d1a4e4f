"""Large answers: those whose decoding and encoding would hold up the event loop are made on a thread, step by step.

A thread alone is not enough: json decodes and encodes a text in one step, in which no other thread has its turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from penstock.common.artifacts import ArtifactStore
from penstock.gateway.view.outputs import on_output_thread

Json = dict[str, Any]
T = TypeVar("T")

LARGE_VALUES = 2_000
"""Numbers of vectors, or candidates of log probabilities: one millisecond or so to shape and to encode."""
_STEP_DEPTH = 4
"""Values nested deeper are decoded in one step; an output's choices have their lists above that."""

_raw_decode = json.JSONDecoder().raw_decode
_skip_blanks = re.compile(r"[ \t\n\r]*").match


async def beside_the_loop(result: Json, make: Callable[[], T]) -> T:
    """What `make` makes of a result: at once, or on a thread if the result is large."""
    return await on_output_thread(make) if is_large(result) else make()


class StoreReads(Protocol):
    """What is asked of `GatewayService`."""

    async def stored(self, tenant: str, work: Callable[[ArtifactStore], bytes]) -> bytes:
        """What the store does for a tenant, on a thread."""
        ...


async def whole_result(reads: StoreReads, tenant: str, result: Json) -> Json:
    """The result with an output in it that it only refers to. Raises as `ArtifactStore.get`."""
    artifact = result.get("artifact")
    if artifact is None:
        return result
    content = await reads.stored(
        tenant, lambda store: store.get(tenant, artifact["artifact_id"], sha256=artifact["sha256"])
    )
    return await on_output_thread(lambda: {**result, **decode_json(content.decode())})


def is_large(result: Json) -> bool:
    """Whether an output is an artifact, or has more than a few vectors or log probabilities."""
    if "artifact" in result:
        return True
    values = sum(map(len, result.get("embeddings") or ()))
    for choice in result.get("choices") or (result,):
        values += sum(1 + len(token.get("top_logprobs") or ()) for token in choice.get("logprobs") or ())
    return values > LARGE_VALUES


def decode_json(text: str) -> Any:
    """As json.loads, step by step. Raises ValueError."""
    try:
        value, end = _value(text, _blanks_end(text, 0), 0)
    except IndexError:
        raise ValueError("the JSON text ends early") from None
    if _blanks_end(text, end) != len(text):
        raise ValueError(f"there is more after the JSON text, at {end}")
    return value


def _blanks_end(text: str, at: int) -> int:
    blanks = _skip_blanks(text, at)
    return at if blanks is None else blanks.end()


def _value(text: str, at: int, depth: int) -> tuple[Any, int]:
    """(value, where it ends) of what begins there."""
    if depth < _STEP_DEPTH and text[at] in "{[":
        inside = _blanks_end(text, at + 1)
        if text[at] == "{" and text[inside] != "}":
            return _object(text, inside, depth + 1)
        if text[at] == "[" and text[inside] in "{[":
            return _list(text, inside, depth + 1)
    return _raw_decode(text, at)


def _object(text: str, at: int, depth: int) -> tuple[Json, int]:
    values: Json = {}
    while True:
        name, at = _raw_decode(text, at)
        at = _blanks_end(text, at)
        if not isinstance(name, str) or text[at] != ":":
            raise ValueError(f"a name and a colon were expected, at {at}")
        values[name], at = _value(text, _blanks_end(text, at + 1), depth)
        at, more = _after_value(text, at, "}")
        if not more:
            return values, at


def _list(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    while True:
        value, at = _value(text, at, depth)
        values.append(value)
        at, more = _after_value(text, at, "]")
        if not more:
            return values, at


def _after_value(text: str, at: int, closing: str) -> tuple[int, bool]:
    """Where the next value begins or the list has ended, and which of the two."""
    at = _blanks_end(text, at)
    if text[at] == closing:
        return at + 1, False
    if text[at] != ",":
        raise ValueError(f"a comma or {closing} was expected, at {at}")
    return _blanks_end(text, at + 1), True
