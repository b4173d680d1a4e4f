"""Which statuses are sent to receivers, and how far the offset may be committed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.records import status as status_event
from penstock.gateway.webhooks.deliveries import Room
from penstock.gateway.webhooks.news import NEWS_S, News, StatusNews
from penstock.gateway.webhooks.policy import DELIVERED, DROPPED, FAILED, Answer, RetryRules
from penstock.schemas.records import StatusEvent

TP = ("inference.status", 0)
OK, DOWN, GONE = Answer(status_code=200), Answer(status_code=500), Answer(status_code=410)
RULES = RetryRules(first_retry_s=1, give_up_s=86_400)
URL = "http://h/hook"


def status(request_id: str, name: str, at: int = 0, **fields: Any) -> StatusEvent:
    return status_event(name, request_id, tenant="t", created_at=at, **fields)


class Topic:
    """A partition of the status topic and what is told of it."""

    def __init__(self, room: Room | None = None) -> None:
        self.news = StatusNews(room or Room(in_flight=16), RULES)
        self.news.offsets.assign([TP])
        self.offset = 0

    def comes(self, event: StatusEvent, now_ms: int = 0) -> str | None:
        said = self.news.on_status(TP, self.offset, event, URL, now_ms)
        self.offset += 1
        self.news.offsets.passed(TP, self.offset)
        return said

    def begun(self, now_ms: int = 0) -> list[str]:
        self.flying = self.news.begin(now_ms)
        return [one.event.status for one in self.flying]

    def ends(self, answer: Answer, now_ms: int = 0) -> str | None:
        (flown,) = self.flying
        return self.news.ended(flown.delivery, answer, now_ms, 0.0)


def test_each_status_is_sent_once_and_a_change_of_position_is_not() -> None:
    topic = Topic()
    topic.comes(status("a", "queued"))
    assert topic.begun() == ["queued"]
    assert topic.news.offsets.commits() == {TP: 0}, "it is not told yet"
    assert topic.ends(OK) == DELIVERED
    assert topic.news.offsets.commits() == {TP: 1}
    topic.comes(status("a", "queued"))
    assert topic.begun() == []
    topic.comes(status("a", "running"))
    assert topic.begun() == ["running"]
    assert topic.ends(OK) == DELIVERED
    assert topic.news.offsets.commits() == {TP: 3}
    topic.comes(status("a", "running", attempt=2))
    assert topic.begun() == ["running"], "another attempt is news"


def test_a_newer_status_takes_the_place_of_one_that_waits() -> None:
    topic = Topic()
    topic.comes(status("a", "queued"))
    topic.comes(status("a", "running"))
    assert topic.begun() == ["running"]
    assert topic.ends(DOWN) is None
    assert topic.begun(500) == []
    assert topic.begun(1_000) == ["running"], "it is tried again"
    topic.comes(status("a", "retrying"))
    assert topic.ends(DOWN, 1_100) == DROPPED, "while it flew it became old"
    assert topic.begun(1_100) == ["retrying"]
    assert topic.ends(OK, 1_200) == DELIVERED
    assert topic.news.offsets.commits() == {TP: 3}


def test_a_final_status_is_not_sent_because_the_outcome_is() -> None:
    topic = Topic()
    topic.comes(status("a", "running"))
    (flown,) = topic.news.begin(0)
    topic.comes(status("a", "completed"))
    assert not topic.news.holds(flown.delivery)
    assert topic.news.ended(flown.delivery, OK, 0, 0.0) is None
    topic.comes(status("b", "running"))
    topic.comes(status("b", "failed"))
    assert topic.begun() == []
    assert topic.news.offsets.commits() == {TP: 4}


def test_old_statuses_are_not_sent_and_failing_receivers_are_given_up() -> None:
    topic = Topic()
    late = int(1000 * NEWS_S) + 1
    topic.comes(status("a", "running"), now_ms=late)
    assert topic.begun(late) == [], "whoever was away for long hears of the outcome alone"
    topic.comes(status("b", "running", at=late), now_ms=late)
    topic.begun(late)
    assert topic.ends(GONE, late) == FAILED
    topic.comes(status("c", "running", at=late), now_ms=late)
    at, calls = late, 0
    while topic.begun(at):
        calls += 1
        if topic.ends(DOWN, at) == FAILED:
            break
        at = topic.news.next_ms() or at
    assert at <= late + 1000 * NEWS_S
    assert calls > 5
    assert topic.news.offsets.commits() == {TP: 3}


def test_a_status_without_room_is_dropped_and_does_not_hold_the_offset() -> None:
    topic = Topic(Room(in_flight=16, held_per_group=1))
    assert topic.comes(status("a", "running")) is None
    assert topic.comes(status("b", "running")) == DROPPED
    assert topic.begun() == ["running"]
    topic.ends(OK)
    assert topic.news.offsets.commits() == {TP: 2}


@pytest.mark.parametrize("lands", ["before", "after"])
def test_a_revoked_partition_takes_its_statuses_along_and_sends_them_when_it_comes_back(lands: str) -> None:
    topic = Topic()
    topic.comes(status("a", "queued"))
    assert topic.begun() == ["queued"]
    if lands == "before":
        assert topic.ends(DOWN) is None
    else:
        topic.comes(status("a", "running"))
    topic.news.revoke(TP)
    if lands == "after":
        assert topic.ends(OK) is None
    assert (len(topic.news), topic.news.begin(0), topic.news.offsets.commits()) == (0, [], {})
    topic.news.offsets.assign([TP])
    topic.offset = 0
    topic.comes(status("a", "queued"))
    assert topic.news.offsets.commits() == {TP: 0}
    assert topic.begun() == ["queued"]


NAMES, STATES = st.sampled_from("abc"), st.sampled_from(["queued", "loading_model", "running", "retrying"])
STEPS = st.one_of(
    st.tuples(st.just("comes"), NAMES, STATES, st.integers(1, 3), st.booleans()),
    st.tuples(st.just("ends"), st.sampled_from([OK, DOWN, GONE])),
    st.tuples(st.just("drop"), NAMES),
)


@given(st.lists(STEPS, max_size=60))
def test_every_status_is_sent_or_given_up_and_the_offset_reaches_the_end(steps: list[tuple[object, ...]]) -> None:
    topic, now, flying = Topic(), 0, list[News]()
    for step in steps:
        now += 400
        match step:
            case ("comes", str(name), str(what), int(attempt), bool(done)):
                topic.comes(status(name, "completed" if done else what, attempt=attempt, at=now), now)
            case ("drop", str(name)):
                topic.news.drop(("t", name))
            case ("ends", Answer() as answer) if flying:
                topic.news.ended(flying.pop(0).delivery, answer, now, 0.5)
            case _:
                pass
        flying += topic.news.begin(now)
        held = [one.event.request_id for one in flying if topic.news.holds(one.delivery)]
        assert len(held) == len(set(held))
    while flying or len(topic.news):
        now += 1_000
        flying += topic.news.begin(now)
        while flying:
            topic.news.ended(flying.pop(0).delivery, OK, now, 0.5)
    topic.news.offsets.passed(TP, topic.offset)
    due = topic.news.offsets.commits()
    assert due.get(TP, topic.offset) == topic.offset
