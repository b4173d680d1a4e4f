"""Three real brokers as a production cluster has them: each a broker and a controller, in a process of its own."""

from __future__ import annotations

import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient, ClusterMetadata

from penstock.cli.embedded_kafka import EmbeddedKafka, new_cluster_id
from penstock.cli.paths import free_port
from penstock.common.kafka_errors import client_logger
from support import alive, wait_until

NODES = (1, 2, 3)
REPLICATED = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "share.coordinator.state.topic.replication.factor": "3",
    "share.coordinator.state.topic.min.isr": "2",
}


class Cluster:
    """Brokers by their node ids. Every broker keeps its ports and its data when it ends and is started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = {node: (free_port(), free_port()) for node in NODES}
        voters = ",".join(f"{node}@127.0.0.1:{controller}" for node, (_, controller) in ports.items())
        cluster_id = new_cluster_id()
        self.brokers = {
            node: EmbeddedKafka(
                folder / str(node),
                port,
                cluster_id=cluster_id,
                properties={
                    "node.id": str(node),
                    "controller.quorum.voters": voters,
                    "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
                    **REPLICATED,
                },
            )
            for node, (port, controller) in ports.items()
        }
        self.bootstrap_servers = ",".join(broker.bootstrap_servers for broker in self.brokers.values())

    def start(self, nodes: Iterable[int] = NODES) -> None:
        """Start these brokers at once, and return when each answers: one of three that is alone does not."""
        chosen = [self.brokers[node] for node in nodes]
        with ThreadPoolExecutor(len(NODES)) as pool:
            list(pool.map(EmbeddedKafka.launch, chosen))
        for broker in chosen:
            broker.wait_until_answering()

    def kill(self, *nodes: int) -> None:
        """With SIGKILL."""
        pids = [self.pid(node) for node in nodes]
        for node in nodes:
            self.brokers[node].kill()
        assert not any(alive(pid) for pid in pids)

    def pid(self, node: int) -> int:
        process = self.brokers[node].process
        assert process is not None
        assert alive(process.pid)
        return process.pid

    def stop(self) -> None:
        """Its data goes with it: nothing is worth an orderly end."""
        for broker in self.brokers.values():
            broker.kill()

    def controller(self) -> int:
        """The active controller, as the nodes have it on their disks."""
        states = [
            json.loads((broker.data_dir / "topics" / "__cluster_metadata-0" / "quorum-state").read_text())
            for broker in self.brokers.values()
        ]
        latest = max(states, key=lambda state: (state["leaderEpoch"], state["leaderId"]))
        return int(latest["leaderId"])

    def leads(self, topic: str) -> list[int]:
        """The leader of each partition of a topic."""
        partitions = self._metadata().topics[topic].partitions
        return [partitions[number].leader for number in sorted(partitions)]

    def whole(self) -> bool:
        """Whether each partition of each topic has a leader and three replicas in sync."""
        try:
            topics = self._metadata().topics.values()
        except KafkaException:
            return False
        return all(
            p.leader in NODES and len(p.isrs) == len(NODES) for topic in topics for p in topic.partitions.values()
        )

    def wait_whole(self, deadline_s: float = 90) -> None:
        wait_until(self.whole, deadline_s, "each partition has three replicas in sync", poll_s=0.2)

    def _metadata(self) -> ClusterMetadata:
        return AdminClient({"bootstrap.servers": self.bootstrap_servers}, logger=client_logger).list_topics(timeout=5)
