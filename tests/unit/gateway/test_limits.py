"""Limits of tenants and keys: rates, slots, what is outstanding, and how long conversations are kept."""

from __future__ import annotations

import heapq
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from kit.records import request
from kit.refusals import refused
from penstock.gateway.limits.allowances import MOST_REFUSALS, MOST_REFUSALS_OF_ONE, Allowances, Totals
from penstock.gateway.limits.callers import Caller
from penstock.gateway.limits.limits import Buckets, Limits, TokenBucket, duration_text
from penstock.gateway.limits.rates import WINDOW_S, Rate
from penstock.gateway.limits.retention import Retention, expiring, last_active_ms
from penstock.gateway.limits.settings import LimitsSection, retention_of, tenant_limits
from penstock.gateway.limits.slots import Slots, share_of
from penstock.gateway.limits.tenants import FORGET_MS, NEW_CONVERSATION_S, Tenants
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


@given(st.integers(1, 30), st.floats(0, 0.9), st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=200))
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
    with refused(TenantLimit, match="the key a", retry_after_s=pytest.approx(2.0)):
        allowances.submission(slow)
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
    with refused(TenantLimit, retry_after_s=pytest.approx(9.1)):
        allowances.cancel(Caller())
    clock.now = 9.2
    allowances.cancel(Caller())


CPU_MEMORY = "requirements.cpu_memory_bytes"


ALL = Limits(models=("a",), pools=("p",), max_priority=4, max_vram_bytes=9)


@pytest.mark.parametrize(
    ("limits", "fields", "model", "param"),
    [
        (Limits(models=("a",)), {"model": "b"}, None, "model"),
        (Limits(models=("a",)), {}, None, "model"),
        (Limits(pools=("p",)), {"pool": "q"}, None, "pool"),
        (Limits(max_priority=4), {"priority": 3}, None, "priority"),
        (Limits(max_priority=4), {"priority": 4}, None, None),
        (Limits(max_vram_bytes=9), {"requirements": Requirements(vram_bytes=10)}, None, "requirements.vram_bytes"),
        (Limits(max_cpu_memory_bytes=9), {"requirements": Requirements(cpu_memory_bytes=10)}, None, CPU_MEMORY),
        (ALL, {"model": "a", "pool": "p", "requirements": Requirements(vram_bytes=9)}, None, None),
        (ALL, {"model": "alias"}, "a", None),
        (ALL, {}, "a", None),
        (ALL, {"task": "conversation_items"}, None, None),  # it asks no model
    ],
)
def test_what_a_tenant_or_key_may_ask_for(
    limits: Limits, fields: dict[str, Any], model: str | None, param: str | None
) -> None:
    of_tenant, of_key = Caller(key_id="k"), Caller(key_id="k", limits=limits)
    for allowances, caller in ((Allowances(defaults=limits), of_tenant), (Allowances(), of_key)):
        with refused(None if param is None else Forbidden, param=param):
            allowances.check(caller, request(**fields), model)


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
    with refused(TenantLimit, details={"limit": "outstanding", "value": 4}), allowances.outstanding(caller):
        pass
    assert allowances.tenants.of("acme").reserved == 0


def test_the_default_priority_passes_all_limits() -> None:
    allowances = Allowances(defaults=Limits(max_priority=6))
    assert allowances.with_priority(Caller()).priority(None) == 6
    assert allowances.with_priority(Caller(max_priority=7)).priority(None) == 7
    assert allowances.with_priority(Caller(key_id="k", limits=Limits(max_priority=8))).priority(None) == 8
    assert Allowances().with_priority(Caller()).priority(None) == 5


@given(st.integers(1, 30), st.integers(1, 50))
def test_sockets_together_are_read_at_their_tenants_rate(sockets: int, rate: int) -> None:
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


# -- rates by the records' own times


NOW_S = 1_700_000_000


SECONDS = st.builds(lambda minute, second: NOW_S + 60 * minute + second, st.integers(-2, 2), st.integers(0, 2))


@example([*range(NOW_S, NOW_S + WINDOW_S)] * 3, 0)
@given(st.lists(SECONDS, min_size=1), st.sampled_from([0, 0, *range(WINDOW_S - 3, WINDOW_S + 2)]))
def test_records_of_the_last_minute_count(seconds: list[int], idle_s: int) -> None:
    """Whole seconds: the current one and those before it. Old records replace no newer ones, whenever they are read."""
    rate, now_s = Rate(), max(seconds) + idle_s
    for second in seconds:
        rate.count(second * 1000 + 500)
    assert rate.per_s(now_s * 1000) == sum(now_s - WINDOW_S < second for second in seconds) / WINDOW_S


def test_a_time_ahead_of_the_clock_does_not_count_yet() -> None:
    rate = Rate()
    rate.count((NOW_S + 1) * 1000)
    assert [rate.per_s((NOW_S + later) * 1000) for later in (-NOW_S, 0, 1)] == [0, 0, 1 / WINDOW_S]


# -- counting tenants from the log


STEPS = st.lists(st.sampled_from(["ask 0", "ask 1", "follow 0", "follow 1", "end"]), max_size=300)


@given(st.integers(0, 12), STEPS)
def test_two_gateways_overshoot_by_no_more_than_they_have_not_read(limit: int, steps: list[str]) -> None:
    """A log and two gateways that read it whenever they like. What is outstanding is never more than the limit and what
    one of them has yet to read of the other's; so never more than twice the limit."""
    log: list[tuple[str, int]] = []
    gateways = [Tenants(), Tenants()]
    read = [0, 0]
    outstanding = 0

    def follow(one: int) -> None:
        for kind, by in log[read[one] :]:
            if kind == "end":
                gateways[one].ended("t")
            elif by != one:  # its own it counted when the broker acknowledged them
                gateways[one].began("t")
        read[one] = len(log)

    for step in steps:
        name, _, of = step.partition(" ")
        if name == "ask":
            one = int(of)
            unread = sum(1 for kind, by in log[read[one] :] if kind == "begin" and by != one)
            if gateways[one].reserve("t", limit):
                log.append(("begin", one))
                gateways[one].began("t")
                gateways[one].settle("t")
                outstanding += 1
                assert outstanding <= limit + unread
            assert outstanding <= 2 * limit
        elif name == "follow":
            follow(int(of))
        elif outstanding:
            log.append(("end", -1))
            outstanding -= 1
    follow(0)
    follow(1)
    assert [one.of("t").outstanding for one in gateways] == [outstanding, outstanding]


def test_tokens_are_charged_when_requests_end_at_any_gateway() -> None:
    tenants = Tenants(lambda tenant: 600 if tenant == "t" else None)
    bucket = tenants.tokens("t", 100.0)
    assert bucket is not None
    assert bucket.wait_s(100.0) == 0
    tenants.on_outcome("t", "completed", 100_000)
    tenants.on_tokens("t", 1_200, 100_000)
    assert bucket.wait_s(100.0) == 60.1, "the debt of a minute, and one more"
    assert bucket.wait_s(161.0) == 0
    tenants.on_tokens("other", 10**9, 100_000)
    assert tenants.tokens("other", 100.0) is None
    assert tenants.of("t").outcomes == {"completed": 1}


def test_a_tenant_without_tokens_or_conversations_left_may_not_ask() -> None:
    allowances = Allowances(defaults=Limits(tokens_per_minute=60, conversations=1))
    allowances.tenants.on_conversations("default", {"a"}, 0.0)
    with refused(TenantLimit, param="conversation_id", retry_after_s=60):
        allowances.check(Caller(), request(conversation_id="b"), None)
    allowances.check(Caller(), request(conversation_id="a"), None)
    allowances.tenants.on_tokens("default", 1_200, int(time.time() * 1000))
    with refused(TenantLimit, match="60 tokens per minute"):
        allowances.check(Caller(), request(), None)


def test_conversations_that_exist_and_those_just_named_count() -> None:
    tenants = Tenants()

    def may_begin(*conversations: str, tenant: str = "t") -> list[bool]:
        return [tenants.may_begin_conversation(tenant, one, 2) for one in conversations]

    tenants.on_conversations("t", {"a"}, 0.0)
    tenants.on_conversations("u", {"x"}, 0.0)
    tenants.on_request("t", "b", 1_000)
    assert may_begin("a", "b", "c") == [True, True, False]
    assert may_begin("c", tenant="u") == [True]
    tenants.on_conversations("t", {"b"}, 10.0)
    assert tenants.of("t").conversations == {"b"}
    assert may_begin("c") == [True]
    tenants.conversation_began("t", "c", 10.0)
    assert may_begin("d") == [False]
    tenants.conversation_gone("t", "b")
    assert may_begin("d") == [True]
    tenants.on_request("t", "c", 11_000)
    tenants.conversation_began("t", "d", 10.0)
    for at_s, named in ((10.0, {"c": 11, "d": 10}), (11.0, {})):
        tenants.on_conversations("t", set(), at_s + NEW_CONVERSATION_S)
        assert tenants.of("t").named == named, "the latest last; one without a conversation is forgotten"


def test_tenants_without_anything_are_forgotten() -> None:
    tenants = Tenants()
    assert [tenants.reserve(name, 1) for name in ("t", "t", "other")] == [True, False, True]
    tenants.settle("t")
    assert tenants.reserve("t", 1)
    tenants = Tenants()
    for number in range(10):
        tenants.began(f"t{number}")
        tenants.on_request(f"t{number}", None, 1_000)
    tenants.ended("t1")
    for number in range(10):
        tenants.on_conversations(f"t{number}", set(), FORGET_MS / 1000 + 2)
    assert tenants.known().keys() == {f"t{number}" for number in range(10)} - {"t1"}


# -- which conversations are due, by their tenant's retention, and what the settings of it allow


DAY_S, DAY_MS = 86_400, 86_400_000
TENANTS = st.sampled_from(["a", "b", "c"])
KEPT_S = st.sampled_from([0, 3_600, DAY_S, 30 * DAY_S])
RETENTIONS = st.builds(
    lambda all_s, tenants_s: Retention(all_s=all_s, tenants_s=tenants_s), KEPT_S, st.dictionaries(TENANTS, KEPT_S)
)
ACTIVE = st.dictionaries(st.tuples(TENANTS, st.sampled_from("wxyz")), st.integers(0, 40 * DAY_MS), max_size=12)


@given(RETENTIONS, ACTIVE, st.integers(0, 80 * DAY_MS), st.integers(0, 40 * DAY_MS))
def test_conversations_are_due_in_the_order_of_their_times_when_their_tenants_retention_has_passed(
    retention: Retention, active: dict[tuple[str, str], int], now_ms: int, later_ms: int
) -> None:
    due = {(one.tenant, one.conversation_id): one for one in expiring(active, retention, now_ms)}
    for key, active_ms in active.items():
        kept_s = retention.tenants_s.get(key[0], retention.all_s)
        assert (key in due) == (kept_s > 0 and active_ms + kept_s * 1000 <= now_ms)
        if key in due:
            assert due[key].expires_ms == active_ms + kept_s * 1000 == retention.expires_ms(key[0], active_ms)
    assert retention.is_on or not due
    later = expiring(active, retention, now_ms + later_ms)
    assert later[: len(due)] == [*due.values()], "they stay due"
    assert [one.expires_ms for one in later] == sorted(one.expires_ms for one in later)


@pytest.mark.parametrize(
    ("record_ms", "facts_ms", "active_ms"), [(None, None, None), (5, None, 5), (None, 6, 6), (5, 6, 6), (7, 6, 7)]
)
def test_changed_facts_are_activity(record_ms: int | None, facts_ms: int | None, active_ms: int | None) -> None:
    assert last_active_ms(record_ms, facts_ms) == active_ms
    expires_ms = None if active_ms is None else active_ms + 3_600_000
    assert Retention(all_s=3_600).expires_ms("a", active_ms) == expires_ms


# -- settings


def test_a_tenants_own_retention_overrides_the_default() -> None:
    tenants = {
        "short": {"conversation_retention_s": "12h"},
        "ever": {"conversation_retention_s": 0},
        "same": {"sockets": 3},
    }
    section = LimitsSection.model_validate({"conversation_retention_s": "30d", "tenants": tenants})
    retention = retention_of(section)
    kept = {tenant: retention.kept_ms(tenant) for tenant in ("short", "ever", "same", "other")}
    assert kept == {"short": DAY_MS // 2, "ever": None, "same": 30 * DAY_MS, "other": 30 * DAY_MS}
    defaults, by_tenant = tenant_limits(section, keyless=False)
    assert by_tenant["same"].sockets == 3
    assert "conversation_retention_s" not in defaults.to_dict()
    assert not retention_of(LimitsSection()).is_on
    of_one = retention_of(LimitsSection.model_validate({"tenants": {"short": tenants["short"]}}))
    assert (of_one.is_on, of_one.kept_ms("other")) == (True, None)


@pytest.mark.parametrize("value", [30, "30", "59m", "30 days", "-1", -1, float("nan"), True])
def test_a_value_without_a_clear_unit_is_refused(value: Any) -> None:
    """`30` without a unit would be half a minute."""
    with pytest.raises(ValidationError):
        LimitsSection.model_validate({"conversation_retention_s": value})
