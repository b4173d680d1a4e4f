"""Traces: a fleet, its models and the requests that come. The file format, JSON lines:

    {"trace": "mine", "devices": [{"device": "cuda:0", "kind": "cuda", "total_bytes": 85899345920}],
     "models": [{"model": "a", "bytes": 42949672960, "load_s": 20, "slots": 8}]}
    {"at_s": 0.5, "model": "a", "priority": 1, "run_s": 2.5}
    {"at_s": 9.0, "model": "a", "priority": 9, "run_s": 30, "tenant": "t", "ttl_s": 600}
    {"at_s": 60, "device": "cuda:0", "foreign_bytes": 8589934592}

The first line is the fleet; each other line is a request, or what other programs use of a device from then on. A device
may have `reserve_bytes`; a model `kind` (cuda), `host_bytes` (main memory while it is loaded) and `max_replicas` (1).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from penstock.processors.core.fleet.ledger import DeviceCapacity
from penstock.processors.core.fleet.views import Need
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.topics import priority_class


@dataclass(frozen=True, kw_only=True, slots=True)
class TraceModel:
    """A model of a trace. Each replica runs `slots` requests at once, each as long as its trace says."""

    model: str
    bytes: int
    load_s: float
    slots: int
    kind: str = "cuda"
    host_bytes: int = 0
    max_replicas: int = 1

    @property
    def need(self) -> Need:
        return Need(bytes=self.bytes, host_bytes=self.host_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request of a trace; seconds since its begin. `ttl_s` None: it waits for as long as need be."""

    at_s: float
    model: str
    priority: int
    run_s: float
    tenant: str = "default"
    ttl_s: float | None = None

    @property
    def klass(self) -> str:
        return priority_class(self.priority)


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignUse:
    """What other programs use of a device from then on."""

    at_s: float
    device: str
    foreign_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """A fleet, its models, and what comes."""

    name: str
    devices: tuple[DeviceCapacity, ...]
    models: tuple[TraceModel, ...]
    requests: tuple[Request, ...]
    foreign: tuple[ForeignUse, ...] = field(default=())


def read(lines: Iterable[str], name: str) -> Trace:
    """Raises InvalidRequest, naming the line that cannot be read."""
    numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
    requests: list[Request] = []
    foreign: list[ForeignUse] = []
    fleet: tuple[tuple[DeviceCapacity, ...], tuple[TraceModel, ...], str] | None = None
    for number, line in numbered:
        try:
            values: dict[str, Any] = json.loads(line)
            if fleet is None:
                devices = tuple(DeviceCapacity(**one) for one in values["devices"])
                models = tuple(TraceModel(**one) for one in values["models"])
                fleet = (devices, models, str(values.get("trace", name)))
            elif "foreign_bytes" in values:
                foreign.append(ForeignUse(**values))
            else:
                requests.append(Request(**values))
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidRequest(f"{name}, line {number}: {error}", param="trace") from error
    if fleet is None:
        raise InvalidRequest(f"{name} is empty: its first line is the fleet", param="trace")
    return checked(
        Trace(name=fleet[2], devices=fleet[0], models=fleet[1], requests=tuple(requests), foreign=tuple(foreign))
    )


def checked(trace: Trace) -> Trace:
    """Raises InvalidRequest for what names no model or device of its fleet, or could never run."""
    models = {one.model: one for one in trace.models}
    devices = {one.device: one for one in trace.devices}
    for one in models.values():
        if not any(one.kind in (d.kind, d.device) and one.bytes <= d.limit_bytes for d in devices.values()):
            raise InvalidRequest(f"{trace.name}: no device could ever hold {one.model}", param="trace")
    for one in trace.requests:
        if one.model not in models:
            raise InvalidRequest(f"{trace.name}: no model {one.model} in the first line", param="trace")
    for one in trace.foreign:
        if one.device not in devices:
            raise InvalidRequest(f"{trace.name}: no device {one.device} in the first line", param="trace")
    return trace


def written(trace: Trace) -> Iterator[str]:
    """Its lines, as `read` takes them."""
    yield json.dumps(
        {
            "trace": trace.name,
            "devices": [{n: getattr(one, n) for n in DeviceCapacity.__dataclass_fields__} for one in trace.devices],
            "models": [{n: getattr(one, n) for n in TraceModel.__dataclass_fields__} for one in trace.models],
        }
    )
    for request in trace.requests:
        yield json.dumps({name: getattr(request, name) for name in Request.__dataclass_fields__})
    for use in trace.foreign:
        yield json.dumps({name: getattr(use, name) for name in ForeignUse.__dataclass_fields__})
