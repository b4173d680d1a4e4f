"""What gateways, and the processes beside them, last reported of themselves."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from penstock.common.reader import RawMessage
from penstock.schemas.codec import Codec
from penstock.schemas.errors import DecodeError, RegistryUnavailable
from penstock.schemas.records import GatewayState
from penstock.schemas.topics import GATEWAY_KEY

logger = logging.getLogger(__name__)

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

Process = tuple[str, int, int]
"""(id, pid, when it was started)"""


class Gateways:
    """Fed with the records of the worker topic that are not of workers. On the event loop."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._states: dict[str, GatewayState] = {}
        self.own_id: str | None = None
        """Under which this gateway reports. It knows more of itself than its reports say."""
        self._started_at = 0
        self._is_refused: Callable[[], bool] = lambda: False
        self._own_heard = deque[int](maxlen=2)
        self._replaced: dict[str, Process] = {}
        """By id, the process whose place was taken. If it reports again, there are two."""
        self._twins: dict[Process, str] = {}
        """Those that another one of the same id is beside, and what they are called."""

    def reports_as(self, own_id: str, started_at: int, is_refused: Callable[[], bool]) -> None:
        """This gateway begins to report under that id. While `is_refused`, it may not, and hears none of its own."""
        self.own_id, self._started_at, self._is_refused = own_id, started_at, is_refused
        self._own_heard.append(started_at)

    def on_record(self, message: RawMessage, heard_ms: int) -> None:
        """A report, or the tombstone of a process that stopped in order. `heard_ms`: see `Arrivals`."""
        gateway_id = (message.key or b"").decode(errors="replace").removeprefix(GATEWAY_KEY)
        if message.value is None:
            self._forget(gateway_id)
            return
        try:
            state = self._codec.decode(message.value, GatewayState)
        except (DecodeError, RegistryUnavailable):  # of a later release: it is heard, and what it says is not known
            if gateway_id not in self._states:
                return
            state = self._states[gateway_id]
        state = replace(state, reported_at=heard_ms)
        name = self._name(gateway_id, state)
        self._states.pop(name, None)
        self._states[name] = replace(state, id=name)
        if len(self._states) > MOST:
            self._forget(next(iter(self._states)))

    def _name(self, gateway_id: str, state: GatewayState) -> str:
        """Its id; with its pid, if another process goes on reporting under that id: two hosts have one name."""
        process, known = (gateway_id, state.pid, state.started_at), self._states.get(gateway_id)
        if gateway_id == self.own_id and state.started_at == self._started_at:
            self._own_heard.append(state.reported_at)
            return gateway_id
        if process in self._twins:
            return self._twins[process]
        if known is None or (gateway_id, known.pid, known.started_at) == process:
            return gateway_id
        beside_own = gateway_id == self.own_id and known.started_at == self._started_at
        if not beside_own and self._replaced.get(gateway_id) != process:
            self._replaced[gateway_id] = gateway_id, known.pid, known.started_at
            return gateway_id
        twin = self._twins[process] = f"{gateway_id}-{state.pid}"
        logger.warning("gateways.same_id id=%s listed_as=%s: two processes report under one id", gateway_id, twin)
        return twin

    def _forget(self, gateway_id: str) -> None:
        """One that goes on under that id reports again."""
        self._states.pop(gateway_id, None)
        self._replaced.pop(gateway_id, None)
        for process in [one for one in self._twins if one[0] == gateway_id]:
            self._states.pop(self._twins.pop(process), None)

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
