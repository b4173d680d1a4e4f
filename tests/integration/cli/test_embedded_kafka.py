"""The embedded broker: data survives stop and kill, the port is freed, nothing outlives its parent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.cli.embedded_kafka import EmbeddedKafka
from penstock.cli.failures import CliFailure
from penstock.cli.paths import free_port, port_in_use
from support import wait_until


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedKafka]:
    broker = EmbeddedKafka(tmp_path / "kafka", free_port())
    yield broker
    broker.kill()


def write(broker: EmbeddedKafka, value: bytes) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "acks": "all"})
    producer.produce("kept", value)
    assert producer.flush(60) == 0


def read_all(broker: EmbeddedKafka) -> list[bytes]:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "reader"})
    partition = TopicPartition("kept", 0, 0)
    _, high = consumer.get_watermark_offsets(partition, timeout=20)
    consumer.assign([partition])
    values: list[bytes] = []
    while len(values) < high:
        message = consumer.poll(20)
        assert message is not None
        assert message.error() is None
        values.append(message.value() or b"")
    consumer.close()
    return values


def test_its_jvm_uses_the_archive_of_classes(broker: EmbeddedKafka) -> None:
    broker.start()
    assert broker.process is not None
    maps = Path(f"/proc/{broker.process.pid}/maps").read_text()
    assert ".aot" in maps, "it loads each class by itself"


def test_records_survive_stop_and_kill(broker: EmbeddedKafka) -> None:
    broker.start()
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    admin.create_topics([NewTopic("kept", 1, 1)])["kept"].result(20)
    write(broker, b"1")
    broker.restart()
    write(broker, b"2")
    broker.kill()
    assert not port_in_use(broker.port)
    broker.start()
    assert read_all(broker) == [b"1", b"2"]
    broker.stop()
    assert not broker.running
    assert not port_in_use(broker.port)


def test_a_port_in_use_is_said_with_the_cure(broker: EmbeddedKafka, kafka: EmbeddedKafka) -> None:
    broker.port = int(kafka.bootstrap_servers.rpartition(":")[2])
    with pytest.raises(CliFailure, match=r"port \d+ is in use: .*--kafka-port"):
        broker.start()


def test_the_broker_dies_with_its_parent(tmp_path: Path) -> None:
    code = (
        "import os, sys; from pathlib import Path; from penstock.cli.embedded_kafka import EmbeddedKafka;"
        "broker = EmbeddedKafka(Path(sys.argv[1]), int(sys.argv[2])); broker.start();"
        "print(broker.process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    port = free_port()
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(port)], capture_output=True, text=True)
    pid = int(done.stdout)

    def gone() -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        return Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"

    wait_until(gone, 20, f"process {pid} is gone")
    wait_until(lambda: not port_in_use(port), 20, f"port {port} is free")
