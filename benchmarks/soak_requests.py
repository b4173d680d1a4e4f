"""The requests of the soak by their numbers, each with what must come of it."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from penstock.common.artifacts import ArtifactStore

NOOP: dict[str, Any] = {"source": "noop", "engine": "noop", "tasks": ["text_generation"]}
PIECE = 50_000
MODELS: tuple[dict[str, Any], ...] = (
    {"id": "quick", **NOOP, "options": {"tokens": 2}},
    {"id": "slow", **NOOP, "options": {"tokens": 40, "delay_ms": 25, "slots": 32}},
    {"id": "large", **NOOP, "options": {"tokens": 8, "chars": PIECE, "delay_ms": 5}},
    {"id": "images", "source": "pillow", "engine": "imaging"},
)
TENANTS = ("t0", "t1", "t2")
COLOURS = [(7 * number % 256, 83 * number % 256, 151 * number % 256) for number in range(20)]
SHORT_TTL_MS = 20_000
MOST_ATTEMPTS = 10
"""Of texts. What ran at so many deaths of one worker is dead-lettered, but here no request is to blame for them."""
SIDE = 24
Inputs = Mapping[tuple[str, int], str]
"""Ids of the images that requests name, by tenant and number of the colour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What must come of a request."""

    kind: str
    tenant: str
    text: str = ""
    max_tokens: int = 100
    colour: tuple[int, int, int] | None = None
    """Of an image of `size` in place of a text."""
    size: tuple[int, int] = (0, 0)
    ttl_ms: int | None = None
    """With one of its own it may expire, but not before."""


def put_inputs(store: ArtifactStore) -> Inputs:
    """Store the images that requests name."""
    found: dict[tuple[str, int], str] = {}
    for number, colour in enumerate(COLOURS):
        data = io.BytesIO()
        Image.new("RGB", (SIDE, SIDE), colour).save(data, "PNG")
        for tenant in TENANTS:
            artifact = store.put(tenant, data.getvalue(), media_type="image/png")
            found[tenant, number] = artifact.artifact_id
    return found


def expected(number: int) -> Expected:
    """Every fourth streams slowly, every tenth is a turn, every twentieth is large, every fortieth an image."""
    tenant = TENANTS[number % 3]
    if number % 4 == 0:
        return Expected(kind="slow", tenant=tenant, text=_words(40))
    if number % 100 == 51:
        return Expected(kind="large turn", tenant="default", text=_words(6, PIECE), max_tokens=6)
    if number % 10 == 1:
        return Expected(kind="turn", tenant="default", text=_words(2))
    if number % 40 == 7:
        size = (8 + number % 23, 8 + number % 17)
        return Expected(kind="image", tenant=tenant, colour=COLOURS[number % len(COLOURS)], size=size)
    if number % 20 == 3:
        ttl_ms = SHORT_TTL_MS if number % 200 == 63 else None
        kind = "large stream" if number % 40 == 3 else "large"
        pieces = 6 + number // 20 % 3  # of different lengths, so that one in place of another is seen
        return Expected(kind=kind, tenant=tenant, text=_words(pieces, PIECE), max_tokens=pieces, ttl_ms=ttl_ms)
    return Expected(kind="quick", tenant=tenant, text=_words(2))


def request(number: int, inputs: Inputs) -> dict[str, Any]:
    """As it is put on its topic."""
    known = expected(number)
    body: dict[str, Any] = {
        "request_id": f"soak-{number}",
        "priority": number % 10,
        "model": {"turn": "quick", "image": "images"}.get(known.kind, known.kind.split(" ")[0]),
        "stream": known.kind in ("slow", "large stream"),
        "tenant": known.tenant,
        "max_attempts": 3 if known.kind == "image" else MOST_ATTEMPTS,
    }
    if known.ttl_ms is not None:
        body["ttl_ms"] = known.ttl_ms
    if known.kind in ("turn", "large turn"):
        name = f"c{number // 10 % 30}" if known.kind == "turn" else f"l{number // 100 % 60}"
        payload = {"messages": [{"role": "user", "content": f"turn {number}"}], "max_tokens": known.max_tokens}
        return {**body, "conversation_id": name, "payload": payload}
    if known.kind == "image":
        return {**body, "task": "image_processing", "payload": _resized(number, known, inputs)}
    return {**body, "payload": {"prompt": "hi", "max_tokens": known.max_tokens}}


def _words(count: int, least: int = 0) -> str:
    return "".join(f"word{number} ".ljust(least) for number in range(count))


def _resized(number: int, known: Expected, inputs: Inputs) -> dict[str, Any]:
    width, height = known.size
    image = {"artifact_id": inputs[known.tenant, number % len(COLOURS)]}
    return {"image": image, "operations": [{"op": "resize", "width": width, "height": height, "fit": "exact"}]}
