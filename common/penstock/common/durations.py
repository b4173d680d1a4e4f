"""Durations in settings: seconds as a number, or a text as `30s`, `5m`, `1h`, `30d`."""

from __future__ import annotations

import re
from typing import Any

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds(value: Any) -> Any:
    """Seconds of a number or of a text as 30s, 5m, 1h; below zero, as Ollama has it, is for ever (null)."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(-?\d+(?:\.\d+)?)\s*(ms|s|m|h|d)?\s*", value)
        if match is None:
            raise ValueError(f"{value!r} is no duration; write it as 300, 30s, 5m or 1h")
        value = float(match[1]) * _UNITS_S[match[2] or "s"]
    if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
        return None
    return value
