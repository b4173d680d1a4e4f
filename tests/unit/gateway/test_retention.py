"""Which conversations are due, by their tenant's retention, and what the settings of it allow."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.gateway.limits.retention import Retention, expiring, last_active_ms
from penstock.gateway.limits.settings import LimitsSection, retention_of, tenant_limits

DAY_S, DAY_MS = 86_400, 86_400_000
TENANTS = st.sampled_from(["a", "b", "c"])
KEPT_S = st.sampled_from([0, 3_600, DAY_S, 30 * DAY_S])
RETENTIONS = st.builds(
    lambda all_s, tenants_s: Retention(all_s=all_s, tenants_s=tenants_s), KEPT_S, st.dictionaries(TENANTS, KEPT_S)
)
ACTIVE = st.dictionaries(st.tuples(TENANTS, st.sampled_from("wxyz")), st.integers(0, 40 * DAY_MS), max_size=12)


@given(RETENTIONS, ACTIVE, st.integers(0, 80 * DAY_MS))
def test_conversations_are_due_when_their_tenants_retention_has_passed(
    retention: Retention, active: dict[tuple[str, str], int], now_ms: int
) -> None:
    due = {(one.tenant, one.conversation_id): one for one in expiring(active, retention, now_ms)}
    for key, active_ms in active.items():
        kept_s = retention.tenants_s.get(key[0], retention.all_s)
        assert (key in due) == (kept_s > 0 and active_ms + kept_s * 1000 <= now_ms)
        if key in due:
            assert due[key].expires_ms == active_ms + kept_s * 1000 == retention.expires_ms(key[0], active_ms)
    if not retention.is_on:
        assert not due


@given(RETENTIONS, ACTIVE, st.integers(0, 80 * DAY_MS), st.integers(0, 40 * DAY_MS))
def test_due_conversations_stay_due_in_the_order_of_their_times(
    retention: Retention, active: dict[tuple[str, str], int], now_ms: int, later_ms: int
) -> None:
    now, then = expiring(active, retention, now_ms), expiring(active, retention, now_ms + later_ms)
    assert then[: len(now)] == now
    assert [one.expires_ms for one in then] == sorted(one.expires_ms for one in then)


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


def test_retention_is_off_by_default_and_can_be_on_for_one_tenant() -> None:
    assert not retention_of(LimitsSection()).is_on
    section = LimitsSection.model_validate({"tenants": {"short": {"conversation_retention_s": "1h"}}})
    assert retention_of(section).is_on
    assert retention_of(section).kept_ms("other") is None


@pytest.mark.parametrize("value", [30, "30", "59m", "30 days", "-1", -1, float("nan"), True])
def test_a_value_without_a_clear_unit_is_refused(value: Any) -> None:
    """`30` without a unit would be half a minute."""
    with pytest.raises(ValidationError):
        LimitsSection.model_validate({"conversation_retention_s": value})
