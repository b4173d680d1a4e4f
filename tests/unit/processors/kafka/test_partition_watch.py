"""The partition watch passes on what the broker says, with the time of asking, and asks again while it is away."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock, call

import pytest

from penstock.processors.kafka import partition_watch
from penstock.processors.kafka.partition_watch import PartitionWatch
from penstock.schemas.errors import BrokerUnavailable
from support import wait_until_async


async def test_new_counts_are_passed_on_also_after_the_broker_was_away(monkeypatch: pytest.MonkeyPatch) -> None:
    admin = Mock(**{"partition_counts.side_effect": [{"t": 4}, BrokerUnavailable("away"), {"t": 8}]})
    monkeypatch.setattr(partition_watch, "admin", admin)
    monkeypatch.setattr(partition_watch, "now_ms", Mock(side_effect=[100, 200, 300, 400]))
    monkeypatch.setattr(partition_watch, "LOOK_EACH_S", 0.001)
    learn = Mock()
    watch = PartitionWatch(None, ["t"], learn)  # type: ignore[arg-type]
    running = asyncio.create_task(watch.run_forever())
    await wait_until_async(lambda: learn.call_count == 2, 10)
    running.cancel()
    assert learn.mock_calls == [call({"t": 4}, 100), call({"t": 8}, 300)]
