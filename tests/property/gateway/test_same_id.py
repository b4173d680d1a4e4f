"""Several records with one id: all gateways show the facts of the same one, in whatever order they read, or restart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kit.records import chunk, request
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.rows import restored, row_of, snapshot
from penstock.schemas.ids import idempotent_request_id
from penstock.schemas.records import InferenceRequest, Origin
from penstock.schemas.requests import content_hash

ID = idempotent_request_id("default", "k")
PLACES = [
    Origin(topic="inference.request.medium", partition=0, offset=7, append_time_ms=20),
    Origin(topic="inference.request.medium", partition=1, offset=3, append_time_ms=20),
    Origin(topic="inference.request.low", partition=0, offset=9, append_time_ms=21),
]
RECORDS: list[tuple[InferenceRequest, Origin]] = [
    (request(ID, priority=number, conversation_id=f"c{number}", metadata={"n": f"{number}"}), place)
    for number, place in enumerate(PLACES)
]


def facts(entry: Entry) -> tuple[Any, ...]:
    return entry.content, entry.origin, entry.priority, entry.conversation_id, entry.metadata, entry.accepted_ms


def read(order: list[int | str], runs: int) -> Entry:
    """Records by their number, and the first result, as one gateway reads them."""
    entry = Entry("default", ID, 0)
    for step in order:
        if step == "restart":
            entry = restored(row_of(snapshot(entry)))
        elif step == "result":
            event = replace(chunk(), request_id=ID, origin=PLACES[runs])
            if entry.fold.origin is None:
                entry.follow(event.origin)
            entry.on_result(event, 0)
        else:
            entry.on_request(*RECORDS[int(step)])
    return entry


STEPS: list[int | str] = [0, 1, 2, "result", "restart", "restart"]


@given(st.permutations(STEPS), st.integers(0, 2))
def test_the_facts_are_those_of_the_record_that_the_results_name(order: list[int | str], runs: int) -> None:
    entry = read(order, runs)
    asked, origin = RECORDS[runs]
    expected = (content_hash(asked), origin, runs, f"c{runs}", {"n": f"{runs}"}, origin.append_time_ms)
    assert facts(entry) == expected
    assert entry.kept_bytes == read([runs], runs).kept_bytes


@given(st.permutations([0, 1, 2, "restart"]), st.permutations([0, 1, 2, "restart"]))
def test_until_there_are_results_they_are_those_of_the_record_that_was_appended_first(
    one: list[int | str], other: list[int | str]
) -> None:
    assert facts(read(one, 0)) == facts(read(other, 0)) == facts(read([0], 0))
