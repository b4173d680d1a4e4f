"""Plain values of which very many are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def fixed(cls: type[T]) -> type[T]:
    """A dataclass with positional fields. Only the type checker holds it frozen, as it does a `record`."""
    return dataclass(slots=True, unsafe_hash=True)(cls)
