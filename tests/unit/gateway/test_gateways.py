"""Reports on the worker topic: whose they are, when they count as heard, and who is known of those that are silent."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.examples import examples
from kit.records import CODEC, NAMES, gateway_state, worker
from kit.view_gateway import ViewGateway
from penstock.common.arrivals import Arrivals
from penstock.common.reader import RawMessage
from penstock.gateway.reporting import id_of, url_of
from penstock.gateway.view.gateways import GONE_MS, HEARS_MS, LATE_MS, MISSED_MS, MOST, Gateways, is_alive
from penstock.schemas.errors import DecodeError, RegistryUnavailable
from penstock.schemas.records import Record
from penstock.schemas.topics import GATEWAY_KEY, is_of_gateway

REPORTS = (NAMES.worker, 0)
NOW = 1_700_000_000_000
OFF_MS = 60_000


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ViewGateway]:
    monkeypatch.setattr("penstock.gateway.view.view.now_ms", lambda: NOW)
    with ViewGateway(tmp_path / "view.sqlite") as made:
        yield made


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


def test_nobody_is_silent_while_this_gateway_hears_nothing_nor_until_all_had_time_to_report(
    gateway: ViewGateway,
) -> None:
    """The partition's leader changes, or this gateway's disk is full, or its host was suspended."""
    known, refused = gateway.view.gateways, [False]

    def hears(at_ms: int, started_at: int = NOW) -> None:
        state = gateway_state(started_at=started_at)
        known.on_record(gateway.message(REPORTS, state, key=b"gateway/gateway-h-1"), at_ms)

    assert known.judged_ms(NOW) == NOW, "it does not report yet"
    known.reports_as("gateway-h-1", NOW, lambda: refused[0])
    hears(NOW - 600_000, started_at=1)
    assert known.judged_ms(NOW + 100) == NOW + 100, "that was a predecessor"
    for ms in range(0, 9_000, 2_000):
        hears(NOW + ms)
    last, back = NOW + 8_000, NOW + 600_000
    assert [known.judged_ms(last + ms) - last for ms in (0, 1_900, 60_000)] == [0, 1_900, 3_000]
    (state,) = known.known(last)
    assert is_alive(state, known.judged_ms(back))
    hears(back)
    assert known.judged_ms(back + 1_000) == last + HEARS_MS, "others have not reported yet"
    hears(back + 2_000)
    assert known.judged_ms(back + 2_001) == back + 2_001
    refused[0] = True
    assert known.judged_ms(back + 60_000) == back + 60_000


@pytest.mark.parametrize("own_id", [None, "bridge-h-1"])
def test_two_processes_of_one_id_are_two_and_one_that_was_started_again_is_one(
    gateway: ViewGateway, own_id: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Two hosts have one name, or a process listens at another address with the same port."""
    one, other = (gateway_state("bridge-h-1", pid=pid, started_at=pid) for pid in (7, 9))
    if own_id is not None:
        gateway.view.gateways.reports_as(own_id, 7, lambda: False)
    read(gateway, "bridge-h-1", gateway_state("bridge-h-1", pid=5))
    for _ in range(3):
        read(gateway, "bridge-h-1", one)
        read(gateway, "bridge-h-1", other)
    first, second = gateway.view.gateways.known(1_000)
    assert {first.id, second.id} == {"bridge-h-1", "bridge-h-1-9" if own_id else "bridge-h-1-7"}
    assert {first.pid, second.pid} == {7, 9}
    assert caplog.text.count("gateways.same_id") == 1
    read(gateway, "bridge-h-1", None)
    read(gateway, "bridge-h-1", other)
    assert known(gateway, 1_000) == ["bridge-h-1"]


def test_a_clock_that_is_set_back_does_not_keep_the_dead_alive(
    gateway: ViewGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.read(REPORTS, worker("w", assigned=["t/0"]), key=b"w")
    read(gateway, "bridge-h-1", gateway_state("bridge-h-1"))
    back = NOW - 3_600_000
    monkeypatch.setattr("penstock.gateway.view.fleet.time.time", lambda: back / 1000)
    gateway.view.fleet.forget_stale_workers(60)
    gateway.view.gateways.clock_is(back)
    assert [one.updated_at for one in gateway.view.fleet.workers.values()] == [back]
    assert [one.reported_at for one in gateway.view.gateways.known(back)] == [back]


def test_a_report_that_cannot_be_decoded_says_that_its_process_lives(tmp_path: Path) -> None:
    """That of a later version, also while a registry is asked for its schema."""
    codec = Mock(wraps=CODEC)
    known = Gateways(codec)
    message = RawMessage(NAMES.worker, 0, 1, NOW, b"gateway/bridge-h-1", CODEC.encode(gateway_state("bridge-h-1")))
    known.on_record(message, NOW)
    for seconds, error in enumerate((DecodeError("no"), RegistryUnavailable("away")), 1):
        codec.decode.side_effect = error
        known.on_record(message, NOW + seconds)
        known.on_record(replace(message, key=b"gateway/bridge-h-2"), NOW + seconds)
        assert [(one.id, one.reported_at) for one in known.known(NOW)] == [("bridge-h-1", NOW + seconds)]


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
