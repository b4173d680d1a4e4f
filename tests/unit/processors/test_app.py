"""What a worker verifies before it joins, what ends it so that another one continues, and its leave of the group."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from penstock.common import admin
from penstock.processors import app as app_module
from penstock.processors.app import UNDELIVERED_S, CannotStart, WorkerApp, verify_topics
from penstock.processors.settings import WorkerSettings
from penstock.schemas.topics import TopicNames


@pytest.mark.parametrize("topic", [TopicNames().control, TopicNames().desired])
def test_a_topic_whose_order_counts_must_have_one_partition(topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: dict[str, int] = defaultdict(lambda: 4, {TopicNames().control: 1, TopicNames().desired: 1})
    monkeypatch.setattr(admin, "partition_counts", lambda _, topics: {name: counts[name] for name in topics})
    assert set(verify_topics(WorkerSettings()).values()) == {4}
    counts[topic] = 2
    with pytest.raises(CannotStart, match=f"{topic} must have one partition, it has 2"):
        verify_topics(WorkerSettings())


@pytest.mark.parametrize(
    ("stopped_s", "answers_s", "trouble"), [(0.6, 0.01, None), (0, 60, "worker.consumer_thread_stuck")]
)
async def test_the_consumer_has_the_time_of_a_running_process(
    stopped_s: float, answers_s: float, trouble: str | None
) -> None:
    async def progress() -> dict[Any, Any]:
        time.sleep(stopped_s)  # noqa: ASYNC251 - as SIGSTOP
        await asyncio.sleep(answers_s)
        return {}

    app = WorkerApp(WorkerSettings.model_validate({"worker": {"stall_s": 0.4}}))
    assert await app._trouble(parts_that_ask(progress)) == trouble  # pyright: ignore[reportPrivateUsage]


def parts_that_ask(progress: Any) -> Any:
    """The parts of a worker whose records wait for Kafka, which answers."""
    return SimpleNamespace(
        membership=SimpleNamespace(crashed=False, joined=True, generation=1, progress=progress),
        watch=SimpleNamespace(wait=AsyncMock(return_value=True)),
        book=Mock(),
        publisher=SimpleNamespace(
            unacknowledged=3, acknowledged=7, oldest_s=1.0, trouble="Kafka has not acknowledged 3 records"
        ),
        worker=SimpleNamespace(has_room=True),
        **dict.fromkeys(("control", "desired", "peers"), SimpleNamespace(alive=True)),
    )


async def test_a_worker_whose_records_are_never_acknowledged_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the requests that wait for these acknowledgements would wait for ever."""
    seconds = [0.0]
    monkeypatch.setattr(app_module, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    parts = parts_that_ask(AsyncMock(return_value={}))
    app = WorkerApp(WorkerSettings())
    trouble = None
    while trouble is None and seconds[0] < 2 * UNDELIVERED_S:
        parts.publisher.oldest_s = seconds[0]
        trouble = await app._trouble(parts)  # pyright: ignore[reportPrivateUsage]
        seconds[0] += 1
    assert trouble == f"worker.undelivered records=3 oldest_s={UNDELIVERED_S:.0f}"
    assert caplog.text.count("worker.waits_for_kafka reason=Kafka has not acknowledged 3 records") == 1


# -- leaving: its time is bounded, whatever Faust's services do when they are cancelled


async def leave(stop: Callable[[], Awaitable[None]]) -> None:
    parts: Any = SimpleNamespace(membership=SimpleNamespace(stop=stop))
    await WorkerApp(WorkerSettings())._leave(parts)  # pyright: ignore[reportPrivateUsage]


async def test_a_stop_that_ignores_cancellations_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(app_module, "LEAVE_S", 0.1)
    let_go = asyncio.Event()

    async def deaf() -> None:
        while not let_go.is_set():
            try:
                await let_go.wait()
            except asyncio.CancelledError:
                continue

    leaving = asyncio.create_task(leave(deaf))
    _, left = await asyncio.wait({leaving}, timeout=5)
    let_go.set()
    assert not left
    assert "worker.leave_failed" in caplog.text


async def test_what_it_raises_is_told_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    await leave(AsyncMock(side_effect=OSError("the broker is away")))
    assert "worker.leave_failed error=OSError('the broker is away')" in caplog.text
