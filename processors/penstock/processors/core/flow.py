"""The flow: every request of a worker from its arrival to its commit. Events in, effects out, time passed in.

A shell calls one method per event, then `step`, then carries out what `take_effects` gives. The flow decides what
starts, what is retried, what ends and what may be committed; it does no I/O and knows no clock. Its states and
transitions stand in `penstock.processors.core.states`, its layers in `board`. Models: websockets' `protocol.py` and
vLLM's `schedule()` / `update_from_output()`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from penstock.processors.core.arriving import Arriving
from penstock.processors.core.board import Catalog, Commands, FlowSettings
from penstock.processors.core.effects import Erase
from penstock.processors.core.lost import key_of_lost, lost_work
from penstock.processors.core.states import IN_SCHEDULER, ON_LANE, Stage
from penstock.processors.core.work import Work
from penstock.schemas.errors import Cancelled, ExecutionTimeout, Expired
from penstock.schemas.records import ControlCommand
from penstock.schemas.topics import TP, priority_class

ENDINGS_PER_PARTITION = 512
ENDING_BYTES_PER_PARTITION = 8 * 2**20
"""Ends under way to the broker at which a partition pauses, and bytes of their records: a flood of what ends at once,
as of poison, must not fill memory. The budget counts only what waits.
"""

EXPIRED_AT_ONCE = 256
"""Requests that one tick ends by their deadlines: a flood of one age must not hold up the event loop."""


class Flow(Arriving):
    """One worker's requests. Not thread-safe. Two flows in one process share nothing."""

    # -- assignments

    def assigned(
        self,
        committed: Mapping[TP, tuple[int, str]],
        generation: int,
        *,
        fenced: bool,
        now: float,
        wall_ms: float = float("inf"),
    ) -> None:
        """A new generation: what is not ours any more is let go of silently; after a fence everything is.

        `wall_ms` is the time now in milliseconds since the epoch: nobody else has worked on what is appended after it.
        """
        self.generation, self.owned_since_ms = generation, wall_ms
        revocation = self.gate.assign(committed, generation, fenced=fenced)
        held = list(self.works.values())
        dropped = set(revocation.dropped)
        gone = [w for w in held if revocation.restart_all or w.key in dropped or w.tp not in committed]
        for work in gone:
            self._drop(work)
        self.budget.assign(list(committed))
        self._paused = frozenset()
        for command in self._commands.erasures():
            self._emit(Erase(command))
        self._all_dirty()

    # -- commands

    def command(self, command: ControlCommand, now: float, wall_ms: int) -> None:
        """A command from the control topic, in log order."""
        if command.kind == "end_lost":
            self._end_lost(command, now)
            return
        if not self._commands.apply(command, wall_ms):
            return
        work = self._subjects.get((command.tenant, command.request_id))
        if command.kind == "erase":
            self._emit(Erase(command))
        elif work is None:
            return
        elif command.kind == "cancel":
            self._cancel(work, Cancelled(command.reason or "cancelled by its caller"), now)
        elif command.kind == "reprioritize" and command.priority is not None and work.stage in IN_SCHEDULER:
            self._reprioritize(work, command.priority)

    def _end_lost(self, command: ControlCommand, now: float) -> None:
        """A request is past its deadline or cancelled, and its record is gone: no delivery will ever bring it.

        The owner of the record's partition ends it, unless it holds it. The outcome is one that the request must have
        in any case. So a command that comes twice, or to a former owner, or for a record that is delivered after all,
        does no harm: readers follow the first outcome. A command that changes nothing now is not remembered. The
        gateway asks again.
        """
        key, origin = key_of_lost(command), command.origin
        if key is None or origin is None or not self.taking or not self.gate.owns(key[:2]):
            return
        subject = (command.tenant, command.request_id)
        if key in self.works or subject in self._subjects:
            return
        work = lost_work(command, key, origin, epoch=self.generation, seq=next(self._seq), now=now)
        self.works[key] = self._subjects[subject] = work
        cancel = self._commands.cancelled(*subject)
        if cancel is not None:
            error = Cancelled(cancel.reason or "cancelled by its caller")
        else:
            error = Expired("its record was deleted from its topic before its turn came, and its deadline has passed")
        self._end_unrun(work, "arrive_ended", error, now)

    def _cancel(self, work: Work, error: Cancelled, now: float) -> None:
        if work.stage in IN_SCHEDULER or work.stage is Stage.RETRYING:
            self._end_waiting(work, "cancel", error, now)
        elif work.stage in ON_LANE:
            self._end_running(work, "cancel", error, now)

    def _reprioritize(self, work: Work, priority: int) -> None:
        klass = priority_class(priority)
        if work.body is not None:
            self.budget.drop_body(work.klass, work.lane, work.size_bytes)
            self.budget.keep_body(klass, work.lane, work.size_bytes)
        if work.stage is Stage.PARKED:
            parked = self.lane(work.lane).parked
            parked[work.klass] -= 1
            parked[klass] += 1
        if self.scheduler.reprioritize(work, klass, priority):
            self._mark_changed(self.lane(work.lane))

    # -- time

    def step(self, now: float) -> None:
        """Start what can start, on every lane where something changed."""
        self.now = now
        while self.taking:
            if self._dirty:
                name, lane = next(iter(self._dirty.items()))
                del self._dirty[name]
                self._fill_or_load(lane, now)
            elif self._plan_due:
                self._plan(now)
            else:
                return

    def tick(self, now: float, wall_ms: int) -> None:
        """What is due by time. Call it every 10 ms or so while there is work, and at `next_due`."""
        self.now = now
        if not self.taking:
            self._hand_back_waiting()  # a run may have failed or lost its engine since
        self.explainer.clock(now, wall_ms)
        self.statuses.tick(now)
        self.streams.tick(now)
        self.steps.tick(now)
        if not self.taking:
            return
        self._retry_due(now)
        for work in self.scheduler.expired(now, EXPIRED_AT_ONCE):
            self._measure_wait(work, now)
            self._end_waiting(work, "expire", Expired("its deadline passed while it waited"), now)
        self._look_at_fleet(now)
        self._all_dirty()

    def check_timeouts(self, now: float) -> None:
        """End runs that take longer than they may; call it a few times a second."""
        for lane in self.lanes.values():
            for work in [w for w in lane.holders() if w.stage is Stage.RUNNING]:
                run = work.run
                if run is not None and run.timeout_at is not None and run.timeout_at <= now:
                    took = now - (run.run_at or now)
                    self._end_running(work, "timeout", ExecutionTimeout(f"the run took longer than {took:.1f} s"), now)

    def next_due(self) -> float | None:
        """When the next status, chunk, retry or paced start is due."""
        due = (self.statuses, self.streams, self.steps, self.scheduler.slack)
        times = [part.next_due() for part in due]
        times.append(self._retries[0][0] if self._retries else None)
        return min((at for at in times if at is not None), default=None)

    def tell_positions(self, count: int) -> None:
        """Who is near the front and waits for long hears how the queue moves, and what it waits for."""
        ahead: dict[str, tuple[int, int]] = {}
        for position, work in enumerate(self.scheduler.front(count)):
            work.position = position
            requests, tokens = ahead.get(work.lane, (0, 0))
            self.statuses.near_front(work, self.now, (requests, tokens))
            ahead[work.lane] = requests + 1, tokens + work.cost

    # -- what the consumer should do

    def pauses(self) -> frozenset[TP]:
        """Partitions of which no more should be delivered now; two watermarks keep it from flapping."""
        paused: set[TP] = set()
        for tp in self.gate.partitions():
            was = tp in self._paused
            share = 2 if was else 1
            ending = self._endings[tp] * share >= ENDINGS_PER_PARTITION
            heavy = self._ending_bytes[tp] * share >= ENDING_BYTES_PER_PARTITION
            if ending or heavy or self.gate.full(tp) or self.budget.full(tp):
                paused.add(tp)
        self._paused = frozenset(paused)
        return self._paused

    # -- stopping

    def stop_taking(self) -> None:
        """From here on nothing is started. What waits is handed back silently; what runs may finish."""
        self.taking = False
        self._hand_back_waiting()

    def _hand_back_waiting(self) -> None:
        for work in [w for w in self.works.values() if w.stage in IN_SCHEDULER or w.stage is Stage.RETRYING]:
            self._drop(work)

    def hand_back(self) -> None:
        """Let go of what still runs. It stays uncommitted, so another worker begins it anew."""
        for work in [w for w in self.works.values() if w.stage is not Stage.SETTLING]:
            self._drop(work)

    @property
    def running(self) -> int:
        return self.starter.on_lanes

    def unfinished(self) -> Collection[Work]:
        """Everything that is held: neither done nor dropped."""
        return self.works.values()


__all__ = ["Catalog", "Commands", "Flow", "FlowSettings"]
