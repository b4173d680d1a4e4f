"""The census against a count of all, and which requests are lost."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.records import outcome, request, status, worker
from penstock.common.clock import now_ms
from penstock.gateway.service import ending_lost
from penstock.gateway.service.ending_lost import EndingLost
from penstock.gateway.view.census import Census
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.follower import Readiness
from penstock.gateway.view.lost_requests import (
    ASK_AGAIN_MS,
    GRACE_MS,
    PASSED_OVER_MS,
    Overdue,
    gone,
    overdue,
    owned_partitions,
    passed_over,
)
from penstock.gateway.view.wait_counts import Kind, LineId
from penstock.schemas.limits import LIMITS
from penstock.schemas.records import STATUS_RANKS, InferenceRequest, Origin, Place, StatusEvent, WaitingFor, WorkerState
from penstock.schemas.topics import CLASSES, priority_class

STATUSES = ("accepted", "queued", "running", "retrying")


def event(number: int, name: str, attempt: int) -> StatusEvent:
    reason = WaitingFor(reason=("memory", "class", "scheduled")[number % 3]) if name == "queued" else None
    return status(name, f"r{number}", attempt=attempt, model="m" if number % 2 else "n", waiting_for=reason)


def accept(entry: Entry, number: int, time_ms: int) -> None:
    conversation = f"c{number % 3}" if number % 2 else None
    later: dict[str, Any] = {"start_after": time_ms + 20_000} if number == 2 else {}
    later["pool"] = "p" if number % 4 == 0 else None
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
            census.evict_to_disk(entry)
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
        by_kind: Counter[Kind] = Counter()
        for klass, one in census.waiting_by_class(NOW_MS):
            by_kind[one.kind] += one.requests
            depths[klass] -= one.requests
        assert by_kind == {kind: requests for kind, (requests, _) in expected_kinds.items()}
        assert not any(depths.values())
        assert lines_of(census) == waiting_by_line(live)
        for tenant in tenants:
            own = {number: entry for number, entry in live.items() if entry.tenant == tenant}
            assert {name: census.live(name, tenant) for name in CLASSES} == by_class(own)
            for name in ("c0", "c1", "c2"):
                expected = {
                    e.request_id for number, e in own.items() if e.conversation_id == name and number not in aside
                }
                assert {e.request_id for e in census.of_conversation(tenant, name).values()} == expected
        assert {name: census.live(name) for name in CLASSES} == by_class(live)
        running = Counter((e.model, e.pool or "") for e in live.values() if e.status_name == "running")
        assert census.running == running


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


def lines_of(census: Census) -> dict[LineId, tuple[int, dict[str, int]]]:
    lines = ((line_id, line.waiting.due(NOW_MS), dict(line.reasons)) for line_id, line in census.lines.waiting())
    return {line_id: (depth, reasons) for line_id, depth, reasons in lines if depth}


def waiting_by_line(live: dict[int, Entry]) -> dict[LineId, tuple[int, dict[str, int]]]:
    lines: dict[LineId, tuple[int, dict[str, int]]] = {}
    for one in live.values():
        if one.status is not None and one.status.rank >= STATUS_RANKS["running"]:
            continue
        line_id = (one.tenant, priority_class(one.priority), (one.task, one.model, one.pool))
        depth, reasons = lines.setdefault(line_id, (0, {}))
        if one.status is not None and one.status.waiting_for is not None:
            reason = one.status.waiting_for.reason
            if reason != "scheduled":
                reasons[reason] = reasons.get(reason, 0) + 1
        lines[line_id] = depth + is_waiting(one), reasons
    return {line_id: (depth, reasons) for line_id, (depth, reasons) in lines.items() if depth}


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


def test_another_reason_is_counted_alone_and_what_runs_may_change_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    census, one = Census(), entry()
    census.count(one)
    one.on_status(replace(STATUS, waiting_for=WaitingFor(reason="memory")))
    with monkeypatch.context() as patch:
        patch.setattr(census, "add", add := Mock())
        census.count(one)
    assert not add.called
    ((_, line),) = census.lines.waiting()
    assert dict(line.reasons) == {"memory": 1}
    one.on_status(status("running", model="m", origin=ORIGIN))
    for pool in (None, "p", "q"):
        one.pool = pool
        census.count(one)
        assert census.running == {("m", pool or ""): 1}


# -- which requests are lost


ORIGIN = Origin(topic="t", partition=2, offset=7, append_time_ms=10_000)
PLACE = Place(topic="t", partition=2, offset=7)
OWNED = {("t", 2)}
REQUEST = request(text_generation=None, ttl_ms=5_000)
DUE_MS = 15_000 + GRACE_MS
STATUS = status("queued", origin=ORIGIN)
OUTCOME = outcome(origin=ORIGIN, created_at=2)


def entry(request: InferenceRequest | None = REQUEST, *events: StatusEvent, cancelled_ms: int = 0) -> Entry:
    made = Entry("default", "r", 0)
    made.cancelled_ms = cancelled_ms
    if request is not None:
        made.on_request(request, ORIGIN)
    for event in events:
        made.on_status(event)
    return made


def is_overdue(one: Entry, now: int) -> bool:
    return bool(list(overdue([one], OWNED, now)))


@pytest.mark.parametrize(
    ("one", "deadline_ms"),
    [
        (entry(), 5_000),
        (entry(replace(REQUEST, ttl_ms=None)), LIMITS.default_ttl_ms),
        (entry(replace(REQUEST, ttl_ms=None), replace(STATUS, ttl_ms=2_000)), 2_000),
        (entry(None, STATUS), LIMITS.max_ttl_ms),
        (entry(replace(REQUEST, ttl_ms=None), cancelled_ms=11_000), 1_000),
    ],
    ids=["its own", "the default", "chosen by a worker", "its record was never seen", "cancelled"],
)
def test_a_request_is_overdue_after_its_deadline_and_the_grace(one: Entry, deadline_ms: int) -> None:
    assert not is_overdue(one, 10_000 + deadline_ms + GRACE_MS - 1)
    assert list(overdue([one], OWNED, 10_000 + deadline_ms + GRACE_MS)) == [Overdue(one, ORIGIN, PLACE)]


def ended(one: Entry) -> None:
    one.on_result(OUTCOME, 0)


MOVED = Place(topic="t", partition=3, offset=0)


@pytest.mark.parametrize(
    ("fact", "value", "is_so"),
    [
        ("erased", True, False),
        ("end_asked_ms", DUE_MS - ASK_AGAIN_MS + 1, False),
        ("end_asked_ms", DUE_MS - ASK_AGAIN_MS, True),
        ("moved_to", MOVED, False),  # nobody owns the partition where it is now
    ],
)
def test_facts_that_decide_whether_a_request_is_overdue(fact: str, value: Any, is_so: bool) -> None:
    one = entry()
    setattr(one, fact, value)
    assert is_overdue(one, DUE_MS) == is_so
    ended(one)
    assert not is_overdue(one, DUE_MS)


def test_a_record_is_looked_for_where_it_was_moved_or_where_the_results_have_their_origin() -> None:
    moved, followed, other = entry(), entry(), replace(ORIGIN, offset=9)
    moved.moved_to = MOVED
    followed.on_result(replace(OUTCOME, kind="chunk", status=None, text="a", text_offset=0, origin=other), 0)
    found = overdue([moved, followed], {("t", 2), ("t", 3)}, DUE_MS)
    assert [(one.origin, one.tp, one.place.offset) for one in found] == [(ORIGIN, ("t", 3), 0), (other, ("t", 2), 9)]


@pytest.mark.parametrize(
    ("start", "end", "lost"), [(7, 8, False), (0, 8, False), (8, 8, True), (0, 7, True), (None, None, False)]
)
def test_a_request_is_gone_when_no_known_log_holds_its_record(start: int | None, end: int | None, lost: bool) -> None:
    one = Overdue(entry(), ORIGIN, PLACE)
    starts, ends = ({} if at is None else {one.tp: at} for at in (start, end))
    assert gone([one], starts, ends) == ([one] if lost else [])


LATE_MS = 15_000 + PASSED_OVER_MS


@pytest.mark.parametrize(
    "events", [[], *([replace(STATUS, status=name)] for name in ("queued", "running", "retrying"))]
)
def test_passed_over_is_what_has_no_outcome_long_after_its_deadline(events: list[StatusEvent]) -> None:
    """Whatever a worker said last: one that lost the partition has dropped the request without a word."""
    one = Overdue(entry(REQUEST, *events), ORIGIN, PLACE)
    assert [passed_over([one], LATE_MS + more) for more in (-1, 0)] == [[], [one]]
    one.entry.end_asked_ms = LATE_MS
    assert [passed_over([one], LATE_MS + PASSED_OVER_MS + more) for more in (-1, 0)] == [[], [one]]


def test_partitions_of_workers() -> None:
    state = worker(assigned=["a.b/12", "odd", "x/-1"])
    assert owned_partitions([state, replace(state, assigned=["t/2"])]) == {("a.b", 12), ("t", 2)}


class Site:
    """The parts beside the decision. The log of the one partition is empty; a catch-up does what a test says."""

    def __init__(self, *entries: Entry) -> None:
        self.entries = entries
        self.asked: list[Overdue] = []
        self.on_catch_up: Callable[[], None] = lambda: None
        self.is_ready = True
        self.known = self.metadata = self.lists = self
        self.recalled: list[Any] = []
        site: Any = self
        self.parts = EndingLost(site, site, site, site, site, site)

    def held_live(self) -> list[Entry]:
        return list(self.entries)

    def overdue(self, after: Any, before_ms: int, most: int) -> list[Any]:
        """In the file are five more that had to end long ago."""
        rows = [(at, "default", f"aside{at}") for at in range(1, 6)]
        return [row for row in rows if row > after][:most]

    def find(self, key: Any) -> Entry | None:
        if key[1].startswith("aside"):
            self.recalled.append(key[1])
        return next((entry for entry in self.entries if entry.key == key), None)

    def live_workers(self) -> list[WorkerState]:
        return [worker(assigned=["t/2", "u/2"])]

    def readiness(self) -> Readiness:
        return Readiness(self.is_ready)

    def known_topic(self, topic: str) -> bool:
        return topic == "t"

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        return work(*args)

    async def catch_up(self) -> None:
        self.on_catch_up()

    async def end_lost(self, lost: Overdue) -> None:
        self.asked.append(lost)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Site:
    for name in ("begin_offsets", "end_offsets"):
        monkeypatch.setattr(ending_lost.admin, name, lambda _, tps: dict.fromkeys(tps, 100))
    return Site(entry())


@pytest.mark.parametrize(
    "news",
    [
        ended,
        lambda one: setattr(one, "moved_to", Place(topic="t", partition=2, offset=101)),
        lambda one: setattr(one, "end_asked_ms", now_ms()),
    ],
    ids=["ended", "moved", "asked"],
)
async def test_what_the_log_says_meanwhile_counts(site: Site, news: Callable[[Entry], None]) -> None:
    site.on_catch_up = lambda: news(site.entries[0])
    assert await site.parts.look() == 0
    assert not site.asked


async def test_a_gateway_that_is_behind_asks_for_nothing(site: Site) -> None:
    site.is_ready = False
    assert await site.parts.look() == 0


@pytest.mark.parametrize("is_gone", [True, False])
async def test_the_end_of_what_is_lost_or_was_passed_over_is_asked_for(
    site: Site, monkeypatch: pytest.MonkeyPatch, is_gone: bool
) -> None:
    if not is_gone:
        monkeypatch.setattr(ending_lost.admin, "begin_offsets", lambda kafka, tps: dict.fromkeys(tps, 0))
    assert await site.parts.look() == 1
    assert [one.place for one in site.asked] == [PLACE]
    monkeypatch.setattr(ending_lost, "now_ms", lambda: LATE_MS - 1)
    assert await site.parts.look() == int(is_gone)


async def test_commands_of_one_look_are_bounded(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending_lost, "ASKED_AT_ONCE", 2)
    site.entries = tuple(entry() for _ in range(5))
    assert await site.parts.look() == 2


async def test_what_was_left_to_the_file_is_looked_at_part_by_part(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending_lost, "RECALLED_AT_ONCE", 2)
    for _ in range(4):
        await site.parts.look()
    assert site.recalled == [f"aside{at}" for at in (1, 2, 3, 4, 5, 1, 2)]


async def test_topics_that_are_gone_are_left_out(site: Site) -> None:
    elsewhere = entry(None)
    elsewhere.on_request(REQUEST, replace(ORIGIN, topic="u"))
    site.entries = (elsewhere,)
    assert await site.parts.look() == 0
