"""`penstock broker`: the embedded Apache Kafka alone, in the foreground."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from penstock.cli.embedded_kafka import EmbeddedKafka
from penstock.cli.failures import CliFailure
from penstock.cli.kafka_jars import KAFKA_VERSION
from penstock.cli.paths import default_data_dir


def broker(
    data_dir: Annotated[
        Path | None, typer.Option(help="Where its topics lie (default: the data folder of `penstock up`).")
    ] = None,
    port: Annotated[int, typer.Option(help="The port on 127.0.0.1.")] = 9092,
) -> None:
    """Run a real Apache Kafka (KRaft, one node) on 127.0.0.1 until Ctrl-C.

    Example:  penstock broker --data-dir /tmp/kafka --port 19092

    For trying things out and for tests; bring a cluster of your own for production.
    """
    stopping = False

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    kafka = EmbeddedKafka((data_dir or default_data_dir()) / "kafka", port, progress=say)
    say(f"starting Apache Kafka {KAFKA_VERSION}")
    try:
        kafka.start()
        say(f"listening on {kafka.bootstrap_servers}; data in {kafka.data_dir}; Ctrl-C stops it")
        while not stopping:
            time.sleep(0.1)
            if not kafka.running:
                raise CliFailure(f"the broker ended; its log is {kafka.log}")
    finally:
        kafka.stop()


def say(line: str) -> None:
    typer.echo(line, err=True)
