"""JSON that is to be written again: NaN and infinities, which Python reads and JSON does not have, are refused."""

from __future__ import annotations

import json
import math
from typing import Any


def loads_finite(text: str) -> Any:
    """As json.loads. Raises ValueError for NaN and infinities too, and for numbers that no float can hold (1e999)."""
    return json.loads(text, parse_constant=no_constant, parse_float=_finite)


def no_constant(name: str) -> float:
    """Of a JSON parser, for NaN and infinities. Raises ValueError."""
    raise ValueError(f"JSON has no {name}")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is more than a float can hold")
    return value
