"""Reports on the worker topic: whose they are, when they count as heard, and who is known of those that are silent."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.examples import examples
from kit.records import NAMES, gateway_state, worker
from kit.view_gateway import ViewGateway
from penstock.common.arrivals import Arrivals
from penstock.common.reader import RawMessage
from penstock.gateway.reporting import id_of, url_of
from penstock.gateway.view.gateways import GONE_MS, LATE_MS, MISSED_MS, MOST, is_alive
from penstock.schemas.records import Record
from penstock.schemas.topics import GATEWAY_KEY, is_of_gateway

REPORTS = (NAMES.worker, 0)
NOW = 1_700_000_000_000
OFF_MS = 60_000


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ViewGateway]:
    monkeypatch.setattr("penstock.gateway.view.view.now_ms", lambda: NOW)
    made = ViewGateway(tmp_path / "view.sqlite")
    yield made
    made.close()


def read(gateway: ViewGateway, name: str, value: Record | bytes | None, **fields: Any) -> None:
    gateway.read(REPORTS, value, key=f"{GATEWAY_KEY}{name}".encode(), **fields)


def known(gateway: ViewGateway, now_ms: int = NOW) -> list[str]:
    return [one.id for one in gateway.view.gateways.known(now_ms)]


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(-OFF_MS, OFF_MS)), min_size=1), st.integers(0, 40))
@settings(max_examples=examples(200))
def test_a_live_record_counts_from_now_and_one_of_the_past_from_the_log(read: Any, end: int) -> None:
    arrivals, live = Arrivals(), False
    arrivals.begin(end)
    for ticks, (offset, off_ms) in enumerate(read):
        now_ms = NOW + ticks
        live = live or offset >= end
        message = RawMessage(NAMES.worker, 0, offset, now_ms + off_ms, b"w", b"")
        assert arrivals.heard_ms(message, now_ms) == (now_ms if live else min(now_ms, now_ms + off_ms))


@pytest.mark.parametrize("off_ms", [-OFF_MS, OFF_MS])
def test_a_clock_that_differs_neither_silences_a_worker_nor_keeps_a_dead_one_alive(
    gateway: ViewGateway, off_ms: int
) -> None:
    gateway.view.reports.begin(1)
    report = worker("w", updated_at=NOW + off_ms, started_at=NOW + off_ms)
    gateway.read(REPORTS, report, key=b"w", timestamp_ms=NOW + off_ms)
    (before,) = gateway.view.fleet.workers.values()
    assert before.updated_at == min(NOW, NOW + off_ms), "what stood in the log"
    gateway.read(REPORTS, report, key=b"w", timestamp_ms=NOW + off_ms)
    (heard,) = gateway.view.fleet.workers.values()
    assert (heard.updated_at, heard.started_at) == (NOW, NOW + off_ms)
    read(gateway, "gateway-h-1", gateway_state(reported_at=NOW + off_ms), timestamp_ms=NOW + off_ms)
    (state,) = gateway.view.gateways.known(NOW)
    assert state.reported_at == NOW


def test_reports_of_gateways_are_no_workers_and_end_with_a_tombstone(gateway: ViewGateway) -> None:
    read(gateway, "gateway-h-1", gateway_state())
    read(gateway, "bridge-h-2", gateway_state("bridge-h-2"))
    gateway.read(REPORTS, worker("w"), key=b"w")
    read(gateway, "bridge-h-3", b"\0\0\0\0\1a record of a later release")
    assert set(gateway.view.fleet.workers) == {"w"}
    assert known(gateway) == ["bridge-h-2", "gateway-h-1"]
    read(gateway, "bridge-h-2", None)
    read(gateway, "unknown", None)
    assert known(gateway) == ["gateway-h-1"]
    assert set(gateway.view.fleet.workers) == {"w"}
    assert [is_of_gateway(key) for key in (None, b"w", b"gateway", b"gateway/w")] == [False, False, False, True]


def test_who_is_silent_is_left_out_sooner_if_another_of_its_kind_lives(gateway: ViewGateway) -> None:
    gateway.view.reports.begin(3)
    for name in ("gateway-h-1", "gateway-h-2", "bridge-h-1"):
        read(gateway, name, gateway_state(name), timestamp_ms=NOW - GONE_MS - 1)
    assert known(gateway) == ["bridge-h-1", "gateway-h-1", "gateway-h-2"], "nobody does their work"
    read(gateway, "gateway-h-2", gateway_state("gateway-h-2"))
    assert known(gateway) == ["bridge-h-1", "gateway-h-2"]
    assert known(gateway, NOW + LATE_MS + 1) == ["bridge-h-1", "gateway-h-1", "gateway-h-2"]
    assert known(gateway, NOW + MISSED_MS) == ["gateway-h-2"]
    assert known(gateway, NOW + MISSED_MS + 1) == []
    (state,) = gateway.view.gateways.known(NOW + MISSED_MS)
    assert [is_alive(state, NOW + age_ms) for age_ms in (-OFF_MS, LATE_MS, LATE_MS + 1)] == [True, True, False]


def test_a_bounded_number_is_remembered(gateway: ViewGateway) -> None:
    for number in range(MOST + 2):
        read(gateway, f"gateway-h-{number}", gateway_state(f"gateway-h-{number}"))
    assert len(known(gateway)) == MOST
    assert "gateway-h-1" not in known(gateway)


def test_an_id_is_stable_where_the_port_is_known_and_a_url_is_one_that_can_be_called() -> None:
    assert id_of("bridge", 8002) == id_of("bridge", 8002)
    assert len({id_of("bridge", 8002), id_of("bridge", 8003), id_of("gateway", 8002), id_of("bridge", 0)}) == 4
    urls = [url_of(*at) for at in (("127.0.0.1", 1), ("::1", 2), ("0.0.0.0", 3), ("::", 4), ("box", 0))]
    assert urls == ["http://127.0.0.1:1", "http://[::1]:2", None, None, None]
