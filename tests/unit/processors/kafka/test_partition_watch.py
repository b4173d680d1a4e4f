"""The partition watch passes on what the broker says, with the time of asking, and asks again while it is away."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.processors.kafka import partition_watch
from penstock.processors.kafka.partition_watch import PartitionWatch
from penstock.schemas.errors import BrokerUnavailable
from support import wait_until_async


async def test_new_counts_are_passed_on_also_after_the_broker_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [{"t": 4}, BrokerUnavailable("away"), {"t": 8}]
    times = iter((100, 200, 300))

    def partition_counts(*_: Any) -> dict[str, int]:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(partition_watch, "admin", SimpleNamespace(partition_counts=partition_counts))
    monkeypatch.setattr(partition_watch, "now_ms", lambda: next(times))
    monkeypatch.setattr(partition_watch, "LOOK_EACH_S", 0.001)
    learned: list[tuple[Mapping[str, int], int]] = []
    watch = PartitionWatch(None, ["t"], lambda counts, asked_at_ms: learned.append((counts, asked_at_ms)))  # type: ignore[arg-type]
    running = asyncio.create_task(watch.run_forever())
    await wait_until_async(lambda: len(learned) == 2, 10)
    running.cancel()
    assert learned == [({"t": 4}, 100), ({"t": 8}, 300)]
