"""Which requests are lost: overdue, owned by a live worker, and with a record that is on no topic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kit.gateway_records import outcome, request, status, worker
from penstock.common.clock import now_ms
from penstock.gateway.service import ending_lost
from penstock.gateway.service.ending_lost import EndingLost
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
from penstock.schemas.limits import DEFAULT_LIMITS
from penstock.schemas.records import InferenceRequest, Origin, Place, StatusEvent, WorkerState
from penstock.schemas.topics import TP

ORIGIN = Origin(topic="t", partition=2, offset=7, append_time_ms=10_000)
PLACE = Place(topic="t", partition=2, offset=7)
OWNED = {("t", 2)}
REQUEST = request(text_generation=None, ttl_ms=5_000)
DUE_MS = 15_000 + GRACE_MS
STATUS = status("queued", origin=ORIGIN)
OUTCOME = outcome(origin=ORIGIN, created_at=2)


def entry(request: InferenceRequest | None = REQUEST, *events: StatusEvent) -> Entry:
    made = Entry("default", "r", 0)
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
        (entry(replace(REQUEST, ttl_ms=None)), DEFAULT_LIMITS.default_ttl_ms),
        (entry(replace(REQUEST, ttl_ms=None), replace(STATUS, ttl_ms=2_000)), 2_000),
        (entry(None, STATUS), DEFAULT_LIMITS.max_ttl_ms),
    ],
    ids=["its own", "the default", "chosen by a worker", "its record was never seen"],
)
def test_a_request_is_overdue_after_its_deadline_and_the_grace(one: Entry, deadline_ms: int) -> None:
    assert not is_overdue(one, 10_000 + deadline_ms + GRACE_MS - 1)
    assert list(overdue([one], OWNED, 10_000 + deadline_ms + GRACE_MS)) == [Overdue(one, ORIGIN, PLACE)]


def test_a_cancelled_request_is_overdue_after_the_grace() -> None:
    one = entry(replace(REQUEST, ttl_ms=None))
    one.cancelled_ms = 11_000
    assert not is_overdue(one, 11_000 + GRACE_MS - 1)
    assert is_overdue(one, 11_000 + GRACE_MS)


def ended(one: Entry) -> None:
    one.on_result(OUTCOME, 0)


def erased(one: Entry) -> None:
    one.erased = True


def asked(one: Entry) -> None:
    one.end_asked_ms = DUE_MS - ASK_AGAIN_MS + 1


def moved(one: Entry) -> None:
    one.moved_to = Place(topic="t", partition=3, offset=0)


@pytest.mark.parametrize("why", [ended, erased, asked, moved])
def test_a_request_is_not_overdue(why: Callable[[Entry], None]) -> None:
    """It has ended; it is erased; its end was just asked for; nobody owns the partition where it stands now."""
    one = entry()
    why(one)
    assert not is_overdue(one, DUE_MS)


def test_the_end_of_a_request_is_asked_for_again_after_a_while() -> None:
    one = entry()
    one.end_asked_ms = DUE_MS
    assert is_overdue(one, DUE_MS + ASK_AGAIN_MS)


def test_a_moved_record_is_looked_for_at_its_new_place() -> None:
    one = entry()
    moved(one)
    (found,) = overdue([one], {("t", 3)}, DUE_MS)
    assert (found.origin, found.tp, found.place.offset) == (ORIGIN, ("t", 3), 0)


def test_readers_follow_the_origin_of_the_results() -> None:
    """The same request stands twice, and its results name the second record."""
    one = entry()
    other = replace(ORIGIN, offset=9)
    one.on_result(replace(OUTCOME, kind="chunk", status=None, text="a", text_offset=0, origin=other), 0)
    (found,) = overdue([one], OWNED, DUE_MS)
    assert (found.origin, found.place.offset) == (other, 9)


@pytest.mark.parametrize(("start", "end", "lost"), [(7, 8, False), (0, 8, False), (8, 8, True), (0, 7, True)])
def test_a_request_is_gone_when_no_log_holds_its_record(start: int, end: int, lost: bool) -> None:
    one = Overdue(entry(), ORIGIN, PLACE)
    assert gone([one], {one.tp: start}, {one.tp: end}) == ([one] if lost else [])


def test_a_request_is_not_lost_while_its_log_is_unknown() -> None:
    assert gone([Overdue(entry(), ORIGIN, PLACE)], {}, {}) == []


LATE_MS = 15_000 + PASSED_OVER_MS


def test_passed_over_is_what_has_no_outcome_long_after_its_deadline() -> None:
    """Its record may be on the log: a broker lost the end of the log, and what grew there since is other records."""
    one = Overdue(entry(), ORIGIN, PLACE)
    assert passed_over([one], LATE_MS - 1) == []
    assert passed_over([one], LATE_MS) == [one]


@pytest.mark.parametrize("name", ["queued", "running", "retrying"])
def test_what_a_worker_said_last_does_not_keep_it_from_being_passed_over(name: str) -> None:
    """A worker that lost the partition and lives on has dropped it without a word. One that runs it ignores this."""
    one = Overdue(entry(REQUEST, replace(STATUS, status=name)), ORIGIN, PLACE)
    assert passed_over([one], LATE_MS) == [one]


def test_what_was_passed_over_is_asked_for_once_a_minute() -> None:
    one = Overdue(entry(), ORIGIN, PLACE)
    one.entry.end_asked_ms = LATE_MS
    assert passed_over([one], LATE_MS + PASSED_OVER_MS - 1) == []
    assert passed_over([one], LATE_MS + PASSED_OVER_MS) == [one]


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
    def begin_offsets(kafka: Any, tps: list[TP]) -> dict[TP, int]:
        return dict.fromkeys(tps, 100)

    for name in ("begin_offsets", "end_offsets"):
        monkeypatch.setattr(ending_lost.admin, name, begin_offsets)
    return Site(entry())


async def test_the_end_of_what_is_lost_is_asked_for(site: Site) -> None:
    assert await site.parts.look() == 1
    assert [one.place for one in site.asked] == [PLACE]


def outcome_is_read(site: Site) -> None:
    ended(site.entries[0])


def move_is_read(site: Site) -> None:
    site.entries[0].moved_to = Place(topic="t", partition=2, offset=101)


def other_gateway_asked(site: Site) -> None:
    site.entries[0].end_asked_ms = now_ms()


@pytest.mark.parametrize("news", [outcome_is_read, move_is_read, other_gateway_asked])
async def test_what_the_log_says_meanwhile_counts(site: Site, news: Callable[[Site], None]) -> None:
    site.on_catch_up = lambda: news(site)
    assert await site.parts.look() == 0
    assert not site.asked


async def test_the_end_of_what_was_passed_over_is_asked_for(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending_lost.admin, "begin_offsets", lambda kafka, tps: dict.fromkeys(tps, 0))
    assert await site.parts.look() == 1
    assert [one.place for one in site.asked] == [PLACE]
    monkeypatch.setattr(ending_lost, "now_ms", lambda: LATE_MS - 1)
    assert await site.parts.look() == 0


async def test_a_gateway_that_is_behind_asks_for_nothing(site: Site) -> None:
    site.is_ready = False
    assert await site.parts.look() == 0


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
