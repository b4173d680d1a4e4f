"""Carries out what the flow asks of engines and conversations, and reports the results to it. Decides nothing."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from penstock.common.background import BackgroundTasks
from penstock.common.clock import now_ms
from penstock.processors.conversations.messages import answer_message, as_summary
from penstock.processors.conversations.turns import ConversationTurns, LostOwnership, ToSumUp
from penstock.processors.core.effects import Begin, CheckForAnswer, Prepare, ShowPreview, Start, StoreOutput
from penstock.processors.core.flow import Flow
from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Subject
from penstock.processors.engines.base import (
    Delta,
    Engine,
    EngineGone,
    Finished,
    Prepared,
    Preview,
    RunFailed,
    RunSpec,
    StepProgress,
    TurnedAway,
)
from penstock.processors.kafka.outcomes import usage_of
from penstock.processors.metrics import Metrics
from penstock.processors.outputs import INLINE_BYTES, Outputs, bytes_of, has_images, pixels_of, size_of
from penstock.processors.preparation import Preparation
from penstock.processors.run_images import Gathered, Images, RunImages
from penstock.processors.spool import Spool, Spooled
from penstock.schemas.errors import (
    EngineFailed,
    Expired,
    InternalError,
    NotFound,
    PenstockError,
    StoreUnavailable,
    conversation_deleted,
)
from penstock.schemas.payloads import NEUTRAL
from penstock.schemas.records import ArtifactRef, ConversationMessage, InferenceRequest
from penstock.schemas.records import Preview as Kept
from penstock.schemas.tasks import default_fields

logger = logging.getLogger(__name__)

T = TypeVar("T")

AGAIN_S = 1.0
LONGEST_AGAIN_S = 15.0
"""Delays between two looks for an answer, when the first one failed: they double."""
STORE_S = 60.0
"""So long at least an output may take to be stored, also when its request's deadline is near or has passed."""
_AS_FIELDS = frozenset({"text_generation", "embedding"})
"""Tasks whose payload a run's spec has as fields of its own."""
ITEMS = "conversation_items"
SUMMARY = "summarization"
_NONE = frozenset[str]()
_PARAMS = frozenset({"max_tokens", "temperature", "top_p", "top_k", "stop", "seed", "dimensions", *NEUTRAL})


class _Sink:
    """Takes the events of one run, with the run's id: the flow ignores events of a run that is over."""

    __slots__ = ("_execution", "_run_id", "_subject")

    def __init__(self, execution: Execution, subject: Subject, run_id: str) -> None:
        self._execution, self._subject, self._run_id = execution, subject, run_id

    def on_delta(self, delta: Delta) -> None:
        self._execution.delta(self._subject, self._run_id, delta)

    def on_progress(self, progress: StepProgress) -> None:
        self._execution.progress(self._subject, self._run_id, progress)

    def on_preview(self, preview: Preview) -> None:
        self._execution.preview(self._subject, self._run_id, preview)

    def on_finished(self, finished: Finished) -> None:
        self._execution.finished(self._subject, self._run_id, finished)

    def on_failed(self, failed: RunFailed) -> None:
        self._execution.failed(self._subject, self._run_id, failed.error, again=failed.retryable_here)


async def begun_nowhere(subject: Subject) -> PublishedPrefix | None:
    """No other worker has run it."""
    return None


class Execution:
    """`engine` gives a replica's engine, None while it is down. `changed` is called after each answer to the flow.

    `defaults` gives the parameters of a lane's model for requests that leave them out: here is where they are applied.
    `published` finds what other workers have published of a stream.
    """

    def __init__(
        self,
        flow: Flow,
        engine: Callable[[str, int], Engine | None],
        turns: ConversationTurns,
        outputs: Outputs,
        spool: Spool,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
        changed: Callable[[], None],
        defaults: Callable[[str], Mapping[str, Any]] = lambda lane: {},
        images: Images | None = None,
        sees: Callable[[str], bool] = lambda lane: False,
        opens: Callable[[str], bool] = lambda lane: False,
        published: Callable[[Subject], Awaitable[PublishedPrefix | None]] = begun_nowhere,
    ) -> None:
        self._flow = flow
        self._told = published
        self._defaults = defaults
        self._engine = engine
        self._turns = turns
        self._outputs = outputs
        self._spool = spool
        self._images = RunImages(images, sees, opens)
        self._showing: set[str] = set()
        self._metrics = metrics
        self._clock = clock
        self._changed = changed
        self._tasks = BackgroundTasks()

    async def close(self) -> None:
        """Give up what is under way."""
        await self._tasks.cancel()
        self._images.close()

    def prepare(self, effect: Prepare) -> None:
        """Read the conversation and have the prompt counted."""
        self._tasks.start(self._prepare(effect))

    async def _prepare(self, effect: Prepare) -> None:
        subject, run_id = effect.subject, effect.run_id
        goes_on = partial(self._flow.attempts.goes_on, subject, run_id)
        if not goes_on():  # another run has begun meanwhile, with a task of its own
            return
        refused = partial(self._refused, subject, run_id, again=True)
        with self._reports("run.prepare", "the run was prepared", subject, refused):
            turn = None
            if subject.conversation is not None:
                turn = await self._turns.read(subject.request, goes_on)
                if turn.answer is not None:
                    self._stands(subject, run_id, await self._standing(run_id, turn.answer))
                    return
            request = await self._outputs.whole(subject.request)
            images = await self._images.of(subject, turn)
            mark, appends = None if turn is None else turn.mark, False
            if (conversation_id := _summarized(subject)) is not None:
                told_of = await self._to_sum_up(subject, conversation_id, goes_on)
                if told_of.standing is not None:
                    self._stands(subject, run_id, await self._standing(run_id, told_of.standing))
                    return
                images = replace(images, past=told_of.past, payload={"covers_through": told_of.through})
                mark, appends = told_of.mark, subject.request.conversation_id is not None
            engine = self._engine(subject.lane, effect.replica)
            if engine is None or not goes_on():
                return  # the replica is down: the flow knows
            published = await self._told(subject) if effect.may_resume_stream else effect.published
            if not goes_on():
                return
            spec = self._spec(effect, request, images, published)
            prepared = await engine.prepare(spec)
            self._flow.attempts.prepared(
                subject,
                run_id,
                prepared.need_tokens,
                Preparation(spec, prepared, images.shown),
                self._clock(),
                mark,
                memory_bytes=prepared.memory_bytes,
                appends=appends,
            )

    def _stands(self, subject: Subject, run_id: str, finished: Finished) -> None:
        """Its answer is in its conversation: an attempt that died has appended it."""
        size = size_of(finished.output)
        large = size > INLINE_BYTES
        self._flow.attempts.answer_stands(subject, run_id, finished, self._clock(), large=large, output_bytes=size)

    def begin(self, effect: Begin) -> None:
        """Append the input of a turn that was granted."""
        self._tasks.start(self._begin(effect))

    async def _begin(self, effect: Begin) -> None:
        subject, run_id = effect.subject, effect.run_id
        # Its input is written only while that stands: not when it was cancelled meanwhile.
        begins = partial(self._flow.attempts.goes_on, subject, run_id, Stage.BEGINNING)
        if not begins():
            return
        refused = partial(self._refused, subject, run_id, again=False)
        with self._reports("turn.begin", "the turn began", subject, refused):
            topic_id = await self._turns.begin(
                subject.request, subject.epoch, now_ms(), begins, effect.mark, effect.prepared.shown
            )
            if topic_id is not None:
                self._flow.attempts.begun(subject, run_id, self._clock(), topic_id)
            else:
                self._flow.attempts.log_moved(subject, run_id, self._clock())

    @contextmanager
    def _reports(
        self, event: str, what: str, subject: Subject, failed: Callable[[PenstockError], None]
    ) -> Generator[None]:
        """Report an error of the block through `failed`, unless the run was taken away or its engine is gone."""
        try:
            yield
        except (LostOwnership, EngineGone):
            pass
        except PenstockError as error:
            failed(error)
        except Exception as error:
            logger.exception("%s_failed request_id=%s", event, subject.request_id)
            failed(InternalError(f"{type(error).__name__} while {what}"))
        finally:
            self._changed()

    def _refused(self, subject: Subject, run_id: str, error: PenstockError, *, again: bool) -> None:
        self._flow.attempts.refused(subject, run_id, error, self._clock(), again=again)

    def start(self, effect: Start) -> None:
        """Begin the run. An engine that prepares inline does so here, before it runs."""
        subject, run_id = effect.subject, effect.run_id
        if not self._flow.attempts.goes_on(subject, run_id, Stage.RUNNING):
            return
        try:
            engine = self._engine(subject.lane, effect.replica)
            if engine is None:
                raise EngineGone(f"{subject.lane} has no engine")
            ready: Preparation | None = effect.prepared
            if ready is None:
                spec = self._spec(effect, subject.request, Gathered(), effect.published)
                ready = Preparation(spec, _at_once(engine.prepare(spec)))
            if ready.prepared.goes_on and ready.spec.published is not None:
                self._flow.output.goes_on_from(subject, run_id, ready.spec.published)
            engine.run(ready.spec, ready.prepared, _Sink(self, subject, run_id))
        except EngineGone:
            self._flow.attempts.not_started(subject, run_id, self._clock())
        except PenstockError as error:
            self._flow.attempts.failed(subject, run_id, error, self._clock(), again=False)
        except Exception as error:
            logger.exception("run.start_failed request_id=%s", subject.request_id)
            failure = InternalError(f"{type(error).__name__} while the run was started")
            self._flow.attempts.failed(subject, run_id, failure, self._clock(), again=False)

    def cancel(self, model: str, replica: int, run_id: str) -> None:
        """Stop a run, if its engine is still there."""
        engine = self._engine(model, replica)
        if engine is not None:
            engine.cancel(run_id)

    def keep(self, effect: StoreOutput) -> None:
        """Make what is large of an output artifacts, and append an answer to its conversation.

        When the store does not take it, the flow says when to try again. After any other failure the request fails,
        unless its answer turns out to be in the conversation.
        """
        self._tasks.start(self._keep(effect))

    async def _keep(self, effect: StoreOutput) -> None:
        subject = effect.subject

        def failed(error: PenstockError) -> None:
            self._flow.durable.store_failed(effect, error, self._clock())

        with self._reports("run.keep", "the output was kept", subject, failed):
            held = effect.finished
            finished = await held.read() if isinstance(held, Spooled) else held
            to, another = effect.to, effect.another
            if subject.task == ITEMS and to is not None:
                finished = held = replace(finished, output=await self._items(subject))
                to = None
            try:
                stored = await _in_time(self._outputs.keep(subject, finished.output), effect.deadline_ms)
                if to is not None:
                    answer = await self._append(subject, to, finished, stored.images)
                    to = None  # an answer stands from here on
                    if answer is not None:
                        held, finished, another = answer, answer, True
                        stored = await _in_time(self._outputs.keep(subject, finished.output), effect.deadline_ms)
            except StoreUnavailable as error:
                logger.warning("output.not_stored request_id=%s error=%s", subject.request_id, error.message)
                held = held if isinstance(held, Spooled) else (await self._spool.put(finished)) or finished
                again = replace(effect, finished=held, to=to, another=another)
                size = 0 if isinstance(held, Spooled) else bytes_of(finished.output)
                # Its traceback holds the output.
                untraced = StoreUnavailable(error.message)
                self._flow.awaiting_store.not_stored(again, untraced, self._clock(), output_bytes=size)
                return
            left = replace(finished, output=stored.output)
            self._flow.durable.stored(
                subject, left, stored.artifact, self._clock(), another=another, output_bytes=size_of(stored.output)
            )

    async def _append(
        self, subject: Subject, to: Any, finished: Finished, references: Sequence[ArtifactRef]
    ) -> Finished | None:
        """Append the answer, or the summary. None when it is what counts in the log, else the earlier one that does."""
        keeps = partial(self._flow.durable.awaits, subject, Stage.STORING)
        record = answer_message(
            subject.request,
            str(finished.output.get("text") or ""),
            epoch=subject.epoch,
            attempt=subject.attempt,
            model=subject.lane,
            finish_reason=finished.finish_reason,
            usage=usage_of(finished),
            now_ms=now_ms(),
            tool_calls=finished.output.get("tool_calls"),
            artifacts=references,
        )
        if subject.task == SUMMARY:
            if not record.content.strip():
                raise EngineFailed("the model gave no summary")
            record = as_summary(record, finished.output["covers_through"])
            winner = await self._turns.add_summary(record, keeps, to)
        else:
            winner = await self._turns.finish(record, keeps, to)
        if winner is record or _said(winner) == _said(record):
            return None
        return await self._standing(finished.run_id, winner)

    async def _items(self, subject: Subject) -> dict[str, Any]:
        """Where the items of a request stand. Raises Cancelled when their conversation was deleted meanwhile."""
        offsets = await self._turns.appended(
            subject.request, partial(self._flow.durable.awaits, subject, Stage.STORING)
        )
        if offsets is None:
            raise conversation_deleted()
        return {"offsets": offsets}

    async def _standing(self, run_id: str, answer: ConversationMessage) -> Finished:
        """An answer that is in a conversation, in the form in which an engine gives it. Raises NotFound."""
        output: dict[str, Any] = {"text": answer.content}
        if answer.covers_through is not None:
            output["covers_through"] = answer.covers_through
        if answer.artifacts:
            output = {"images": await self._outputs.images_of(answer.tenant, answer.artifacts)}
        if answer.tool_calls:
            output["tool_calls"] = answer.tool_calls
        usage = None if answer.usage is None else dataclasses.asdict(answer.usage)
        return Finished(
            run_id=run_id,
            output=output,
            finish_reason=answer.finish_reason,
            usage=None if usage is None else {name: count for name, count in usage.items() if count is not None},
        )

    def show_preview(self, effect: ShowPreview, publish: Callable[[ShowPreview, Kept], None]) -> None:
        """Keep a preview and publish where it lies. While one of a run is on its way, others of it are left out."""
        if effect.run_id not in self._showing:
            self._showing.add(effect.run_id)
            self._tasks.start(self._show_preview(effect, publish))

    async def _show_preview(self, effect: ShowPreview, publish: Callable[[ShowPreview, Kept], None]) -> None:
        try:
            kept = await self._outputs.keep_preview(effect)
            if self._flow.attempts.goes_on(effect.subject, effect.run_id, Stage.RUNNING):
                publish(effect, kept)
        except Exception as error:  # the run goes on without it
            logger.warning("preview.not_kept request_id=%s error=%s", effect.subject.request_id, type(error).__name__)
        finally:
            self._showing.discard(effect.run_id)

    def look_up(self, effect: CheckForAnswer) -> None:
        """See whether the conversation holds the answer of a request that is to end without a run."""
        self._tasks.start(self._look_up(effect.subject))

    async def _look_up(self, subject: Subject) -> None:
        """After a failure nobody knows whether an answer exists: ask again while this worker owns the request."""
        looks = partial(self._flow.durable.awaits, subject, Stage.CHECKING_FOR_ANSWER)
        again_s = AGAIN_S
        while looks():
            try:
                finished = await self._found(subject, looks)
            except LostOwnership:
                return
            except Exception as error:
                fault = None if isinstance(error, PenstockError) else error
                logger.warning("turn.look_up_waits request_id=%s error=%s", subject.request_id, error, exc_info=fault)
                await asyncio.sleep(again_s)
                again_s = min(2 * again_s, LONGEST_AGAIN_S)
                continue
            size = 0 if finished is None else size_of(finished.output)
            self._flow.durable.answer_checked(
                subject, finished, self._clock(), large=size > INLINE_BYTES, output_bytes=size
            )
            self._changed()
            return

    async def _found(self, subject: Subject, looks: Callable[[], bool]) -> Finished | None:
        """The answer in the conversation; None if there is none, or its images are deleted. Raises LostOwnership."""
        if subject.task == ITEMS:
            offsets = await self._turns.appended(subject.request, looks)
            return None if offsets is None else Finished(run_id="", output={"offsets": offsets}, finish_reason=None)
        look = self._turns.summary if subject.task == SUMMARY else self._turns.answer
        answer = await look(subject.request, looks)
        try:
            return None if answer is None else await self._standing("", answer)
        except NotFound:
            return None

    def delta(self, subject: Subject, run_id: str, delta: Delta) -> None:
        text, token_ids = delta.text, delta.token_ids
        first_s = self._flow.output.delta(subject, run_id, text, token_ids, self._clock(), delta.calls, delta.logprobs)
        if first_s is not None:
            self._metrics.first_token_after(first_s, subject.lane)
        self._changed()

    def progress(self, subject: Subject, run_id: str, progress: StepProgress) -> None:
        self._flow.output.stepped(subject, run_id, progress.step, progress.steps, self._clock())
        self._changed()

    def preview(self, subject: Subject, run_id: str, preview: Preview) -> None:
        self._flow.output.previewed(subject, run_id, preview)
        self._changed()

    def finished(self, subject: Subject, run_id: str, finished: Finished) -> None:
        self._metrics.prompt_tokens.inc(finished.prompt_tokens)
        self._metrics.completion_tokens.inc(finished.completion_tokens)
        if (pixels := pixels_of(finished.output)) is not None:
            self._metrics.pixels.inc(pixels)
        size = bytes_of(finished.output)
        large = size > INLINE_BYTES or has_images(finished.output)
        self._flow.attempts.finished(subject, run_id, finished, self._clock(), large=large, output_bytes=size)
        self._changed()

    def failed(self, subject: Subject, run_id: str, error: PenstockError, *, again: bool) -> None:
        if isinstance(error, TurnedAway):
            self._flow.attempts.turned_away(subject, run_id, error, self._clock())
        else:
            self._flow.attempts.failed(subject, run_id, error, self._clock(), again=again)
        self._changed()

    async def _to_sum_up(self, subject: Subject, conversation_id: str, goes_on: Callable[[], bool]) -> ToSumUp:
        """What a summary is to be made of. Raises NotFound, LostOwnership."""
        through = subject.request.payload.get("through_offset")
        found = await self._turns.to_sum_up(subject.request, conversation_id, through, goes_on)
        if found is None:
            param = "payload.conversation_id" if subject.request.conversation_id is None else "conversation_id"
            raise NotFound(f"the conversation {conversation_id} holds nothing", param=param)
        return found

    def _spec(
        self, effect: Prepare | Start, request: InferenceRequest, images: Gathered, published: PublishedPrefix | None
    ) -> RunSpec:
        """What the engine is asked for. `request` has all of its text.

        The run id is this run's own, so late events of another are known as such.

        Raises InvalidRequest for a request whose output could be kept nowhere.
        """
        subject, payload = effect.subject, request.payload
        self._outputs.check(request.output)
        inputs = payload.get("input")
        params = {name: value for name, value in payload.items() if value is not None and name in _PARAMS}
        filled: dict[str, Any] = {}
        if defaults := self._defaults(subject.lane):
            known = default_fields(request.task)
            filled = {name: value for name, value in defaults.items() if name in known and name not in params}
        return RunSpec(
            run_id=effect.run_id,
            task=request.task,
            model=subject.lane,
            messages=_without_nulls(payload.get("messages")),
            history=images.past,
            prompt=payload.get("prompt"),
            inputs=[inputs] if isinstance(inputs, str) else inputs,
            params={**params, **filled} if filled else params,
            payload={} if request.task in _AS_FIELDS else _payload(payload, {**filled, **images.payload}),
            images=images.images,
            files=images.files,
            output=request.output,
            defaulted=frozenset(filled) if filled else _NONE,
            context=request.context,
            stream=request.stream,
            extra=request.extra,
            request_id=subject.request_id,
            published=published,
            priority=subject.priority,
        )


async def _in_time(storing: Awaitable[T], deadline_ms: int | None) -> T:
    """What comes of storing an output. Raises Expired when the store hangs beyond the request's deadline."""
    left_s = None if deadline_ms is None else max(STORE_S, (deadline_ms - now_ms()) / 1000)
    try:
        async with asyncio.timeout(left_s):
            return await storing
    except TimeoutError as error:
        raise Expired("its output was not stored before its deadline: the store does not answer") from error


def _summarized(subject: Subject) -> str | None:
    """The conversation that a summary is to be made of; it is no turn of it."""
    request = subject.request
    return (request.conversation_id or request.payload.get("conversation_id")) if subject.task == SUMMARY else None


def _payload(payload: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Without nulls, and without the empty reference that stands for a conversation's newest image."""
    return {**defaults, **{name: value for name, value in payload.items() if value is not None and value != {}}}


def _without_nulls(messages: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Messages as templates and servers know them: some ask whether a field is there, not whether it is null."""
    if messages is None:
        return None
    return [
        message if len(message) == 2 else {name: value for name, value in message.items() if value is not None}
        for message in messages
    ]


def _at_once(coroutine: Coroutine[Any, Any, Prepared]) -> Prepared:
    """The result of a coroutine that never waits. So an inline engine costs no task for each request."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    coroutine.close()
    raise RuntimeError("an inline engine's prepare waits")


def _said(answer: ConversationMessage) -> tuple[Any, ...]:
    return answer.content, answer.tool_calls, [one.artifact_id for one in answer.artifacts]
