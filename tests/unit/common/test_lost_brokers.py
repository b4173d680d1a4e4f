"""When a client that hears of no broker is replaced, and when it is left alone."""

from __future__ import annotations

import itertools
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
    """When it said so, looked at each second from now on."""
    said: list[float] = []
    client: Any = world
    for _ in range(seconds):
        world.now += 1
        if watch.replaces(client, busy=busy):
            said.append(world.now)
        if watch._asking is not None:
            watch._asking.join(10)
    return said


def make(world: World) -> LostBrokers:
    return LostBrokers(KafkaSettings(bootstrap_servers="127.0.0.1:1"), "t")


def test_one_that_has_no_broker_is_replaced_soon_and_then_more_and_more_seldom(world: World) -> None:
    times = replaced(world, make(world), 600)
    assert times[0] == 2 * LOOK_EACH_S
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert (gaps[0], gaps[-1]) == (4 * LOOK_EACH_S, 2 * LOOK_SELDOM_S)


@pytest.mark.parametrize(
    ("error", "kafka", "busy"),
    [(KafkaError._TIMED_OUT, True, False), (None, True, False), (KafkaError._TRANSPORT, False, False),
     (KafkaError._TRANSPORT, True, True)],
    ids=["slow", "well", "kafka is away", "busy"],
)  # fmt: skip
def test_these_are_left_alone(world: World, error: int | None, kafka: bool, busy: bool) -> None:
    world.error, world.kafka = error, kafka
    assert replaced(world, make(world), 300, busy=busy) == []


def test_one_look_in_which_a_connection_is_made_counts_for_nothing(world: World) -> None:
    watch = make(world)
    for _ in range(10):
        assert replaced(world, watch, round(LOOK_EACH_S)) == []
        world.error = None
        assert replaced(world, watch, round(LOOK_EACH_S)) == []
        world.error = KafkaError._TRANSPORT


def test_one_that_heard_again_is_looked_at_as_often_as_before(world: World) -> None:
    watch = make(world)
    replaced(world, watch, 200)
    world.error = None
    replaced(world, watch, round(LOOK_SELDOM_S) + 1)
    world.error, began = KafkaError._TRANSPORT, world.now
    assert replaced(world, watch, 10)[0] <= began + 2 * LOOK_EACH_S
