"""Limits: buckets never give more than their rate, slots hold back a share, and what a key may ask for."""

from __future__ import annotations

import heapq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.gateway_records import request
from penstock.gateway.limits.allowances import MOST_REFUSALS, MOST_REFUSALS_OF_ONE, Allowances, Totals
from penstock.gateway.limits.callers import Caller
from penstock.gateway.limits.limits import Buckets, Limits, TokenBucket, duration_text
from penstock.gateway.limits.settings import LimitsSection
from penstock.gateway.limits.slots import Slots, share_of
from penstock.gateway.settings import AuthSection, GatewaySection, GatewaySettings, allowances_of
from penstock.schemas.errors import Forbidden, Overloaded, TenantLimit
from penstock.schemas.records import Requirements

GAPS = st.lists(st.floats(0, 5, allow_nan=False), min_size=1, max_size=60)


@given(st.floats(0.1, 100), st.integers(1, 20), GAPS)
def test_the_bucket_gives_no_more_than_burst_and_rate(rate: float, burst: int, gaps: list[float]) -> None:
    bucket, now, given_out = TokenBucket(rate, burst, 0.0), 0.0, 0
    for gap in gaps:
        now += gap
        wait = bucket.take(now)
        given_out += wait == 0.0
        assert given_out <= burst + rate * now + 1e-6
        if wait:
            assert bucket.take(now + wait + 1e-9) == 0.0, "the wait that was told is enough"
            given_out += 1
            now += wait + 1e-9


@given(st.floats(0.5, 100), st.lists(st.tuples(st.floats(0, 5), st.floats(0, 500)), min_size=1, max_size=40))
def test_what_was_used_is_paid_before_more_is_given(rate: float, uses: list[tuple[float, float]]) -> None:
    bucket, now, used = TokenBucket(rate, 10, 0.0), 0.0, 0.0
    for gap, cost in uses:
        now += gap
        if bucket.wait_s(now) == 0.0:
            assert used <= 10 + rate * now + 1e-6, "no more is begun before the debt is paid"
            bucket.charge(now, cost)
            used += cost
        assert bucket.remaining(now) >= 0
        assert bucket.reset_s(now) >= 0


def test_durations_as_openai_tells_them() -> None:
    seconds = (0.0, 0.02, 1.5, 1.0, 360.0, 61.2)
    assert [duration_text(one) for one in seconds] == ["0ms", "20ms", "1.5s", "1s", "6m0s", "1m2s"]


@given(
    st.integers(1, 30),
    st.floats(0, 0.9),
    st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=200),
)
def test_slots_keep_a_share_for_the_others(total: int, reserve: float, steps: list[tuple[str, bool]]) -> None:
    slots, share = Slots("streams", total), share_of(total, reserve)
    held: dict[str, list[object]] = {"a": [], "b": [], "c": []}
    for tenant, takes in steps:
        if takes:
            try:
                held[tenant].append(slots.take([(tenant, share)]))
            except TenantLimit:
                assert len(held[tenant]) == share
            except Overloaded:
                assert sum(map(len, held.values())) == total
        elif held[tenant]:
            give_back = held[tenant].pop()
            assert callable(give_back)
            give_back()
        assert slots.open == sum(map(len, held.values())) <= total
        assert all(slots.held(one) == len(held[one]) <= share for one in held)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_refusal_for_a_rate_names_the_wait_and_others_are_served() -> None:
    clock = Clock()
    allowances = Allowances(clock=clock)
    slow, other = (Caller(key_id=one, limits=Limits(requests_per_s=0.5)) for one in "ab")
    allowances.submission(slow)
    with pytest.raises(TenantLimit, match="the key a") as caught:
        allowances.submission(slow)
    assert caught.value.retry_after_s == pytest.approx(2.0)
    allowances.submission(other)
    clock.now = 2.0
    allowances.submission(slow)


def test_the_rate_of_a_tenant_holds_for_all_its_keys_and_costs_them_nothing() -> None:
    big = Limits(requests_per_s=100)
    allowances = Allowances(defaults=Limits(requests_per_s=2), by_tenant={"big": big}, clock=Clock())
    caller = Caller(tenant="acme", key_id="a", limits=Limits(requests_per_s=3))
    allowances.submission(caller)
    allowances.submission(Caller(tenant="acme", key_id="b"))
    for key in "aaaac":
        with pytest.raises(TenantLimit, match="the tenant acme"):
            allowances.submission(replace(caller, key_id=key))
    for _ in range(100):
        allowances.submission(Caller(tenant="big", key_id="d"))
    headers = dict(allowances.headers(caller))
    names = ("limit", "remaining", "reset")
    assert [headers[f"x-ratelimit-{name}-requests".encode()] for name in names] == [b"2", b"0", b"1s"]


def test_many_cancels_at_once_leave_a_debt() -> None:
    clock = Clock()
    allowances = Allowances(defaults=Limits(cancels_per_s=10), clock=clock)
    allowances.cancel(Caller())
    allowances.cancelled_more(Caller(), 99)
    with pytest.raises(TenantLimit) as caught:
        allowances.cancel(Caller())
    assert caught.value.retry_after_s == pytest.approx(9.1)
    clock.now = 9.2
    allowances.cancel(Caller())


CPU_MEMORY = "requirements.cpu_memory_bytes"


@pytest.mark.parametrize(
    ("limits", "fields", "param"),
    [
        (Limits(models=("a",)), {"model": "b"}, "model"),
        (Limits(models=("a",)), {}, "model"),
        (Limits(pools=("p",)), {"pool": "q"}, "pool"),
        (Limits(max_priority=4), {"priority": 3}, "priority"),
        (Limits(max_vram_bytes=9), {"requirements": Requirements(vram_bytes=10)}, "requirements.vram_bytes"),
        (Limits(max_cpu_memory_bytes=9), {"requirements": Requirements(cpu_memory_bytes=10)}, CPU_MEMORY),
    ],
)
def test_what_a_tenant_or_key_may_not_ask_for_is_forbidden(
    limits: Limits, fields: dict[str, object], param: str
) -> None:
    of_tenant, of_key = Caller(key_id="k"), Caller(key_id="k", limits=limits)
    for allowances, caller in ((Allowances(defaults=limits), of_tenant), (Allowances(), of_key)):
        with pytest.raises(Forbidden) as caught:
            allowances.check(caller, request(**fields), None)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "model"),
    [
        ({"model": "a", "pool": "p", "requirements": Requirements(vram_bytes=9)}, None),
        ({"model": "alias"}, "a"),
        ({}, "a"),
        ({"task": "conversation_items"}, None),  # it asks no model
    ],
)
def test_a_request_within_the_limits_passes(fields: dict[str, Any], model: str | None) -> None:
    limits = Limits(models=("a",), pools=("p",), max_priority=4, max_vram_bytes=9)
    Allowances().check(Caller(key_id="k", limits=limits), request(**fields), model)


def test_settings_hold_for_tenants_and_without_keys_only_what_is_set(tmp_path: Path) -> None:
    section = LimitsSection(sockets=7, tenants={"big": {"sockets": 70}})  # type: ignore[dict-item]
    conf = GatewaySection.model_validate({"limits": section})
    for auth, streams, reserve in ((AuthSection(), None, 0), (AuthSection(keys_file=tmp_path), 1000, 0.25)):
        allowances = allowances_of(GatewaySettings(gateway=conf, auth=auth))
        limits = [allowances.limits_of(tenant) for tenant in ("x", "big")]
        assert [(one.sockets, one.streams) for one in limits] == [(7, streams), (70, streams)]
        assert allowances.totals.reserve == reserve


@pytest.mark.parametrize(
    "values", [{"socket": 1}, {"sockets": -1}, {"sockets": 1.5}, {"models": "a"}, {"calls_per_s": 0}]
)
def test_impossible_limits_are_named(values: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(values))):
        Limits.from_dict(values)


def test_no_tenant_can_take_all_that_is_on_its_way() -> None:
    allowances = Allowances(totals=Totals(max_live=8, max_pending_submits=4, reserve=0.5))
    caller = Caller(tenant="acme")
    with allowances.outstanding(caller), allowances.outstanding(caller):
        with pytest.raises(TenantLimit), allowances.outstanding(caller):
            pass
        with allowances.outstanding(Caller(tenant="other")):
            pass
    for _ in range(4):
        allowances.tenants.began("acme")
    with pytest.raises(TenantLimit) as caught, allowances.outstanding(caller):
        pass
    assert caught.value.details == {"limit": "outstanding", "value": 4}
    assert allowances.tenants.of("acme").reserved == 0


def test_the_default_priority_passes_all_limits() -> None:
    allowances = Allowances(defaults=Limits(max_priority=6))
    assert allowances.with_priority(Caller()).priority(None) == 6
    assert allowances.with_priority(Caller(max_priority=7)).priority(None) == 7
    assert allowances.with_priority(Caller(key_id="k", limits=Limits(max_priority=8))).priority(None) == 8
    assert Allowances().with_priority(Caller()).priority(None) == 5


@given(st.integers(1, 30), st.integers(1, 50))
def test_sockets_together_are_read_at_their_tenants_rate(sockets: int, rate: int) -> None:
    """However many there are: each waits for its frame, and all of them are charged to one bucket."""
    clock = Clock()
    allowances = Allowances(defaults=Limits(calls_per_s=rate), clock=clock)
    due = [(0.0, number) for number in range(sockets)]
    read = 0
    while True:
        at, number = heapq.heappop(due)
        if at > 10:
            break
        clock.now = at
        read += 1
        heapq.heappush(due, (at + allowances.frame_s(Caller()), number))
        if read > 100 * rate:
            break
    assert read <= rate * 11 + sockets + 1


def test_limits_are_written_in_the_keys_file_and_on_the_command_line() -> None:
    limits = Limits.from_texts(["outstanding=0", "calls_per_s=1.5", "models=a, b", "max_priority=3"])
    assert limits == Limits(outstanding=0, calls_per_s=1.5, models=("a", "b"), max_priority=3)
    assert Limits.from_texts(limits.to_text().split()) == Limits.from_dict(limits.to_dict()) == limits
    assert Limits().to_dict() == {}
    for bad in ("outstanding", "outstanding=x", "outstandin=5", "calls_per_s=0"):
        with pytest.raises(ValueError, match=bad.split("=")[0]):
            Limits.from_texts([bad])


@pytest.mark.parametrize(("every_s", "most"), [(10.0, 11), (0.0, 10)])
def test_holders_are_bounded_be_they_idle_or_not(every_s: float, most: int) -> None:
    """Addresses cost an attacker nothing: the oldest buckets give way."""
    buckets = Buckets(max_holders=10)
    for n in range(100):
        buckets.of(str(n), 1.0, every_s * n).take(every_s * n)
    assert len(buckets) <= most
    assert buckets.of("99", 1.0, every_s * 99).take(every_s * 99) > 0, "the newest are kept"


def test_refusals_are_sent_at_a_pace_and_are_bounded_in_all_and_by_holder() -> None:
    allowances = Allowances(clock=Clock())
    waits = [allowances.refusal_s("a") for _ in range(150)]
    assert (waits[0], waits[-1], allowances.refusal_s("b")) == (0.0, pytest.approx(0.5), 0.0)
    assert waits == sorted(waits)
    for n in range(MOST_REFUSALS):
        allowances.open_refusal(f"the address {n // MOST_REFUSALS_OF_ONE}")
    with pytest.raises(TenantLimit):
        allowances.open_refusal("the address 0")
    with pytest.raises(Overloaded):
        allowances.open_refusal("the address of another")
