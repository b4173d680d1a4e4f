"""One compressed record stops nobody (#0). Whole clients of other languages are in tests/integration/stock."""

from __future__ import annotations

import json

import pytest
from confluent_kafka import Producer

from system import System
from worker_requests import outcome, send

SYSTEM = {"processes": ["w1"]}


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_a_compressed_record_runs_and_so_does_the_next(system: System, codec: str) -> None:
    producer = Producer({"bootstrap.servers": system.bootstrap, "compression.type": codec})
    body = {"request_id": f"packed-{codec}", "task": "text_generation", "payload": {"prompt": "hello " * 200}}
    producer.produce(system.names.request("text_generation", 5), json.dumps(body), partition=0)
    assert producer.flush(60) == 0
    send(system, {"request_id": f"next-{codec}"}, partition=0)
    for request_id in (f"packed-{codec}", f"next-{codec}"):
        assert outcome(system, request_id, 15).status == "completed"
    (worker,) = system.processes
    assert worker.alive()
