"""Three brokers under load: one dies, the controller dies, all restart in turn. Clients hear nothing of it."""

from __future__ import annotations

import signal

import httpx
import pytest

from cluster_load import loaded
from kafka_cluster import NODES, Cluster
from support import wait_until
from system import System

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.usefixtures("whole")]


def test_a_leader_of_partitions_is_killed(cluster: Cluster, system: System) -> None:
    """A conversation that begins meanwhile has as many replicas as one that began before."""
    victim = next(node for node in cluster.leads(system.names.result) if node != cluster.controller())
    with loaded(system) as load:
        cluster.kill(victim)
        wait_until(lambda: victim not in cluster.leads(system.names.result), 60, "others lead")
        answer = httpx.post(system.processes[1].url + "/v1/conversations", json={"id": "c1"}, timeout=30)
        assert answer.status_code == 200, answer.text
        load.wait_more()
        cluster.start([victim])
        cluster.wait_whole()
    assert load.refused == []
    print("longest waits", sorted(load.waits_s)[-4:])


def test_the_active_controller_is_killed(cluster: Cluster, system: System) -> None:
    victim = cluster.controller()
    with loaded(system) as load:
        cluster.kill(victim)
        wait_until(lambda: cluster.controller() in set(NODES) - {victim}, 60, "another one is active")
        load.wait_more()
        cluster.start([victim])
        cluster.wait_whole()
    assert load.refused == []
    print("longest waits", sorted(load.waits_s)[-4:])


def test_all_brokers_restart_in_turn(cluster: Cluster, system: System) -> None:
    with loaded(system) as load:
        for node in NODES:
            cluster.signal(node, signal.SIGTERM)
            cluster.brokers[node].stop()
            cluster.start([node])
            cluster.wait_whole()
    assert load.refused == []
    print("longest waits", sorted(load.waits_s)[-4:])
