"""Single records read again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.common import log_records
from penstock.common.log_records import LogRecords
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.schemas.topics import TP


class Refetcher:
    """Fails once, then gives every record at once."""

    def __init__(self, settings: Any, loop: Any, on_fetched: Any, on_gone: Any) -> None:
        self.on_fetched, self.failures = on_fetched, 1

    def start(self) -> None: ...

    def request(self, tp: TP, offsets: Sequence[int]) -> None:
        self.failures -= 1
        if self.failures >= 0:
            raise RuntimeError("no thread can be started")
        self.on_fetched(tp, [RawMessage(*tp, offset, 1, None, b"record") for offset in offsets])


async def test_a_record_that_could_not_be_asked_for_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_records, "Refetcher", Refetcher)
    records = LogRecords(KafkaSettings(), most=1)
    with pytest.raises(RuntimeError):
        await records.read(("t", 0), 7)
    found = await asyncio.wait_for(records.read(("t", 0), 7), 5)
    assert found.value == b"record"
