"""Kafka's own MirrorMaker 2 in one JVM: the topics of a broker copied to another one under the same names."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jgo
import pytest

from broker_reads import BrokerReads
from penstock.cli.embedded_kafka import java
from penstock.cli.kafka_jars import KAFKA_VERSION
from penstock.cli.paths import cache_dir, exclusive
from support import wait_until

_CODE = f"org.apache.kafka:connect-mirror:{KAFKA_VERSION}+org.slf4j:slf4j-simple:1.7.36"
_PROPERTIES = """
clusters = old, new
old.bootstrap.servers = {old}
new.bootstrap.servers = {new}
old->new.enabled = true
old->new.topics = {topics}
old->new.groups = .*
replication.policy.class = org.apache.kafka.connect.mirror.IdentityReplicationPolicy
replication.factor = 1
checkpoints.topic.replication.factor = 1
heartbeats.topic.replication.factor = 1
offset-syncs.topic.replication.factor = 1
offset.storage.replication.factor = 1
status.storage.replication.factor = 1
config.storage.replication.factor = 1
offset.storage.partitions = 1
status.storage.partitions = 1
emit.heartbeats.enabled = false
old->new.sync.group.offsets.enabled = {offsets}
old->new.sync.group.offsets.interval.seconds = 1
old->new.emit.checkpoints.interval.seconds = 1
old->new.sync.topic.acls.enabled = false
old->new.consumer.auto.offset.reset = earliest
old->new.producer.linger.ms = 5
refresh.topics.interval.seconds = 1
offset.flush.interval.ms = 1000
"""


@cache
def _jars() -> str:
    """34 MB, fetched once: to build again puts the files anew while another process's JVM loads them."""
    folder = cache_dir() / f"mirror-maker-{KAFKA_VERSION}"
    built = folder / "classpath"
    with exclusive(folder.with_suffix(".lock"), lambda _: None):
        if not built.exists() or not all(Path(jar).exists() for jar in built.read_text().split(":")):
            try:
                environment: Any = jgo.build(_CODE, cache_dir=folder)
            except Exception as error:
                pytest.skip(f"MirrorMaker cannot be fetched: {error}")
            built.write_text(":".join(str(jar) for jar in environment.all_jars))
        return built.read_text()


@contextmanager
def mirroring(old: str, new: str, topics: str, folder: Path, *, offsets: bool = False) -> Iterator[None]:
    """Copy the topics that the pattern names while the block runs. `offsets`: those of consumer groups too."""
    folder.mkdir()
    settings, log = folder / "mirror.properties", folder / "mirror.log"
    settings.write_text(_PROPERTIES.format(old=old, new=new, topics=topics, offsets=str(offsets).lower()))
    with log.open("wb") as out:
        process = subprocess.Popen(
            [java(), "-Xmx256m", "-cp", _jars(), "org.apache.kafka.connect.mirror.MirrorMaker", str(settings)],
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield
    finally:
        process.terminate()
        process.wait(60)


def copy_topics(old: str, new: str, prefix: str, folder: Path, *, offsets: bool = False) -> None:
    """Mirror all topics of an installation that nobody writes to, until the copies are whole."""
    theirs, ours = BrokerReads(old), BrokerReads(new)

    def counts(reads: BrokerReads, topic: str) -> int:
        return len(reads.records(topic, 30))

    try:
        wanted = {topic: counts(theirs, topic) for topic in theirs.topics() if topic.startswith(prefix)}
        with mirroring(old, new, f"{prefix}.*", folder, offsets=offsets):
            wait_until(
                lambda: wanted.keys() <= set(ours.topics()) and {one: counts(ours, one) for one in wanted} == wanted,
                180,
                lambda: (folder / "mirror.log").read_text()[-3_000:],
                poll_s=0.5,
            )
    finally:
        theirs.close()
        ours.close()
