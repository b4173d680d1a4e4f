"""The process around an engine: its death fails its own runs only, it comes back, and it never outlives its worker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.common.background import on_faults
from penstock.common.engine_kinds import KINDS
from penstock.processors.earlier_messages import EarlierMessages
from penstock.processors.engines.base import Engine, EngineGone, EngineState, Limits, Prepared, RunSpec
from penstock.processors.engines.process import engine_process
from penstock.processors.engines.process.engine_process import EngineProcess
from penstock.processors.engines.process.host import ChildEngine
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.factory import make_engine
from penstock.processors.models.sizing import size_model
from penstock.schemas.errors import EngineFailed, InvalidRequest
from support import alive, wait_until, wait_until_async

from .conftest import Run, Runner, StartEngine, changed_copy


async def until(condition: Any, timeout_s: float = 60) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_death_is_told_once_for_all_runs(start_engine: StartEngine, tiny_lm: Path) -> None:
    codes: list[int] = []
    runner = await start_engine("text", tiny_lm, host={"on_died": codes.append}, ignore_eos=True)
    runs = [await runner.chat(f"Story {number}", max_tokens=800) for number in range(3)]
    await asyncio.wait_for(runs[0].first.wait(), 30)
    preparing = asyncio.create_task(runner.chat("word " * 100_000, max_tokens=1))
    prepared = runner.spec(prompt="x")
    late = await runner.engine.prepare(prepared)
    pid = runner.engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        while runner.engine.state is not EngineState.DEAD:
            await asyncio.sleep(0)
    assert not codes
    runs.append(Run(runner.engine, prepared, late))  # given to it before its end was told
    with pytest.raises(EngineGone):
        await preparing
    with pytest.raises(EngineGone):
        await runner.chat("Story", max_tokens=5)
    await until(lambda: codes)
    assert codes == [-signal.SIGKILL]
    assert not psutil.pid_exists(pid)
    assert not any(run.done.done() for run in runs), "the sinks are told nothing"
    assert (await Run(runner.engine, prepared, late).failed()).retryable_here, "after that each is told"
    with pytest.raises(RuntimeError, match="starts once"):
        await runner.engine.start()


async def test_a_stuck_process_is_killed(start_engine: StartEngine, tiny_lm: Path) -> None:
    codes: list[int] = []
    runner = await start_engine("text", tiny_lm, host={"on_died": codes.append}, silent_s=3, ignore_eos=True)
    await runner.chat("Story", max_tokens=900)
    pid = runner.engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: codes)
    assert codes == [-signal.SIGKILL]


async def test_a_process_that_sigkill_does_not_end_is_dead_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """It stayed ready: runs were granted to it, and timed out."""
    monkeypatch.setattr(EngineProcess, "kill", lambda process: None)  # as if the kernel held it in a call of a driver
    monkeypatch.setattr(engine_process, "DEAD_WITHIN_S", 0.5)
    codes: list[int] = []
    engine = ChildEngine("m", "engine_backends:Plain", "nowhere", {}, limits=Limits(slots=1), silent_s=5)
    engine.on_died = codes.append
    await engine.start()
    pid = engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        await until(lambda: codes)
        assert (codes, engine.state, engine.left_pid) == ([-1], EngineState.DEAD, pid)
        with pytest.raises(EngineGone):
            await engine.prepare(Runner(engine).spec(prompt="x"))
        await engine.stop()  # does not wait for it longer
        assert engine.left_pid == pid
    finally:
        os.kill(pid, signal.SIGKILL)
    await until(lambda: engine.left_pid is None, 30)


async def test_a_fork_server_that_hangs_is_replaced() -> None:
    """Every load of the worker waited for it, one time limit of a load after the other."""

    def engine() -> ChildEngine:
        return ChildEngine("m", "engine_backends:Plain", "nowhere", {}, limits=Limits(slots=1), silent_s=3)

    first, second, third = engine(), engine(), engine()
    await first.start()
    assert first.pid is not None
    server = psutil.Process(first.pid).ppid()
    os.kill(server, signal.SIGSTOP)
    with pytest.raises(EngineFailed, match=f"fork server {server} gave no sign of life for 3 s"):
        await asyncio.wait_for(second.start(), 60)
    await until(lambda: not psutil.pid_exists(server))
    await third.start()
    assert third.pid is not None
    assert psutil.Process(third.pid).ppid() != server
    for one in (first, second, third):
        await one.stop()


async def test_stop_ends_even_a_stuck_process(start_engine: StartEngine, tiny_lm: Path) -> None:
    runner = await start_engine("text", tiny_lm, ignore_eos=True)
    run = await runner.chat("Story", max_tokens=900)
    pid = runner.engine.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await runner.engine.stop()
    assert not run.done.done(), "what is stopped is not told"
    assert not psutil.pid_exists(pid)
    assert runner.engine.state is EngineState.STOPPED
    with pytest.raises(EngineGone):
        await runner.chat("anybody there?")


async def test_a_model_that_cannot_be_loaded_says_why(start_engine: StartEngine, tiny_lm: Path, tmp_path: Path) -> None:
    broken = changed_copy(tiny_lm, tmp_path, "config.json", '{"model_type": "no-such-architecture"}')
    with pytest.raises(EngineFailed, match="could not be loaded"):
        await start_engine("text", broken)
    with pytest.raises(InvalidRequest, match="too small"):
        await start_engine("text", tiny_lm, cache_tokens=32)


async def test_an_engine_stays_within_what_it_was_sized_to_need(tiny_lm: Path) -> None:
    config = ModelConfig(id="m", source=str(tiny_lm), engine="text")
    size = await size_model(config)
    engine = make_engine(config, size, "cpu", size.need_bytes)
    await engine.start()
    try:
        measured = engine.measured_memory()
        assert measured is not None
        assert 0 < measured <= size.need_bytes
    finally:
        await engine.stop()


WORKER = """
    import asyncio, sys
    from penstock.processors.models.catalog import ModelConfig
    from penstock.processors.models.factory import make_engine
    from penstock.processors.models.sizing import size_model

    async def main():
        config = ModelConfig(id="m", source=sys.argv[1], engine="text", options={"threads": 1})
        engine = make_engine(config, await size_model(config))
        await engine.start()
        print(engine.pid, flush=True)
        await asyncio.sleep(600)

    if __name__ == "__main__":
        asyncio.run(main())
"""


def test_an_engine_does_not_outlive_a_killed_worker(tiny_lm: Path, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    worker = subprocess.Popen([sys.executable, str(script), str(tiny_lm)], stdout=subprocess.PIPE, text=True)
    assert worker.stdout is not None
    try:
        engine = int(worker.stdout.readline())
        family = psutil.Process(worker.pid).children(recursive=True)
        assert engine in {process.pid for process in family}
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
    wait_until(lambda: not any(map(alive, family)), 20, lambda: [one for one in family if alive(one)])


async def test_a_hung_computation_is_noticed_though_the_process_answers(
    start_engine: StartEngine, tiny_lm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(KINDS, "text", replace(KINDS["text"], backend="engine_backends:HangingText"))
    codes: list[int] = []
    runner = await start_engine("text", tiny_lm, host={"on_died": codes.append}, silent_s=4, hang_at=7, ignore_eos=True)
    # Without work for longer than that, and with work for longer than that, it is alive.
    await asyncio.sleep(5)
    long = await runner.chat("Story", max_tokens=900)
    await long.finished()
    assert not codes
    hung = await runner.chat("Story", max_tokens=7)
    for _ in range(20):
        # Its event loop still answers: that is no sign of life.
        await runner.engine.prepare(runner.spec(prompt="anybody there?"))
        await asyncio.sleep(0.1)
    runner.engine.cancel(hung.spec.run_id)  # nor is it that nobody waits for the run any more
    await until(lambda: codes, 30)
    assert codes == [-signal.SIGKILL]


@pytest.mark.parametrize("backend", ["Unsendable", "CheckFails"])
async def test_a_broken_backend_ends_its_process_at_once(backend: str) -> None:
    engine = ChildEngine("m", f"engine_backends:{backend}", "nowhere", {}, limits=Limits(slots=1))
    codes: list[int] = []
    engine.on_died = codes.append
    await engine.start()
    try:
        if backend == "Unsendable":
            spec = Runner(engine).spec(prompt="x")
            Run(engine, spec, await engine.prepare(spec))
        await until(lambda: codes, 10)
        assert codes == [1]
    finally:
        await engine.stop()


@pytest.mark.parametrize("prompt", ["short", "long " * 1000])
async def test_who_prepares_hears_of_a_fault_where_nobody_waits(prompt: str) -> None:
    """In a callback of the event loop, and in a task: the answer would never come."""
    engine = ChildEngine("m", "engine_backends:PreparesNonsense", "nowhere", {}, limits=Limits(slots=1))
    codes: list[int] = []
    engine.on_died = codes.append
    await engine.start()
    try:
        async with asyncio.timeout(20):
            with pytest.raises(EngineGone):
                await engine.prepare(Runner(engine).spec(prompt=prompt))
        await until(lambda: codes, 10)
        assert codes == [1]
    finally:
        await engine.stop()


async def test_a_sink_that_raises_is_a_fault_of_the_worker_and_none_of_the_engine() -> None:
    faults: list[str] = []
    on_faults(asyncio.get_running_loop(), lambda: faults.append("fault"))
    engine = ChildEngine("m", "engine_backends:Plain", "nowhere", {}, limits=Limits(slots=1))
    await engine.start()
    try:
        runner = Runner(engine)
        for number, event in enumerate(("on_delta", "on_finished"), 1):
            spec = runner.spec(prompt="x")
            RaisingRun(engine, spec, await engine.prepare(spec), event)
            await wait_until_async(lambda number=number: len(faults) >= number, 10)
        assert (await (await runner.begin(prompt="still there")).finished()).output == {"text": "still there"}
    finally:
        await engine.stop()


class RaisingRun(Run):
    """Cannot take one kind of event."""

    def __init__(self, engine: Engine, spec: RunSpec, prepared: Prepared, event: str) -> None:
        def refuse(_: object) -> None:
            raise UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed")

        setattr(self, event, refuse)
        super().__init__(engine, spec, prepared)


async def test_of_a_long_history_only_what_may_fit_is_sent() -> None:
    engine = ChildEngine("m", "engine_backends:Plain", "nowhere", {}, limits=Limits(slots=1))
    await engine.start()
    try:
        turn = [{"role": "user", "content": "u" * 400}, {"role": "assistant", "content": "a" * 600}]
        history = [{"role": "system", "content": "s"}, *turn * 5000]
        prepared = await engine.prepare(Runner(engine).spec(history=EarlierMessages(messages=history), messages=[]))
        sent = prepared.prompt_tokens
        assert sent % 2 == 1, "the system message, and whole turns"
        assert 1000 * 5 < sent // 2 * 1000 <= 1000 * 32, "the window is 1,000 tokens"
        assert prepared.held is not None
        assert prepared.held.dropped_turns == 5000 - sent // 2
    finally:
        await engine.stop()


async def test_a_long_prompt_that_is_prepared_holds_up_nobody() -> None:
    options = {"seconds": 3}
    engine = ChildEngine("m", "engine_backends:SlowPrepare", "nowhere", options, limits=Limits(slots=1), silent_s=2)
    await engine.start()
    try:
        runner = Runner(engine)
        forgotten = runner.spec(prompt="y" * 20_000)
        long = asyncio.create_task(engine.prepare(runner.spec(prompt="x" * 20_000)))
        await asyncio.sleep(0)
        short = await runner.begin(prompt="short")
        assert (await short.finished()).output == {"text": "short"}
        # What the process has not prepared it prepares when it is run, as long.
        unprepared = Run(engine, forgotten, Prepared(run_id=forgotten.run_id, prompt_tokens=0, need_tokens=0))
        dropped_spec = runner.spec(prompt="z" * 20_000)
        dropped = Run(engine, dropped_spec, Prepared(run_id=dropped_spec.run_id, prompt_tokens=0, need_tokens=0))
        short = await runner.begin(prompt="short again")
        await short.finished()
        engine.cancel(dropped_spec.run_id)
        assert not long.done()
        assert (await long).prompt_tokens == 20_000
        assert (await unprepared.finished()).output == {"text": "y" * 20_000}
        assert not dropped.done.done()
        assert engine.state is EngineState.READY
    finally:
        await engine.stop()
