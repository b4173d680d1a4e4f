"""When a client that knows no broker is replaced."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.common import admin, lost_brokers
from penstock.common.lost_brokers import LOOK_EACH_S, LOOK_SELDOM_S, LostBrokers
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import BrokerUnavailable


class World:
    """A client and a clock. `error`: what the client answers; `kafka`: whether others are answered."""

    def __init__(self) -> None:
        self.error: int | None = KafkaError._TRANSPORT
        self.kafka, self.now = True, 0.0

    def list_topics(self, topic: str, timeout: float) -> None:
        if self.error is not None:
            raise KafkaException(KafkaError(self.error))

    def partition_counts(self, *_: Any) -> dict[str, int]:
        if not self.kafka:
            raise BrokerUnavailable("away")
        return {}

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    found = World()
    monkeypatch.setattr(lost_brokers, "time", found)
    monkeypatch.setattr(admin, "partition_counts", found.partition_counts)
    return found


def replaced(world: World, watch: LostBrokers, seconds: int, *, busy: bool = False) -> list[float]:
    """The times at which it asks for a new client, polled each second."""
    times: list[float] = []
    client: Any = world
    for _ in range(seconds):
        world.now += 1
        if watch.replaces(client, busy=busy):
            times.append(world.now)
        for thread in threading.enumerate():
            if thread.name == "lost brokers":
                thread.join(10)
    return times


@pytest.fixture
def watch(world: World) -> LostBrokers:
    return LostBrokers(KafkaSettings(bootstrap_servers="127.0.0.1:1"), "t")


def test_a_client_without_a_broker_is_replaced_soon_and_then_less_often(world: World, watch: LostBrokers) -> None:
    times = replaced(world, watch, 600)
    assert times[0] == 2 * LOOK_EACH_S
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert (gaps[0], gaps[-1]) == (4 * LOOK_EACH_S, 2 * LOOK_SELDOM_S)


CLIENTS = {
    "slow": (KafkaError._TIMED_OUT, True, False),
    "well": (None, True, False),
    "kafka is away": (KafkaError._TRANSPORT, False, False),
    "busy": (KafkaError._TRANSPORT, True, True),
}


@pytest.mark.parametrize(("error", "kafka", "busy"), CLIENTS.values(), ids=CLIENTS)
def test_other_clients_are_kept(world: World, watch: LostBrokers, error: int | None, kafka: bool, busy: bool) -> None:
    world.error, world.kafka = error, kafka
    assert replaced(world, watch, 300, busy=busy) == []


def test_a_connection_resets_the_looks(world: World, watch: LostBrokers) -> None:
    for _ in range(10):
        assert replaced(world, watch, round(LOOK_EACH_S)) == []
        world.error = None
        assert replaced(world, watch, round(LOOK_EACH_S)) == []
        world.error = KafkaError._TRANSPORT


def test_after_a_connection_the_looks_are_frequent_again(world: World, watch: LostBrokers) -> None:
    replaced(world, watch, 200)
    world.error = None
    replaced(world, watch, round(LOOK_SELDOM_S) + 1)
    world.error, began = KafkaError._TRANSPORT, world.now
    assert replaced(world, watch, 10)[0] <= began + 2 * LOOK_EACH_S
