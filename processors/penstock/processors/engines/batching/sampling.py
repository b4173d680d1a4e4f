"""Sampling parameters as continuous batching may be given them: a bad value would kill its loop with all streams."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.schemas.errors import InvalidRequest

GREEDY_BELOW = 0.01
"""Temperatures below are taken for zero: they would divide logits into infinities."""
_ONE_TOKEN = 1e-6
"""A nucleus of one token: top_k=1 alone keeps all that tie, which in bfloat16 is no rare thing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """What the per-request logits processors take. Temperature > 0, 1 ≤ top_k ≤ vocabulary, 0 < top_p ≤ 1."""

    temperature: float
    top_k: int
    top_p: float


GREEDY = Sampling(temperature=1.0, top_k=1, top_p=_ONE_TOKEN)


def sampling_of(params: Mapping[str, Any], *, vocabulary: int) -> Sampling:
    """The sampling for a request's parameters. Raises InvalidRequest."""
    temperature = _number(params, "temperature", 1.0)
    top_p = _number(params, "top_p", 1.0)
    top_k = _number(params, "top_k", vocabulary)
    if not 0 <= temperature <= 100:
        raise InvalidRequest("temperature must be from 0 to 100", param="payload.temperature")
    if not 0 <= top_p <= 1:
        raise InvalidRequest("top_p must be from 0 to 1", param="payload.top_p")
    if top_k < 0 or top_k != int(top_k):
        raise InvalidRequest("top_k must be a whole number, 0 (off) or more", param="payload.top_k")
    if temperature < GREEDY_BELOW:
        return GREEDY
    return Sampling(
        temperature=temperature,
        top_k=vocabulary if top_k == 0 else min(int(top_k), vocabulary),
        top_p=max(top_p, _ONE_TOKEN),
    )


def _number(params: Mapping[str, Any], name: str, default: float) -> float:
    value = params.get(name)
    if value is None:
        return float(default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number", param=f"payload.{name}")
    return float(value)
