"""Engines and conversations for tests of the worker's shells: they do what a test tells them, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kit.records import conversation_message
from penstock.processors.conversations.log import HistoryMark, SummaryMark
from penstock.processors.conversations.messages import Shown
from penstock.processors.conversations.turns import ToSumUp, TurnStart
from penstock.processors.earlier_messages import EarlierMessages
from penstock.processors.engines.base import (
    Delta,
    EngineInfo,
    EngineState,
    Finished,
    Limits,
    Prepared,
    RunFailed,
    RunSpec,
    Sink,
    usage_of,
)
from penstock.schemas.errors import PenstockError
from penstock.schemas.records import ConversationMessage, InferenceRequest

MARK = HistoryMark(topic_id="t", count=1, fingerprint=7)


class ScriptedEngine:
    """Keeps what it is asked. A test ends its runs; `refusal` and `run_error` are raised."""

    model = "m"
    left_pid = None

    def __init__(
        self,
        *,
        inline: bool = False,
        slots: int = 4,
        need_tokens: int = 0,
        device: str = "cpu:7",
        error: Exception | None = None,
    ) -> None:
        self.state = EngineState.NEW
        self.device, self.error = device, error
        self.prepares_inline = inline
        self.slots, self.need_tokens = slots, need_tokens
        self.memory_bytes = 0
        self.refusal: BaseException | None = None
        self.run_error: BaseException | None = None
        self.answers = asyncio.Event()
        self.answers.set()
        self.prepared: list[RunSpec] = []
        self.runs: dict[str, tuple[RunSpec, Prepared, Sink]] = {}
        self.cancelled: list[str] = []
        self.on_died: Callable[[int], None] = lambda code: None
        self.on_busy: Callable[[float], None] = lambda seconds: None
        self.on_limits: Callable[[Any], None] = lambda limits: None
        self.on_out_of_memory: Callable[[], None] = lambda: None

    async def prepare(self, spec: RunSpec) -> Prepared:
        self.prepared.append(spec)
        if not self.prepares_inline or not self.answers.is_set():
            await self.answers.wait()
        if self.refusal is not None:
            raise self.refusal
        return Prepared(
            run_id=spec.run_id, prompt_tokens=3, need_tokens=self.need_tokens, memory_bytes=self.memory_bytes
        )

    def run(self, spec: RunSpec, prepared: Prepared, sink: Sink) -> None:
        if self.run_error is not None:
            raise self.run_error
        self.runs[spec.run_id] = (spec, prepared, sink)

    def cancel(self, run_id: str) -> None:
        self.cancelled.append(run_id)
        self.runs.pop(run_id, None)

    def limits(self) -> Limits:
        return Limits(slots=self.slots)

    def measured_memory(self) -> int | None:
        return 42

    def peak_memory(self) -> int | None:
        return 43

    def info(self) -> EngineInfo:
        return EngineInfo(device=self.device)

    async def start(self) -> None:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        self.state = EngineState.READY

    async def stop(self) -> None:
        self.state = EngineState.STOPPED

    # -- what a test makes it say

    def only_run(self) -> tuple[RunSpec, Prepared, Sink]:
        (run,) = self.runs.values()
        return run

    def say(self, text: str, tokens: int = 1) -> None:
        spec, _, sink = self.only_run()
        sink.on_delta(Delta(run_id=spec.run_id, text=text, token_ids=[1] * tokens, first_token_index=0))

    def finish(self, text: str = "done", **output: Any) -> None:
        self.finish_with(output or {"text": text})

    def finish_with(self, output: dict[str, Any]) -> None:
        spec, _, sink = self.only_run()
        del self.runs[spec.run_id]
        sink.on_finished(Finished(run_id=spec.run_id, output=output, finish_reason="stop", usage=usage_of(3, 2)))

    def fail(self, error: PenstockError, *, again: bool) -> None:
        spec, _, sink = self.only_run()
        del self.runs[spec.run_id]
        sink.on_failed(RunFailed(run_id=spec.run_id, error=error, retryable_here=again))


class ScriptedTurns:
    """Conversations that say what a test sets. An exception in place of an answer is raised."""

    def __init__(self) -> None:
        self.stands: ConversationMessage | BaseException | None = None
        self.readable = asyncio.Event()
        self.readable.set()
        self.beginnable = asyncio.Event()
        self.beginnable.set()
        self.may_begin: Callable[[], bool] = lambda: False
        self.history: list[dict[str, Any]] = [{"role": "user", "content": "before"}]
        self.agrees: list[bool | BaseException] = []
        self.winner: ConversationMessage | BaseException | None = None
        self.begun: list[tuple[str, HistoryMark]] = []
        self.pictured: list[ConversationMessage] = []
        self.standing: Shown = {}
        self.shown: list[Shown] = []
        self.finished: list[ConversationMessage] = []
        self.mine: list[Callable[[], bool]] = []

    async def read(self, request: InferenceRequest, mine: Callable[[], bool]) -> TurnStart:
        self.mine.append(mine)
        await self.readable.wait()
        if isinstance(self.stands, BaseException):
            raise self.stands
        return TurnStart(
            answer=self.stands,
            past=EarlierMessages(messages=self.history),
            mark=MARK,
            pictured=self.pictured,
            shown=self.standing,
        )

    async def to_sum_up(
        self, request: InferenceRequest, conversation_id: str, through: int | None, mine: Callable[[], bool]
    ) -> ToSumUp | None:
        self.mine.append(mine)
        if not self.history:
            return None
        standing = self.stands if isinstance(self.stands, ConversationMessage) else None
        mark = SummaryMark("topic-1", through or 9, 0, None)
        return ToSumUp(past=EarlierMessages(messages=self.history), through=mark.through, mark=mark, standing=standing)

    async def summary(self, request: InferenceRequest, mine: Callable[[], bool]) -> ConversationMessage | None:
        return self.stands if isinstance(self.stands, ConversationMessage) else None

    async def add_summary(
        self, summary: ConversationMessage, mine: Callable[[], bool], made_of: SummaryMark
    ) -> ConversationMessage:
        return await self.finish(summary, mine, made_of.topic_id or "")

    async def begin(
        self,
        request: InferenceRequest,
        epoch: int,
        now_ms: int,
        mine: Callable[[], bool],
        mark: HistoryMark,
        shown: Shown | None = None,
    ) -> str | None:
        self.may_begin = mine
        self.shown.append(dict(shown or {}))
        self.begun.append((request.request_id, mark))
        await self.beginnable.wait()
        agrees = self.agrees.pop(0) if self.agrees else True
        if isinstance(agrees, BaseException):
            raise agrees
        return "topic-1" if agrees else None

    async def answer(self, request: InferenceRequest, mine: Callable[[], bool]) -> ConversationMessage | None:
        return (await self.read(request, mine)).answer

    async def finish(self, answer: ConversationMessage, mine: Callable[[], bool], topic_id: str) -> ConversationMessage:
        assert topic_id == "topic-1"
        self.mine.append(mine)
        self.finished.append(answer)
        if isinstance(self.winner, BaseException):
            raise self.winner
        return self.winner or answer


def answer_of(request_id: str, text: str) -> ConversationMessage:
    """An answer that stands in a conversation."""
    fields: dict[str, Any] = {"tenant": "default", "created_at": 1, "epoch": 1, "attempt": 1, "finish_reason": "stop"}
    return conversation_message("assistant", request_id=request_id, content=text, index=0, **fields)
