"""Whose memory it is: what is in use on a device, parted into that of our engines and that of others. Pure."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from penstock.processors.hardware.probe import Reading

Key = tuple[str, int]
"""(model, replica)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineUse:
    """An engine that holds memory of a device, or is being loaded there.

    `pids`: its whole tree of processes. `reported_bytes`: what it says itself that it holds of this device.
    """

    key: Key
    granted_bytes: int
    loading: bool = False
    pids: Set[int] = frozenset()
    reported_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Bytes in use on a device: by all, by our engines, by others; and by engine, where that is known."""

    used_bytes: int = 0
    ours_bytes: int = 0
    foreign_bytes: int = 0
    measured: dict[Key, int] = field(default_factory=dict[Key, int])


def simulated(reading: Reading, engines: Sequence[EngineUse]) -> Shares:
    """On a device that is not there engines use what they were granted, and the reading is of others."""
    ours_bytes = sum(one.granted_bytes for one in engines)
    return Shares(used_bytes=reading.used_bytes + ours_bytes, ours_bytes=ours_bytes, foreign_bytes=reading.used_bytes)


def split(reading: Reading, engines: Sequence[EngineUse], before: Shares | None) -> Shares:
    """Part a reading. `before` is what the last one came to.

    Where processes are listed, an engine has what its processes have. Where not, one that is ready has what it reports,
    or else its grant; and what a device has more in use than before belongs to those that are being loaded there, up to
    their grants. What nobody here explains is foreign.
    """
    measured: dict[Key, int] = {}
    assumed_bytes, unknown = 0, list[EngineUse]()
    for one in engines:
        listed = None if reading.by_pid is None else [reading.by_pid[pid] for pid in one.pids if pid in reading.by_pid]
        if listed or (listed is not None and one.loading):
            measured[one.key] = sum(listed)
        elif one.loading:
            unknown.append(one)
        elif one.reported_bytes is not None:
            measured[one.key] = one.reported_bytes
        else:
            assumed_bytes += one.granted_bytes
    rest = max(0, reading.used_bytes - sum(measured.values()) - assumed_bytes)
    growth = 0 if before is None else max(0, rest - before.foreign_bytes)
    for one in unknown:
        measured[one.key] = min(growth, one.granted_bytes)
        growth -= measured[one.key]
    ours_bytes = min(reading.used_bytes, sum(measured.values()) + assumed_bytes)
    return Shares(
        used_bytes=reading.used_bytes,
        ours_bytes=ours_bytes,
        foreign_bytes=reading.used_bytes - ours_bytes,
        measured=measured,
    )
