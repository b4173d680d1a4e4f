"""What a process writes about itself, and how often it tries."""

from __future__ import annotations

import asyncio
from unittest.mock import Mock

import pytest

from kit.records import CODEC, NAMES
from penstock.common.starting import Starting
from penstock.common.transport import Delivery
from penstock.gateway import reporting
from penstock.gateway.reporting import Reporter
from penstock.gateway.side_process import Status
from penstock.schemas.errors import BrokerUnavailable, Forbidden, PenstockError
from penstock.schemas.topics import GATEWAY_KEY


@pytest.mark.parametrize("error", [Forbidden("no right to write"), BrokerUnavailable("away"), None], ids=str)
async def test_a_process_without_the_right_to_report_seldom_tries(
    monkeypatch: pytest.MonkeyPatch, error: PenstockError | None
) -> None:
    """Each refusal costs the producer, which carries requests too."""
    monkeypatch.setattr(reporting, "REPORT_S", 0.001)
    said = Delivery(topic="t", partition=0, offset=0, timestamp_ms=0, error=error)
    writer = Mock(**{"send.side_effect": lambda *_, on_delivery, **__: on_delivery(said)})
    reporter = Reporter("gateway", ("h", 1), writer, NAMES, CODEC, lambda: {"status": "ready"})
    reporter.start()
    await asyncio.sleep(0.2)
    await reporter.stop(in_order=False)
    keys = [one.kwargs["key"] for one in writer.send.call_args_list]
    assert set(keys) == {f"{GATEWAY_KEY}{reporter.id}".encode()}
    is_refused = isinstance(error, Forbidden)
    assert reporter.is_refused == is_refused
    assert (len(keys) == 1) == is_refused


def test_a_start_is_no_fault_and_what_hinders_it_is() -> None:
    reads = Starting("it reads the topics")
    steps = {reads: "starting", f"{reads}: no right": "unavailable", None: "ready", "Kafka is away": "unavailable"}
    status = Status()
    assert [status.by(reason) for reason in steps] == [*steps.values()]
    assert status.by(reads) == "unavailable", "it was ready"
    status.draining = True
    assert status.by(None) == "draining"
