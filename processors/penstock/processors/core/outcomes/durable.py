"""What became durable of requests that end, and what never will be: answers of broker, conversation and store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from penstock.processors.core.effects import Effect, Erase, ForgetDeaths, Republish, StoreOutput
from penstock.processors.core.outcomes.endings import Endings, status_of
from penstock.processors.core.requests.holdings import Holdings
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.statuses import status_event
from penstock.processors.core.settings import Commands
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Subject, Work, WorkKey
from penstock.schemas.errors import InternalError, InvalidRequest, PenstockError


@dataclass(eq=False)
class Durable:
    """An answer for a request that does not wait for it any more changes nothing."""

    _registry: Registry
    _holdings: Holdings
    _endings: Endings
    _emit: Callable[[Effect], None]
    _deaths: Callable[[WorkKey, str], int]
    _commands: Commands

    def awaits(self, subject: Subject, stage: Stage) -> bool:
        """Whether the request is in this stage still, and waits for the answer that ends it."""
        return self._registry.in_stage(subject, stage) is not None

    def answer_checked(
        self, subject: Subject, finished: Any | None, now: float, *, large: bool = False, output_bytes: int = 0
    ) -> None:
        """The answer that is in the conversation of a request that was to end without one, or None."""
        if (work := self._registry.in_stage(subject, Stage.CHECKING_FOR_ANSWER)) is None:
            return
        if finished is not None:
            work.count_as_new_attempt()
            self._endings.completed(
                work, "answer_checked", finished, now, append=False, large=large, output_bytes=output_bytes
            )
        elif work.error is not None:
            self._endings.letter(work, "answer_checked", work.error)
        else:
            self._endings.settle(work, "answer_checked", now, error=work.end_with)

    def stored(
        self,
        subject: Subject,
        finished: Any,
        artifact: Any,
        now: float,
        *,
        another: bool = False,
        output_bytes: int | None = None,
    ) -> None:
        """Its answer is in the conversation; a large output is an artifact.

        `another`: the answer that counts is that of an earlier run, not what this run said. `output_bytes`: what is
        left of the output in memory; None: all of it.
        """
        if (work := self._registry.in_stage(subject, Stage.STORING)) is not None:
            if output_bytes is not None:
                self._registry.hold_output(work, output_bytes)
            if another:
                work.count_as_new_attempt()
            self._endings.settle(work, "stored", now, finished=finished, artifact=artifact)

    def store_failed(self, keep: StoreOutput, error: PenstockError, now: float) -> None:
        """Its answer can never be kept, or nobody knows whether it was."""
        if (work := self._registry.in_stage(keep.subject, Stage.STORING)) is not None:
            self._endings.end_awaiting_store(work, "store_failed", keep, error, now)

    def moved(self, subject: Subject) -> WorkKey | None:
        """Its record is on the partition where it belongs. Readers may follow any place of it: each gets its copy.

        Returns the place whose offset may be committed now, as the other two that end a request do.
        """
        if (work := self._registry.in_stage(subject, Stage.MOVING)) is None:
            return None
        if work.repeats:
            assert work.pass_to is not None, "what arrived misplaced is not known by its name"
            self._emit(Republish(work.subject, work.pass_to.partition, work.repeats.pop(0), work.pass_to.pool))
            return None
        self._registry.transition(work, "moved", Stage.DONE)
        return self._over(work)

    def cannot_move(self, subject: Subject, error: PenstockError, now: float) -> None:
        """Its record cannot be written again; it fails when its caller is to blame, who named an unknown pool."""
        if (work := self._registry.in_stage(subject, Stage.MOVING)) is None:
            return
        if isinstance(error, InvalidRequest):
            self._endings.end(work, "unmovable", error, now)
        else:
            self._endings.letter(work, "unmovable", error)

    def dead_lettered(self, subject: Subject, now: float) -> WorkKey | None:
        if (work := self._registry.in_stage(subject, Stage.DEAD_LETTERING)) is None:
            return None
        if work.request_id:
            status = status_of(work.end_with) if work.end_with is not None else "dead_lettered"
            self._endings.settle(work, "dead_lettered", now, error=work.error, status=status)
            return None
        self._registry.transition(work, "dead_lettered", Stage.DONE)
        return self._over(work)

    def published(self, subject: Subject, status: str) -> WorkKey | None:
        """The broker has its terminal event."""
        if (work := self._registry.in_stage(subject, Stage.PUBLISHING)) is None:
            return None
        if work.repeats:
            self._emit(replace(work.outcome, origin=work.repeats.pop(0)))
            return None
        self._registry.transition(work, "delivered", Stage.DONE)
        # What ended unrun, for its deaths, keeps them: it may be delivered again before its offset is committed.
        known = work.history is not None or self._deaths(work.first_key, work.request_id)
        if known and (work.started_at is not None or work.run is not None):
            self._emit(ForgetDeaths(work.first_key, work.request_id))
        key = self._over(work)
        self._emit(status_event(work, status, done=True))
        return key

    def _over(self, work: Work) -> WorkKey:
        """Forgets it. What it wrote after its erasure, here or at a worker before, is erased too."""
        self._holdings.forget(work)
        erasure = self._commands.erasure(work.tenant, work.request_id, work.first_place.append_time_ms)
        if erasure is not None:
            self._emit(Erase(erasure, held=True))
        return work.key

    def chunk_refused(self, subject: Subject, now: float) -> None:
        """A piece of its stream can never be published: the whole could not either."""
        if (work := self._registry.in_stage(subject, Stage.RUNNING)) is not None:
            self._holdings.stop_run(work)
            error = InternalError("a piece of the output cannot be published")
            self._endings.settle(work, "failed", now, error=error)
