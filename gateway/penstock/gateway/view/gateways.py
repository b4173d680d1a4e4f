"""What gateways, and the processes beside them, last reported of themselves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

from penstock.common.reader import RawMessage
from penstock.schemas.codec import Codec
from penstock.schemas.errors import DecodeError, RegistryUnavailable
from penstock.schemas.records import GatewayState
from penstock.schemas.topics import GATEWAY_KEY

REPORT_S = 2.0
"""Each process reports so often."""
LATE_MS = 7_000
"""A process whose newest report was heard longer ago is silent: three reports are missing."""
HEARS_MS = 5_000
"""This gateway hears its last but one report so long after it at most, if it hears reports at all."""
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
        self._began_ms = 0
        self._is_refused: Callable[[], bool] = lambda: False
        self._own_heard = deque[int](maxlen=2)

    def reports_as(self, own_id: str, now_ms: int, is_refused: Callable[[], bool]) -> None:
        """This gateway begins to report under that id. While `is_refused`, it may not, and hears none of its own."""
        self.own_id, self._began_ms, self._is_refused = own_id, now_ms, is_refused
        self._own_heard.append(now_ms)

    def on_record(self, message: RawMessage, heard_ms: int) -> None:
        """A report, or the tombstone of a process that stopped in order. `heard_ms`: see `Arrivals`."""
        gateway_id = (message.key or b"").decode(errors="replace").removeprefix(GATEWAY_KEY)
        if gateway_id == self.own_id:
            self._own_heard.append(max(heard_ms, self._began_ms))  # a predecessor's are older
        if message.value is None:
            self._states.pop(gateway_id, None)
            return
        try:
            state = self._codec.decode(message.value, GatewayState)
        except (DecodeError, RegistryUnavailable):  # of a later release: it is heard, and what it says is not known
            if gateway_id not in self._states:
                return
            state = self._states[gateway_id]
        self._states.pop(gateway_id, None)
        self._states[gateway_id] = replace(state, id=gateway_id, reported_at=heard_ms)
        if len(self._states) > MOST:
            del self._states[next(iter(self._states))]

    def judged_ms(self, now_ms: int) -> int:
        """The moment as of which others are silent: the present, if this gateway hears its own reports.

        Where it hears none, nothing is known of others either. When it hears them again, others have one interval more.
        """
        if not self._own_heard or self._is_refused():
            return now_ms
        return min(now_ms, self._own_heard[0] + HEARS_MS)

    def clock_is(self, now_ms: int) -> None:
        """Reports that were heard later than now, before the clock was set back, count as heard now."""
        self._states = {
            name: replace(one, reported_at=min(one.reported_at, now_ms)) for name, one in self._states.items()
        }

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
