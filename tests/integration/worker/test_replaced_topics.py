"""A topic of orders that is deleted and made anew is followed anew by a running worker, which says so."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from penstock.common import admin
from penstock.common.desired import DesiredRecord
from penstock.common.settings import KafkaSettings
from penstock.common.transport import Transport
from penstock.processors.kafka import record_follower
from penstock.processors.kafka.control import ControlFollower
from penstock.processors.kafka.record_follower import DesiredFollower
from penstock.schemas.codec import default_codec
from penstock.schemas.desired import key_of
from penstock.schemas.records import ControlCommand, DesiredState
from support import wait_until_async

CODEC = default_codec()


class Place:
    """The topics of a test, and what followers of them heard."""

    def __init__(self, kafka: Any, prefix: str, create_topics: Callable[..., None]) -> None:
        self.settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix=prefix)
        self.names = self.settings.names
        self._create_topics = create_topics
        self.states: dict[str, DesiredState | None] = {}
        self.commands: list[str] = []
        self.topic_ids: list[str | None] = []
        create_topics()
        loop = asyncio.get_running_loop()
        self.desired = DesiredFollower(self.settings, CODEC, loop, self._on_records, self.topic_ids.append)
        self.control = ControlFollower(self.settings, CODEC, loop, self._on_commands)

    def _on_records(self, news: Any) -> None:
        for item in news:
            assert isinstance(item, DesiredRecord)
            self.states[item.key] = item.state

    def _on_commands(self, news: Any) -> None:
        self.commands += [command.request_id for command in news]

    def put(self, topic: str, *records: tuple[str, Any]) -> None:
        transport = Transport(self.settings)
        try:
            for key, record in records:
                transport.send(topic, CODEC.encode(record), key=key.encode())
        finally:
            transport.close()

    def order(self, *names: str) -> None:
        states = [DesiredState(kind="model", name=name, action="unload", created_at=1, loaded=False) for name in names]
        self.put(self.names.desired, *((key_of(state), state) for state in states))

    def cancel(self, *request_ids: str) -> None:
        now_ms = int(time.time() * 1000)
        fields: dict[str, Any] = {"kind": "cancel", "tenant": "default", "created_at": now_ms}
        commands = ((f"{one}/cancel", ControlCommand(request_id=one, **fields)) for one in request_ids)
        self.put(self.names.control, *commands)

    async def replace(self, topic: str) -> None:
        before = admin.topic_id(self.settings, topic)
        assert await asyncio.to_thread(admin.delete_topic, self.settings, topic)

        def made() -> bool:
            self._create_topics()
            return admin.topic_id(self.settings, topic) not in (None, before)

        for _ in range(200):
            if await asyncio.to_thread(made):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"{topic} was not made anew")

    def unloaded(self) -> set[str]:
        return {key for key, state in self.states.items() if state is not None}


@pytest.fixture
async def place(
    kafka: Any, kafka_prefix: str, create_topics: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Place]:
    monkeypatch.setattr(record_follower, "LOOK_EACH_S", 0.2)
    place = Place(kafka, kafka_prefix, create_topics)
    place.order("a", "b", "c")
    place.cancel("r1", "r2", "r3")
    await place.desired.start(30)
    await place.control.start(30)
    assert place.unloaded() == {"model/a", "model/b", "model/c"}
    yield place
    await place.desired.stop()
    await place.control.stop()


async def test_orders_of_a_topic_that_was_made_anew_are_obeyed_and_those_that_went_with_it_are_not(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        await place.replace(place.names.desired)
        place.order("b", "d")
        await wait_until_async(lambda: place.unloaded() == {"model/b", "model/d"}, 30, lambda: place.states)
    assert place.topic_ids == [*place.topic_ids[:1], admin.topic_id(place.settings, place.names.desired)]
    assert f"desired.topic_replaced topic={place.names.desired}" in caplog.text
    place.order("e")
    await wait_until_async(lambda: "model/e" in place.unloaded(), 30, lambda: place.states)
    assert place.desired.alive


async def test_commands_of_a_topic_that_was_made_anew_are_heard(place: Place) -> None:
    """Those that went with it stay heard: a request that was cancelled is not asked for again."""
    await place.replace(place.names.control)
    more = [f"s{number}" for number in range(6)]
    place.cancel(*more)
    await wait_until_async(lambda: set(more) <= set(place.commands), 30, lambda: place.commands)
    assert place.commands[:3] == ["r1", "r2", "r3"]
    assert place.control.alive
