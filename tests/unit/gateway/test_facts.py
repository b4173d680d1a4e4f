"""What operators are told: of the workers that live."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.metrics import GatewayMetrics
from penstock.gateway.service.facts import Facts
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.store import Store
from penstock.gateway.view.view import View
from penstock.schemas.records import DeviceState, WorkerState
from penstock.schemas.topics import TopicNames


@pytest.fixture
def view(tmp_path: Path) -> Iterator[View]:
    store = Store(tmp_path / "view.sqlite", "cluster")
    yield View(store, Hub(), TopicNames(), 1)
    store.close()


def worker(name: str, state: str) -> WorkerState:
    device = DeviceState(device="cuda:0", kind="gpu", total_bytes=100, reserved_bytes=20, used_bytes=10)
    return WorkerState(worker_id=name, state=state, started_at=1, updated_at=1, devices=[device])


def test_the_memory_of_workers_that_stopped_is_not_counted(view: View) -> None:
    """Their last word stands on the topic for a day; the device is the next worker's."""
    follower: Any = None
    facts = Facts(view, follower, Hub())
    view.fleet.workers = {
        name: worker(name, state) for name, state in (("a", "running"), ("b", "stopped"), ("c", "stopping"))
    }
    assert facts.gauges().device_memory[("cuda:0", "limit")] == 200


def test_no_gauge_tells_when_a_counter_began() -> None:
    assert "_created" not in GatewayMetrics().render().decode()
