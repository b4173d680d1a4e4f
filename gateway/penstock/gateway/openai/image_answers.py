"""The answers of OpenAI's routes for images."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Json = dict[str, Any]


def images_response(
    created: int, result: Json, contents: Sequence[bytes] | None, url_of: Callable[[Mapping[str, Any]], str]
) -> Json:
    """OpenAI's object: with the bytes in base64 if there are `contents`, else with URLs."""
    made: list[Json] = result.get("images") or []
    data: list[Json] = [
        {"url": url_of(image), "penstock": image}
        if contents is None
        else {"b64_json": base64.b64encode(contents[number]).decode(), "penstock": image}
        for number, image in enumerate(made)
    ]
    answer: Json = {"created": created, "data": data}
    if made:
        answer |= size_of(made[0])
    answer["usage"] = image_usage(result.get("usage") or {})
    return answer


def size_of(image: Mapping[str, Any]) -> Json:
    """An image's format and sides as OpenAI's API has them."""
    kind = str(image.get("media_type") or "image/png").removeprefix("image/")
    return {"output_format": kind, "size": f"{image.get('width')}x{image.get('height')}"}


def image_usage(usage: Mapping[str, Any]) -> Json:
    """As OpenAI counts it, in tokens; diffusion models take none for what they draw, so `pixels` stand beside."""
    read, made = usage.get("prompt_tokens") or 0, usage.get("completion_tokens") or 0
    counted: Json = {
        "input_tokens": read,
        "input_tokens_details": {"text_tokens": read, "image_tokens": 0},
        "output_tokens": made,
        "total_tokens": read + made,
    }
    if usage.get("pixels") is not None:
        counted["pixels"] = usage["pixels"]
    return counted
