"""Which records of restored topics run again, under which origin, and what the group commits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from kit.records import NAMES, chunk, outcome, request
from penstock.cli.restored.outcomes import Outcomes
from penstock.cli.restored.requests import PartitionPlan, RequestLogs
from penstock.processors.core.commit import donemap
from penstock.processors.core.intake.arrivals import Poison, Taken
from penstock.processors.core.intake.intake import Intake
from penstock.schemas.codec import default_codec
from penstock.schemas.origins import origin_header
from penstock.schemas.records import Origin
from penstock.schemas.topics import HORIZON_MS, TP

CODEC = default_codec()
TOPIC = NAMES.request("text_generation", 5)
HERE: TP = (TOPIC, 0)
NOW_MS = 70_000
INTAKE = Intake(CODEC, NAMES, {TOPIC: 1})


def at(offset: int, append_ms: int = 1_000) -> Origin:
    return Origin(topic=TOPIC, partition=0, offset=offset, append_time_ms=append_ms)


class Read(NamedTuple):
    """A record as a worker reads it."""

    read: Taken | Poison
    is_moved: bool = False


def read(value: bytes, offset: int, origin: Origin | None) -> Read:
    headers = () if origin is None else (origin_header(origin),)
    return Read(INTAKE.read(*HERE, offset, 1_000, headers, value), origin is not None)


def record(request_id: str, offset: int, origin: Origin | None = None) -> Read:
    return read(CODEC.encode(request(request_id, ttl_ms=60_000)), offset, origin)


def poison(offset: int, origin: Origin | None = None) -> Read:
    return read(b"\x00?", offset, origin)


def event(request_id: str, origin: Origin, *, ended: bool = False, epoch: int = 1) -> Any:
    made = outcome() if ended else chunk()
    return replace(made, request_id=request_id, origin=origin, epoch=epoch, created_at=1_000)


def plan(
    *records: Read | None, events: Any = (), committed: tuple[int, str] | None = None, now_ms: int = NOW_MS
) -> PartitionPlan:
    """`records` stand at the offsets 0, 1, …; None: there is none."""
    outcomes = Outcomes()
    for one in events:
        outcomes.on_result(one)
    logs = RequestLogs(outcomes, {} if committed is None else {HERE: committed}, now_ms)
    for offset, one in enumerate(records):
        if one is not None:
            logs.take(HERE, offset, one.read, is_moved=one.is_moved)
    (found,) = logs.plans({HERE: len(records)})
    return found


def done(found: PartitionPlan) -> list[tuple[int, int]]:
    return donemap.decode(*found.commit)


def test_the_done_map_names_what_has_ended_behind_the_first_that_has_not() -> None:
    ended = [event(f"r{n}", at(n), ended=True) for n in (0, 2, 4)]
    found = plan(*(record(f"r{n}", n) for n in range(5)), events=ended)
    assert (found.commit[0], done(found), dict(found.again)) == (1, [(2, 3), (4, 5)], {})
    assert found.unfinished == 2


def test_where_all_has_ended_the_group_begins_at_the_end() -> None:
    found = plan(record("r", 0), None, events=[event("r", at(90), ended=True)])
    assert (found.commit, found.unfinished) == ((2, ""), 0)


def test_all_unfinished_records_are_appended_again_where_readers_follow_another_origin() -> None:
    """In their order, each under the origin that is followed, else its own."""
    found = plan(record("a", 0), record("b", 1), record("c", 2), events=[event("b", at(91))])
    assert found.commit == (3, "")
    assert dict(found.again) == {0: at(0), 1: at(91), 2: at(2)}


def test_a_second_call_finds_what_the_first_has_appended() -> None:
    first = [record("a", 0), record("b", 1)]
    found = plan(*first, record("a", 2, at(0)), record("b", 3, at(91)), events=[event("b", at(91))], committed=(2, ""))
    assert (found.commit, dict(found.again)) == ((2, ""), {})


def test_a_call_after_an_interrupted_one_keeps_the_order_of_turns() -> None:
    """The first call has appended `a` alone."""
    found = plan(record("a", 0), record("b", 1), record("a", 2, at(91)), events=[event("a", at(91))])
    assert list(found.again.items()) == [(2, at(91)), (1, at(1))]
    assert found.commit == (3, "")


def test_what_has_no_id_and_was_appended_again_counts_once() -> None:
    found = plan(poison(0), poison(1, at(0)))
    assert (found.commit, found.unfinished) == ((1, ""), 1)
    assert plan(poison(0), poison(1)).unfinished == 2


def test_an_appended_record_is_found_where_its_origin_names_the_place_at_which_it_stands() -> None:
    found = plan(record("r", 0), record("r", 1, at(1)), events=[event("r", at(1))], committed=(1, ""))
    assert (found.commit, dict(found.again)) == ((1, ""), {})


def test_an_event_of_an_older_epoch_is_no_outcome() -> None:
    events = [event("r", at(0), epoch=7), event("r", at(0), epoch=6, ended=True)]
    assert plan(record("r", 0), events=events).commit == (0, "")


def test_of_several_records_of_a_request_the_first_counts() -> None:
    found = plan(record("r", 0), record("r", 1))
    assert (found.commit[0], done(found)) == (0, [(1, 2)])


def test_what_was_committed_runs_again_only_before_its_deadline() -> None:
    """Its outcome is missing from the copy, or retention has deleted it."""
    fresh, old = record("r", 0, at(0, append_ms=20_000)), record("r", 0, at(0, append_ms=1_000))
    assert plan(fresh, committed=(1, "")).commit == (0, "")
    assert plan(old, committed=(1, "")).commit == (1, "")
    assert plan(old).commit == (0, ""), "nobody has committed it"


def test_what_is_older_than_all_results_runs_again_only_before_its_deadline() -> None:
    """A mirror has no commits, and retention has deleted the outcome: the request must not get a second one."""
    results = [event("other", at(9), ended=True)]
    older = record("r", 0, at(0, append_ms=900))
    found = plan(older, events=results)
    assert (found.commit, found.presumed_ended) == ((1, ""), 1)
    assert plan(record("r", 0), events=results).unfinished == 1, "it came with the results"
    begun = [replace(event("r", at(0, append_ms=900)), created_at=1_000)]
    assert plan(older, events=begun).unfinished == 1, "readers wait for its end"


def test_what_is_long_past_its_deadline_does_not_run_again() -> None:
    now_ms = 61_000 + 2 * HORIZON_MS
    assert plan(record("r", 0), now_ms=now_ms - 1).unfinished == 1
    found = plan(record("r", 0), now_ms=now_ms)
    assert (found.unfinished, found.presumed_ended) == (0, 1)


def test_what_is_no_request_is_done_when_it_was_committed() -> None:
    assert plan(poison(0), committed=(1, "")).commit == (1, "")
    assert plan(poison(0)).commit == (0, "")


def test_an_id_that_is_used_again_after_a_day_is_another_request() -> None:
    later = record("r", 0, at(0, append_ms=HORIZON_MS + 3_000))
    assert plan(later, events=[event("r", at(90), ended=True)]).unfinished == 1
