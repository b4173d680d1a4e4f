"""One `[[devices]]` table: a simulated device, or what Penstock may use of a real one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from penstock.common.configuration import Section

_SIMULATED_ALONE = ("total_bytes", "foreign", "foreign_file")


class ForeignStep(Section):
    """What others use of a simulated device from some time on."""

    after_s: float = Field(ge=0)
    """Seconds since the worker's start."""
    bytes: int = Field(ge=0)
    """Bytes in use by others from then on."""


class DeviceSection(Section):
    kind: Literal["cpu", "cuda", "simulated"]
    """`cpu` (main memory), `cuda` (GPUs and MIG slices) or `simulated` (a device that is only said to be there)."""
    name: str | None = Field(default=None, min_length=1, max_length=100)
    """`cuda:0`, `cuda:0/mig:1`, or the beginning of a UUID; null: all of the kind that no other table names. Simulated
    devices need one, by which models ask for them."""
    enabled: bool = True
    """False: as if it were not there."""
    limit_bytes: int | None = Field(default=None, ge=0)
    """The most that Penstock may use of it, whatever it has; null: all but the reserve."""
    reserve_bytes: int | None = Field(default=None, ge=0)
    """What is left to others in any case; null: `memory.cpu_reserve_bytes`, `memory.gpu_reserve_bytes`, none of a
    simulated one."""
    total_bytes: int | None = Field(default=None, ge=1)
    """Of a simulated device: what it has."""
    foreign: list[ForeignStep] = Field(default_factory=list[ForeignStep])
    """Of a simulated device: what others use of it, as `[{after_s = 60, bytes = 8_000_000_000}]`; nothing before."""
    foreign_file: Path | None = None
    """Of a simulated device: a file with the number of bytes that others use, read again at each look."""

    @model_validator(mode="after")
    def _consistent(self) -> DeviceSection:
        if self.kind == "simulated":
            missing = [name for name in ("name", "total_bytes") if getattr(self, name) is None]
            if missing:
                raise ValueError(f"a simulated device needs {' and '.join(missing)}")
            if self.foreign and self.foreign_file is not None:
                raise ValueError("foreign and foreign_file exclude each other")
            if any(later.after_s <= earlier.after_s for earlier, later in pairwise(self.foreign)):
                raise ValueError("the steps of foreign must come in the order of after_s")
        else:
            given = [name for name in _SIMULATED_ALONE if getattr(self, name)]
            if given:
                raise ValueError(f"{' and '.join(given)}: only simulated devices have that; {self.kind} is measured")
        if self.kind == "cpu" and self.name not in (None, "cpu"):
            raise ValueError(f"main memory is called cpu, not {self.name}")
        return self


def check_entries(entries: Sequence[DeviceSection]) -> None:
    """Raises ValueError when two tables tell of the same device."""
    seen: set[tuple[str, str | None]] = set()
    for entry in entries:
        key = (
            ("", entry.name) if entry.kind == "simulated" else (entry.kind, None if entry.kind == "cpu" else entry.name)
        )
        if key in seen:
            raise ValueError(f"two tables of devices tell of {entry.name or entry.kind}")
        seen.add(key)
