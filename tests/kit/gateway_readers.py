"""Stands for the readers of topics: a test hands over what a reader's thread would read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest

from penstock.common import admin
from penstock.common.reader import RawMessage
from penstock.schemas.topics import TP


class FakeReader:
    """In place of `PartitionReader`. `made` holds those that exist."""

    failure: BaseException | None = None

    def __init__(
        self, kafka: Any, begin: Any, on_batch: Callable[[Sequence[RawMessage]], None], **options: Any
    ) -> None:
        self.begin, self.read, self.options = begin, on_batch, options
        self.partitions: dict[TP, int] = dict(begin) if isinstance(begin, Mapping) else {}

    def start(self) -> None: ...
    def stop(self) -> None: ...
    def drop(self, tp: TP) -> None: ...

    def call(self, work: Callable[[], object]) -> None:
        work()

    def wait_until_caught_up(self, timeout_s: float, partitions: Iterable[TP] | None = None) -> None: ...

    def positions(self) -> dict[TP, int]:
        return self.partitions

    def add_partitions(self, partitions: Mapping[TP, int]) -> None:
        self.partitions.update(partitions)


def fake_readers(monkeypatch: pytest.MonkeyPatch, module: Any, topics: Mapping[str, int], first: int = 0) -> list[Any]:
    """The readers that the module makes from now on, on a broker that has these topics (name → partitions).
    Every partition begins at `first`."""
    made: list[Any] = []

    def make(*args: Any, **options: Any) -> FakeReader:
        made.append(FakeReader(*args, **options))
        return made[-1]

    monkeypatch.setattr(module, "PartitionReader", make)
    monkeypatch.setattr(admin, "partition_counts", lambda *_, **__: dict(topics))
    monkeypatch.setattr(admin, "topic_id", lambda _, topic, *__: topic if topic in topics else None)
    for name in ("begin_offsets", "end_offsets", "offsets_at"):
        monkeypatch.setattr(admin, name, lambda _, partitions, *__: dict.fromkeys(partitions, first))
    return made
