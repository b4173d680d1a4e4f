"""A moment of the fault table is reached only once its condition is observed."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.cli.faults import moments
from penstock.cli.faults.histories import History
from penstock.cli.faults.moments import NotReached, Scene, leave, prepare, reach
from penstock.cli.faults.targets import STOPPED


class FakeProcess:
    """A Target that only notes its signals."""

    def __init__(self) -> None:
        self.state, self.processes = "S", list[FakeProcess]()

    def engines(self) -> list[FakeProcess]:
        return list(self.processes)

    def signal(self, number: signal.Signals) -> None:
        self.state = {signal.SIGSTOP: STOPPED, signal.SIGCONT: "S"}.get(number, self.state)


class FakeSite:
    def __init__(self) -> None:
        self.worker = FakeProcess()

    def target(self, name: str) -> FakeProcess:
        return self.worker

    def asked(self, name: str, path: str) -> Any:
        return SimpleNamespace(json=lambda: {"models": {"mass": "loading"}, "state": "stopping"})

    def committed_and_lag(self) -> tuple[int, int]:
        return 1, 0


@pytest.fixture
def scene(tmp_path: Path) -> Any:
    outside: Any = SimpleNamespace(refuses=asyncio.Event(), answers=asyncio.Event())
    site: Any = FakeSite()
    return Scene(site=site, outside=outside, history=History(tmp_path / "row.jsonl"), count=1, streams=1)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments.wait_for, "__defaults__", (0.1,))


@pytest.mark.parametrize("moment", ["accepted", "result_commit", "result_commit, planted"])
async def test_a_stopped_worker_waits_until_all_requests_are_acknowledged(scene: Any, moment: str) -> None:
    moment, _, planted = moment.partition(", ")
    scene.site.worker.state = "S" if planted else STOPPED
    with pytest.raises(NotReached, match="acknowledged"):
        await reach(moment, scene, planted=bool(planted))
    if planted:
        return
    scene.history.note("acknowledged", "a")
    await reach(moment, scene)
    leave(scene)
    assert scene.site.worker.state == "S"


async def test_as_many_streams_begin_as_can_run_at_once(scene: Any) -> None:
    scene = replace(scene, streams=2)
    scene.history.note("acknowledged", "a")
    scene.history.note("piece", "a")
    with pytest.raises(NotReached, match="begun"):
        await reach("mid_stream", scene)
    scene.history.note("piece", "b")
    await reach("mid_stream", scene)


async def test_only_the_process_that_loads_the_model_is_stopped(scene: Any) -> None:
    scene = replace(scene, real_model=True)
    idle, new = FakeProcess(), FakeProcess()
    scene.site.worker.processes = [idle]
    await prepare("loading", scene)
    scene.history.note("acknowledged", "a")
    with pytest.raises(NotReached, match="loads the model"):
        await reach("loading", scene)
    scene.site.worker.processes = [idle, new]
    await reach("loading", scene)
    assert (idle.state, new.state) == ("S", STOPPED)
    leave(scene)
    assert new.state == "S"
