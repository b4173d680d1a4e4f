"""Which terminal events are outcomes, and how far the offset may be committed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kit.gateway_records import ORIGIN, chunk, outcome
from penstock.gateway.webhooks.results import FORGET_MS, ResultLog
from penstock.schemas.records import ResultEvent

TP = ("results", 0)


def event(name: str, **fields: Any) -> ResultEvent:
    return outcome(name, tenant="t", **fields)


def begun(name: str, **fields: Any) -> ResultEvent:
    return chunk("x", 0, name, tenant="t", **fields)


def log() -> ResultLog:
    found = ResultLog()
    found.assign(TP)
    return found


def test_the_offset_waits_for_open_requests_and_unkept_outcomes() -> None:
    results = log()
    results.passed(TP, 10, 0)
    assert results.commits() == {TP: 10}
    assert not results.on_event(TP, 10, 0, begun("a"))
    assert results.on_event(TP, 11, 0, event("b"))
    results.passed(TP, 20, 0)
    assert results.commits() == {}, "it stays at 10"
    results.settle(TP, ("t", "b"))
    assert results.commits() == {}
    assert results.on_event(TP, 20, 0, event("a"))
    results.settle(TP, ("t", "a"))
    assert results.commits() == {TP: 20}
    assert results.commits() == {}, "it is told once"


def test_an_outcome_of_a_worker_that_lost_its_partition_does_not_count() -> None:
    results = log()
    results.on_event(TP, 1, 0, begun("a", epoch=2, worker_id="new"))
    assert not results.on_event(TP, 2, 0, event("a", epoch=1, worker_id="old"))
    assert results.on_event(TP, 3, 0, event("a", epoch=2, worker_id="new"))


def test_of_two_records_with_one_request_id_the_first_counts() -> None:
    results = log()
    results.on_event(TP, 1, 0, begun("a"))
    other = replace(ORIGIN, offset=9)
    assert not results.on_event(TP, 2, 0, event("a", origin=other))


def test_a_request_that_never_ends_is_forgotten_after_a_while() -> None:
    results = log()
    results.on_event(TP, 1, 0, begun("a"))
    results.passed(TP, 9, FORGET_MS)
    assert results.commits() == {TP: 1}
    results.passed(TP, 9, FORGET_MS + 1)
    assert results.commits() == {TP: 9}


def test_a_revoked_partition_is_not_committed() -> None:
    results = log()
    results.revoke(TP)
    results.passed(TP, 9, 0)
    results.settle(TP, ("t", "a"))
    assert results.commits() == {}
