"""A fault in a task that nobody awaits is heard, in each room that starts such tasks."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from kit.records import ORIGIN
from penstock.processors.engines.base import EngineState, Limits
from penstock.processors.engines.managed.server_process import ServerProcess
from penstock.processors.engines.process.host import ChildEngine
from penstock.processors.erasing import Erasing
from penstock.processors.kafka import topic_watch
from penstock.processors.kafka.topic_watch import PoolTopics
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.manager import ModelManager
from penstock.schemas.records import ControlCommand
from shell_fakes import ScriptedEngine
from support import wait_until_async


def broken(*_: object) -> Any:
    raise RuntimeError("as in a bug")


async def test_an_engine_that_cannot_be_stopped_is_heard(faults: list[str]) -> None:
    """Else its model would be unloading for ever."""

    reports, engine = Mock(), ScriptedEngine()
    engine.stop = broken
    config = ModelConfig(id="m", source="noop", engine="noop", tasks=["text_generation"])
    manager = ModelManager([config], reports, make=lambda *_: engine)
    manager.load("m", 0, ("cpu",), 0)
    await wait_until_async(lambda: reports.up.called, 10)
    manager.unload("m", 0)
    await wait_until_async(lambda: faults, 10)
    assert not reports.gone.called


async def test_a_look_for_a_topic_that_fails_is_heard(faults: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Else requests of that pool would wait for ever."""

    monkeypatch.setattr(topic_watch, "admin", SimpleNamespace(partition_counts=broken))
    topics = PoolTopics(None)  # type: ignore[arg-type]
    topics.look("inference.requests.x", lambda: None, lambda: None)
    await wait_until_async(lambda: faults, 10)


async def test_a_death_that_cannot_be_told_is_heard(faults: list[str]) -> None:
    """Else its replica would stay ready, and its runs would hang."""

    engine = ChildEngine("m", "bare", "noop", {}, limits=Limits(slots=1))
    engine.on_died = broken
    engine._process = AsyncMock(**{"exit_code.return_value": -9, "end.return_value": -9})
    engine._state = EngineState.READY
    engine._lost()
    await wait_until_async(lambda: faults, 10)
    await engine.stop()


async def test_a_server_s_end_that_cannot_be_told_is_heard(faults: list[str], tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "log", broken, grace_s=0.1)
    await server.start(["true"], {"PATH": os.environ["PATH"]})
    await wait_until_async(lambda: faults, 20)
    await server.end()


ERASE = ControlCommand(kind="erase", request_id="r", tenant="default", created_at=1, conversation_id="c", origin=ORIGIN)


@pytest.mark.parametrize(("owns", "calls", "times"), [(True, (False,), 1), (False, (False,), 0), (False, (True,), 1),
    (True, (False, True), 2), (True, (False, True, True), 2), (True, (True, False), 1)])  # fmt: skip
async def test_what_this_worker_held_is_erased_after_all_that_it_wrote(
    owns: bool, calls: tuple[bool, ...], times: int
) -> None:
    """`calls`: whether it held the request, of each effect. One that comes meanwhile comes after it."""
    turns, book = Mock(erase=AsyncMock(return_value=1)), Mock()
    erasing = Erasing(turns, book, lambda topic, partition: owns)
    for held in calls:
        erasing.erase(ERASE, held=held)
    await wait_until_async(lambda: book.erasure_done.call_count == times, 10)
    await erasing.close()
    assert turns.erase.await_count == times


async def test_an_erasure_that_fails_by_a_fault_is_heard(faults: list[str]) -> None:
    """Else the request's words would stand in the conversation for ever."""
    owns = Mock(side_effect=[True, RuntimeError("as in a bug")])
    erasing = Erasing(None, None, owns)  # type: ignore[arg-type]
    erasing.erase(ERASE)
    await wait_until_async(lambda: faults, 10)
    await erasing.close()
