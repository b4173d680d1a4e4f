"""Defects planted by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

PLANTS: dict[str, object] = {}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    yield
