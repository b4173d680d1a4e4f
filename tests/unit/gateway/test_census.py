"""The census against a count of all: whatever happens to requests, in whatever order."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.gateway_records import ORIGIN, request, status
from penstock.gateway.view.census import Census, Kind
from penstock.gateway.view.entries import Entry
from penstock.schemas.records import STATUS_RANKS, StatusEvent
from penstock.schemas.topics import CLASSES, priority_class

STATUSES = ("accepted", "queued", "running", "retrying")


def event(number: int, name: str, attempt: int) -> StatusEvent:
    return status(name, f"r{number}", attempt=attempt, model="m" if number % 2 else "n")


def accept(entry: Entry, number: int, time_ms: int) -> None:
    conversation = f"c{number % 3}" if number % 2 else None
    later = {"start_after": time_ms + 20_000} if number == 2 else {}
    made = request(entry.request_id, text_generation={}, priority=number, conversation_id=conversation, **later)
    entry.on_request(made, replace(ORIGIN, append_time_ms=time_ms))


NOW_MS = 60_000
NAMES = ("request", *STATUSES, "end", "aside")
STEPS = st.lists(st.tuples(st.integers(0, 9), st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 50_000)))


@given(STEPS)
def test_the_census_counts_what_a_plain_count_finds(steps: list[tuple[int, str, int, int]]) -> None:
    census, live, aside = Census(), dict[int, Entry](), set[int]()
    tenants = "default", "other"
    for number, step, attempt, time_ms in steps:
        entry = live.setdefault(number, Entry(tenants[number % 4 == 3], f"r{number}", 0))
        if number in aside:
            aside.discard(number)
            census.recall(entry)
        if step == "aside":
            census.count(entry)
            census.put_aside(entry)
            aside.add(number)
            continue
        if step == "request":
            accept(entry, number, time_ms)
        elif step == "end":
            census.forget(live.pop(number))
            continue
        else:
            entry.on_status(event(number, step, attempt))
        census.count(entry)
        (depths, ages), (expected_depths, expected_ages) = census.queue_depths(NOW_MS), counted(live)
        assert depths == expected_depths
        assert all(0 <= ages[name] - expected_ages[name] < 1 for name in CLASSES), (ages, expected_ages)
        expected_kinds = waiting_by_kind(live)
        assert {one.kind for one in census.waiting(NOW_MS)} == set(expected_kinds)
        for one in census.waiting(NOW_MS):
            requests, since_ms = expected_kinds[one.kind]
            assert one.requests == requests
            assert one.since_ms == since_ms or 0 <= (since_ms or 0) - (one.since_ms or 0) < 1_000
        for tenant in tenants:
            own = {number: entry for number, entry in live.items() if entry.tenant == tenant}
            assert {name: census.live(name, tenant) for name in CLASSES} == by_class(own)
            for name in ("c0", "c1", "c2"):
                expected = {
                    e.request_id for number, e in own.items() if e.conversation_id == name and number not in aside
                }
                assert {e.request_id for e in census.of_conversation(tenant, name).values()} == expected
        assert {name: census.live(name) for name in CLASSES} == by_class(live)
        running = [e.model for e in live.values() if e.status_name == "running"]
        assert dict(census.running) == {model: running.count(model) for model in set(running)}


def is_waiting(entry: Entry) -> bool:
    waits = entry.status is None or entry.status.rank < STATUS_RANKS["running"]
    return waits and entry.waits_from_ms // 1_000 <= NOW_MS // 1_000


def by_class(live: dict[int, Entry]) -> dict[str, int]:
    return {name: sum(priority_class(e.priority) == name for e in live.values()) for name in CLASSES}


def counted(live: dict[int, Entry]) -> tuple[dict[str, int], dict[str, float]]:
    waiting = {number: entry for number, entry in live.items() if is_waiting(entry)}
    ages = dict.fromkeys(CLASSES, 0.0)
    for one in waiting.values():
        name, age = priority_class(one.priority), (NOW_MS - one.waits_from_ms) / 1000 if one.accepted_ms else 0.0
        ages[name] = max(ages[name], age)
    return by_class(waiting), ages


def waiting_by_kind(live: dict[int, Entry]) -> dict[Kind, tuple[int, int | None]]:
    kinds: dict[Kind, list[Entry]] = {}
    for one in filter(is_waiting, live.values()):
        kinds.setdefault((one.task, one.model, one.pool), []).append(one)
    return {
        kind: (len(same), min((one.waits_from_ms for one in same if one.accepted_ms), default=None))
        for kind, same in kinds.items()
    }


@pytest.mark.parametrize("others_wait", [False, True])
def test_memory_is_freed_with_the_requests_that_end(others_wait: bool) -> None:
    """Or a gateway that runs for weeks would hold every request that it ever saw."""
    census, first = Census(), Entry("default", "first", 0)
    accept(first, 5, 500)
    census.count(first)
    if not others_wait:
        census.forget(first)
    before = len(pickle.dumps(census))
    for number in range(10_000):
        entry = Entry("default", f"r{number}", 0)
        accept(entry, 5, 1_000 + 1_000 * number)
        census.count(entry)
        census.forget(entry)
    most = before + 200 * 60 if others_wait else before + 100
    assert len(pickle.dumps(census)) < most, "one that waits keeps some ages beside its own, however many have ended"
