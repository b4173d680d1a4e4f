"""Moments of the fault table are reached only when what they say is seen."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.faults import moments
from penstock.cli.faults.histories import History
from penstock.cli.faults.moments import NotReached, Scene, leave, prepare, reach
from penstock.cli.faults.targets import STOPPED


@dataclass(eq=False)
class FakeProcess:
    """A Target that only notes its signals."""

    state: str = "S"
    processes: list[FakeProcess] = field(default_factory=list["FakeProcess"])

    def engines(self) -> list[FakeProcess]:
        return list(self.processes)

    def signal(self, number: signal.Signals) -> None:
        self.state = {signal.SIGSTOP: STOPPED, signal.SIGCONT: "S"}.get(number, self.state)


class FakeAnswer:
    def json(self) -> dict[str, Any]:
        return {"models": {"mass": "loading"}, "state": "stopping"}


class FakeSite:
    def __init__(self) -> None:
        self.worker = FakeProcess()

    def target(self, name: str) -> FakeProcess:
        return self.worker

    def asked(self, name: str, path: str) -> FakeAnswer:
        return FakeAnswer()

    def committed_and_lag(self) -> tuple[int, int]:
        return 1, 0


class FakeOutside:
    def __init__(self) -> None:
        self.refuses, self.answers = asyncio.Event(), asyncio.Event()


def scene_of(tmp_path: Path, **facts: Any) -> Any:
    history = History(tmp_path / "row.jsonl")
    parts: Any = {"site": FakeSite(), "outside": FakeOutside(), "history": history}
    return Scene(**parts, **{"count": 1, "streams": 1, **facts})


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moments.wait_for, "__defaults__", (0.1,))


@pytest.mark.parametrize("moment", ["accepted", "result_commit"])
async def test_a_worker_that_stands_waits_until_all_requests_are_acknowledged(tmp_path: Path, moment: str) -> None:
    scene = scene_of(tmp_path)
    scene.site.worker.state = STOPPED
    with pytest.raises(NotReached, match="acknowledged"):
        await reach(moment, scene)
    scene.history.note("acknowledged", "a")
    await reach(moment, scene)
    leave(scene)
    assert scene.site.worker.state == "S"


async def test_the_planted_defect_waits_until_all_requests_are_acknowledged(tmp_path: Path) -> None:
    scene = scene_of(tmp_path)
    with pytest.raises(NotReached, match="acknowledged"):
        await reach("result_commit", scene, planted=True)


async def test_streams_begin_as_many_as_can_run_at_once(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, streams=2)
    scene.history.note("acknowledged", "a")
    scene.history.note("piece", "a")
    with pytest.raises(NotReached, match="begun"):
        await reach("mid_stream", scene)
    scene.history.note("piece", "b")
    await reach("mid_stream", scene)


async def test_only_the_process_that_loads_the_model_is_stopped(tmp_path: Path) -> None:
    scene = scene_of(tmp_path, real_model=True)
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
