"""Runs of works on engines: turn → prompt counted → room granted → run → chunks → outcome; again when an engine dies.

The order of the code is the order of the promise: nothing reaches `engine.run` before admission granted its memory (the
model's by the ledger when it was loaded, the run's slot and tokens here).
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from penstock.processors.conversations.turns import LostOwnership, Turns, TurnStart, answer_message
from penstock.processors.core.retries import DeadLetter as GiveUp
from penstock.processors.core.retries import Retry, decide
from penstock.processors.engines.base import Delta, Engine, Finished, Prepared, RunFailed, RunSpec
from penstock.processors.lanes import Lane, Lanes
from penstock.processors.metrics import Metrics
from penstock.processors.outcomes import Outcomes, now_ms
from penstock.processors.outputs import INLINE_BYTES, Outputs, size_of
from penstock.processors.work import Stage, Work
from penstock.schemas.errors import (
    BrokerUnavailable,
    Cancelled,
    ExecutionTimeout,
    Expired,
    InternalError,
    PenstockError,
    RegistryUnavailable,
)
from penstock.schemas.records import ArtifactRef, Usage

logger = logging.getLogger(__name__)

_PARAMS = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "dimensions")


class _Sink:
    """What one run tells; after its run is over (retried, dropped, cancelled) it tells nobody."""

    __slots__ = ("_run_id", "_runs", "_work")

    def __init__(self, runs: Runs, work: Work) -> None:
        self._runs, self._work, self._run_id = runs, work, work.run_id

    def on_delta(self, delta: Delta) -> None:
        if self._work.run_id == self._run_id and self._work.stage is Stage.RUNNING:
            self._runs.delta(self._work, delta)

    def on_finished(self, finished: Finished) -> None:
        if self._work.run_id == self._run_id and self._work.stage is Stage.RUNNING:
            self._runs.finished(self._work, finished)

    def on_failed(self, failed: RunFailed) -> None:
        if self._work.run_id == self._run_id and self._work.stage is Stage.RUNNING:
            self._runs.failed(self._work, failed.error, again=failed.retryable_here)


class Runs:
    """Works from the moment the scheduler gave them out until their outcome is handed to `Outcomes`."""

    def __init__(
        self,
        lanes: Lanes,
        outcomes: Outcomes,
        turns: Turns,
        outputs: Outputs,
        metrics: Metrics,
        *,
        chunk_linger_s: float,
        max_execution_s: float,
        retry_delay_s: float,
        clock: Callable[[], float],
        on_room: Callable[[], None],
        dead_letter: Callable[[Work, PenstockError], None],
    ) -> None:
        self._lanes = lanes
        self._outcomes = outcomes
        self._turns = turns
        self._outputs = outputs
        self._metrics = metrics
        self._linger_s = chunk_linger_s
        self._max_execution_s = max_execution_s
        self._retry_delay_s = retry_delay_s
        self._clock = clock
        self._on_room = on_room
        self._dead_letter = dead_letter
        self._ids = itertools.count(1)
        self._order = itertools.count()
        self._retries: list[tuple[float, int, Work]] = []
        self._buffered: deque[Work] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self.active: dict[int, Work] = {}

    # -- starting

    def start(self, work: Work, epoch: int) -> None:
        """Begin a work that the scheduler gave out; its slot on the lane is taken from here on."""
        work.stage = Stage.STARTING
        work.epoch = epoch
        work.started_at = self._clock()
        work.load_ms = self._lanes[work.lane].loading_ms(work.arrived_at, work.started_at)
        self.active[id(work)] = work
        self._lanes.take(work)
        self._begin(work)

    def _begin(self, work: Work) -> None:
        lane = self._lanes[work.lane]
        if work.line is None and lane.inline and lane.engine is not None:
            self._prepare_inline(work, lane.engine)
        else:
            self._task(self._prepare(work))

    def _prepare_inline(self, work: Work, engine: Engine) -> None:
        """An engine that prepares without waiting costs no task per message."""
        coroutine = engine.prepare(self._spec(work, None))
        try:
            coroutine.send(None)
        except StopIteration as done:
            self._admit(work, engine, done.value)
        except PenstockError as error:
            self.failed(work, error, again=False)
        else:
            coroutine.close()
            raise RuntimeError(f"{type(engine).__name__}.prepare waits, so its lane must not be inline")

    async def _prepare(self, work: Work) -> None:
        """Read the turn, count the prompt. A work that was cancelled or dropped meanwhile is let be."""
        try:
            turn = await self._turn(work)
            if turn is not None and turn.answer is not None:
                if work.stage is Stage.STARTING:
                    self._answered(work, turn)
                return
            engine = await self._lanes.ready(work.lane)
            prepared = await engine.prepare(self._spec(work, turn))
        except LostOwnership:
            return
        except PenstockError as error:
            if work.stage is Stage.STARTING:
                self.failed(work, error, again=True)
        except Exception as error:
            logger.exception("run.prepare_failed request=%s", work.request.request_id)
            if work.stage is Stage.STARTING:
                self.failed(work, InternalError(f"{type(error).__name__} while the run was prepared"), again=True)
        else:
            if work.stage is Stage.STARTING:
                self._admit(work, engine, prepared)

    async def _turn(self, work: Work) -> TurnStart | None:
        if work.line is None:
            return None
        while work.turn is None:
            try:
                work.turn = await self._turns.begin(work.request, work.epoch, now_ms(), lambda: work.live)
            except (BrokerUnavailable, RegistryUnavailable) as error:  # no fault of the request: it costs no attempt
                logger.warning("turn.begin_waits request=%s error=%s", work.request.request_id, error)
                await asyncio.sleep(0.5)
                if not work.live:
                    raise LostOwnership from error
        return work.turn

    def _spec(self, work: Work, turn: TurnStart | None) -> RunSpec:
        """What the engine is asked for; its run id is this attempt's own, late words of another are not heard."""
        request = work.request
        payload = request.payload or {}
        work.run_id = f"{request.request_id}#{work.epoch}.{work.attempt}.{next(self._ids)}"
        inputs = payload.get("input")
        timeout_s = self._max_execution_s
        if request.execution_timeout_ms is not None:
            timeout_s = min(timeout_s, request.execution_timeout_ms / 1000)
        work.spec = RunSpec(
            run_id=work.run_id,
            task=request.task,
            model=work.lane,
            messages=payload.get("messages"),
            history=None if turn is None else turn.history,
            prompt=payload.get("prompt"),
            inputs=[inputs] if isinstance(inputs, str) else inputs,
            params={name: payload[name] for name in _PARAMS if payload.get(name) is not None},
            context=request.context,
            stream=request.stream,
            extra=request.extra,
            timeout_s=timeout_s,
        )
        return work.spec

    def _admit(self, work: Work, engine: Engine, prepared: Prepared) -> None:
        """Grant the run's tokens, or let it wait in its lane without blocking other lanes."""
        work.prepared = prepared
        lane = self._lanes[work.lane]
        if lane.waiting or not lane.grant(work, prepared.need_tokens):
            work.stage = Stage.WAITING
            lane.waiting.append(work)
            self._outcomes.status(work, "waiting_for_memory")
        else:
            self._run(work, engine)

    def _run(self, work: Work, engine: Engine) -> None:
        now = self._clock()
        work.stage = Stage.RUNNING
        work.run_at = now
        work.timeout_at = now + (work.spec.timeout_s or self._max_execution_s)
        self._outcomes.status(work, "running")
        engine.run(work.spec, work.prepared, _Sink(self, work))

    # -- what a run tells

    def delta(self, work: Work, delta: Delta) -> None:
        now = self._clock()
        if work.first_token_at is None:
            work.first_token_at = now
            self._metrics.first_token.observe(now - work.arrived_at)
        work.text.append(delta.text)
        work.tokens.extend(delta.token_ids)
        if not work.request.stream:
            return
        if work.sent_pieces == 0 and delta.text:  # the first text goes out at once
            self._outcomes.flush_chunk(work, now)
        elif work.buffered_at is None:
            work.buffered_at = now
            self._buffered.append(work)

    def finished(self, work: Work, finished: Finished) -> None:
        now = self._clock()
        if work.request.stream:
            self._outcomes.flush_chunk(work, now)
        self._metrics.prompt_tokens.inc(finished.prompt_tokens)
        self._metrics.completion_tokens.inc(finished.completion_tokens)
        usage = _usage(finished)
        in_conversation = work.line is not None and "text" in finished.output
        if not in_conversation and size_of(finished.output) <= INLINE_BYTES:
            self._release(work)
            self._settle_completed(work, finished.output, finished.finish_reason, usage)
        else:
            # It has finished: from here on neither a cancel nor a timeout may deny what stands in the log.
            work.keeping, work.timeout_at = True, None
            self._release_engine(work)
            self._task(self._keep(work, finished, usage, in_conversation=in_conversation))

    def failed(self, work: Work, error: PenstockError, *, again: bool) -> None:
        """A run ended without an outcome: run it again in place, or say that it failed."""
        self._release_engine(work)
        request = work.request
        decision = decide(error, work.attempt, request.max_attempts, self._clock(), None) if again else None
        if isinstance(decision, Retry) and work.live:
            self._metrics.retries.inc()
            work.attempt += 1
            work.restart()
            work.stage = Stage.STARTING
            work.run_id = ""
            self._outcomes.status(work, "retrying", detail=error.code, at_once=True)
            due = self._clock() + max(decision.delay_s, self._retry_delay_s)
            heapq.heappush(self._retries, (due, next(self._order), work))
            return
        self._forget(work)
        if isinstance(decision, GiveUp):
            self._dead_letter(work, error)
        else:
            self._outcomes.settle(work, _failure_status(error), error=error)

    # -- from outside

    def cancel(self, work: Work, error: PenstockError) -> None:
        """End a started work with this outcome (cancelled, timed out); its engine stops when it can."""
        self._stop_engine(work)
        self._release_engine(work)
        self._forget(work)
        if work.request.stream:
            self._outcomes.flush_chunk(work, self._clock())
        self._outcomes.settle(work, _failure_status(error), error=error)

    def drop(self, work: Work) -> None:
        """Forget a started work without a word: its partition went elsewhere."""
        self._stop_engine(work)
        self._release_engine(work)
        self._forget(work)

    def tick(self, now: float) -> None:
        """Chunks that have gathered long enough, retries that are due, runs that take too long, waits that fit now."""
        while self._buffered:
            work = self._buffered[0]
            if work.buffered_at is not None and now - work.buffered_at < self._linger_s and work.live:
                break
            self._buffered.popleft()
            if work.buffered_at is not None:
                self._outcomes.flush_chunk(work, now)
        while self._retries and self._retries[0][0] <= now:
            _, order, work = heapq.heappop(self._retries)
            if work.stage is not Stage.STARTING or work.run_id:
                continue
            if self._lanes[work.lane].has_slot():
                self._begin_again(work)
            else:  # full, or its engine is being started again: that costs no attempt
                heapq.heappush(self._retries, (now + 0.05, order, work))
        for lane in self._lanes:
            self._start_waiting(lane)

    def check_timeouts(self, now: float, wall_ms: int) -> None:
        """End what runs too long, and what waits for a place or a retry beyond its deadline."""
        for work in [w for w in self.active.values() if w.timeout_at is not None and w.timeout_at <= now]:
            if work.stage is Stage.RUNNING:
                self.cancel(work, ExecutionTimeout(f"the run took longer than {now - (work.run_at or now):.1f} s"))
        for work in [w for w in self.active.values() if w.deadline_ms is not None and w.deadline_ms <= wall_ms]:
            if work.stage is Stage.WAITING or (work.stage is Stage.STARTING and not work.run_id):
                self.cancel(work, Expired("its deadline passed while it waited to run"))

    def batch_sizes(self) -> dict[str, int]:
        """Model → how many requests run on its engine together."""
        found = {lane.model: 0 for lane in self._lanes}
        for work in self.active.values():
            found[work.lane] += work.stage is Stage.RUNNING
        return found

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- inside

    def _begin_again(self, work: Work) -> None:
        self._lanes.take(work)
        self._begin(work)

    def _start_waiting(self, lane: Lane) -> None:
        while lane.waiting and lane.engine is not None:
            work = lane.waiting[0]
            if work.stage is not Stage.WAITING:
                lane.waiting.popleft()
            elif lane.grant(work, work.prepared.need_tokens):
                lane.waiting.popleft()
                self._run(work, lane.engine)
            else:
                return

    def _answered(self, work: Work, turn: TurnStart) -> None:
        """The answer stands in the conversation already (a worker died after appending it): it is the outcome."""
        answer = turn.answer
        assert answer is not None
        self._release(work)
        self._settle_completed(work, {"text": answer.content}, answer.finish_reason, answer.usage)

    def end_unless_answered(self, work: Work, error: Cancelled | Expired) -> None:
        """End a turn that did not run here, unless its answer stands in its conversation: then that is the outcome."""
        work.stage, work.keeping = Stage.STARTING, True
        self._task(self._end_unless_answered(work, error))

    async def _end_unless_answered(self, work: Work, error: Cancelled | Expired) -> None:
        answer = None
        while work.live:
            try:
                answer = await self._turns.answer(work.request)
                break
            except (BrokerUnavailable, RegistryUnavailable) as away:
                logger.warning("turn.look_up_waits request=%s error=%s", work.request.request_id, away)
                await asyncio.sleep(0.5)
            except Exception:
                logger.exception("turn.look_up_failed request=%s", work.request.request_id)
                break
        if answer is None:
            self._outcomes.settle(work, error.code, error=error)
        else:
            output = {"text": answer.content}
            reason, usage = answer.finish_reason, answer.usage
            self._outcomes.settle(work, "completed", output=output, finish_reason=reason, usage=usage)

    async def _keep(self, work: Work, finished: Finished, usage: Usage | None, *, in_conversation: bool) -> None:
        """Put the output where it belongs and settle; whatever goes wrong, the request gets an outcome."""
        try:
            if in_conversation:
                await self._append_answer(work, finished, usage)
            else:
                await self._settle_kept(work, finished.output, finished.finish_reason, usage)
        except Exception as error:
            logger.exception("run.keep_failed request=%s", work.request.request_id)
            self._forget(work)
            failure = InternalError(f"{type(error).__name__} while the output was kept")
            self._outcomes.settle(work, "failed", error=failure)

    async def _settle_kept(self, work: Work, output: dict[str, Any], reason: str | None, usage: Usage | None) -> None:
        """Settle with the output, or with the artifact that holds it."""
        artifact = None if size_of(output) <= INLINE_BYTES else await self._outputs.keep(work, output)
        self._forget(work)
        self._settle_completed(work, output, reason, usage, artifact)

    async def _append_answer(self, work: Work, finished: Finished, usage: Usage | None) -> None:
        """What counts in the log is the outcome. A broker that is away is waited for."""
        answer = answer_message(
            work.request,
            str(finished.output["text"]),
            epoch=work.epoch,
            attempt=work.attempt,
            model=work.lane,
            finish_reason=finished.finish_reason,
            usage=usage,
            now_ms=now_ms(),
        )
        while work.live:
            try:
                winner = await self._turns.finish(answer, lambda: work.live)
            except LostOwnership:
                return
            except PenstockError as error:
                if not error.retryable:
                    self._forget(work)
                    self._outcomes.settle(work, "failed", error=error)
                    return
                logger.warning("turn.append_waits request=%s error=%s", work.request.request_id, error)
                await asyncio.sleep(0.5)
                continue
            if winner is not answer and winner.content != answer.content:
                finished.output.update(text=winner.content, token_ids=None)
            await self._settle_kept(work, finished.output, winner.finish_reason, winner.usage or usage)
            return

    def _settle_completed(
        self,
        work: Work,
        output: dict[str, Any],
        reason: str | None,
        usage: Usage | None,
        artifact: ArtifactRef | None = None,
    ) -> None:
        lane = self._lanes[work.lane]
        self._outcomes.settle(
            work,
            "completed",
            output=output if artifact is None else None,
            artifact=artifact,
            finish_reason=reason,
            usage=usage,
            device=lane.device,
            measured_memory_bytes=lane.measured_bytes,
        )

    def _stop_engine(self, work: Work) -> None:
        engine = self._lanes[work.lane].engine
        if work.stage is Stage.RUNNING and engine is not None:
            engine.cancel(work.run_id)

    def _release(self, work: Work) -> None:
        self._release_engine(work)
        self._forget(work)

    def _release_engine(self, work: Work) -> None:
        self._lanes.give_back(work)
        self._on_room()

    def _forget(self, work: Work) -> None:
        self.active.pop(id(work), None)

    def _task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _usage(finished: Finished) -> Usage:
    usage = finished.usage or {}
    prompt = int(usage.get("prompt_tokens", finished.prompt_tokens))
    completion = int(usage.get("completion_tokens", finished.completion_tokens))
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=int(usage.get("total_tokens", prompt + completion)),
        pixels=None,
    )


def _failure_status(error: PenstockError) -> str:
    return {"cancelled": "cancelled", "expired": "expired", "dead_lettered": "dead_lettered"}.get(error.code, "failed")
