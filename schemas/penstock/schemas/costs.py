"""What a request costs, in tokens, before it runs: what fair shares of tenants and estimates of times are counted in.

A token is one of a text model. Of text four bytes are a token, and an answer costs what it may have at most. An image
that is drawn costs by its pixels and its denoising steps: one of 512 × 512 pixels in 30 steps costs about 1,000 tokens,
four of 1024 × 1024 in 50 steps about 27,000. It is a rule of thumb that depends on nothing but the request, so that
every worker and gateway says the same: how fast a model works them off is measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from penstock.schemas.plain import text_bytes
from penstock.schemas.records import InferenceRequest

OUTPUT_TOKENS = 256
"""An answer whose length nobody bounded."""
IMAGE_TOKENS = 1_000
"""An image that is read, by a model or before it is changed without one."""
OPERATION_TOKENS = 100
"""One operation on an image without a model."""
UPSCALE_TOKENS = 1_000
"""One that a model makes."""
PIXEL_STEPS_PER_TOKEN = 8_000
"""Pixels times steps of an image that is drawn. Coding and decoding it counts as one step more."""
DEFAULT_SIDE = 512
"""Pixels, where a request leaves the size to the model."""
DEFAULT_STEPS = 30

Payload = Mapping[str, Any]


def estimated_cost(request: InferenceRequest) -> int:
    """The cost of a valid request, in tokens: at least 1."""
    payload, stored = request.text_generation, request.input_artifact
    if stored is not None:
        return _BY_TASK[request.task](request.payload) + (stored.size_bytes >> 2)
    if payload is not None:
        return _of_text(payload)
    return _BY_TASK[request.task](request.payload)


def drawing_cost(payload: Payload) -> int:
    """Of images drawn from a prompt, or from another image: n × (steps + 1) × width × height, as tokens.

    `strength` is the share of the steps that is run. What the request leaves open counts as the defaults above: the
    model's own are not asked for.
    """
    pixels = _number(payload, "width", DEFAULT_SIDE) * _number(payload, "height", DEFAULT_SIDE)
    steps = _number(payload, "inference_steps", DEFAULT_STEPS) * _number(payload, "strength", 1.0)
    images = _number(payload, "n", 1)
    return max(1, math.ceil(images * (math.ceil(steps) + 1) * pixels / PIXEL_STEPS_PER_TOKEN))


def _of_text(payload: Payload) -> int:
    """The most frequent task by far: this is called for each record that a worker reads."""
    prompt, messages = payload.get("prompt"), payload.get("messages")
    size, images = 0 if prompt is None else text_bytes(prompt), 0
    if messages is not None:
        for message in messages:
            size += text_bytes(message["content"])
            if (parts := message.get("parts")) is not None:
                images += sum(part.get("image") is not None for part in parts)
    get = payload.get
    tokens, answers, ids = get("max_tokens"), get("n"), get("prompt_token_ids")
    answer = OUTPUT_TOKENS if tokens is None else tokens
    read = (size + 3 >> 2) + (0 if ids is None else len(ids)) + images * IMAGE_TOKENS
    return read + (answer if answers is None else answer * answers)


def _of_embedding(payload: Payload) -> int:
    ids = payload.get("input_token_ids") or ()
    return max(1, (sum(map(text_bytes, payload["input"])) + 3 >> 2) + sum(map(len, ids)))


def _of_reading(payload: Payload) -> int:
    asked = text_bytes(payload.get("prompt") or "") + 3 >> 2
    return IMAGE_TOKENS + asked + int(_number(payload, "max_tokens", OUTPUT_TOKENS))


def _of_processing(payload: Payload) -> int:
    operations: list[Payload] = payload.get("operations") or []
    made = sum(UPSCALE_TOKENS if one.get("op") == "upscale" else OPERATION_TOKENS for one in operations)
    return IMAGE_TOKENS + made


def _of_summary(payload: Payload) -> int:
    """What it reads of a conversation nobody knows yet."""
    return (text_bytes(payload.get("text") or "") + 3 >> 2) + int(_number(payload, "max_tokens", OUTPUT_TOKENS))


_BY_TASK: dict[str, Callable[[Payload], int]] = {
    "text_generation": _of_text,
    "embedding": _of_embedding,
    "image_generation": drawing_cost,
    "image_editing": drawing_cost,
    "image_to_text": _of_reading,
    "image_processing": _of_processing,
    "summarization": _of_summary,
    "conversation_items": lambda payload: 1,
}


def _number(payload: Payload, name: str, otherwise: float) -> float:
    value = payload.get(name)
    return otherwise if value is None else value
