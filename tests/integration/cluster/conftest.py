"""One Penstock on three brokers for the whole file: nobody but a broker is ended, so its processes see every outage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kafka_cluster import Cluster
from penstock.cli.topics import create_topics
from penstock.common.settings import KafkaSettings
from system import System, running
from worker_requests import engine

PREFIX = "cluster-"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        made.start()
        yield made
    finally:
        made.stop()


@pytest.fixture(scope="module")
def system(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """A worker and a gateway with default settings, on topics as `penstock topics create` makes them."""
    kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, topic_prefix=PREFIX)
    create_topics(kafka, partitions=4, durability="replicas")
    made = System(
        cluster.bootstrap_servers,
        PREFIX,
        tmp_path_factory.mktemp("system"),
        models=[engine(tokens=20, delay_ms=50, slots=64)],
    )
    with running(made):
        worker, gateway = made.worker(), made.gateway()
        worker.wait_ready()
        gateway.wait_ready()
        yield made


@pytest.fixture
def whole(cluster: Cluster, system: System) -> Iterator[None]:
    """Each test begins and ends with three brokers, the same worker and the same gateway."""
    cluster.wait_whole()
    pids = [process.popen.pid for process in system.processes]
    yield
    assert [process.popen.pid for process in system.processes if process.alive()] == pids, system.logs(30)
