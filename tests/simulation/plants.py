"""Known defects, planted by name: small patches of the product's parts while a seed runs.

Each is a defect that the worker had once (numbers are those of the issue), or one that an invariant exists to catch.
"""

from __future__ import annotations

from base64 import b85decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from penstock.common.shards.heads import Heads
from penstock.gateway.view import lost_requests
from penstock.processors.conversations.log import ConversationLog
from penstock.processors.core.commit import commit, donemap
from penstock.processors.core.commit.commit import Arrival, Commit
from penstock.processors.core.commit.span import CommitSpan
from penstock.processors.core.effects import Chunk, Fetch, PublishDeadLetter, RunEnded, Terminal
from penstock.processors.core.fleet import ledger
from penstock.processors.core.fleet.eviction import Evictions
from penstock.processors.core.fleet.ledger import Ledger, MemoryGrant
from penstock.processors.core.fleet.memory import DeviceMemory
from penstock.processors.core.fleet.replica import Replica
from penstock.processors.core.fleet.run_memory import RunMemory
from penstock.processors.core.fleet.views import PlacementSettings
from penstock.processors.core.flow import Flow
from penstock.processors.core.intake.arriving import Arrivals
from penstock.processors.core.intake.commanding import Commanding, key_of_lost
from penstock.processors.core.intake.intake import Intake
from penstock.processors.core.intake.screening import Screening
from penstock.processors.core.intake.start_times import StartTimes
from penstock.processors.core.intake.unserved import UnservedRequests
from penstock.processors.core.loading.lane_failures import LaneFailures
from penstock.processors.core.loading.placing import Placing
from penstock.processors.core.loading.replicas import Replicas
from penstock.processors.core.loading.view_maker import Views
from penstock.processors.core.outcomes.endings import Endings
from penstock.processors.core.queue.budget import Budget
from penstock.processors.core.queue.lane_queues import LaneQueues
from penstock.processors.core.queue.rereads import Rereads
from penstock.processors.core.queue.scheduler import Scheduler
from penstock.processors.core.requests.admission import MANY, Admission
from penstock.processors.core.requests.explaining import Explainer
from penstock.processors.core.requests.holdings import Holdings
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.streams import Streams
from penstock.processors.core.runs import retry_queue
from penstock.processors.core.runs.attempts import Attempts
from penstock.processors.core.runs.retry_queue import RetryQueue
from penstock.processors.core.runs.suspect_starts import SuspectStarts
from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.processors.core.work.retries import MOST_DEATHS, Requeue, Retry
from penstock.processors.core.work.states import IN_SCHEDULER, OVER, Stage
from penstock.processors.core.work.work import Run, Work
from penstock.processors.kafka.control import ControlBook
from penstock.processors.kafka.lost_logs import LostLogs
from penstock.schemas.errors import Cancelled, EngineFailed
from penstock.schemas.fold import ResultFold
from penstock.schemas.records import WaitingFor
from simulation import membership, talks
from simulation.shared_topic import CopyView, ModelCopy, SharedTopic

Patch = tuple[Any, str, Any]
PLANTS: dict[str, Callable[[], list[Patch]]] = {}


NEEDS: dict[str, frozenset[str]] = {}
"""By plant, the operators and checks that find it, even where they are left out of other runs."""


def plant(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
    """Known under the function's name."""
    PLANTS[make.__name__] = make
    return make


def plant_for(*needs: str) -> Callable[[Callable[[], list[Patch]]], Callable[[], list[Patch]]]:
    """As `plant`, with what must be in the plans to find it."""

    def note(make: Callable[[], list[Patch]]) -> Callable[[], list[Patch]]:
        NEEDS[make.__name__] = frozenset(needs)
        return plant(make)

    return note


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """With this defect, or with none."""
    patches = [] if name is None else PLANTS[name]()
    originals = [(owner, attribute, owner.__dict__[attribute]) for owner, attribute, _ in patches]
    try:
        for owner, attribute, replacement in patches:
            setattr(owner, attribute, replacement)
        yield
    finally:
        for owner, attribute, original in originals:
            setattr(owner, attribute, original)


def _wrap(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Patch:
    return owner, name, make(owner.__dict__[name])


def _without(kind: type) -> Patch:
    """The shell never hears of effects of a kind."""

    def make(take: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def some(self: Flow) -> list[Any]:
            return [effect for effect in take(self) if not isinstance(effect, kind)]

        return some

    return _wrap(Flow, "take_effects", make)


# -- commits


@plant
def commit_before_outcome() -> list[Patch]:
    """The offset counts as done when the outcome is sent, not when the broker has it."""

    def make(take: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def early(self: Flow) -> list[Any]:
            for work in [work for work in self.works.values() if work.stage is Stage.PUBLISHING]:
                self.commit.complete(work.tp, work.key[2])
            return take(self)

        return early

    return [_wrap(Flow, "take_effects", make)]


@plant
def ack_past_a_hole() -> list[Patch]:
    """The newest done offset is committed, whatever is unfinished below it."""

    def head(self: CommitSpan) -> int:
        return min(self._base + self._done.rfind(1) + 1, self.end)

    return [(CommitSpan, "head", property(head))]


@plant
def commit_goes_backwards() -> list[Patch]:
    """What was refused is sent again though more was committed meanwhile."""

    def make(commits: Callable[..., dict[Any, tuple[int, str]]]) -> Callable[..., dict[Any, tuple[int, str]]]:
        def older(self: Commit) -> dict[Any, tuple[int, str]]:
            sent = self.__dict__.setdefault("sent_before", {})
            newest = commits(self)
            again = {tp: sent.get(tp, commit) for tp, commit in newest.items()}
            sent.update(newest)
            return newest if self.__dict__.setdefault("calls", iter(range(1 << 30))).__next__() % 3 else again

        return older

    return [_wrap(Commit, "commits", make)]


@plant
def done_map_copied() -> list[Patch]:
    """The map of an older offset is committed with a newer one."""

    def done_map(self: CommitSpan) -> str:
        head = self.head - self._base
        return donemap.encode_flags(self.head, self._done[max(0, head - 1) :][:-1])

    return [(CommitSpan, "done_map", done_map)]


@plant
def gap_committed_past() -> list[Patch]:
    """A delivery that skips offsets is taken as if they had no record (12)."""

    def make(deliver: Callable[..., None]) -> Callable[..., None]:
        def anyhow(self: CommitSpan, start: int, end: int, offsets: Any) -> None:
            deliver(self, min(start, self.position), end, offsets)

        return anyhow

    return [_wrap(CommitSpan, "deliver", make)]


@plant
def offsets_reset() -> list[Patch]:
    """Offsets that the coordinator could not tell count as none committed (13), in the simulated membership."""

    def make(told: Callable[..., None]) -> Callable[..., None]:
        def as_none(self: Any, generation: int, assigned: Any, offsets: Any) -> None:
            told(self, generation, assigned, ({}, False) if offsets is None else offsets)

        return as_none

    return [_wrap(membership.Membership, "_offsets_told", make)]


# -- readers


@plant
def no_epoch_check() -> list[Patch]:
    """Readers take what comes, of whichever epoch and attempt."""

    def make(apply: Callable[..., Any]) -> Callable[..., Any]:
        def trusting(self: ResultFold, event: Any, offset: int | None = None) -> Any:
            if (event.epoch, event.attempt) < (self.epoch, self.attempt):
                self.epoch, self.attempt = event.epoch, event.attempt
            return apply(self, event, offset)

        return trusting

    return [_wrap(ResultFold, "apply", make)]


@plant
def attempt_used_twice() -> list[Patch]:
    """A run whose words were published begins again under the same number."""

    def make(requeue: Callable[..., None]) -> Callable[..., None]:
        def same(self: Attempts, work: Work, *args: Any) -> None:
            attempt = work.attempt
            requeue(self, work, *args)
            work.attempt = attempt

        return same

    return [_wrap(Attempts, "requeue", make)]


@plant
def dropped_work_publishes() -> list[Patch]:
    """Work of a partition that went elsewhere is told to be cancelled."""

    def make(drop: Callable[..., None]) -> Callable[..., None]:
        def loud(self: Holdings, work: Work) -> None:
            drop(self, work)
            self._emit(Terminal(work.subject, "cancelled", work.klass, work.timings(0.0), None, None))

        return loud

    return [_wrap(Holdings, "drop", make)]


@plant
def fence_ignored() -> list[Patch]:
    """A worker that was thrown out of the group goes on with what it had."""

    def make(assign: Callable[..., Any]) -> Callable[..., Any]:
        def calm(self: Commit, committed: Any, generation: int, *, fenced: bool = False) -> Any:
            self.generation = min(self.generation, generation - 1) if self.generation < 0 else generation - 1
            return assign(self, committed, generation, fenced=False)

        return calm

    return [_wrap(Commit, "assign", make)]


# -- order


@plant
def line_never_released() -> list[Patch]:
    """The conversation stays taken when its turn has ended."""
    return [(Scheduler, "release_conversation", lambda self, line: None)]


@plant
def first_in_first_out_lane() -> list[Patch]:
    """What came first starts first, whatever is more urgent (4)."""

    def candidates(self: Any, lane: str, now: float) -> Iterator[Any]:
        known = self._lanes.get(lane)
        places = [] if known is None else [place for queue in known.queues.values() for place in queue]
        return iter([place.item for place in sorted(places, key=lambda place: place.item.seq)])

    return [(Scheduler, "candidates", candidates)]


@plant
def aged_never_start() -> list[Patch]:
    """There is always something more urgent."""
    return [(Scheduler, "_is_turn_of_aged", lambda self, lane: False)]


@plant
def retry_polls_slot() -> list[Patch]:
    """A retry that is due looks for a free slot now and then, and loses to newer work (6)."""

    def make(tick: Callable[..., None]) -> Callable[..., None]:
        def poll(self: RetryQueue, now: float) -> None:
            for at, (due, seq, work) in enumerate(self._queue):
                if due <= now and not any(one.free_slots > 0 for one in self._lanes[work.lane].ready):
                    self._queue[at] = (now + 0.05, seq, work)
            self._queue.sort()
            tick(self, now)

        return poll

    return [_wrap(RetryQueue, "tick", make)]


@plant
def global_intake_cap() -> list[Patch]:
    """So many requests in all, then nothing more is delivered but the most urgent (2)."""

    def pauses(self: Flow) -> frozenset[Any]:
        full = len(self.works) >= 6
        self._paused = frozenset(tp for tp in self.commit.partitions() if full and "high" not in tp[0])
        return self._paused

    return [(Flow, "pauses", pauses)]


@plant
def grant_before_fit() -> list[Patch]:
    """Slots and tokens are given out before it is known whether they are free."""

    def make(on: Any) -> Any:
        def careless(self: Admission, replica: Replica, work: Work, slots: int, tokens: int, now: float) -> Any:
            return on(self, replica, work, 1, MANY, now)

        return careless

    return [_wrap(Admission, "on", make)]


@plant
def tokens_not_given_back() -> list[Patch]:
    """A run that is over keeps its slot free and its tokens taken."""

    def give_back(self: Replica, work: Work) -> bool:
        self.ahead.pop(work, None)
        return self.holders.pop(work, None) is not None

    return [(Replica, "give_back", give_back)]


# -- endings


@plant
def batch_dies_with_poison() -> list[Patch]:
    """Whoever was on an engine that died has failed (3)."""

    def make(replica_down: Callable[..., None]) -> Callable[..., None]:
        def all_guilty(self: Replicas, name: str, number: int, now: float) -> None:
            running = [work for work in self._lanes[name].holders() if work.stage is Stage.RUNNING]
            replica_down(self, name, number, now)
            for work in running:
                if work.stage is Stage.QUEUED:
                    work.spent += 1
                    if work.spent > (work.max_attempts or MOST_DEATHS):
                        self._attempts._holdings.leave_waiting(work)
                        work.stage = Stage.RUNNING
                        error = EngineFailed("the engine's process died while it ran")
                        self._attempts._endings.letter(work, "replica_down", error)

        return all_guilty

    return [_wrap(Replicas, "down", make)]


@plant
def poison_forgotten() -> list[Patch]:
    """A record that cannot be read is passed over without a dead letter."""

    def make(take: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
        def silent(self: Flow) -> list[Any]:
            effects = take(self)
            unwritten = [one for one in effects if isinstance(one, PublishDeadLetter) and not one.subject.request_id]
            for one in unwritten:
                self.dead_lettered(one.subject, 0.0)
            return [one for one in effects if one not in unwritten]

        return silent

    return [_wrap(Flow, "take_effects", make)]


@plant
def duplicate_not_held() -> list[Patch]:
    """A record that is delivered again is worked on again beside the first."""

    def make(arrive: Callable[..., Arrival]) -> Callable[..., Arrival]:
        def forgetful(self: Commit, tp: Any, offset: int, request_id: str | None, **named: Any) -> Arrival:
            arrival = arrive(self, tp, offset, request_id, **named)
            return Arrival.NEW if arrival is Arrival.HELD else arrival

        return forgetful

    return [_wrap(Commit, "arrive", make)]


@plant
def parked_never_fetched() -> list[Patch]:
    """What is parked stays parked until a turn that never comes."""

    return [_without(Fetch)]


@plant
def journal_not_told() -> list[Patch]:
    """The crash journal never hears that a run is over."""
    return [_without(RunEnded)]


@plant
def plans_for_ever() -> list[Patch]:
    """Each placement asks for the next one at once while work waits: a step never ends (W0)."""

    def make(plan: Callable[..., None]) -> Callable[..., None]:
        def again(self: Placing, now: float) -> None:
            plan(self, now)
            self._dirty.plan_due = len(self._scheduler) > 0

        return again

    return [_wrap(Placing, "plan", make)]


# -- orders, and reasons to wait


@plant_for("load_unload")
def unloaded_for_ever() -> list[Patch]:
    """An order to unload a model that is not loaded keeps it from being loaded ever again (W1)."""

    def make(view: Callable[..., Any]) -> Callable[..., Any]:
        def unwanted(self: Views, lane: Any, now: float) -> Any:
            seen = view(self, lane, now)
            ordered = lane.desired is False and not lane.replicas
            return replace(seen, desired_loaded=False) if ordered else seen

        return unwanted

    return [_wrap(Views, "model", make)]


@plant_for("summary")
def summary_added_nowhere() -> list[Patch]:
    """What takes no turn has its outcome, and its conversation nothing of it."""
    prepared = Attempts.prepared

    def prepared_as_others(self: Attempts, *facts: Any, appends: bool = False, **named: Any) -> None:
        prepared(self, *facts, **named)

    return [(Attempts, "prepared", prepared_as_others)]


@plant_for("pause_suspects")
def suspect_stops_worker() -> list[Patch]:
    """Who must run alone keeps all others waiting, also while its model is paused or takes nothing (W2)."""

    def may_be_alone(self: Any, lane: Any, work: Work, now: float) -> bool:
        return bool(self._admission.is_waiting(lane, work))

    return [(SuspectStarts, "may_be_alone", may_be_alone)]


@plant_for("change_models")
def removed_still_waited_for() -> list[Patch]:
    """What waits for a model that is removed goes on waiting for it (W3)."""

    return [(LaneFailures, "_end_removed", lambda self, lane, now: False)]


@plant_for("retention")
def vanished_without_outcome() -> list[Patch]:
    """A parked request whose record has vanished is let go of without a word (W4)."""

    def gone(self: Arrivals, key: Any, now: float) -> None:
        work = self._registry.works.get(key)
        if work is not None and work.stage is Stage.FETCHING:
            offsets: Any = self._unserved._leaves
            offsets.__self__.complete(work.tp, work.key[2])
            self._holdings.drop(work)

    return [(Arrivals, "gone", gone)]


@plant_for("delete_conversation", "questions")
def answered_after_deletion() -> list[Patch]:
    """The worker does not follow the deletion of a conversation, and writes to any topic of its name (W7)."""

    def make(append: Callable[..., bool]) -> Callable[..., bool]:
        def anyhow(self: talks.Talks, line: str, *args: Any) -> bool:
            self.open(line, self.topic_id(line))
            return append(self, line, *args)

        return anyhow

    return [
        (talks.Talks, "topic_id", lambda self, line, view=None: line),
        _wrap(talks.Talks, "append", make),
        (Commanding, "_cancel_turns", lambda self, command, now: None),
        (Screening, "_conversation_was_deleted", lambda self, read: False),
    ]


@plant_for("fork_conversation", "delete_conversation")
def fork_follows_its_parent() -> list[Patch]:
    """A fork has what is said in its parent after it was made."""
    return [(ConversationLog, "is_within", lambda self, offset: True)]


@plant_for("sharded")
def newest_record_not_waited_for() -> list[Patch]:
    """A worker's copy counts as caught up while it lacks the newest record of the shared topic."""

    class Behind(ModelCopy):
        def end(self, partition: int) -> int:
            return super().end(partition) - 1

    return [(SharedTopic, "view", lambda self: CopyView(Behind(self.logs)))]


@plant_for("sharded", "churn", "questions")
def old_id_when_begun_again() -> list[Patch]:
    """A conversation that is begun again in the shared topic has the id of the one before it."""

    def make(apply: Callable[..., None]) -> Callable[..., None]:
        def as_first(self: Heads, conversation: str, key: bytes, offset: int, *, is_tombstone: bool) -> None:
            first = self.__dict__.setdefault("first_heads", {}).setdefault(conversation, offset)
            apply(self, conversation, key, first, is_tombstone=is_tombstone)

        return as_first

    return [_wrap(Heads, "apply", make)]


@plant_for("sharded", "churn", "questions")
def counts_behind_a_gone_head() -> list[Patch]:
    """A tombstone does not end a conversation in the shared topic: what is written behind it counts."""

    def make(apply: Callable[..., None]) -> Callable[..., None]:
        def for_good(self: Heads, *head: Any, is_tombstone: bool) -> None:
            if not is_tombstone:
                apply(self, *head, is_tombstone=False)

        return for_good

    return [_wrap(Heads, "apply", make)]


@plant_for("add_partitions")
def counts_of_the_start() -> list[Patch]:
    """A worker never learns of new partitions, and moves records that were moved already (W10)."""

    def make(belongs_on: Callable[..., int | None]) -> Callable[..., int | None]:
        def anyway(self: Intake, line: str, place: Any, *, moved: bool) -> int | None:
            return belongs_on(self, line, place, moved=False)

        return anyway

    return [
        (Intake, "learn_partitions", lambda self, counts, asked_at_ms: None),
        _wrap(Intake, "_belongs_on", make),
    ]


@plant_for("blame")
def journal_blames_finished() -> list[Patch]:
    """The crash journal hears that a request runs no more only when the broker has its outcome (W8)."""

    def make(transition: Callable[..., None]) -> Callable[..., None]:
        def late(self: Registry, work: Work, event: str, after: Stage) -> None:
            emit, before = self._emit, work.stage
            if before is Stage.RUNNING and after not in OVER:
                self._emit = lambda effect: None
            transition(self, work, event, after)
            self._emit = emit
            if event == "delivered":
                emit(RunEnded(work.first_key, work.request_id))

        return late

    return [_wrap(Registry, "transition", make)]


@plant_for("slack", "pause_class", "standing_orders")
def paused_class_keeps_slack() -> list[Patch]:
    """Low work leaves slots free for a class that is paused (W9)."""

    def strict(self: LaneQueues[Any], paused: Any) -> str | None:
        return next((klass for klass, queue in self.queues.items() if queue), None)

    return [(LaneQueues, "strict", strict)]


@plant_for("reasons")
def false_reason() -> list[Patch]:
    """Who waits for those before it is told that its model is being loaded."""
    return [_says("class", "model_loading")]


@plant_for("reasons", "pause_class", "pause_model", "standing_orders")
def false_paused() -> list[Patch]:
    """Who is paused is told to wait for those before it."""
    return [_says("paused", "class")]


def _says(reason: str, false: str) -> Patch:
    def make(explain: Callable[..., WaitingFor]) -> Callable[..., WaitingFor]:
        def other(*arguments: Any) -> WaitingFor:
            waiting = explain(*arguments)
            return replace(waiting, reason=false) if waiting.reason == reason else waiting

        return other

    return _wrap(Explainer, "explain", make)


# -- what stands on a log already


@plant_for("answers")
def ended_without_look_up() -> list[Patch]:
    """A turn that ends without having run is not looked up in its conversation, where its answer may stand."""

    def end(self: Endings, work: Work, event: str, error: Any, now: float) -> None:
        self.settle(work, event, now, error=error)

    return [(Endings, "end", end)]


@plant_for("answers_of_letters")
def lettered_without_look_up() -> list[Patch]:
    """As `ended_without_look_up`, of turns that get a dead letter."""

    letter = Endings.letter

    def unlooked(self: Endings, work: Work, event: str, error: Any) -> None:
        work.begun = True
        letter(self, work, event, error)

    return [(Endings, "letter", unlooked)]


@plant_for("answers", "answers_of_letters")
def failed_attempts_without_look_up() -> list[Patch]:
    """A turn whose engine dies before its run has begun ends by that, whatever stands in its conversation."""
    failed = Attempts.attempt_failed

    def unlooked(self: Attempts, work: Work, event: str, error: Any, now: float, *, again: bool) -> None:
        work.begun = True
        failed(self, work, event, error, now, again=again)

    return [(Attempts, "attempt_failed", unlooked)]


@plant_for("answers")
def unkept_without_look_up() -> list[Patch]:
    """A failure after the answer was appended ends the request as failed."""

    def end(self: Endings, work: Work, event: str, keep: Any, error: Any, now: float) -> None:
        self.settle(work, event, now, error=error)

    return [(Endings, "end_awaiting_store", end)]


@plant_for("delete_records")
def lost_not_asked_for() -> list[Patch]:
    """No gateway asks for the end of a request whose record is gone, which no worker holds (W4)."""

    return [(lost_requests, "overdue", lambda entries, owned, now_ms: ())]


@plant_for("delete_records", "lose_end", "moved_offsets")
def passed_over_forgotten() -> list[Patch]:
    """No gateway asks for the end of a request whose record stands where no worker reads any more."""

    return [(lost_requests, "passed_over", lambda found, now_ms: [])]


@plant
def old_class_after_a_run() -> list[Patch]:
    """A new priority is forgotten that came while its request ran, or waited for its next attempt."""

    def make(reprioritize: Any) -> Any:
        def of_queued_ones(self: Commanding, work: Work, priority: int, now: float) -> None:
            if work.stage in IN_SCHEDULER:
                reprioritize(self, work, priority, now)

        return of_queued_ones

    return [_wrap(Commanding, "_reprioritize", make)]


@plant_for("delete_records")
def lost_not_ended() -> list[Patch]:
    """The owner of the partition does not end a request whose record is gone (W4)."""

    return [(Commanding, "_end_lost", lambda self, command, now: None)]


@plant_for("lose_end")
def lost_end_unnoticed() -> list[Patch]:
    """At an assignment nobody asks whether the log is shorter than the commit, or than what was read of it."""

    def at_assignment(self: LostLogs, kafka: Any, committed: Any, wait: Any) -> Any:
        return committed

    return [(LostLogs, "at_assignment", at_assignment)]


@plant_for("lose_end")
def read_end_forgotten() -> list[Patch]:
    """A member that gets its partition back does not know up to where it had read its log."""

    def has_read(self: LostLogs, tp: Any, end: int, committed: Any) -> None:
        """Nothing is remembered."""

    return [(LostLogs, "has_read", has_read)]


@plant_for("add_partitions")
def taken_again_as_moved() -> list[Patch]:
    """A record that is held, and delivered again after partitions were added, is moved as if it were new."""
    return [(commit, "_other_name", lambda *place, leaves: None)]


@plant
def duplicates_of_dropped_finish() -> list[Patch]:
    """Duplicates of work that is let go of at an assignment count as done."""

    def make(drop: Callable[..., Any]) -> Callable[..., Any]:
        def finished(self: Commit, entry: Any) -> Any:
            for partition, duplicate in commit._held_duplicates(self._partitions, entry):
                self._finish(duplicate.key[:2], partition, duplicate)
            return drop(self, entry)

        return finished

    return [_wrap(Commit, "_drop", make)]


@plant_for("moved_offsets")
def kept_without_reopen() -> list[Patch]:
    """Work goes on whose offset was committed by another, and its offset counts as done."""

    def kept(partition: Any, committed: int, metadata: str) -> Any:
        if partition is None:
            return commit._Partition(committed, metadata)
        if committed >= partition.committed:
            partition.committed, partition.metadata = committed, metadata
        partition.span.resume(committed)
        partition.proposed = None
        return partition

    return [(commit, "_kept", kept)]


@plant_for("foreign_metadata")
def checksum_ignored() -> list[Patch]:
    """Any metadata that looks like a done map is taken for one."""

    def decode_flags(base: int, text: str) -> bytes:
        if text[:2] not in {"1r", "1b"}:
            return b""
        body = b85decode(text[2:])[4:]
        if text.startswith("1r"):
            return donemap._flags_of_runs(body)
        bits = int.from_bytes(body, "little")
        return f"{bits:b}".encode()[::-1].translate(bytes.maketrans(b"01", b"\x00\x01")).rstrip(b"\x00")

    return [(donemap, "decode_flags", decode_flags)]


# -- cancels


def _cancel_unheard(stage: Stage) -> Callable[[], list[Patch]]:
    """A cancel changes nothing for requests in one stage."""

    def make(cancel: Callable[..., None]) -> Callable[..., None]:
        def unless(self: Commanding, work: Work, *facts: Any) -> None:
            if work.stage is not stage:
                cancel(self, work, *facts)

        return unless

    return lambda: [_wrap(Commanding, "_cancel", make)]


for _stage in (*sorted(IN_SCHEDULER), Stage.BEGINNING, Stage.RUNNING, Stage.RETRYING, Stage.AWAITING_STORE):
    PLANTS[f"cancel_unheard_{_stage}"] = _cancel_unheard(_stage)


@plant
def cancel_unheard_at_arrival() -> list[Patch]:
    """A request that arrives after its cancel is taken."""
    return [(ControlBook, "cancelled", lambda self, tenant, request_id: None)]


@plant
def erasure_forgotten() -> list[Patch]:
    """A request that is delivered again after its erasure runs."""
    return [(ControlBook, "erasure", lambda self, tenant, request_id, append_time_ms: None)]


@plant
def cancel_of_turns_unheard() -> list[Patch]:
    """The turns of a deleted conversation run."""
    return [(Commanding, "_cancel_turns", lambda self, command, now: None)]


@plant
def cancelled_run_goes_on() -> list[Patch]:
    """A cancelled request ends, and its engine is not told to stop."""

    def stop_run(self: Holdings, work: Work) -> None:
        self.give_back(work)

    return [(Holdings, "stop_run", stop_run)]


@plant
def fetched_to_end_runs() -> list[Patch]:
    """A parked request that is cancelled is read again, and then queued."""

    def make(fetched: Callable[..., None]) -> Callable[..., None]:
        def forgets(self: Arrivals, key: Any, *facts: Any) -> None:
            work = self._registry.works.get(key)
            if work is not None and isinstance(work.end_with, Cancelled):
                work.end_with = None
            fetched(self, key, *facts)

        return forgets

    return [_wrap(Arrivals, "fetched", make)]


# -- streams


def _every_chunk(**wrong: Callable[[Chunk], Any]) -> Callable[[], list[Patch]]:
    """Each chunk but the first of a run has something wrong."""

    def make(init: Callable[..., None]) -> Callable[..., None]:
        def spoiling(self: Streams, emit: Callable[[Chunk], None], linger_s: float) -> None:
            def spoiled(chunk: Chunk) -> None:
                changes = {name: value(chunk) for name, value in wrong.items()} if chunk.first_token_index else {}
                emit(replace(chunk, **changes))

            init(self, spoiled, linger_s)

        return spoiling

    return lambda: [_wrap(Streams, "__init__", make)]


PLANTS["chunk_index_stands_still"] = _every_chunk(first_token_index=lambda chunk: 0)
PLANTS["chunk_index_off_by_one"] = _every_chunk(first_token_index=lambda chunk: chunk.first_token_index + 1)
PLANTS["chunk_text_twice"] = _every_chunk(text=lambda chunk: chunk.text * 2)
PLANTS["chunk_without_its_end"] = _every_chunk(text=lambda chunk: chunk.text[:-1])
PLANTS["chunk_without_a_token"] = _every_chunk(token_ids=lambda chunk: chunk.token_ids[:-1])
PLANTS["chunk_with_another_token"] = _every_chunk(token_ids=lambda chunk: [1, *chunk.token_ids[1:]])
PLANTS["chunk_logprobs_from_the_start"] = _every_chunk(first_logprob_index=lambda chunk: 0)


def _told(**wrong: Callable[[PublishedPrefix], Any]) -> Callable[[], list[Patch]]:
    """What a run goes on from has something wrong."""

    def make(go_on_from: Any) -> Any:
        def spoiled(run: Run, told: PublishedPrefix) -> None:
            go_on_from.__func__(run, replace(told, **{name: value(told) for name, value in wrong.items()}))

        return staticmethod(spoiled)

    return lambda: [_wrap(Streams, "go_on_from", make)]


PLANTS["continued_without_tokens"] = _told(token_ids=lambda told: ())
PLANTS["continued_without_text"] = _told(text=lambda told: "")
PLANTS["continued_since_nowhere"] = _told(since=lambda told: (told.since[0], told.since[1] + 1))


# -- who may


@plant
def lost_ended_by_anybody() -> list[Patch]:
    """Each worker ends a request whose record is lost."""

    def make(end_lost: Callable[..., None]) -> Callable[..., None]:
        def anybody(self: Commanding, command: Any, now: float, partitions: Any) -> None:
            key = key_of_lost(command)
            end_lost(self, command, now, {key[:2]} if key is not None else ())

        return anybody

    return [_wrap(Commanding, "_end_lost", make)]


def _kept(*stages: Stage) -> Callable[[], list[Patch]]:
    """An assignment takes the partition away, and the request stays."""

    def make(drop: Callable[..., None]) -> Callable[..., None]:
        def unless(self: Holdings, work: Work) -> None:
            if work.stage not in stages:
                drop(self, work)

        return unless

    return lambda: [_wrap(Holdings, "drop", make)]


PLANTS["kept_while_retrying"] = _kept(Stage.RETRYING)
PLANTS["kept_while_running"] = _kept(Stage.RUNNING)
PLANTS["kept_while_queued"] = _kept(*IN_SCHEDULER)


# -- deadlines


def _decides(**wrong: Any) -> Callable[[], list[Patch]]:
    """An attempt that failed is decided upon without its deadline."""

    def make(decide: Callable[..., Any]) -> Callable[..., Any]:
        def without(error: Any, tries: Any, now: float, deadline: float | None, settings: Any) -> Any:
            asked = decide(error, tries, now, None, settings)
            return asked if isinstance(asked, wrong["kind"]) else decide(error, tries, now, deadline, settings)

        return without

    return lambda: [(retry_queue, "decide", make(retry_queue.decide))]


PLANTS["retried_past_deadline"] = _decides(kind=Retry)
PLANTS["put_back_past_deadline"] = _decides(kind=Requeue)


# -- times to start


@plant
def starts_before_its_time() -> list[Patch]:
    """The clock of those who wait for a time is ahead."""

    def make(tick: Callable[..., None]) -> Callable[..., None]:
        return lambda self, now, wall_ms, lags_below: tick(self, now, wall_ms + 200, lags_below)

    return [_wrap(StartTimes, "tick", make)]


@plant
def holds_back_its_partition() -> list[Patch]:
    """What is to start later is never written again."""
    return [(Commit, "lags_below", lambda self, tp: -1)]


# -- memory


@plant
def leaked_grant() -> list[Patch]:
    """A replica whose process died, or that was unloaded, keeps its memory in the books."""

    def release(self: DeviceMemory, replica: Replica) -> None:
        replica.grant = None

    return [(DeviceMemory, "release", release)]


@plant
def evict_without_hysteresis() -> list[Patch]:
    """Who waits for memory gets it at once from whoever holds it, however short that one's turn was."""
    return [
        (PlacementSettings, "turn_s", lambda self, view: 0.0),
        (Evictions, "_resided", lambda self, view, replica: True),
        (Evictions, "_idle_enough", lambda self, view, replica, rank, **named: True),
    ]


@plant
def grant_before_observing() -> list[Patch]:
    """A device that nobody has measured counts as empty."""

    def make(init: Callable[..., None]) -> Callable[..., None]:
        def known(self: Ledger, *args: Any, **named: Any) -> None:
            init(self, *args, **named)
            for capacity in self.devices():
                self.observe(capacity.device, 0)

        return known

    return [_wrap(Ledger, "__init__", make)]


@plant
def grown_beyond_device() -> list[Patch]:
    """A grant grows by what was measured, whether that is free or not."""

    def resize(self: Ledger, grant: MemoryGrant, device: str, need_bytes: int, now: float) -> bool:
        self._devices[device].set_held(grant.number, need_bytes)
        return True

    return [(Ledger, "resize", resize)]


def _room(free_for: Callable[[Any], int]) -> Callable[[], list[Patch]]:
    """More of a device counts as free than is."""
    return lambda: [(ledger._Device, "free_for", lambda self, owner, now: free_for(self) if self.observed else 0)]


PLANTS["granted_what_others_use"] = _room(lambda one: one.capacity.limit_bytes - one.reserved_bytes)
PLANTS["granted_the_reserve"] = _room(lambda one: one.capacity.total_bytes - one.taken_bytes)


@plant
def runs_without_memory() -> list[Patch]:
    """A run takes memory of its device, and no grant says so."""
    return [(RunMemory, "grant", lambda self, replica, work, now: None)]


@plant
def reserved_said_wrong() -> list[Patch]:
    """What is reserved is counted wrong when a grant changes."""

    def make(resize: Callable[..., bool]) -> Callable[..., bool]:
        def forgets(self: Ledger, grant: MemoryGrant, device: str, need_bytes: int, now: float) -> bool:
            done = resize(self, grant, device, need_bytes, now)
            self._devices[device].reserved_bytes -= 1
            return done

        return forgets

    return [_wrap(Ledger, "resize", make)]


# -- bytes


@plant
def bytes_kept_beyond_share() -> list[Patch]:
    """The bytes of each record that is delivered stay in memory."""

    def always(self: Budget, klass: str, lane: str, size: int) -> bool:
        self.register(lane)
        self.keep_body(klass, lane, size)
        return True

    return [(Budget, "try_keep_body", always)]


@plant
def bytes_read_again_beyond_share() -> list[Patch]:
    """Parked records are read again though others have all the room."""
    return [(Budget, "room", lambda self, klass, lane: 1 << 40)]


@plant
def bytes_read_again_to_end() -> list[Patch]:
    """All that ends while it is parked is read again at once."""

    def make(init: Callable[..., None]) -> Callable[..., None]:
        return lambda self, emit, limit_bytes: init(self, emit, 1 << 40)

    return [_wrap(Rereads, "__init__", make)]


# -- models that others serve


@plant_for("rollout")
def ends_what_others_serve() -> list[Patch]:
    """A worker ends each request whose model it does not serve."""

    def resolve(self: UnservedRequests, work: Work, model: str | None, payload: dict[str, Any], wall_ms: int) -> None:
        work.lane, work.model_reason = self._catalog.resolve(work.task, model)

    return [(UnservedRequests, "resolve", resolve)]


@plant_for("rollout")
def copy_that_comes_back_is_a_duplicate() -> list[Patch]:
    """A record that was passed on keeps its name: its copy ends with it where both meet."""
    return [(Commit, "leaves", lambda self, tp, offset: None)]


@plant_for("rollout")
def ends_what_others_could_load() -> list[Patch]:
    """A worker ends each turn whose model it cannot load."""
    return [(UnservedRequests, "keep_unloadable", lambda self, work, error, now: False)]
