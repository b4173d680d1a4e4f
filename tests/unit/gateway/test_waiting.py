"""What waits in lines by tenant, class and model, and the tenants' shares, as operators read them."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.records import ORIGIN, model_info, model_state, outcome, request, status, worker
from penstock.gateway.limits.limits import Limits
from penstock.gateway.limits.tenants import Tenants
from penstock.gateway.service.tenant_shares import MOST_TENANTS, tenants_json
from penstock.gateway.service.waiting import MOST_LINES as MOST_SHOWN
from penstock.gateway.service.waiting import all_waiting_json
from penstock.gateway.view.census import Census
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.liveness import Liveness, judge
from penstock.gateway.view.wait_counts import MOST_OF_TENANT, OTHERS, LineId, Lines
from penstock.schemas.records import WaitingFor
from penstock.schemas.topics import CLASSES

NOW_MS = 100_000
LIVE = judge([worker(updated_at=NOW_MS, models=[model_state("m")])], [model_info("m")], NOW_MS, 8_000)


def accepted(census: Census, number: int, at_ms: int, tenant: str = "acme", reason: str = "memory") -> Entry:
    """A request that waits for this."""
    census.read_ms = at_ms
    entry = Entry(tenant, f"r{number}", 0)
    entry.on_request(request(entry.request_id, tenant=tenant, priority=9), replace(ORIGIN, append_time_ms=at_ms))
    census.count(entry)
    waits = WaitingFor(reason=reason)
    entry.on_status(
        status("queued", entry.request_id, tenant=tenant, model="m", created_at=at_ms + 1, waiting_for=waits)
    )
    census.count(entry)
    return entry


def begins(census: Census, entry: Entry, at_ms: int) -> None:
    census.read_ms = at_ms
    entry.on_status(status("running", entry.request_id, tenant=entry.tenant, model="m", created_at=1))
    census.count(entry)


def line(census: Census, liveness: Liveness = LIVE) -> dict[str, object]:
    (found,) = all_waiting_json(census.lines.waiting(), liveness, NOW_MS)["data"]
    return found


def test_a_line_has_its_depth_age_rates_reason_and_when_it_will_be_empty() -> None:
    census = Census()
    waiting = [accepted(census, number, 50_000 + number * 100) for number in range(60)]
    for number, entry in enumerate(waiting[:20]):
        begins(census, entry, 91_000 + number * 450)
    found = line(census)
    assert {name: found[name] for name in ("tenant", "class", "task", "model", "depth", "reasons")} == {
        **{"tenant": "acme", "class": "low", "task": "text_generation", "model": "m", "depth": 40},
        "reasons": {"memory": 40},
    }
    assert found["oldest_age_s"] == 48.0
    assert found["rates"] == {"accepted_per_s": 1.0, "left_per_s": 0.333}
    assert found["empty_in_s"] == 20.0, "two left each second"
    nobody = judge([], [model_info("m")], NOW_MS, 8_000)
    assert (line(census, nobody)["reasons"], line(census, nobody)["empty_in_s"]) == ({"no_worker": 40}, None)


@pytest.mark.parametrize("reason", ["paused", "transaction"])
def test_a_line_that_stands_still_has_no_forecast_though_requests_of_it_expire(reason: str) -> None:
    census = Census()
    waiting = [accepted(census, number, 50_000, reason=reason) for number in range(20)]
    for entry in waiting[:8]:
        census.read_ms = 95_000
        census.forget(entry)
    assert (line(census)["reasons"], line(census)["empty_in_s"]) == ({reason: 12}, None)
    accepted(census, 20, 50_000)
    assert (line(census)["reasons"], line(census)["empty_in_s"]) == ({reason: 12, "memory": 1}, 16.2)


def test_what_starts_at_once_counts_in_the_line_of_the_model_that_was_chosen() -> None:
    census = Census()
    for number in range(12):
        entry = Entry("acme", f"r{number}", 0)
        made = request(entry.request_id, tenant="acme", priority=9)
        entry.on_request(made, replace(ORIGIN, append_time_ms=90_500))
        census.count(entry)
        begins(census, entry, 91_000)
    accepted(census, 12, 95_000)
    assert line(census)["rates"] == {"accepted_per_s": 0.217, "left_per_s": 0.2}


def test_a_line_that_grows_is_never_empty() -> None:
    census = Census()
    for number in range(40):
        entry = accepted(census, number, 92_000 + number * 200)
        if number % 4 == 0:
            begins(census, entry, 92_100 + number * 200)
    assert line(census)["empty_in_s"] is None


def test_the_longest_lines_are_listed() -> None:
    lines = Lines()
    for number in range(150):
        lines.add((f"t{number}", "low", ("x", None, None)), 1_000, number + 1, later=False, reason=None)
    found = all_waiting_json(lines.waiting(), LIVE, NOW_MS)
    assert (found["depth"], found["omitted"]) == (sum(range(151)), 50)
    assert [one["depth"] for one in found["data"]] == list(range(150, 50, -1))
    assert [line_id[0] for line_id, _ in lines.waiting("t7")] == ["t7"]


CHANGES = st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(CLASSES), st.integers(0, 9), st.booleans()))


@given(CHANGES, st.integers(1, 4), st.integers(1, 8))
def test_lines_beyond_the_most_share_one_and_nothing_is_counted_twice(
    changes: list[tuple[str, str, int, bool]], most_of_tenant: int, most: int
) -> None:
    lines, waits = Lines(most, most_of_tenant), Counter[LineId]()
    for number, (tenant, klass, model, comes) in enumerate(changes):
        line_id = (tenant, klass, ("x", f"m{model}", None))
        if comes or not waits[line_id]:
            lines.add(line_id, 1_000 + number, 1, later=False, reason="memory")
            lines.moved((tenant, klass, ("x", f"m{9 - model}", None)), line_id, 1_000)
            waits[line_id] += 1
        else:
            lines.add(line_id, 1_000 + number, -1, later=False, reason="memory")
            lines.moved(line_id, None, 1_000)
            waits[line_id] -= 1
        found = {line_id: line.waiting.requests for line_id, line in lines.waiting()}
        assert sums(found) == sums(+waits)
        assert all(line.reasons["memory"] == line.waiting.requests for _, line in lines.waiting())
        own = [line_id for line_id in found if line_id[2] != OTHERS]
        assert all(found[line_id] <= waits[line_id] for line_id in own)
        assert len(own) <= most
        assert max(Counter(tenant for tenant, *_ in own).values(), default=0) <= most_of_tenant
        assert {line_id for line_id, _ in lines.waiting("a")} == {line_id for line_id in found if line_id[0] == "a"}


def sums(waits: Mapping[LineId, int]) -> Counter[tuple[str, str]]:
    found = Counter[tuple[str, str]]()
    for (tenant, klass, _), requests in waits.items():
        found[tenant, klass] += requests
    return found


def come_and_go(lines: Lines, tenant: str, model: str) -> None:
    line_id = (tenant, "low", ("x", model, None))
    for count in (1, -1):
        lines.add(line_id, 1_000, count, later=False, reason=None)
    lines.moved(line_id, None, 1_000)


def test_a_line_of_very_many_models_keeps_its_size_and_says_so() -> None:
    census = Census()
    sizes: list[int] = []
    for first in range(0, 3 * MOST_OF_TENANT, MOST_OF_TENANT):
        for number in range(first, first + MOST_OF_TENANT):
            census.lines.add(("acme", "low", ("x", f"m{number}", None)), 1_000, 1, later=False, reason="memory")
        sizes.append(len(pickle.dumps(census.lines)))
    assert sizes[2] - sizes[1] < 100
    found = all_waiting_json(census.lines.waiting("acme"), judge([], [], NOW_MS, 8_000), NOW_MS)
    shared = found["data"][0]
    assert (found["depth"], found["omitted"]) == (3 * MOST_OF_TENANT, MOST_OF_TENANT + 1 - MOST_SHOWN)
    assert (shared["task"], shared["model"], shared["depth"]) == ("others", None, 2 * MOST_OF_TENANT)
    assert shared["reasons"] == {"memory": 2 * MOST_OF_TENANT}, "whether a worker serves them is not known"


def test_a_tenant_that_runs_through_model_names_drops_its_own_rates_alone() -> None:
    lines = Lines()
    line_id = ("shop", "low", ("x", "m", None))
    come_and_go(lines, "shop", "m")
    for number in range(10_000):
        come_and_go(lines, "acme", f"m{number}")
    lines.add(line_id, 1_000, 1, later=False, reason=None)
    assert [line.left.per_s(1_000) for _, line in lines.waiting("shop")] == [1 / 60]
    assert len(pickle.dumps(lines)) < 2 * MOST_OF_TENANT * 1_000


def test_tenants_have_shares_of_what_ran_and_those_near_a_limit_come_first() -> None:
    census, tenants = Census(), Tenants(lambda _: 1_000)
    for number, tenant in enumerate(["acme"] * 6 + ["shop"] * 3 + ["crawler"] * 19):
        entry = accepted(census, number, 95_000, tenant)
        tenants.on_request(tenant, None, 95_000)
        if tenant != "crawler":
            begins(census, entry, 96_000)
        if tenant == "shop":  # ended
            entry.on_result(outcome(entry.request_id, tenant=tenant), 0)
            census.forget(entry)
            tenants.on_outcome(tenant, "completed", 97_000)
            tenants.on_tokens(tenant, 100, 97_000)
        else:
            tenants.began(tenant)
    tenants.on_request("old", None, 1_000)
    found = tenants_json(tenants, census.lines, lambda _: Limits(outstanding=20, tokens_per_minute=1_000), NOW_MS)
    shown = {one["tenant"]: (one["outstanding"], one["waiting"], round(one["share"], 2)) for one in found["data"]}
    assert shown == {"crawler": (19, 19, 0.0), "acme": (6, 0, 0.67), "shop": (0, 0, 0.33)}
    crawler, _, shop = found["data"]
    assert crawler["limits"]["outstanding"] == {"used": 19, "limit": 20}
    assert shop["limits"]["tokens_per_minute"] == {"used": 250, "limit": 1_000}, "50 were given back in 3 s"


def test_of_very_many_tenants_those_are_shown_that_are_near_a_limit_and_the_busiest() -> None:
    tenants = Tenants()
    for number in range(MOST_TENANTS + 50):
        tenants.began(f"t{number:03}", number + 1)
    limits = {"t007": Limits(outstanding=8), "t003": Limits(outstanding=5)}
    found = tenants_json(tenants, Lines(), lambda tenant: limits.get(tenant, Limits()), NOW_MS)
    shown = [one["tenant"] for one in found["data"]]
    assert shown == ["t007", *(f"t{number:03}" for number in range(MOST_TENANTS + 49, 50, -1))]
    assert found["omitted"] == 50
