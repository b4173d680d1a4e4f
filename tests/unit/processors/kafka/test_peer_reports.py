"""What a worker reads of the reports of others."""

from __future__ import annotations

import pytest

from kit.records import CODEC, NAMES, gateway_state, worker
from penstock.common.clock import steady_ms
from penstock.common.reader import RawMessage
from penstock.processors.core.work.peers import Peers
from penstock.processors.kafka.record_follower import report_in
from penstock.schemas.records import Record

NOW = 1_700_000_000_000


def message(key: bytes, value: Record | None) -> RawMessage:
    return RawMessage(NAMES.worker, 0, 0, NOW, key, None if value is None else CODEC.encode(value))


def test_workers_whose_clocks_differ_know_one_another() -> None:
    peers, off_ms = Peers("here"), {"here": 0, "ahead": 60_000, "behind": -60_000}
    for name, off in off_ms.items():
        report = report_in(message(name.encode(), worker(name, updated_at=NOW + off)), CODEC, NOW)
        assert report is not None
        peers.reported([report])
    assert {one.worker_id for one in peers.running} == off_ms.keys()
    assert peers.now_ms == NOW


def test_a_clock_that_is_set_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    before = steady_ms()
    monkeypatch.setattr("time.time_ns", lambda: 0)
    assert before <= steady_ms() < before + 60_000


def test_reports_of_gateways_and_tombstones_are_passed_over() -> None:
    later = RawMessage(NAMES.worker, 0, 0, NOW, b"gateway/g-h-1", b"\0\0\0\0\1a record of a later release")
    for passed in (message(b"gateway/g-h-1", gateway_state()), message(b"w", None), later):
        assert report_in(passed, CODEC, NOW) is None
