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

    @classmethod
    def ok(cls, name: str, detail: str) -> Check:
        return cls(name=name, state="ok", detail=detail)

    @classmethod
    def warn(cls, name: str, detail: str, cure: str) -> Check:
        return cls(name=name, state="warn", detail=detail, cure=cure)

    @classmethod
    def fail(cls, name: str, detail: str, cure: str) -> Check:
        return cls(name=name, state="fail", detail=detail, cure=cure)
