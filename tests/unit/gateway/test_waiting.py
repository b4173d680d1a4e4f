"""What waits in lines by tenant, class and model, and the tenants' shares, as operators read them."""

from __future__ import annotations

import pickle
from dataclasses import replace

from kit.records import ORIGIN, model_info, model_state, outcome, request, status, worker
from penstock.gateway.limits.limits import Limits
from penstock.gateway.limits.tenants import Tenants
from penstock.gateway.service.tenant_shares import tenants_json
from penstock.gateway.service.waiting import all_waiting_json
from penstock.gateway.view.census import Census
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.liveness import Liveness, judge
from penstock.gateway.view.wait_counts import MOST_EMPTY_LINES, Lines
from penstock.schemas.records import WaitingFor

NOW_MS = 100_000
LIVE = judge([worker(updated_at=NOW_MS, models=[model_state("m")])], [model_info("m")], NOW_MS, 8_000)


def accepted(census: Census, number: int, at_ms: int, tenant: str = "acme") -> Entry:
    """A request that waits for memory."""
    entry = Entry(tenant, f"r{number}", 0)
    entry.on_request(request(entry.request_id, tenant=tenant, priority=9), replace(ORIGIN, append_time_ms=at_ms))
    census.count(entry)
    waits = WaitingFor(reason="memory")
    entry.on_status(
        status("queued", entry.request_id, tenant=tenant, model="m", created_at=at_ms + 1, waiting_for=waits)
    )
    census.count(entry)
    return entry


def begins(census: Census, entry: Entry, at_ms: int) -> None:
    entry.on_status(status("running", entry.request_id, tenant=entry.tenant, model="m", created_at=at_ms))
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
    assert line(census, nobody)["reasons"] == {"no_worker": 40}


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


def test_the_longest_lines_are_listed_and_empty_ones_are_forgotten() -> None:
    lines = Lines()
    for number in range(150):
        lines.add((f"t{number}", "low", ("x", None, None)), 1_000, number + 1, later=False, reason=None)
    found = all_waiting_json(lines.waiting(), LIVE, NOW_MS)
    assert (found["depth"], found["omitted"]) == (sum(range(151)), 50)
    assert [one["depth"] for one in found["data"]] == list(range(150, 50, -1))
    assert [line_id[0] for line_id, _ in lines.waiting("t7")] == ["t7"]
    empty = Lines()
    for number in range(MOST_EMPTY_LINES):
        come_and_go(empty, f"a{number:04}")
    size = len(pickle.dumps(empty))
    for number in range(MOST_EMPTY_LINES):
        come_and_go(empty, f"b{number:04}")
    assert not list(empty.waiting())
    assert len(pickle.dumps(empty)) < size + 1_000


def come_and_go(lines: Lines, tenant: str) -> None:
    line_id = (tenant, "low", ("x", None, None))
    for count in (1, -1):
        lines.add(line_id, 1_000, count, later=False, reason=None)
    lines.moved(line_id, None, 1_000)


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
            tenants.on_outcome(tenant, "completed", 100, 97_000)
        else:
            tenants.began(tenant)
    tenants.on_request("old", None, 1_000)
    found = tenants_json(tenants, census.lines, lambda _: Limits(outstanding=20, tokens_per_minute=1_000), NOW_MS)
    shown = {one["tenant"]: (one["outstanding"], one["waiting"], round(one["share"], 2)) for one in found["data"]}
    assert shown == {"crawler": (19, 19, 0.0), "acme": (6, 0, 0.67), "shop": (0, 0, 0.33)}
    crawler, _, shop = found["data"]
    assert crawler["limits"]["outstanding"] == {"used": 19, "limit": 20}
    assert shop["limits"]["tokens_per_minute"] == {"used": 250, "limit": 1_000}, "50 were given back in 3 s"
