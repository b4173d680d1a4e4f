"""Three brokers under load, of which one or two die, lose power or restart: nothing that was accepted is lost."""

from __future__ import annotations

import httpx
import openai
import pytest

from broker_files import lose_power, whole_log
from cluster_load import loaded
from kafka_cluster import NODES, Cluster
from support import wait_until
from system import System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("whole")]
BODY = {"task": "text_generation", "payload": {"prompt": "hi"}}


def test_one_broker_dies_and_then_a_second(cluster: Cluster, system: System) -> None:
    """Two serve all, and a conversation that begins then has three replicas. One refuses, and loses nothing."""
    url = system.processes[1].url
    first = next(node for node in cluster.leads(system.names.result) if node != cluster.controller())
    with loaded(system) as load:
        cluster.kill(first)
        wait_until(lambda: first not in cluster.leads(system.names.result), 60, "others lead")
        assert httpx.post(url + "/v1/conversations", json={"id": "c1"}, timeout=30).status_code == 200
        load.wait_more()
        assert load.refused == []
        second = cluster.controller()
        cluster.kill(second)
        refused = httpx.post(url + "/v1/requests", json=BODY, timeout=30)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broker_unavailable")
        cluster.start([first])
        load.wait_more(deadline_s=120)
        cluster.start([second])
        cluster.wait_whole()
    assert {type(error) for error in load.refused} <= {openai.InternalServerError}
    assert {error.code for error in load.refused if isinstance(error, openai.APIError)} <= {"broker_unavailable"}


def test_the_active_controller_loses_power(cluster: Cluster, system: System) -> None:
    """Its disk has less than it acknowledged; it gets that from the others before it leads again."""
    victim = cluster.controller()
    with loaded(system) as load:
        cluster.kill(victim)
        assert lose_power(cluster.brokers[victim].data_dir) > 0
        wait_until(lambda: cluster.controller() in set(NODES) - {victim}, 60, "another one is active")
        load.wait_more()
        cluster.start([victim])
        cluster.wait_whole()
    assert load.refused == []
    for topic in (system.names.result, *system.names.request_topics()):
        for number in range(4):
            logs = {whole_log(broker.data_dir, (topic, number)) for broker in cluster.brokers.values()}
            assert len(logs) == 1, (topic, number)


def test_all_brokers_restart_in_turn(cluster: Cluster, system: System) -> None:
    """By SIGTERM, each when the one before it is in sync again."""
    with loaded(system) as load:
        for node in NODES:
            cluster.brokers[node].stop()
            cluster.start([node])
            cluster.wait_whole()
    assert load.refused == []
