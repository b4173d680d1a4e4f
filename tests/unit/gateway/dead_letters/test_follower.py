"""The follower of dead letters on a disk that is full for a while."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import pytest

from penstock.common import admin
from penstock.common.reader import PartitionReader
from penstock.common.settings import KafkaSettings
from penstock.gateway.dead_letters.follower import LOOK_S, LetterFollower
from penstock.gateway.dead_letters.index import LetterFilter, LetterIndex
from penstock.gateway.dead_letters.letters import LetterFacts
from penstock.schemas.codec import default_codec
from penstock.schemas.topics import TP


class FullFor(LetterIndex):
    """An index whose disk does not take the first deletion."""

    failures = 1

    def expired(self, firsts: Mapping[int, int]) -> None:
        if self.failures:
            self.failures -= 1
            raise sqlite3.OperationalError("database or disk is full")
        super().expired(firsts)


class FakeReader:
    def __init__(self) -> None:
        self.added: dict[TP, int] = {}

    def positions(self) -> dict[TP, int]:
        return self.added

    def add_partitions(self, partitions: Mapping[TP, int]) -> None:
        self.added.update(partitions)


def test_a_full_disk_does_not_end_the_reading_of_dead_letters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What retention had removed could not be forgotten: from then on no letter was run again, purged or erased."""
    index = FullFor(tmp_path / "letters", "topic")
    index.take([LetterFacts(partition=0, offset=n, created_ms=n, reason="engine_failed") for n in range(2)])
    follower, reader, tp = LetterFollower(KafkaSettings(), default_codec(), index), FakeReader(), ("dlq", 0)
    monkeypatch.setattr(follower, "_partitions", lambda: [tp])
    monkeypatch.setattr(admin, "begin_offsets", lambda *_: {tp: 1})
    follower._reader = cast("PartitionReader", reader)
    for left in ([0, 1], [1]):
        follower._looked_at -= 2 * LOOK_S
        follower._on_idle()
        assert [one.offset for one in index.page(LetterFilter(), limit=9)] == left
    assert reader.added == {tp: 1}
    index.close()
