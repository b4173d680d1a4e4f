"""The fleet of a trace taken from the `[[devices]]` of a configuration: what a worker there would have to give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.processors.core.fleet.ledger import DeviceCapacity
from penstock.processors.core.fleet.views import HOST
from penstock.processors.hardware.entries import DeviceSection
from penstock.processors.hardware.simulated import KIND as SIMULATED
from penstock.processors.replay.trace import ForeignUse, Trace, checked

CARD = "cuda"


def on_devices(trace: Trace, capacities: Sequence[DeviceCapacity], entries: Sequence[DeviceSection] = ()) -> Trace:
    """The trace on these devices. Its models keep their sizes; a simulated device stands for a card.

    What others use is what the tables say of simulated devices; of the trace's own steps those are left that name a
    device that is there. Raises InvalidRequest for a model that no device could ever hold.
    """
    cards = [one for one in capacities if one.device != HOST]
    simulated = [one for one in cards if one.kind == SIMULATED]
    devices = [replace(one, kind=CARD) for one in simulated] or [one for one in capacities if one.kind == CARD]
    devices += [one for one in capacities if one.device == HOST]
    names = {one.device for one in devices}
    told = [
        ForeignUse(at_s=step.after_s, device=entry.name, foreign_bytes=step.bytes)
        for entry in entries
        for step in entry.foreign
        if entry.name is not None and entry.name in names
    ]
    kinds = {one.kind for one in devices} | names
    models = [one if one.kind in kinds else replace(one, kind=CARD) for one in trace.models]
    foreign = sorted([*(one for one in trace.foreign if one.device in names), *told], key=lambda one: one.at_s)
    return checked(replace(trace, devices=tuple(devices), models=tuple(models), foreign=tuple(foreign)))
