"""What the checks read of a flow's parts. Nothing else in the simulator reaches behind the flow's events and effects.

A flow that is built in another way changes this file, and the planted defects.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.common.desired import DesiredRecord
from penstock.common.model_entry import ModelEntry
from penstock.processors.core.fleet.lane import Lane
from penstock.processors.core.fleet.ledger import MemoryGrant
from penstock.processors.core.fleet.replica import Replica, ReplicaState
from penstock.processors.core.flow import Flow
from penstock.processors.core.queue import scheduler
from penstock.processors.core.requests import registry
from penstock.processors.core.runs.starting import RESERVE_AFTER_S
from penstock.processors.core.work.states import Transition
from penstock.processors.core.work.work import Subject, Work
from penstock.processors.models.desired_models import DesiredModels, OrderTarget
from penstock.schemas.topics import TP

GrantSeen = Callable[[Lane, Replica, Work, float], None]


@contextmanager
def ends_per_partition(most: int) -> Iterator[None]:
    """So many ends under way pause a partition, in every flow."""
    before, registry.ENDINGS_PER_PARTITION = registry.ENDINGS_PER_PARTITION, most
    try:
        yield
    finally:
        registry.ENDINGS_PER_PARTITION = before


def desired_models(entries: Sequence[ModelEntry], target: OrderTarget) -> Callable[[Sequence[DesiredRecord]], None]:
    """What carries orders out over the configured models; it takes records of the topic of orders."""
    return DesiredModels(entries, None, target).on_records


class Inside:
    """The parts of one flow, to be read; and callbacks where a check must look before or after something happens."""

    aged_tried = scheduler.AGED_TRIED
    """So many aged requests are tried before what is more urgent."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._before_grant: list[GrantSeen] = []
        self._starts_ungranted: list[Callable[[Work], None]] = []
        self._when_held: list[Callable[[Work], None]] = []
        self._granting = False
        self._held: dict[int, Work] = {}
        self._remember_held()
        self._wrap_grants()

    def note_transitions(self, seen: set[Transition]) -> None:
        self._flow.registry.transitions = seen

    # -- requests

    def _remember_held(self) -> None:
        hold = self._flow.registry.hold

        def remember(work: Work) -> None:
            self._held[work.number] = work
            hold(work)
            for look in self._when_held:
                look(work)

        self._flow.registry.hold = remember

    def work_of(self, subject: Subject) -> Work:
        """The request that an effect is about, also after its end."""
        return self._held[subject.seq]

    def outputs_fill_memory(self) -> bool:
        """Whether finished outputs that nobody has taken yet have all the memory that they may have."""
        return sum(work.output_bytes for work in self.works()) >= self._flow.registry.most_output_bytes

    def works(self) -> Collection[Work]:
        """All requests that are held."""
        return self._flow.works.values()

    @staticmethod
    def need_tokens(work: Work) -> int:
        """Tokens of its engine's cache, as far as that is known."""
        return 0 if work.run is None else work.run.need_tokens

    @staticmethod
    def replica_number(work: Work) -> int | None:
        """The replica that prepares it, or runs it."""
        return None if work.run is None else work.run.replica

    @staticmethod
    def was_granted(work: Work) -> bool:
        return work.run is not None and work.run.granted_at is not None

    # -- the queue

    def queued(self) -> int:
        return len(self._flow.scheduler)

    def eligible(self, work: Work) -> bool:
        """Whether no other turn of its conversation stands before it."""
        return self._flow.scheduler.eligible(work)

    def ahead(self, model: str, klass: str) -> list[Work]:
        """Those of a class that may start, in their order."""
        return self._flow.scheduler.fronts.ahead(model, klass, len(self.works()))

    def paused_classes(self) -> Collection[str]:
        return self._flow.scheduler.fronts.paused

    def parked(self) -> int:
        return sum(sum(lane.parked.values()) for lane in self._flow.lanes.values())

    def budget_bytes(self) -> int:
        return self._flow.budget.used_bytes

    # -- models

    def lanes(self) -> Iterable[Lane]:
        return self._flow.lanes.values()

    def replicas(self) -> Iterator[Replica]:
        for lane in self._flow.lanes.values():
            yield from lane.replicas.values()

    def replica(self, model: str, number: int) -> Replica | None:
        lane = self._flow.lanes.get(model)
        return None if lane is None else lane.replicas.get(number)

    def holders(self) -> list[Work]:
        """Requests that hold a slot, of all models."""
        return [work for replica in self.replicas() for work in replica.holders]

    def granted(self) -> int:
        """As the flow counts them."""
        return self._flow.grants.held

    def alone(self) -> Work | None:
        """The request that keeps all others waiting because it must run by itself."""
        return self._flow.claim.holder

    def replicas_of(self, model: str) -> Collection[Replica]:
        lane = self._flow.lanes.get(model)
        return [] if lane is None else lane.replicas.values()

    def taking_replicas(self, model: str) -> list[tuple[str, int]]:
        """Those that are loaded and not being given up."""
        return [(model, one.number) for one in self.replicas_of(model) if one.state is ReplicaState.READY]

    def room_for(self, work: Work, now: float) -> bool:
        """Whether a replica has a slot, tokens and memory for it, and is kept for nobody else."""
        need = max(self.need_tokens(work), 1)
        return any(
            one.state is ReplicaState.READY
            and now >= one.busy_until
            and (one.exclusive is None or one.exclusive is work.group)
            and one.free_slots > 0
            and (one.free_tokens is None or one.free_tokens >= need)
            and self.memory_is_free(one, work, now)
            for one in self.replicas_of(work.lane)
        )

    def others_must_end_first(self, work: Work) -> bool:
        """Whether it may not run beside what runs now."""
        if work.alone:
            return bool(self.holders())
        if work.group is not None and self._flow.scheduler.fronts.first(work.lane) not in work.group.members:
            return True  # suspects go apart when it is the turn of one of them
        return work.group is not None and all(
            any(holder.group is not work.group for holder in one.holders)
            for one in self.replicas_of(work.lane)
            if one.exclusive in (None, work.group)
        )

    def describe_room(self, work: Work) -> str:
        free = [f"{one.free_slots} of {one.slots} slots" for one in self.replicas_of(work.lane)]
        return f"its model has {', '.join(free)} free"

    def is_paced(self, work: Work, now: float) -> bool:
        """Whether low work keeps its distance from the start before it."""
        due_at = self._flow.scheduler.slack.of(work.lane).due_at
        return work.klass == "low" and due_at is not None and due_at > now

    # -- memory

    def devices_for(self, work: Work, now: float) -> list[str]:
        """Where its run may get memory: devices of replicas with room for it, kept for nobody else; else all.
        Suspects of a group run on one replica: where one runs, the others wait for that one's device, unless all of its
        slots are taken.
        """
        group, need = work.group, 0 if work.run is None else work.run.need_tokens
        beside = [one for one in self.replicas_of(work.lane) if group is not None and one.exclusive is group]
        own = {
            device
            for one in (
                beside if any(one.holders and one.free_slots > 0 for one in beside) else self.replicas_of(work.lane)
            )
            if one.state is ReplicaState.READY
            and one.free_slots > 0
            and now >= one.busy_until
            and (one.free_tokens is None or need <= one.free_tokens)
            and (one.exclusive is None or one.exclusive is work.group)
            for device in one.devices
        }
        devices = [one.device for one in self._flow.ledger.devices()]
        too_small = self._flow.lanes[work.lane].too_small
        return [device for device in devices if (device in own if own else device not in too_small)] or devices

    def kept_for_first(self, work: Work, now: float) -> Collection[str]:
        """Devices of a replica that is kept for the first of its queue, which has waited for its cache for a second."""
        first = next(iter(self._flow.scheduler.candidates(work.lane, now)), None)
        if first is None or first is work or first.blocked_at is None or now - first.blocked_at < RESERVE_AFTER_S:
            return ()
        replica = self._flow.lanes[work.lane].replica_of(first)
        return () if replica is None else replica.devices

    def reserved_for(self, device: str, now: float) -> str | None:
        """For whom room is kept there."""
        kept = self._flow.ledger.reservation(device, now)
        if kept is not None:
            return kept[0]
        waiters = self._flow.run_memory.waiters.values()
        return next((waiter.owner for waiter in waiters if waiter.device == device), None)

    def memory_is_free(self, replica: Replica, work: Work, now: float) -> bool:
        return self._flow.run_memory.is_free(replica, work, now)

    def grants(self) -> list[MemoryGrant]:
        return self._flow.ledger.grants()

    def grants_of(self, replica: Replica) -> list[MemoryGrant]:
        """Of the replica itself, and of the runs on it."""
        runs = [work.run.grant for work in replica.holders if work.run is not None and work.run.grant is not None]
        return runs if replica.grant is None else [replica.grant, *runs]

    def reserved_bytes(self, device: str) -> int:
        return self._flow.ledger.reserved_bytes(device)

    def limit_bytes(self, device: str) -> int:
        return self._flow.ledger.limit_bytes(device)

    def evictions(self) -> int:
        return self._flow.lifecycle.evictions

    # -- offsets

    def in_flight(self) -> int:
        return self._flow.commit.inflight

    def span(self, tp: TP) -> int:
        partition = self._flow.commit._partitions.get(tp)
        return 0 if partition is None else partition.span.end - partition.span.head

    def check_offsets(self) -> None:
        """The invariants of their owner."""
        self._flow.commit.check()

    def check_counts(self) -> None:
        """The invariants between the owners."""
        self._flow.check()

    def delivered_up_to(self, tp: TP) -> int:
        """The offset behind all that was delivered of a partition that it has, in this assignment or before it."""
        partition = self._flow.commit._partitions.get(tp)
        return 0 if partition is None else partition.span.end

    def full(self, tp: TP) -> bool:
        """Whether a partition has run far enough ahead, or holds as many bytes as it may."""
        return self._flow.commit.full(tp) or self._flow.budget.full(tp)

    def fills_span(self, work: Work) -> bool:
        """Whether its partition delivers no more because this one is not done."""
        return self._flow.commit.full(work.tp) and self._flow.commit._partitions[work.tp].span.head == work.key[2]

    def counts_as_done(self, work: Work) -> bool:
        """Whether its offset is committed, or said to be done, as if the request had its outcome."""
        partition = self._flow.commit._partitions.get(work.tp)
        if partition is None or not work.lane:  # it ends one whose record is gone, and holds no offset
            return False
        return partition.span.done(work.key[2])

    def ends_under_way(self, tp: TP | None = None) -> int:
        """Ends of requests that the broker has not acknowledged yet."""
        ends = self._flow.registry.endings
        return sum(ends.values()) if tp is None else ends[tp]

    # -- callbacks

    def when_held(self, look: Callable[[Work], None]) -> None:
        """A request is held from now on."""
        self._when_held.append(look)

    def when_read_again(self, look: Callable[[list[Work]], None]) -> None:
        """Parked requests are asked for because their turn is near; `look` sees the queue as it is at that moment."""
        fetching, works = self._flow.placing._starter._fetching, self._flow.works
        emit = fetching._emit

        def asked(effect: Any) -> None:
            look([works[(*effect.tp, offset)] for offset in effect.offsets])
            emit(effect)

        fetching._emit = asked

    def before_each_grant(self, look: GrantSeen) -> None:
        self._before_grant.append(look)

    def when_started_ungranted(self, look: Callable[[Work], None]) -> None:
        """A request leaves the queue as started, without a slot."""
        self._starts_ungranted.append(look)

    def at_each_change_of_memory(self, look: Callable[[int, str, dict[str, int]], None]) -> None:
        """`look` is told the number and the owner of a grant, and by device what it holds from now on."""
        ledger = self._flow.ledger
        grant, resize, release = ledger.grant, ledger.resize, ledger.release

        def granted(
            owner: str, needs: dict[str, int], now: float, *, reserved_as: str | None = None
        ) -> MemoryGrant | None:
            given = grant(owner, needs, now, reserved_as=reserved_as)
            if given is not None:
                look(given.number, owner, dict(needs))
            return given

        def resized(given: MemoryGrant, device: str, need_bytes: int, now: float) -> bool:
            done = resize(given, device, need_bytes, now)
            if done:
                look(given.number, given.owner, {device: need_bytes})
            return done

        def released(given: MemoryGrant) -> None:
            release(given)
            look(given.number, given.owner, dict.fromkeys(given.needs, 0))

        ledger.grant, ledger.resize, ledger.release = granted, resized, released  # pyright: ignore[reportAttributeAccessIssue]

    def at_each_round(self, look: Callable[[str], None]) -> None:
        """`look` is told of each step, each look at a model and each placement, by what it is."""
        flow = self._flow
        step, fill, plan = flow.step, flow.placing.fill_or_load, flow.placing.plan

        def stepped(now: float) -> None:
            look("step")
            step(now)

        def filled(lane: Lane, now: float) -> None:
            look(f"look at {lane.name}")
            fill(lane, now)

        def planned(now: float) -> None:
            look("placement")
            plan(now)

        flow.step, flow.placing.fill_or_load, flow.placing.plan = stepped, filled, planned

    def _wrap_grants(self) -> None:
        grants, queue = self._flow.grants, self._flow.scheduler
        grant, start = grants.grant, queue.start

        def granted(lane: Lane, work: Work, replica: Replica, now: float) -> None:
            for look in self._before_grant:
                look(lane, replica, work, now)
            self._granting = True
            grant(lane, work, replica, now)
            self._granting = False

        def started(work: Work, now: float, tokens: int = 0) -> None:
            if not self._granting:
                for look in self._starts_ungranted:
                    look(work)
            start(work, now, tokens)

        grants.grant = granted
        queue.start = started  # pyright: ignore[reportAttributeAccessIssue]
