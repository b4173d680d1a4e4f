"""Power loss at one broker: what was acknowledged and not flushed is gone, of the group's own records too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from broker_files import lose_power
from cluster_load import Chat, stock_client
from penstock.cli.embedded_kafka import EmbeddedKafka
from penstock.cli.paths import free_port
from penstock.cli.topics import create_topics
from penstock.common.admin import topic_configs
from penstock.common.altering import GROUPS_TOPIC
from penstock.common.settings import KafkaSettings
from penstock.schemas.topics import topic_specs
from support import wait_until
from system import System, running
from worker_requests import engine, send

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture
def kafka(tmp_path: Path) -> Iterator[EmbeddedKafka]:
    broker = EmbeddedKafka(tmp_path / "kafka", free_port())
    try:
        broker.start()
        yield broker
    finally:
        broker.kill()


def test_fsync_keeps_what_was_accepted_and_streams_go_on(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    """The machine of broker and worker. The group's generation must not begin again: readers would take what follows
    for older work.
    """
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix="power-")
    create_topics(settings, partitions=4, durability="fsync", alter=True)
    specs = topic_specs(settings.names)
    names = [*(spec.name for spec in specs), GROUPS_TOPIC]
    flushed = {name for name, config in topic_configs(settings, names).items() if config["flush.messages"] == "1"}
    noop = engine(tokens=40, delay_ms=100, slots=8)
    system = System(kafka.bootstrap_servers, "power-", tmp_path / "system", models=[noop])
    with running(system):
        gateway, first = system.gateway(), system.worker("w0").wait_ready()
        assert first.stop() == 0
        worker = system.worker().wait_ready()
        gateway.wait_ready()
        ids = {f"r{number}" for number in range(20)}
        send(system, *({"request_id": one, "payload": {"prompt": "hi", "max_tokens": 5}} for one in ids))
        with Chat(stock_client(gateway)) as chat:
            chat.read(5)
            worker.kill9()
            kafka.kill()
            assert lose_power(kafka.data_dir, flushed) > 0
            kafka.start()
            worker = system.worker()
            with httpx.Client(base_url=gateway.url, timeout=60) as http:
                wait_until(lambda: http.get(f"/v1/requests/{chat.id}").json().get("done"), 120, lambda: system.logs(20))
            text = chat.rest()
        accepted = httpx.post(
            gateway.url + "/v1/requests", json={"task": "text_generation", "payload": {"prompt": "hi"}}, timeout=60
        )
        assert accepted.status_code == 202
        system.wait_drained()
        outcomes = system.outcomes()
        assert (outcomes[chat.id].text_generation or {})["text"] == text
        assert ids < outcomes.keys()
        wait_until(gateway.ready, 60, gateway.tail)
        assert worker.ready()


def test_without_fsync_requests_are_lost_and_the_next_ones_are_served(kafka: EmbeddedKafka, tmp_path: Path) -> None:
    """Here the broker's machine alone loses power: a worker and a gateway have read more than its logs hold."""
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix="power-")
    create_topics(settings, partitions=4, durability="replicas")
    noop = engine(tokens=5, delay_ms=100, slots=1)
    system = System(kafka.bootstrap_servers, "power-", tmp_path / "system", models=[noop])
    with running(system):
        worker, gateway = system.worker(), system.gateway()
        worker.wait_ready()
        gateway.wait_ready()
        ids = {f"r{number}" for number in range(100)}
        send(system, *({"request_id": one} for one in ids))
        wait_until(lambda: len(system.outcomes()) > 5, 60, worker.tail)
        kafka.kill()
        assert lose_power(kafka.data_dir) > 0
        kafka.start()
        wait_until(gateway.ready, 120, gateway.tail)
        after = {f"a{number}" for number in range(20)}
        send(system, *({"request_id": one} for one in after))
        with httpx.Client(base_url=gateway.url, timeout=60) as http:
            wait_until(
                lambda: all(http.get(f"/v1/requests/{one}").json().get("status") == "completed" for one in after),
                120,
                lambda: system.logs(20),
            )
        assert ids - system.outcomes().keys(), "nothing was lost: the test cuts nothing that matters"
        assert worker.ready()
