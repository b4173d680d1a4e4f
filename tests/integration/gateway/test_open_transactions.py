"""A producer's open transaction holds back everybody behind it: requests, probes, metrics and doctor say so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from confluent_kafka import Producer

from penstock.cli.live_checks import transaction_checks
from support import wait_until
from system import NOOP, Process, System

SYSTEM = {"models": [{**NOOP, "id": "m"}], "processes": ["w1", "g1", "g2"]}


@pytest.fixture
def holder(system: System) -> Iterator[Producer]:
    """A producer with a record in each partition of the medium class, in a transaction that is open."""
    config = {"bootstrap.servers": system.bootstrap, "transactional.id": f"{system.names.prefix}holder"}
    producer = Producer({**config, "transaction.timeout.ms": 120_000})
    producer.init_transactions(30)
    producer.begin_transaction()
    topic = system.names.request("text_generation", 5)
    for partition in range(len(system.ends([topic]))):
        producer.produce(topic, b'{"task": "text_generation", "payload": {"prompt": "x"}}', partition=partition)
    producer.flush()
    yield producer
    producer.abort_transaction(30)


def transactions(gateway: Process) -> dict[str, Any]:
    body = httpx.get(f"{gateway.url}/readyz").json()
    return {"status": body["status"], **next(one for one in body["dependencies"] if one["name"] == "transactions")}


def test_an_open_transaction_is_named_until_it_ends(system: System, holder: Producer) -> None:
    gateway, topic = system.process("g1"), system.names.request("text_generation", 5)
    held, free = gateway.submit(), gateway.submit(priority=1)
    wait_until(lambda: gateway.request(free)["done"], 60, gateway.tail)
    found = wait_until(lambda: (shown := gateway.request(held))["waiting_for"] and shown, 60, gateway.tail)
    assert (found["status"], found["waiting_for"]["reason"]) == ("accepted", "transaction")
    assert "open transaction" in found["detail"]
    shown = transactions(gateway)
    assert (shown["status"], shown["ok"]) == ("degraded", False)
    assert topic in shown["reason"]
    assert gateway.metric("penstock_held_records", topic=topic) > len(system.ends([topic]))
    assert {check.state for check in transaction_checks(system.kafka)} == {"fail"}

    holder.abort_transaction(30)
    wait_until(lambda: gateway.request(held)["done"], 60, gateway.tail)
    wait_until(lambda: transactions(gateway)["ok"], 60, gateway.tail)
    assert gateway.metric("penstock_held_records", topic=topic) == 0
    assert [check.state for check in transaction_checks(system.kafka)] == ["ok"]
    holder.begin_transaction()
