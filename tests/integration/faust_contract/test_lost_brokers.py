"""A member of a group whose client has lost the cluster becomes one again with a new client, in the same process."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from confluent_kafka import Consumer
from group import Group, Seen

from penstock.common import group_consumer
from penstock.common.group_consumer import GroupConsumer, Listener, Read
from penstock.common.settings import KafkaSettings
from penstock.processors.kafka import poll_thread
from support import wait_until_async


@pytest.fixture
def clients(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Consumer]]:
    """The clients that were made. The first one talks to nobody; those that follow are as they should be."""
    made: list[Consumer] = []
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"127.0.0.1:{deaf.getsockname()[1]}"

        def make(config: dict[str, Any], **options: Any) -> Consumer:
            changed = config if made else {**config, "bootstrap.servers": address}
            made.append(Consumer(changed, **options))
            return made[-1]

        monkeypatch.setattr(poll_thread, "Consumer", make)
        monkeypatch.setattr(group_consumer, "Consumer", make)
        yield made


async def test_a_workers_client_is_replaced_and_what_it_takes_joins_on(
    group: Callable[..., Group], clients: list[Consumer]
) -> None:
    here, seen = group(partitions=2), Seen()
    here.produce(10)
    async with here.member("m", seen):
        await wait_until_async(lambda: len(seen.records) == 10, 30, seen.places)
        await seen.commit_all()
        here.produce(10, start=10)
        await wait_until_async(lambda: len(seen.records) == 20, 30, seen.places)
        assert (len(clients), len(seen.assignments)) == (2, 1)


async def test_the_client_of_another_group_is_replaced(group: Callable[..., Group], clients: list[Consumer]) -> None:
    here, read = group(partitions=2), list[Read]()
    here.produce(10)

    async def nothing(_: Sequence[Any]) -> None: ...

    listener = Listener(
        on_batch=read.extend, on_assigned=lambda _: None, on_revoked=nothing, on_failure=lambda why: pytest.fail(why)
    )
    consumer = GroupConsumer(KafkaSettings(bootstrap_servers=here.bootstrap), here.topics, here.id, listener)
    consumer.start()
    try:
        await wait_until_async(lambda: len(read) == 10, 30, lambda: read)
        consumer.commit({here.tp: 10})
        await wait_until_async(lambda: here.committed() == {here.tp: (10, "")}, 30, here.committed)
    finally:
        await consumer.stop()
    assert len(clients) == 2
