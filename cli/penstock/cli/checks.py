"""A finding of `penstock doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One finding. `cure` says what to do when the state is not ok."""

    name: str
    state: Literal["ok", "warn", "fail"]
    detail: str
    cure: str | None = None
