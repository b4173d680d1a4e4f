"""Which terminal events are outcomes, and how far the offset may be committed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

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
        assert results.commits() == commits
    results.revoke(TP)
    results.passed(TP, 12, 0)
    results.settle(TP, ("t", "a"))
    assert results.commits() == {}
