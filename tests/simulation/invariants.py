"""The promises of DESIGN §2, checked while a cluster runs. A violation names its invariant and says what is wrong."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from penstock.processors.core import effects as ask
from penstock.processors.core.commit import donemap
from penstock.processors.core.fleet.lane import UNSERVED
from penstock.processors.core.fleet.ledger import CannotLoad
from penstock.processors.core.intake.commanding import MAY_WAIT
from penstock.processors.core.queue.budget import FACT_BYTES
from penstock.processors.core.work.peers import Wanted
from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.processors.core.work.states import IN_SCHEDULER, ON_LANE, OVER, Stage
from penstock.processors.core.work.work import Work, WorkKey
from penstock.schemas.errors import PenstockError
from penstock.schemas.records import ControlCommand
from penstock.schemas.topics import priority_class
from simulation.consumer import INBOX_BATCHES, MOST_RECORDS
from simulation.devices import Memory
from simulation.grants import Grants
from simulation.log import TP
from simulation.reasons import Reasons
from simulation.requests import Requests
from simulation.truth import Accepted, Subject, Violation

if TYPE_CHECKING:
    from simulation.cluster import Cluster
    from simulation.engines import Engine, EngineRun
    from simulation.workers import Life

LOOK_EACH = 16
"""Steps between two looks at what is bounded."""
COUNT_EACH = 10 * LOOK_EACH
"""What is counted wrongly stays so: it is looked at less often."""
IN_FLIGHT_BYTES = 2 * INBOX_BATCHES * MOST_RECORDS * FACT_BYTES
"""What is delivered already, when a partition is held because the budget is full, is taken all the same."""
ROUNDING_S = 1e-6
ABSENT_ROUNDING_S = 0.7
"""A request that waits is looked at each half second, and workers report each 0.3 s."""
PUBLISHES = (
    ask.Chunk,
    ask.PublishDeadLetter,
    ask.Prepare,
    ask.Begin,
    ask.Start,
    ask.StoreOutput,
    ask.CheckForAnswer,
    ask.Republish,
)


class Checks:
    """Called by the cluster where something happens that an invariant speaks of."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._committed: dict[TP, int] = {}
        self._passed: dict[TP, set[int]] = {}
        self._lost_ends: set[TP] = set()
        self._grants: dict[Life, Grants] = {}
        self._memory: dict[Life, Memory] = {}
        self._requests: dict[Life, Requests] = {}
        self._reasons: dict[Life, Reasons] = {}
        self._due: dict[Work, float] = {}
        self._judged: set[Work] = set()
        """Requests that fail for want of their model."""

    def watch(self, life: Life) -> None:
        """Look at every grant of a new worker before it is made."""
        self._grants[life] = Grants(life)
        self._memory[life] = Memory(life)
        self._requests[life] = Requests(life)
        if "reasons" in self._cluster.plan.checks:
            self._reasons[life] = Reasons(life)

    def handled(self, life: Life) -> None:
        """A worker has handled an event."""
        self._requests[life].handled()
        for work in life.inside.works() if self._cluster.plan.reports else ():
            self._nobody_serves(life, work, work.end_with)
        if (reasons := self._reasons.get(life)) is not None:
            reasons.look()

    def foreign_bytes(self, life: Life, device: str) -> int:
        """What a worker was told that others use of a device."""
        return self._memory[life].seen.get(device, 0)

    # -- memory

    def observed(self, life: Life, observed: dict[str, tuple[int, int]]) -> None:
        """A worker is told what of its devices is in use."""
        self._memory[life].observed(observed)

    def measured(self, life: Life, measured: dict[tuple[str, int], dict[str, int]]) -> None:
        """It has corrected its grants by that, and by what each replica uses."""
        self._memory[life].measured(measured)

    def unloads(self, life: Life, effect: ask.Unload) -> None:
        """A flow gives a replica up."""
        self._memory[life].unloads(effect)

    # -- requests

    def assigned(self, life: Life, tps: Collection[TP]) -> None:
        """A worker is told its partitions."""
        self._requests[life].assigned(tps)

    def holds_only_its_own(self, life: Life, *, fenced: bool) -> None:
        """It has let go of what is of others."""
        self._requests[life].holds_only_its_own(fenced=fenced)

    def taken(self, life: Life, work: Work) -> None:
        """A worker has taken a record that is new to it."""
        self._requests[life].taken(work)

    def hears(self, life: Life, command: ControlCommand) -> None:
        """A worker hears a command."""
        self._requests[life].hears(command)

    def continues(self, work: Work, told: PublishedPrefix) -> None:
        """A run begins behind what earlier runs of its request have published."""
        runs = self._cluster.truth.runs.get((work.tenant, work.request_id), {})
        end, tokens = (len(told.text), len(told.token_ids)), list(told.token_ids)
        for run in (run for there in runs.values() for run in there):
            if end in run.ends and run.text.startswith(told.text) and run.tokens[: end[1]] == tokens:
                return
        raise Violation(f"chunk: {work} goes on from {told}, which no run has said")

    # -- commits

    def passed(self, tp: TP) -> set[int]:
        """Offsets that are committed, or done by the committed map."""
        return self._passed.setdefault(tp, set())

    def committed(self, tp: TP, offset_and_map: tuple[int, str]) -> None:
        """The broker has taken a commit: what it passes over must have been replaced."""
        offset, metadata = offset_and_map
        before = self._committed.get(tp, 0)
        if tp in self._lost_ends:  # it begins again, or its owner has not noticed yet
            self._passed[tp] = {passed for passed in self.passed(tp) if passed < offset}
            before = min(before, offset)
        if offset < before:
            raise Violation(f"commit_backwards: {tp} went from {before} to {offset}")
        end = self._cluster.log.partitions[tp].end
        if offset > end and tp not in self._lost_ends:
            raise Violation(f"commit_beyond: {tp} is committed at {offset}, and ends at {end}")
        if len(metadata) > donemap.LIMIT:
            raise Violation(f"metadata: {len(metadata)} characters for {tp}")
        self._committed[tp] = offset
        self._pass(tp, range(before, offset))
        for first, behind in donemap.decode(offset, metadata):
            self._pass(tp, range(first, behind))

    def _pass(self, tp: TP, offsets: range) -> None:
        passed = self.passed(tp)
        for offset in offsets:
            if offset in passed:
                continue
            passed.add(offset)
            if not self._cluster.truth.replaced(tp, offset):
                record = self._cluster.truth.records[(tp, offset)]
                raise Violation(f"commit_before_outcome: {tp} {offset} of {record.subject} is passed, with no outcome")

    def loses_end(self, tp: TP) -> None:
        """The broker has lost the end of this log: its offsets may go back, and name records that are gone."""
        self._lost_ends.add(tp)

    # -- effects

    def effect(self, life: Life, effect: ask.Effect) -> None:
        """A flow asks for something."""
        if isinstance(effect, ask.Fetch):
            self._requests[life].reads_to_end(effect)
        subject = getattr(effect, "subject", None)
        if subject is None:
            return
        work = life.inside.work_of(subject)
        self._requests[life].effect(subject, effect)
        if isinstance(effect, PUBLISHES):
            if work.stage is Stage.DROPPED:
                raise Violation(f"dropped_publishes: {type(effect).__name__} for {work}, which was let go of")
            if isinstance(effect, ask.Start | ask.PublishDeadLetter):
                self._attempts(work)
            if isinstance(effect, ask.PublishDeadLetter):
                self._innocent(work)
        elif isinstance(effect, ask.Retried):
            self.retried(work, self._cluster.world.now)
        elif isinstance(effect, ask.Terminal | ask.Status) and work.stage is Stage.DROPPED:
            raise Violation(f"dropped_publishes: {effect.status} for {work}, which was let go of")
        if isinstance(effect, ask.Terminal) and self._cluster.plan.reports:
            self._nobody_serves(life, work, effect.error)
        if isinstance(effect, ask.Terminal) and work.conversation is not None:
            self._answer(work, effect)
        elif isinstance(effect, ask.Terminal) and work.conversation_id is not None and effect.status == "completed":
            self._cluster.talks.sums_up(work, effect.finished.text)

    def _nobody_serves(self, life: Life, work: Work, error: PenstockError | None) -> None:
        """A request fails for want of its model only if no other worker has the model.

        It is judged when that is decided: its outcome may be published later.
        """
        if error is None or work in self._judged:
            return
        if isinstance(error, CannotLoad):
            self._judged.add(work)
            self._nobody_loads(life, work)
        elif error.code == "model_not_found" and work.lane == UNSERVED:
            self._judged.add(work)
            self._nobody_reports(life, work)

    def _nobody_reports(self, life: Life, work: Work) -> None:
        """No other worker has reported the model for a while."""
        model = work.request.model if work.unserved is None else work.unserved.wanted.model
        if model in life.told.removed:
            return  # an operator has removed it from the whole pool
        heard_ms = life.flow.peers.now_ms
        absent_ms = 1000 * (self._cluster.plan.settings.model_absent_s - ABSENT_ROUNDING_S)
        for report in self._cluster.reports:
            serves = (
                any(model in (one.model, None) and one.state != "failed" for one in report.models)
                and report.worker_id != life.name
            )
            if serves and heard_ms - absent_ms < report.updated_at <= heard_ms:
                raise Violation(f"rollout: {work} fails on {life.name}, and {report.worker_id} serves {model}")

    def _nobody_loads(self, life: Life, work: Work) -> None:
        """A load has failed here. No other worker may run it, or it has waited until none has had the model loaded for
        a while.
        """
        peers = life.flow.peers
        wanted = Wanted(work.task, work.lane) if work.unserved is None else work.unserved.wanted
        since_ms = peers.now_ms - 1000 * self._cluster.plan.settings.model_absent_s
        if work.unserved is None:
            others = peers.may_run_elsewhere(wanted, since_ms)
        else:
            others = peers.loaded_elsewhere_ms(wanted) > since_ms
        if others and wanted.model not in life.told.removed:
            raise Violation(f"rollout: {work} fails on {life.name}, and another worker has its model")

    def _answer(self, work: Work, effect: ask.Terminal) -> None:
        """An answer that stood in the conversation when its worker looked last is the outcome."""
        if effect.status == "completed" and "questions" in self._cluster.plan.checks:
            self._cluster.talks.completes(work)
        check = "answers_of_letters" if effect.status == "dead_lettered" else "answers"
        if check not in self._cluster.plan.checks or work in self._cluster.truth.awaiting_store:
            return
        if effect.status == "cancelled" and self._was_erased(work):
            return  # what stands now is of a later request of this id
        standing = self._cluster.talks.answer_before(work, self._cluster.world.now)
        if standing is not None and (effect.finished is None or effect.finished.text != standing):
            raise Violation(f"answer: {work} ends as {effect.status}, and its conversation has {standing!r}")

    def _was_erased(self, work: Work) -> bool:
        """Whether its tenant erased the request after this record of it had come."""
        return any(
            command.kind == "erase"
            and (command.tenant, command.request_id) == (work.tenant, work.request_id)
            and work.first_place.append_time_ms <= command.created_at
            for command in self._cluster.commands
        )

    def engine_starts(self, engine: Engine, started: EngineRun) -> None:
        """A run has been put on an engine."""
        work = started.work
        self._memory[engine.life].starts(engine, started)
        spec, runs = engine.spec, engine.runs.values()
        if len(runs) > spec.slots:
            raise Violation(f"slots: {len(runs)} runs on {spec.name} with {spec.slots} slots")
        if spec.tokens is not None and sum(run.need for run in runs) > spec.tokens:
            raise Violation(f"tokens: {[run.need for run in runs]} on {spec.name} with {spec.tokens}")
        if work.alone:
            others = [run for one in engine.life.engines.values() for run in one.runs.values() if run.work is not work]
            if others:
                raise Violation(f"alone: {work} runs beside {[run.work for run in others]}")

    def retried(self, work: Work, now: float) -> None:
        """An attempt failed: the next one is due after a delay that doubles."""
        if (work.failure or "").startswith("the run took longer"):  # the worker found that, and no engine said it
            self._cluster.truth.told_failures[work] += 1
        settings = self._cluster.plan.settings.retries
        times = work.put_backs or work.spent - 1
        self._due[work] = now + min(settings.longest_s, settings.first_s * 2 ** (times - 1))

    def ticked(self, life: Life, now: float) -> None:
        """A tick is over: no retry is overdue."""
        self._requests[life].ticked(now)
        for work in life.inside.works():
            if work.stage is Stage.SCHEDULED and life.inside.fills_span(work):
                raise Violation(f"scheduled: {work} holds back the commit of a partition that is full")
            if work.stage is not Stage.RETRYING:
                self._due.pop(work, None)
            elif now > self._due.get(work, now) + ROUNDING_S:  # what timed out in this tick is not known yet
                raise Violation(f"retry: {work} was due {now - self._due[work]:.3f} s ago")

    def held(self, life: Life, tps: frozenset[TP]) -> None:
        """Partitions are held for reasons of their own only: none hides another."""
        inside, most = life.inside, self._cluster.plan.endings // 2
        for tp in tps:
            if not (inside.full(tp) or inside.ends_under_way(tp) >= most):
                raise Violation(
                    f"hidden: {tp} is held with {inside.span(tp)} offsets and {len(inside.works())} works in all"
                )

    # -- deaths of engines

    def replica_goes_down(self, life: Life, engine: Engine) -> None:
        """Who was on it as the flow knows it; only one who was there by himself can be the culprit."""
        replica = life.inside.replica(engine.spec.name, engine.replica)
        victims = [] if replica is None else replica.victims()
        if len(victims) == 1:
            self._cluster.truth.solo_deaths[victims[0]] += 1
        if engine.killer not in victims:
            # Its killer was cancelled or timed out a moment before: whoever is there now can only be blamed.
            self._cluster.truth.excused.update(victims)

    def _attempts(self, work: Work) -> None:
        truth = self._cluster.truth
        solo, failures = truth.solo_deaths[work], truth.told_failures[work]
        most = 1 + failures + (max(solo, work.deaths) if solo else 0)
        if work.spent > most:
            raise Violation(f"innocent: {work} spent {work.spent} attempts, with {failures} failures and {solo} deaths")

    def _innocent(self, work: Work) -> None:
        """Nobody is dead-lettered for a death that another prompt caused."""
        plan, truth = self._cluster.plan, self._cluster.truth
        if work.error is None or "died while it ran" not in str(work.error) or plan.has("engine_death"):
            return
        guilty = (work.tenant, work.request_id) in truth.killers or work in truth.excused
        if str(work.error).startswith("the engine") and not guilty:
            raise Violation(f"innocent: {work} is dead-lettered for a death that it did not cause")

    @staticmethod
    def vanished(held: list[Work]) -> None:
        """A worker was told that the record of what it held is gone: that gets a dead letter."""
        for work in held:
            if work.stage in OVER or work.stage in IN_SCHEDULER:
                raise Violation(f"vanished: the record of {work} is gone, and no dead letter says so")

    def journal_blames(self, life: Life) -> None:
        """A worker dies: its journal may blame only what was on an engine, or about to be.

        What has ended in the turn in which a worker broke is blamed too: the journal does not hear of it any more.
        """
        if "blame" not in self._cluster.plan.checks:
            return
        stages: dict[tuple[WorkKey, str], set[Stage]] = {}
        for work in life.inside.works():
            stages.setdefault((work.first_key, work.request_id), set()).add(work.stage)
        unheard = {(one.key, one.request_id) for one in life.flow.take_effects() if isinstance(one, ask.RunEnded)}
        for one in life.host.journal.running.keys() - unheard:
            copies = stages.get(one, set[Stage]())
            if copies.isdisjoint(ON_LANE):
                raise Violation(f"blame: {life.name} dies, and {one} is blamed, which is {sorted(copies) or 'over'}")

    # -- bounds

    def after_step(self) -> None:
        if self._cluster.world.steps % LOOK_EACH:
            return
        for life in self._cluster.lives():
            self._bounds(life)

    def _bounds(self, life: Life) -> None:
        inside = life.inside
        for work in inside.works():
            if inside.counts_as_done(work):
                raise Violation(f"open: {work} is held, and its offset counts as done")
            commanded = life.commands.priority(work.tenant, work.request_id)
            if commanded is not None and work.stage in MAY_WAIT and work.klass != priority_class(commanded):
                raise Violation(f"class: {work} was given the priority {commanded}, and is in the class {work.klass}")
        try:
            inside.check_offsets()
        except AssertionError as error:
            raise Violation(f"offsets: {error}") from error
        used_bytes = inside.budget_bytes()
        self._memory[life].look()
        total = self._cluster.plan.settings.intake_bytes
        if used_bytes > total + IN_FLIGHT_BYTES:
            raise Violation(f"budget: {used_bytes} bytes of {total}")
        counted = [work for work in inside.works() if work.in_budget]
        bodies = sum(work.size_bytes for work in counted if work.body is not None)
        if used_bytes != bodies + len(counted) * FACT_BYTES:
            raise Violation(f"budget: counts {used_bytes} bytes; held are {len(counted)} facts and {bodies} bytes")
        for replica in inside.replicas():
            if replica.used_tokens != sum(replica.holders.values()):
                held = dict(replica.holders)
                raise Violation(f"lane: {replica} counts {replica.used_tokens} tokens, held are {held}")
        if self._cluster.world.steps % COUNT_EACH == 0:
            try:
                inside.check_counts()
            except AssertionError as error:
                raise Violation(f"counts: {error}") from error

    # -- the end

    def at_end(self) -> None:
        """Everything is quiet: nothing is lost, nothing is held, the journals are empty."""
        cluster = self._cluster
        for host in cluster.hosts:
            if host.journal.running:
                raise Violation(f"journal: {host.name} is idle, and {host.journal.running} are said to run")
        for subject in cluster.truth.subjects:
            self._has_outcome(subject)
        for (tp, offset), record in cluster.truth.records.items():
            if record.subject is None and not cluster.truth.replaced(tp, offset):
                raise Violation(f"lost: the poison at {tp} {offset} has no dead letter")
        for life in cluster.lives():
            self._holds_nothing(life)
        self._questions()

    def _questions(self) -> None:
        if "questions" in self._cluster.plan.checks:
            self._cluster.talks.at_end(self._cluster.erased())

    def at_rest(self) -> None:
        """Orders stand: what they forbid says so, all else has its outcome, and nothing runs."""
        cluster, left = self._cluster, set[Subject]()
        for life in cluster.lives():
            for work in life.inside.works():
                must, waiting = cluster.forbidden(life, work), life.flow.waiting_for(work, cluster.world.now)
                if "reasons" in cluster.plan.checks and waiting.reason != must:
                    raise Violation(f"reason: {work} waits for {waiting.reason}, and orders say {must}")
                left.add((work.tenant, work.request_id))
            if life.inside.holders() or any(engine.runs for engine in life.engines.values()):
                raise Violation(f"leak: {life.name} rests, and {life.inside.holders()} run")
        for subject in cluster.truth.subjects:
            if subject not in left and not all(self._is_held(record) for record in cluster.truth.subjects[subject]):
                self._has_outcome(subject)
        self._questions()

    def _is_held(self, record: Accepted) -> bool:
        """Whether no worker was given the record, because its partition is held."""
        return all(
            life.consumer.positions.get(record.tp, -1) <= record.stored.offset
            for life in self._cluster.lives()
            if record.tp in life.consumer.positions
        )

    def _has_outcome(self, subject: Subject) -> None:
        truth = self._cluster.truth
        outcome = self._cluster.readers.outcome(subject)
        if outcome is None and subject not in truth.lost:
            fold = self._cluster.readers.results.get(subject)
            raise Violation(f"lost: {subject} has no outcome; its readers saw {None if fold is None else fold.origin}")

    def _holds_nothing(self, life: Life) -> None:
        inside = life.inside
        held = {
            "scheduled": inside.queued(),
            "granted": inside.granted(),
            "alone": inside.alone() is not None,
            "holders": sum(len(one.holders) + len(one.ahead) for one in inside.replicas()),
            "parked": inside.parked(),
            "runs": sum(len(engine.runs) for engine in life.engines.values()),
            "bytes": inside.budget_bytes(),
            "in flight": inside.in_flight(),
            "endings": inside.ends_under_way(),
        }
        if any(held.values()):
            raise Violation(f"leak: {life.name} is idle and holds {held}")
