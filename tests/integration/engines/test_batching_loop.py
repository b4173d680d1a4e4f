"""What happens when the batching loop dies under its runs, and that transformers' manager is still as it is used."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.common.engine_kinds import KINDS
from penstock.processors.engines.base import RunSpec
from penstock.processors.engines.text.backend import TextBackend
from support import wait_until_async

from .conftest import StartEngine


async def test_a_dead_batching_loop_is_the_death_of_its_engine(
    start_engine: StartEngine, tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "text", replace(KINDS["text"], backend="engine_backends:PoisonedText"))
    codes: list[int] = []
    runner = await start_engine("text", tiny_lm, host={"on_died": codes.append}, dies_at=7, ignore_eos=True)
    runs = [await runner.chat("Story", max_tokens=800) for _ in range(2)]
    await asyncio.wait_for(runs[0].first.wait(), 30)
    runs.append(await runner.chat("Story", max_tokens=7))
    await wait_until_async(lambda: codes, 30)
    assert codes == [1]
    # No run is told that it failed: who ran on it, and who is to blame, is the worker's to find out.
    assert not any(run.done.done() for run in runs)


async def test_tokens_are_taken_without_the_loop_being_asked_for_each(tiny_lm: Path) -> None:
    events: list[tuple[Any, ...]] = []
    backend = TextBackend(str(tiny_lm), {"threads": 1, "cache_tokens": 1024, "ignore_eos": True}, events.append)
    await asyncio.to_thread(backend.load)
    batching: Any = backend._batching
    try:
        turns = batching.turns
        await wait_until_async(lambda: batching.turns > turns, 10, "an idle loop turns, too")

        def begin(run_id: str, tokens: int, **fields: Any) -> None:
            params = {"temperature": 0, "max_tokens": tokens}
            spec = RunSpec(run_id=run_id, task="text_generation", model="m", prompt="Once", params=params, **fields)
            backend.run(spec, backend.prepare(spec)[1])

        def ended() -> list[str]:
            return [event[1].run_id for event in events if event[0] == "finished"]

        begin("streamed", 300, stream=True)
        begin("plain", 300, stream=False)
        begin("cancelled", 600, stream=True)
        await wait_until_async(lambda: any(event[:2] == ("delta", "cancelled") for event in events), 30)
        backend.cancel("cancelled")
        told = len([event for event in events if event[1] == "cancelled"])
        await wait_until_async(lambda: len(ended()) == 2, 60)
        assert {event[1] for event in events if event[0] == "delta"} == {"streamed", "cancelled"}
        assert len([event for event in events if event[1] == "cancelled"]) == told
        # Nothing that a run leaves behind stays.
        await wait_until_async(lambda: not batching.batch_processor.scheduler.active_requests, 10)
        await wait_until_async(lambda: not batching._outputs and not backend._will_look, 10)
        assert not backend._runs
        assert not batching.output_router.result_handlers
        assert batching.output_router.output_queue.empty()
        # A run that comes when nobody looks is seen.
        begin("after", 3, stream=True)
        await wait_until_async(lambda: "after" in ended(), 30)
    finally:
        batching.stop(block=True, timeout=10, hard_stop=True)


async def test_the_prompt_of_an_urgent_run_does_not_wait_for_those_of_others(tiny_lm: Path) -> None:
    """Beside 63 low runs an urgent one waited for all of their prompts: 17 s for four tokens, 0.35 s alone."""
    events: list[tuple[Any, ...]] = []
    options = {"threads": 1, "cache_tokens": 8192, "max_batch_tokens": 64, "ignore_eos": True}
    backend = TextBackend(str(tiny_lm), options, events.append)
    await asyncio.to_thread(backend.load)
    try:
        for number in range(30):
            begin(backend, f"low {number}", 8, prompt=f"{number} " + "Once " * 150)
        begin(backend, "urgent", 1)
        begin(backend, "low last", 8)
        await wait_until_async(lambda: len(ended(events)) == 32, 120)
        order = ended(events)
        assert order.index("urgent") < 15, order
        assert order.index("low last") == 31, order
        assert not cast(Any, backend)._batching._places.keys() & set(order)
    finally:
        cast(Any, backend)._batching.stop(block=True, timeout=10, hard_stop=True)


def begin(backend: TextBackend, run_id: str, priority: int, *, prompt: str = "Once") -> None:
    params = {"temperature": 0, "max_tokens": 4}
    spec = RunSpec(
        run_id=run_id, task="text_generation", model="m", prompt=prompt, params=params, stream=True, priority=priority
    )
    backend.run(spec, backend.prepare(spec)[1])


def ended(events: list[tuple[Any, ...]]) -> list[str]:
    return [event[1].run_id for event in events if event[0] == "finished"]
