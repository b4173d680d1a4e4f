"""The scripted engine that stands for a model around which the rest is tested."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kit.engines import Sink, run, start
from kit.refusals import refused
from penstock.processors.earlier_messages import EarlierMessages
from penstock.processors.engines.base import EngineState, Finished, RunSpec
from penstock.processors.engines.noop import NoopEngine
from penstock.schemas.errors import ContextLengthExceeded, EngineFailed
from penstock.schemas.records import ContextLimits
from support import wait_until_async


def spec(number: int = 1, **fields: Any) -> RunSpec:
    return RunSpec(run_id=f"r{number}", task="text_generation", model="m", **fields)


async def started(options: dict[str, Any]) -> NoopEngine:
    engine = NoopEngine("m", options)
    await engine.start()
    return engine


@pytest.mark.parametrize("options", [{"tokens": 5}, {"tokens": 5, "delay_ms": 1}, {"tokens": 5, "first_delay_ms": 1}])
async def test_deltas_concatenate_to_the_output(options: dict[str, Any]) -> None:
    engine = await started(options)
    sink, found = await run(engine, spec(prompt="a b c", stream=True))
    assert "".join(sink.texts) == found.output["text"] == "word0 word1 word2 word3 word4 "
    assert [token for delta in sink.deltas for token in delta.token_ids] == list(range(5))
    assert found.usage == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert found.finish_reason == "stop"
    assert (engine.limits().slots, engine.limits().tokens) == (256, None)


async def test_max_tokens_and_stop_strings_end_it() -> None:
    engine = await started({"tokens": 50, "delay_ms": 0.1})
    _, short = await run(engine, spec(1, prompt="x", params={"max_tokens": 2}))
    assert (short.output["text"], short.finish_reason) == ("word0 word1 ", "length")
    _, stopped = await run(engine, spec(2, prompt="x", params={"stop": ["word3"]}))
    assert (stopped.output["text"], stopped.finish_reason) == ("word0 word1 word2 ", "stop")


async def test_echo_answers_with_the_context_it_was_given() -> None:
    engine = await started({"echo": True})
    history = [{"role": "user", "content": "old"}, {"role": "assistant", "content": "answer"}] * 2
    new = [{"role": "user", "content": "new"}]
    _, found = await run(
        engine, spec(messages=new, history=EarlierMessages(messages=history), context=ContextLimits(last_turns=1))
    )
    assert json.loads(found.output["text"]) == [*history[:2], *new]
    _, found = await run(engine, spec(2, prompt="a\ud800"))
    assert found.output["text"] == "a\ufffd"


async def test_a_cancelled_run_tells_nothing() -> None:
    engine = await started({"tokens": 3, "delay_ms": 5, "slots": 1})
    sink = await start(engine, spec(1, prompt="x", stream=True))
    engine.cancel("r1")
    await run(engine, spec(2, prompt="x"))
    assert not sink.deltas
    assert not sink.done.done()


async def test_too_long_a_prompt_is_refused() -> None:
    engine = NoopEngine("m", {"window": 10})
    with pytest.raises(ContextLengthExceeded):
        await engine.prepare(spec(messages=[{"role": "user", "content": "word " * 20}]))


@pytest.mark.parametrize("stream", [False, True])
async def test_what_nobody_sees_come_waits_with_one_timer_as_long_as_with_one_for_each_token(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A benchmark's engine must not fill the loop with timers of its own; what comes out is the same."""
    delays: list[float] = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda delay, step, *of: delays.append(delay) or loop.call_soon(step, *of))
    engine = await started({"tokens": 4, "delay_ms": 3, "first_delay_ms": 5})
    found = await (await start(engine, spec(prompt="x", stream=stream))).done
    assert isinstance(found, Finished)
    assert found.output["text"] == "word0 word1 word2 word3 "
    assert len(delays) == (4 if stream else 1)
    assert sum(delays) == pytest.approx(0.014)


@pytest.mark.parametrize("way", [None, "stop", "cancel"])
async def test_a_load_takes_the_time_it_was_given_or_is_given_up_at_once(way: str | None) -> None:
    engine = NoopEngine("m", {"load_ms": 20 if way is None else 3_600_000})
    assert engine.state is EngineState.NEW
    began = asyncio.get_running_loop().time()
    loading = asyncio.create_task(engine.start())
    await wait_until_async(lambda: engine.state is not EngineState.NEW, 5)
    if way == "stop":
        await engine.stop()
    elif way == "cancel":
        loading.cancel()
    error = {None: None, "stop": EngineFailed, "cancel": asyncio.CancelledError}[way]
    with refused(error):
        await asyncio.wait_for(loading, 5)
    assert way or asyncio.get_running_loop().time() - began >= 0.019
    ends = {None: EngineState.READY, "stop": EngineState.STOPPED, "cancel": EngineState.STARTING}
    assert engine.state is ends[way]


async def test_neither_loads_nor_runs_end_while_they_are_held(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    engine = NoopEngine("m", {"tokens": 2, "delay_ms": 1, "hold": str(hold)})
    loading = asyncio.create_task(engine.start())
    await wait_until_async(lambda: engine.state is EngineState.STARTING, 5)
    hold.unlink()
    await asyncio.wait_for(loading, 5)
    hold.touch()
    sinks: list[Sink] = []
    for number, stream in enumerate([True, False]):
        sinks.append(await start(engine, spec(number, prompt="x", stream=stream)))
    await wait_until_async(lambda: sinks[0].texts == ["word0 "], 5)
    await asyncio.sleep(0.01)  # longer than the tokens take
    assert not any(sink.done.done() for sink in sinks)
    hold.unlink()
    await wait_until_async(lambda: all(sink.done.done() for sink in sinks), 5)
