"""Summaries: every part is read, what was granted is kept, one outcome whatever happens inside."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit import engines as kit
from kit.refusals import refused
from penstock.processors.earlier_messages import EarlierMessages
from penstock.processors.engines.base import (
    Delta,
    EngineGone,
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
from penstock.processors.engines.text.summarizing import SummarizingEngine
from penstock.processors.engines.text.summary_parts import packed, sizes_for, split
from penstock.schemas.errors import ContextLengthExceeded, EngineFailed, InvalidRequest
from shell_fakes import ScriptedEngine
from support import wait_until_async


class Reader(ScriptedEngine):
    """A text engine with a window and a cache that keeps what it was asked, and answers when it is let.

    Its answer names the marks (m1, m2 …) that it read, so that the summary shows which parts came through.
    """

    def __init__(self, *, window: int | None = 600, cache: int | None = 2400, dense: str = "") -> None:
        super().__init__(slots=8)
        self.state = EngineState.READY
        self.asked: list[str] = []
        self.most_held = self.most_together = 0
        self.let = asyncio.Event()
        self.let.set()
        self.fails_on: str | None = None
        self.window, self.cache, self.dense = window, cache, dense
        self.tasks: list[asyncio.Task[None]] = []

    def limits(self) -> Limits:
        return Limits(slots=8, tokens=self.cache)

    def info(self) -> EngineInfo:
        return EngineInfo(context_window=self.window)

    async def prepare(self, spec: RunSpec) -> Prepared:
        await asyncio.sleep(0)
        if self.state is not EngineState.READY:
            raise EngineGone("gone")
        assert spec.task == "text_generation"
        text = spec.messages[0]["content"]
        tokens = len(text) // (1 if self.dense and self.dense in text else 4) + 10
        need = tokens + spec.params["max_tokens"]
        if need > (self.window or 4096):
            raise ContextLengthExceeded("too long")
        return Prepared(run_id=spec.run_id, prompt_tokens=tokens, need_tokens=-(-need // 32) * 32)

    def run(self, spec: RunSpec, prepared: Prepared, sink: Sink) -> None:
        super().run(spec, prepared, sink)
        self.asked.append(spec.messages[0]["content"])
        self.most_held = max(self.most_held, sum(one.need_tokens for _, one, _ in self.runs.values()))
        self.most_together = max(self.most_together, len(self.runs))
        self.tasks.append(asyncio.create_task(self.answer(spec, prepared, sink)))

    async def answer(self, spec: RunSpec, prepared: Prepared, sink: Sink) -> None:
        await self.let.wait()
        await asyncio.sleep(0.001)
        if self.runs.pop(spec.run_id, None) is None:
            return
        content = spec.messages[0]["content"]
        if self.fails_on is not None and self.fails_on in content:
            error = EngineFailed("as in a fault")
            sink.on_failed(RunFailed(run_id=spec.run_id, error=error, retryable_here=True))
            return
        text = " ".join(re.findall(r"\bm\d+\b", content)) or "nothing"
        if spec.stream:
            sink.on_delta(Delta(run_id=spec.run_id, text=text, token_ids=[1], first_token_index=0))
        usage = usage_of(prepared.prompt_tokens, 3)
        sink.on_finished(Finished(run_id=spec.run_id, output={"text": text}, finish_reason="stop", usage=usage))


def spec(text: str | None = None, **fields: Any) -> RunSpec:
    payload = {} if text is None else {"text": text}
    return RunSpec(run_id="run", task="summarization", model="m", payload=payload, stream=True, **fields)


async def begun(reader: Reader, wanted: RunSpec) -> tuple[SummarizingEngine, kit.Sink, Prepared]:
    engine, heard = SummarizingEngine(reader), kit.Sink()
    prepared = await engine.prepare(wanted)
    engine.run(wanted, prepared, heard)
    return engine, heard, prepared


async def summary(reader: Reader, wanted: RunSpec) -> tuple[Finished, kit.Sink, Prepared]:
    _, heard, prepared = await begun(reader, wanted)
    outcome = await asyncio.wait_for(heard.done, 30)
    assert isinstance(outcome, Finished), outcome
    assert {delta.run_id for delta in heard.deltas} | {outcome.run_id} == {"run"}
    assert not reader.runs
    return outcome, heard, prepared


def marked(parts: int, words: int = 100) -> str:
    return "\n\n".join(f"m{n} " + "word " * words for n in range(1, parts + 1))


async def test_a_short_text_is_one_run_that_streams() -> None:
    reader = Reader()
    outcome, heard, _ = await summary(reader, spec("m1 is short"))
    assert outcome.output == {"text": "m1"}
    assert "".join(heard.texts) == "m1"
    assert len(reader.asked) == 1
    assert heard.steps == [(1, 1)]


@pytest.mark.parametrize("parts", [5, 60])
async def test_every_part_of_a_long_text_is_read(parts: int) -> None:
    reader = Reader()
    text = marked(parts)
    outcome, heard, prepared = await summary(reader, spec(text))
    assert outcome.output["text"].split() == [f"m{n}" for n in range(1, parts + 1)]
    assert "".join(heard.texts) == outcome.output["text"], "the last run streams, and no other"
    assert all(any(mark in asked for asked in reader.asked) for mark in outcome.output["text"].split())
    steps = [step for step, _ in heard.steps]
    assert steps == list(range(1, len(steps) + 1))
    assert heard.steps[-1][0] == heard.steps[-1][1] == len(reader.asked)
    assert reader.most_held <= prepared.need_tokens <= 2400 // 2 + 128
    assert outcome.usage["completion_tokens"] == 3 * len(reader.asked)
    assert outcome.usage["prompt_tokens"] > len(text) // 4


async def test_parts_run_together_as_far_as_the_cache_allows() -> None:
    wide, narrow, server = Reader(cache=40_000), Reader(cache=700), Reader(cache=None, window=None)
    for reader in (wide, narrow, server):
        await summary(reader, spec(marked(40)))
    assert wide.most_together == 4
    assert narrow.most_together == 1
    assert server.most_together == 1


async def test_a_part_that_is_denser_than_thought_is_cut_in_two() -> None:
    reader = Reader(dense="§")
    text = marked(3) + " m4 §" + "x" * 3000 + " m5 " + marked(2).replace("m1", "m6").replace("m2", "m7")
    outcome, heard, prepared = await summary(reader, spec(text))
    assert set(outcome.output["text"].split()) >= {f"m{n}" for n in (1, 2, 3, 4, 6, 7)}
    assert reader.most_held <= prepared.need_tokens
    assert heard.steps[-1][0] == heard.steps[-1][1]


async def test_a_conversation_is_told_by_its_messages() -> None:
    reader = Reader()
    history = [{"role": "user", "content": "m1?"}, {"role": "assistant", "content": "m2!"}]
    outcome, _, _ = await summary(reader, spec(history=EarlierMessages(messages=history), params={"max_tokens": 20}))
    assert outcome.output["text"] == "m1 m2"
    assert "user: m1?\nassistant: m2!" in reader.asked[0]


async def test_refusals() -> None:
    engine = SummarizingEngine(Reader())
    with pytest.raises(InvalidRequest):
        await engine.prepare(spec(history=EarlierMessages(messages=[])))
    with refused(ContextLengthExceeded, param="payload.max_tokens"):
        await engine.prepare(spec("m1", params={"max_tokens": 590}))


async def test_cancelled_all_of_it_ends_silently() -> None:
    reader = Reader(cache=40_000)
    reader.let.clear()
    engine, heard, _ = await begun(reader, spec(marked(40)))
    await wait_until_async(lambda: len(reader.runs) >= 4, 30)
    engine.cancel("run")
    await wait_until_async(lambda: not reader.runs, 30)
    reader.let.set()
    await asyncio.sleep(0.05)
    assert not heard.done.done()
    assert len(reader.asked) == 4


async def test_a_part_that_fails_fails_the_whole_once() -> None:
    reader = Reader(cache=40_000)
    reader.fails_on = "m7 "
    _, heard, _ = await begun(reader, spec(marked(40)))
    outcome = await asyncio.wait_for(heard.done, 30)
    assert isinstance(outcome, RunFailed)
    assert outcome.retryable_here
    assert str(outcome.error) == "as in a fault"
    await wait_until_async(lambda: not reader.runs, 30)


async def test_the_death_of_the_engine_is_told_once_for_all() -> None:
    reader = Reader()
    reader.let.clear()
    engine, heard, _ = await begun(reader, spec(marked(10)))
    deaths: list[int] = []
    engine.on_died = deaths.append
    await wait_until_async(lambda: reader.runs, 30)
    reader.state = EngineState.DEAD
    reader.on_died(-9)
    await asyncio.sleep(0.05)
    assert deaths == [-9]
    assert not heard.done.done()


async def test_other_tasks_pass_through() -> None:
    reader = Reader()
    params = {"max_tokens": 5}
    messages = [{"role": "user", "content": "m9"}]
    chat = RunSpec(run_id="run", task="text_generation", model="m", params=params, messages=messages)
    await kit.run(SummarizingEngine(reader), chat)
    assert reader.asked == ["m9"]


@given(st.text(alphabet="ab .\n", max_size=300), st.integers(1, 50))
def test_parts_are_the_text(text: str, chars: int) -> None:
    parts = split(text, chars)
    assert "".join(parts) == text
    assert all(len(part) <= chars for part in parts)
    assert all(parts[:-1])


@given(st.lists(st.text(max_size=30), min_size=2), st.integers(1, 60))
def test_putting_together_always_leaves_fewer(texts: list[str], chars: int) -> None:
    groups = packed(texts, chars)
    assert [text for group in groups for text in group] == texts
    assert len(groups) < len(texts)


@given(st.integers(64, 200_000), st.none() | st.integers(64, 200_000), st.none() | st.integers(1, 500))
def test_sizes_fit(window: int, cache: int | None, wanted: int | None) -> None:
    try:
        sizes = sizes_for(window, cache, wanted, 4)
    except ContextLengthExceeded:
        return
    assert sizes.part_tokens + max(sizes.answer_tokens, sizes.summary_tokens) <= window
    assert sizes.part_tokens > 2 * sizes.answer_tokens
    if cache is not None:
        assert sizes.together * sizes.run_tokens <= max(cache, sizes.run_tokens)
