"""Engines in their processes, and a sink that keeps what a run tells."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from penstock.processors.engines.base import (
    Delta,
    Engine,
    Finished,
    Prepared,
    Preview,
    RunFailed,
    RunSpec,
    StepProgress,
)
from penstock.processors.engines.process.host import ChildEngine
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.factory import make_engine
from penstock.processors.models.sizing import size_model


class Run:
    """One run: what it told, and its end."""

    def __init__(self, engine: Engine, spec: RunSpec, prepared: Prepared) -> None:
        self.spec, self.prepared = spec, prepared
        self.deltas: list[Delta] = []
        self.progress: list[StepProgress] = []
        self.first = asyncio.Event()
        self.done: asyncio.Future[Finished | RunFailed] = asyncio.get_running_loop().create_future()
        engine.run(spec, prepared, self)

    def on_delta(self, delta: Delta) -> None:
        self.deltas.append(delta)
        self.first.set()

    def on_progress(self, progress: StepProgress) -> None:
        self.progress.append(progress)

    def on_preview(self, preview: Preview) -> None:
        raise AssertionError(preview)

    def on_finished(self, finished: Finished) -> None:
        self.done.set_result(finished)

    def on_failed(self, failed: RunFailed) -> None:
        self.done.set_result(failed)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    async def finished(self, timeout_s: float = 60) -> Finished:
        found = await asyncio.wait_for(self.done, timeout_s)
        assert isinstance(found, Finished), found
        return found

    async def failed(self, timeout_s: float = 60) -> RunFailed:
        found = await asyncio.wait_for(self.done, timeout_s)
        assert isinstance(found, RunFailed), found
        return found


class Runner:
    """An engine with run ids that never repeat."""

    def __init__(self, engine: ChildEngine) -> None:
        self.engine = engine
        self._number = 0

    def spec(self, *, task: str = "text_generation", stream: bool = True, **fields: Any) -> RunSpec:
        self._number += 1
        return RunSpec(run_id=f"run-{self._number}", task=task, model="m", stream=stream, **fields)

    async def begin(self, **fields: Any) -> Run:
        spec = self.spec(**fields)
        return Run(self.engine, spec, await self.engine.prepare(spec))

    async def chat(self, text: str, **params: Any) -> Run:
        return await self.begin(messages=[{"role": "user", "content": text}], params={"temperature": 0, **params})


def changed_copy(model: Path, folder: Path, name: str, text: str) -> Path:
    """A model's folder with one file replaced."""
    for file in model.iterdir():
        if file.name != name:
            (folder / file.name).symlink_to(file)
    (folder / name).write_text(text)
    return folder


StartEngine = Callable[..., Awaitable[Runner]]


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """Start an engine of a kind from a folder; all are stopped at the end. Options of the host go into `host`."""
    async with AsyncExitStack() as stack:

        async def start(kind: str, source: Path | str, *, host: dict[str, Any] | None = None, **options: Any) -> Runner:
            config = ModelConfig(id="m", source=str(source), engine=kind, options={"threads": 1, **options})
            engine = make_engine(config, await size_model(config))
            assert isinstance(engine, ChildEngine)
            for name, value in (host or {}).items():
                setattr(engine, name, value)
            stack.push_async_callback(engine.stop)
            await engine.start()
            return Runner(engine)

        yield start
