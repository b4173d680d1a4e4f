"""Which deliveries are sent next: all of them, none twice at once, and no host or tenant holds up another."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit import records
from kit.records import CODEC, ORIGIN, chunk, outcome
from penstock.gateway.webhooks.bodies import webhook_body
from penstock.gateway.webhooks.deliveries import Deliveries, Room, group_of, key_of
from penstock.gateway.webhooks.policy import Answer, RetryRules, decide
from penstock.gateway.webhooks.results import FORGET_MS, ResultLog
from penstock.schemas.records import Place, ResultEvent, WebhookDelivery
from penstock.schemas.topics import HORIZON_MS

TP = ("results", 0)


def delivery(name: str, host: str = "a", tenant: str = "t", at: int = 0, partition: int = 0) -> WebhookDelivery:
    place = Place(topic="results", partition=partition, offset=1)
    return records.delivery(name, tenant=tenant, url=f"http://{host}/hook?{name}", next_at=at, place=place)


def names(found: list[WebhookDelivery]) -> list[str]:
    return [one.request_id for one in found]


def test_a_host_and_a_tenant_have_a_part_of_the_calls() -> None:
    room = Deliveries(Room(in_flight=16))
    for number in range(10):
        room.add(delivery(f"slow{number}", "slow"))
    assert names(room.begin(0)) == ["slow0", "slow1"]
    for number in range(20):
        room.add(delivery(f"many{number}", f"h{number}"))
    assert len(room.begin(0)) == 8 - 2, "a tenant has half"
    room.add(delivery("other", "slow2", "u"))
    assert names(room.begin(0)) == ["other"]


def held(room: Room, *deliveries: WebhookDelivery) -> Deliveries:
    made = Deliveries(room)
    for one in deliveries:
        made.add(one)
    return made


def test_groups_take_turns_when_a_place_gets_free() -> None:
    room = held(Room(in_flight=2), *(delivery(f"{host}{number}", host) for number in range(3) for host in "ab"))
    order: list[str] = []
    while found := room.begin(0):
        order += names(found)
        for one in found:
            room.end(one)
    assert order == ["a0", "b0", "a1", "b1", "a2", "b2"]
    room = held(Room(in_flight=4), *(delivery(f"e{n}", f"h{n}") for n in range(50)), delivery("g", "g", "u"))
    assert names(room.begin(0)) == ["e0", "g", "e1"]


def test_a_delivery_without_room_is_loaded_when_there_is_some() -> None:
    room = Deliveries(Room(in_flight=8, held_per_group=2))
    assert [room.add(delivery(name, "dead", partition=3)) for name in "abc"] == [True, True, False]
    assert room.add(delivery("d", "well"))
    assert [room.knows(("t", name), 0) for name in "ac"] == [True, False]
    assert room.to_load() == set()
    room.end(delivery("a", "dead"))
    assert room.to_load() == {("results", 3)}
    assert room.to_load() == set()
    assert room.add(delivery("c", "dead"))


def test_the_hosts_of_one_tenant_take_no_room_from_other_tenants() -> None:
    room = Deliveries(Room(in_flight=8, held=8, held_per_tenant=3, held_per_group=2))
    assert [room.add(delivery(f"e{number}", f"h{number}")) for number in range(5)] == [True] * 3 + [False] * 2
    assert room.add(delivery("g", "h0", "u"))
    room.add(delivery("h", "h0", "u"))
    assert not room.add(delivery("i", "h0", "u"))
    assert room.add(delivery("k", "h1", "u"))
    for number in range(2):
        room.end(delivery(f"e{number}", f"h{number}"))
    assert room.to_load() == {TP}


def test_choosing_the_next_calls_costs_no_more_with_many_hosts() -> None:
    def seconds(hosts: int) -> float:
        room = held(
            Room(in_flight=64, held_per_tenant=50_000),
            *(delivery(f"e{number}", f"h{number}") for number in range(hosts)),
        )
        flying = room.begin(0)
        assert len(flying) == 32, "half, for one tenant"
        began = time.perf_counter()
        for _ in range(300):
            room.end(flying.pop())
            flying += room.begin(0)
        return time.perf_counter() - began

    assert min(seconds(50_000) for _ in range(2)) < 20 * max(seconds(500) for _ in range(3))


def test_a_revoked_partition_takes_its_deliveries_along() -> None:
    """Also what is known of those that have ended, of which the newest are known. An id that is used again later is
    another webhook."""
    room = held(Room(in_flight=8, ended=2), delivery("x"), delivery("y", "b", partition=1))
    (flying,) = [one for one in room.begin(0) if one.request_id == "x"]
    for name in "abc":
        room.end(delivery(name))
    assert [room.knows(("t", name), HORIZON_MS - 1) for name in "abc"] == [False, True, True]
    assert not room.knows(("t", "c"), HORIZON_MS)
    room.revoke([TP])
    assert not room.knows(("t", "c"), 0)
    assert (len(room), room.in_flight) == (1, 1)
    room.wait(replace(flying, next_at=5))
    assert room.find(("t", "x")) is None


# -- which terminal events are outcomes, and how far the offset may be committed


def event(name: str, **fields: Any) -> ResultEvent:
    return outcome(name, tenant="t", **fields)


def begun(name: str, **fields: Any) -> ResultEvent:
    return chunk("x", 0, name, tenant="t", **fields)


def log() -> ResultLog:
    found = ResultLog()
    found.offsets.assign([TP])
    return found


def test_the_offset_waits_for_open_requests_and_unkept_outcomes() -> None:
    results = log()
    results.passed(TP, 10, 0)
    assert results.offsets.commits() == {TP: 10}
    assert not results.on_event(TP, 10, 0, begun("a"))
    assert results.on_event(TP, 11, 0, event("b"))
    results.passed(TP, 20, 0)
    assert results.offsets.commits() == {}, "it stays at 10"
    results.settle(TP, ("t", "b"))
    assert results.offsets.commits() == {}
    assert results.on_event(TP, 20, 0, event("a"))
    results.settle(TP, ("t", "a"))
    assert results.offsets.commits() == {TP: 20}
    assert results.offsets.commits() == {}, "it is told once"


OTHER = replace(ORIGIN, offset=9)


@pytest.mark.parametrize(
    ("events", "count"),
    [
        ([begun("a", epoch=2), event("a", epoch=1), event("a", epoch=2)], [False, False, True]),
        ([begun("a"), event("a", origin=OTHER)], [False, False]),
    ],
    ids=["of a worker that lost its partition", "of another record with the same id"],
)
def test_which_terminal_events_are_outcomes(events: list[ResultEvent], count: list[bool]) -> None:
    results = log()
    assert [results.on_event(TP, at, 0, one) for at, one in enumerate(events)] == count


def test_a_request_that_never_ends_is_forgotten_after_a_while_and_with_its_partition() -> None:
    results = log()
    results.on_event(TP, 1, 0, begun("a"))
    for now_ms, commits in ((FORGET_MS, {TP: 1}), (FORGET_MS + 1, {TP: 9})):
        results.passed(TP, 9, now_ms)
        assert results.offsets.commits() == commits
    results.revoke(TP)
    results.passed(TP, 12, 0)
    results.settle(TP, ("t", "a"))
    assert results.offsets.commits() == {}


# -- what becomes of a webhook after an attempt, as a table


RULES = RetryRules(first_retry_s=5, give_up_s=86_400)
T0 = 1_700_000_000_000
DAY = 86_400_000


@pytest.mark.parametrize(
    ("answer", "attempts", "age_ms", "state", "wait_ms"),
    [
        (Answer(status_code=200), 1, 0, "delivered", None),
        (Answer(status_code=299), 9, DAY * 2, "delivered", None),
        (Answer(status_code=410), 1, 0, "failed", None),
        (Answer(error="private", final=True), 1, 0, "failed", None),
        (Answer(status_code=199), 1, 0, "waiting", 5_000),
        (Answer(status_code=302), 1, 0, "waiting", 5_000),
        (Answer(status_code=404), 2, 0, "waiting", 10_000),
        (Answer(status_code=500), 3, 0, "waiting", 20_000),
        (Answer(error="no answer"), 11, 0, "waiting", 3_600_000),
        (Answer(error="no answer"), 1_000, 0, "waiting", 3_600_000),
        (Answer(status_code=429, retry_after_s=60), 1, 0, "waiting", 60_000),
        (Answer(status_code=503, retry_after_s=1), 1, 0, "waiting", 5_000),
        (Answer(status_code=503, retry_after_s=80_000), 1, 0, "waiting", 80_000_000),
        (Answer(status_code=503, retry_after_s=90_000), 1, 0, "waiting", 3_600_000),
        (Answer(status_code=503, retry_after_s=90_000), 1, DAY - 60_000, "waiting", 30_000),
        (Answer(status_code=500), 3, DAY - 20_000, "waiting", 20_000),
        (Answer(status_code=500), 3, DAY - 19_999, "failed", None),
    ],
)
def test_decide(answer: Answer, attempts: int, age_ms: int, state: str, wait_ms: int | None) -> None:
    next_ms = None if wait_ms is None else T0 + age_ms + wait_ms
    assert decide(answer, attempts, T0 + age_ms, T0, RULES, 0.0) == (state, next_ms)


def test_jitter_shortens_a_wait_by_up_to_a_half() -> None:
    found = [decide(Answer(status_code=500), 2, T0, T0, RULES, chance)[1] for chance in (0.0, 0.5, 1.0)]
    assert found == [T0 + 10_000, T0 + 7_500, T0 + 5_000]


# -- the body of a webhook is valid JSON, as a GET of the request is


@pytest.mark.parametrize(
    ("number", "note", "part"),
    [
        (float("nan"), "é", b'"embeddings":[[null]]'),
        (float("inf"), "é", b'"embeddings":[[null]]'),
        (1.0, "\ud800", b"\\ud800"),
    ],
)
def test_what_json_lacks_does_not_fail_the_body(number: float, note: str, part: bytes) -> None:
    embedding = {"embeddings": [[number]], "dimensions": 1}
    event = outcome(task="embedding", embedding=embedding, metadata={"note": note})
    text = webhook_body(Place(topic="inference.result", partition=0, offset=1), event, None, CODEC)
    assert part in text
    json.loads(text, parse_constant=lambda name: pytest.fail(name))


@given(
    st.lists(st.tuples(st.sampled_from("abcd"), st.sampled_from("tu"), st.integers(0, 20)), max_size=40),
    st.lists(st.booleans(), max_size=200),
)
def test_all_deliveries_are_sent_within_the_bounds(given: list[tuple[str, str, int]], answers: list[bool]) -> None:
    limits = Room(in_flight=8)
    room = Deliveries(limits)
    for number, (host, tenant, at) in enumerate(given):
        room.add(delivery(f"r{number}", host, tenant, at))
    flying: dict[tuple[str, str], WebhookDelivery] = {}
    ended: set[str] = set()
    says = iter(answers)
    for now in range(0, 20_000, 7):
        for one in room.begin(now):
            assert key_of(one) not in flying
            assert (one.next_at or 0) <= now
            flying[key_of(one)] = one
        groups = [group_of(one) for one in flying.values()]
        assert len(flying) <= limits.in_flight
        assert all([host for _, host in groups].count(host) <= limits.per_host for _, host in groups)
        assert all([tenant for tenant, _ in groups].count(tenant) <= limits.per_tenant for tenant, _ in groups)
        if not flying and not len(room):
            break
        for key in list(flying)[:2]:
            one = flying.pop(key)
            if next(says, True):
                room.end(one)
                ended.add(one.request_id)
            else:
                room.wait(replace(one, next_at=now + 3))
    assert ended == {f"r{number}" for number in range(len(given))}
