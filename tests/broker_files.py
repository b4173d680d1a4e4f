"""The files of the session's broker: logs that lose records, as after a disk that failed or an old backup."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
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
