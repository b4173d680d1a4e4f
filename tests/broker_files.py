"""The files of a broker: logs that lose records, as after a disk that failed, an old backup or a loss of power."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from penstock.common import admin
from penstock.common.settings import KafkaSettings

TP = tuple[str, int]


def _folder(kafka: Any, tp: TP) -> Path:
    return kafka.data_dir / "topics" / f"{tp[0]}-{tp[1]}"


def _start(kafka: Any) -> None:
    """Start the broker and wait until every partition has its leader again."""
    kafka.start()
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    counts = admin.partition_counts(settings, timeout_s=60)
    admin.end_offsets(settings, [(topic, number) for topic, count in counts.items() for number in range(count)], 60)


def back_up(kafka: Any, tp: TP, into: Path) -> Path:
    """A copy of a partition's log as it is now. The broker starts again."""
    kafka.stop()
    copy = shutil.copytree(_folder(kafka, tp), into)
    _start(kafka)
    return copy


def lose_logs(kafka: Any, tps: Iterable[TP]) -> None:
    """These partitions are empty, and their offsets begin at 0 again. The broker starts again."""
    kafka.stop()
    for tp in tps:
        shutil.rmtree(_folder(kafka, tp))
    _start(kafka)


def restore(kafka: Any, tp: TP, copy: Path) -> None:
    """The partition has its older log again. The broker starts again."""
    kafka.stop()
    shutil.rmtree(_folder(kafka, tp))
    shutil.copytree(copy, _folder(kafka, tp))
    _start(kafka)


def lose_power(data_dir: Path, flushed: Collection[str] = ()) -> int:
    """Cut the logs of a broker that does not run to what it has flushed, and return the bytes that are gone.

    `flushed` names topics that are flushed with every record. The quorum's own log always is.
    """
    folder = data_dir / "topics"
    lines = (folder / "recovery-point-offset-checkpoint").read_text().splitlines()[2:]
    points = {f"{topic}-{number}": int(offset) for topic, number, offset in map(str.split, lines)}
    gone = 0
    for log in folder.glob("*/*.log"):
        topic = log.parent.name.rpartition("-")[0]
        if topic in flushed or topic == "__cluster_metadata":
            continue
        content = log.read_bytes()
        kept = _bytes_below(content, points.get(log.parent.name, 0))
        gone += len(content) - kept
        os.truncate(log, kept)
    return gone


def whole_log(data_dir: Path, tp: TP) -> bytes:
    """All record batches that a broker has of a partition: replicas in sync have the same ones."""
    segments = sorted((data_dir / "topics" / f"{tp[0]}-{tp[1]}").glob("*.log"))
    return b"".join(segment.read_bytes() for segment in segments)


def _bytes_below(log: bytes, offset: int) -> int:
    """The length of the record batches that begin below an offset."""
    at = 0
    while at + 12 <= len(log):
        base, size = struct.unpack_from(">qi", log, at)
        if base >= offset or size <= 0:
            break
        at += 12 + size
    return at
