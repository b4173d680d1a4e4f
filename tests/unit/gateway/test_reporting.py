"""What a process writes about itself, and how often it tries."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kit.records import CODEC, NAMES
from penstock.common.starting import Starting
from penstock.common.transport import Delivery
from penstock.gateway import reporting
from penstock.gateway.reporting import Reporter
from penstock.gateway.side_process import Status
from penstock.schemas.errors import BrokerUnavailable, Forbidden, PenstockError
from penstock.schemas.topics import GATEWAY_KEY


class Writer:
    """Answers each record with `error`."""

    def __init__(self, error: PenstockError | None) -> None:
        self.error = error
        self.keys: list[bytes] = []

    def send(self, topic: str, _: bytes | None, *, key: bytes, on_delivery: Callable[[Delivery], None]) -> None:
        self.keys.append(key)
        on_delivery(Delivery(topic=topic, partition=0, offset=0, timestamp_ms=0, error=self.error))


@pytest.mark.parametrize("error", [Forbidden("no right to write"), BrokerUnavailable("away"), None], ids=str)
async def test_a_process_without_the_right_to_report_seldom_tries(
    monkeypatch: pytest.MonkeyPatch, error: PenstockError | None
) -> None:
    """Each refusal costs the producer, which carries requests too."""
    monkeypatch.setattr(reporting, "REPORT_S", 0.001)
    writer: Any = Writer(error)
    reporter = Reporter("gateway", ("h", 1), writer, NAMES, CODEC, lambda: {"status": "ready"})
    reporter.start()
    await asyncio.sleep(0.2)
    await reporter.stop(in_order=False)
    assert set(writer.keys) == {f"{GATEWAY_KEY}{reporter.id}".encode()}
    is_refused = isinstance(error, Forbidden)
    assert reporter.is_refused == is_refused
    assert (len(writer.keys) == 1) == is_refused


def test_a_start_is_no_fault_and_what_hinders_it_is() -> None:
    reads = Starting("it reads the topics")
    steps = {reads: "starting", f"{reads}: no right": "unavailable", None: "ready", "Kafka is away": "unavailable"}
    status = Status()
    assert [status.by(reason) for reason in steps] == [*steps.values()]
    assert status.by(reads) == "unavailable", "it was ready"
    status.draining = True
    assert status.by(None) == "draining"
