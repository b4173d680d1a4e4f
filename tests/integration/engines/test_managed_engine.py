"""The managed engine with llama.cpp's own server, as the package xllamacpp carries it, and commands that go wrong."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.processors.core.fleet.ledger import CannotLoad
from penstock.processors.engines.base import EngineGone, EngineState, RunSpec
from penstock.processors.engines.managed.engine import ManagedEngine
from penstock.processors.engines.managed.server_process import tree
from penstock.schemas.errors import EngineFailed
from support import alive, wait_until_async

from .conftest import Run

pytestmark = pytest.mark.slow

Make = Callable[..., ManagedEngine]
GIB = 1 << 30


@pytest.fixture
async def make(llama_cpp: dict[str, Any], tmp_path: Path) -> AsyncIterator[Make]:
    """An engine of llama.cpp's server; options replace those of its entry."""
    async with AsyncExitStack() as stack:

        def made(**options: Any) -> ManagedEngine:
            engine = ManagedEngine(
                "m",
                str(llama_cpp["source"]),
                {**llama_cpp["options"], **options},
                granted_bytes=GIB,
                total_bytes=16 * GIB,
                logs=tmp_path,
            )
            stack.push_async_callback(engine.stop)
            return engine

        yield made


def chat(number: int, text: str = "Say hello.", max_tokens: int = 8) -> RunSpec:
    messages = [{"role": "user", "content": text}]
    params = {"max_tokens": max_tokens, "temperature": 0}
    return RunSpec(
        run_id=f"r{number}", task="text_generation", model="m", messages=messages, params=params, stream=True
    )


async def begin(engine: ManagedEngine, spec: RunSpec) -> Run:
    return Run(engine, spec, await engine.prepare(spec))


async def test_a_real_server_is_started_spoken_to_measured_and_ended(make: Make, tmp_path: Path) -> None:
    engine = make()
    told: list[int] = []
    engine.on_died = told.append
    await engine.start()
    assert engine.state is EngineState.READY
    run = await begin(engine, chat(1))
    finished = await run.finished()
    assert finished.output["text"] == run.text != ""
    assert (finished.usage or {})["completion_tokens"] <= 8
    await wait_until_async(lambda: engine.measured_memory(), 20, "its memory")
    assert 100_000_000 < (engine.measured_memory() or 0) < GIB
    assert engine.pid is not None
    members = [process.pid for process in tree(engine.pid)]
    assert len(members) == 2  # keeper and server
    await engine.stop()
    assert not any(map(alive, members))
    assert told == []
    assert "model loaded" in (tmp_path / "server-m.log").read_text()


async def test_a_server_that_dies_takes_its_runs_with_it_and_tells_once(make: Make) -> None:
    engine = make()
    codes: list[int] = []
    engine.on_died = codes.append
    await engine.start()
    runs = [await begin(engine, chat(number, "Tell a long story.", 500)) for number in range(3)]
    await asyncio.wait_for(runs[0].first.wait(), 30)
    assert engine.pid is not None
    tree(engine.pid)[1].kill()
    await wait_until_async(lambda: codes, 5, "the death")
    assert codes == [128 + signal.SIGKILL]
    await asyncio.sleep(1.5)  # longer than a broken run waits to hear of a death
    assert not any(run.done.done() for run in runs)
    with pytest.raises(EngineGone):
        await engine.prepare(chat(9))


SLEEPER = "import subprocess, sys, time; subprocess.Popen(['setsid', 'sleep', '600']); time.sleep(600)"


async def test_what_it_started_in_sessions_of_its_own_ends_with_it(make: Make) -> None:
    """The engine is given up while it loads; also a server that ignores SIGTERM ends."""
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPER
    engine = make(command=[sys.executable, "-c", stubborn])
    starting = asyncio.create_task(engine.start())
    await wait_until_async(lambda: engine.pid is not None and len(tree(engine.pid)) == 3, 10, "the tree")
    assert engine.pid is not None
    members = [process.pid for process in tree(engine.pid)]
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(starting, 5)
    assert not any(map(alive, members))


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"command": ["no-such-program"]}, CannotLoad, "no-such-program of m is not there"),
        ({"command": [sys.executable, "-c", "print('no card', flush=True); raise SystemExit(3)"]}, EngineFailed,
         "ended with exit code 3 before it was healthy"),
        ({"command": [sys.executable, "-c", SLEEPER], "load_timeout_s": 0.5}, EngineFailed,
         "was not healthy within 0.5 s"),
    ],
)  # fmt: skip
async def test_a_server_that_does_not_come_up_says_why(
    make: Make, options: dict[str, Any], kind: type[EngineFailed], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make(**options)
    with pytest.raises(kind, match=says):
        await engine.start()
    assert engine.pid is None or tree(engine.pid) == []
    if "exit code" in says:
        assert "last=no card" in caplog.text  # the worker's log has the server's last word


async def test_a_port_that_is_taken_and_one_on_which_another_answers(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make()
    await first.start()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with pytest.raises(EngineFailed, match=r"the port \d+ of m is taken"):
            await make(port=listener.getsockname()[1]).start()
    assert first.pid is not None
    port = next(
        found.laddr.port for found in tree(first.pid)[1].net_connections("tcp") if found.status == psutil.CONN_LISTEN
    )
    # A server that listens elsewhere: the health that answers on the port is the first one's.
    impostor = make(command=[sys.executable, "-c", "import time; time.sleep(600)"])
    monkeypatch.setattr(impostor, "_free_port", lambda: port)
    with pytest.raises(EngineFailed, match="another program answers there"):
        await impostor.start()


async def test_a_keeper_that_is_killed_leaves_nothing(make: Make) -> None:
    engine = make(command=[sys.executable, "-c", SLEEPER])
    starting = asyncio.create_task(engine.start())
    await wait_until_async(lambda: engine.pid is not None and len(tree(engine.pid)) == 3, 10, "the tree")
    assert engine.pid is not None
    members = tree(engine.pid)
    await asyncio.sleep(0.5)  # it is looked at while it loads
    members[0].kill()
    with pytest.raises(EngineFailed, match="before it was healthy"):
        await asyncio.wait_for(starting, 10)
    await wait_until_async(lambda: not any(map(alive, members)), 5, "the end of all")
