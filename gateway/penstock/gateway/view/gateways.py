"""What gateways, and the processes beside them, last reported of themselves."""

from __future__ import annotations

from dataclasses import replace

from penstock.common.reader import RawMessage
from penstock.schemas.codec import Codec
from penstock.schemas.records import GatewayState
from penstock.schemas.topics import GATEWAY_KEY

REPORT_S = 2.0
"""Each process reports so often."""
LATE_MS = 7_000
"""A process whose newest report was heard longer ago is silent: three reports are missing."""
GONE_MS = 60_000
"""A silent process is left out after so long if another of its kind is alive."""
MISSED_MS = 3_600_000
"""A silent process is left out after so long in any case."""
MOST = 1_000
"""Processes that are remembered; then those go of which nothing was heard for longest."""


class Gateways:
    """Fed with the records of the worker topic that are not of workers. On the event loop."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._states: dict[str, GatewayState] = {}
        self.own_id: str | None = None
        """Under which this gateway reports. It knows more of itself than its reports say."""

    def on_record(self, message: RawMessage, heard_ms: int) -> None:
        """A report, or the tombstone of a process that stopped in order. `heard_ms`: see `Arrivals`."""
        gateway_id = (message.key or b"").decode(errors="replace").removeprefix(GATEWAY_KEY)
        self._states.pop(gateway_id, None)
        if message.value is None:
            return
        state = self._codec.decode(message.value, GatewayState)
        self._states[gateway_id] = replace(state, id=gateway_id, reported_at=heard_ms)
        if len(self._states) > MOST:
            del self._states[next(iter(self._states))]

    def known(self, now_ms: int) -> list[GatewayState]:
        """By kind and id, without those that have been silent for long. `reported_at` is when the report was heard."""
        kinds = {one.kind for one in self._states.values() if is_alive(one, now_ms)}
        known = (
            one
            for one in self._states.values()
            if now_ms - one.reported_at <= (GONE_MS if one.kind in kinds else MISSED_MS)
        )
        return sorted(known, key=lambda one: (one.kind, one.id))


def is_alive(state: GatewayState, now_ms: int) -> bool:
    """Whether it has reported within `LATE_MS`."""
    return now_ms - state.reported_at <= LATE_MS
