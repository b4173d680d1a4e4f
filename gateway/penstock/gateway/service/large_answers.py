"""Large answers: those whose decoding and encoding would hold up the event loop are made on a thread.

A thread alone is not enough: json decodes a text in one step, in which no other thread has its turn.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from penstock.common.artifacts import ArtifactStore
from penstock.gateway.view.outputs import on_output_thread
from penstock.schemas.large_inputs import put_text_back
from penstock.schemas.records import InferenceRequest

Json = dict[str, Any]
T = TypeVar("T")

LARGE_VALUES = 2_000
"""Numbers of vectors, or candidates of log probabilities: one millisecond or so to shape and to encode."""


async def beside_the_loop(result: Json, make: Callable[[], T]) -> T:
    """What `make` makes of a result: at once, or on a thread if the result is large."""
    return await on_output_thread(make) if is_large(result) else make()


class StoreReads(Protocol):
    """What is asked of `GatewayService`."""

    async def stored(self, tenant: str, work: Callable[[ArtifactStore], bytes]) -> bytes: ...


async def whole_result(reads: StoreReads, tenant: str, result: Json) -> Json:
    """The result with an output in it that it only refers to. Raises as `ArtifactStore.get`."""
    artifact = result.get("artifact")
    if artifact is None:
        return result
    content = await reads.stored(
        tenant, lambda store: store.get(tenant, artifact["artifact_id"], sha256=artifact["sha256"])
    )
    return await on_output_thread(lambda: {**result, **decode_json(content.decode())})


async def whole_request(reads: StoreReads, request: InferenceRequest) -> InferenceRequest:
    """The request with the text that its record left in the store. Raises as `ArtifactStore.get`."""
    text = request.input_artifact
    if text is None:
        return request
    content = await reads.stored(
        request.tenant, lambda store: store.get(request.tenant, text.artifact_id, sha256=text.sha256)
    )
    return await on_output_thread(lambda: put_text_back(request, content))


def is_large(result: Json) -> bool:
    """Whether an output is an artifact, or has more than a few vectors or log probabilities."""
    if "artifact" in result:
        return True
    values = sum(map(len, result.get("embeddings") or ()))
    for choice in (*(result.get("choices") or ()), result):
        for tokens in (choice.get("logprobs") or (), choice.get("prompt_logprobs") or ()):
            values += sum(1 + len(token.get("top_logprobs") or ()) for token in tokens)
    return values > LARGE_VALUES


def decode_json(text: str) -> Any:
    """As json.loads, but other threads have their turn: whenever it calls Python, for an object or a float."""
    return json.loads(text, object_hook=lambda values: values, parse_float=lambda number: float(number))
