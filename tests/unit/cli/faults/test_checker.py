"""The checker of the fault table finds each kind of violation in a history that holds it, and none in a clean one."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.faults.checker import BROKEN, CLEAN, LOST, UNPROVEN, Row, check
from penstock.cli.faults.histories import text_or_digest
from penstock.schemas.codec import default_codec
from penstock.schemas.records import Origin, ResultEvent

Entry = dict[str, Any]
TEXT = "the river runs "
STRUCK_AT = 10.0


def head(*, faults: bool = True, expected: str = CLEAN, least: int = 0, count: int = 1, **more: Any) -> Entry:
    facts = {"row": "worker", "moment": "mid_stream", "faults": faults, "least_in_flight": least, "expected": expected}
    return {"what": "row", "at": 0, "count": count, "seed": 1, "commit": "abc", **facts, **more}


def event(name: str, *, epoch: int = 1, attempt: int = 1, offset: int = 0, at: float = 20, **facts: Any) -> Entry:
    made = ResultEvent(
        request_id=name,
        tenant="default",
        origin=Origin(topic="t", partition=0, offset=0, append_time_ms=0),
        epoch=epoch,
        attempt=attempt,
        task="text_generation",
        created_at=0,
        worker_id=f"w{epoch}",
        **facts,
    )
    value = base64.b64encode(default_codec().encode(made)).decode()
    return {"what": "record", "at": at, "request_id": name, "partition": 0, "offset": offset, "value": value}


def ended(name: str, text: str = TEXT, status: str = "completed", **facts: Any) -> Entry:
    return event(name, kind="terminal", status=status, text_generation={"text": text}, **facts)


def client(name: str, what: str, at: float, **facts: Any) -> Entry:
    return {"what": what, "at": at, "request_id": name, **facts}


def streamed(name: str = "s") -> list[Entry]:
    """A stream that was struck in its middle, and went on."""
    return [
        client(name, "expected", 0, text=TEXT, streams=True, client="sse", webhook=True),
        client(name, "acknowledged", 1),
        client(name, "status", 2, status="running", epoch=1, attempt=1),
        client(name, "piece", 3, text="the ", offset=0),
        client(name, "status", 12, status="running", epoch=2, attempt=1),
        client(name, "piece", 14, text="river runs ", offset=4),
        ended(name, epoch=2),
        client(name, "outcome", 21, status="completed", text=TEXT),
        client(name, "webhook", 22, status="completed"),
    ]


def produced(name: str = "a") -> list[Entry]:
    """A request that went to its topic as Avro: its client is a reader of the results."""
    return [
        client(name, "expected", 0, text=TEXT, streams=False, client="avro", webhook=False),
        client(name, "acknowledged", 1),
        ended(name),
    ]


def polled(name: str = "p") -> list[Entry]:
    return [
        client(name, "expected", 0, text=TEXT, streams=False, client="poll", webhook=False),
        client(name, "acknowledged", 1),
        ended(name),
        client(name, "outcome", 21, status="completed", text=TEXT),
    ]


LARGE = "x" * 300_000
FAULT = {"what": "fault", "at": STRUCK_AT, "target": "worker", "how": "pid 7 is gone", "proven": True}
END = [
    {"what": "grants", "at": 30, "reserved": 5, "of_models": 5},
    {"what": "lag", "at": 30, "records": 0},
]


def checked(*entries: Entry, fault: Entry | None = FAULT, end: list[Entry] = END, expected: str = CLEAN) -> Row:
    faults = [] if fault is None else [fault]
    count = sum(entry["what"] == "acknowledged" for entry in entries)
    return check([head(expected=expected, count=count), *entries, *faults, *end])


def test_a_clean_row() -> None:
    row = checked(*streamed(), *produced())
    assert (row.acknowledged, row.outcomes, row.in_flight) == (2, 2, 2)
    assert (row.lost, row.visible_twice, row.seams, row.wrong_tokens, row.not_completed) == (0, 0, 0, 0, 0)
    assert (row.webhooks_missing, row.leaked_grants, row.lag) == (0, 0, 0)
    assert (row.repeated, row.longest_wait_s, row.recovery_s, row.recovery_max_s) == (0.5, 20.0, 4.0, 4.0)
    assert row.proven
    assert row.how == ["pid 7 is gone"]
    assert row.verdict == CLEAN
    assert row.as_expected


def without(entries: list[Entry], what: str) -> list[Entry]:
    return [entry for entry in entries if entry["what"] != what]


def swapped(entries: list[Entry], what: str, **facts: Any) -> list[Entry]:
    """The first line of this kind is changed."""
    at = next(number for number, entry in enumerate(entries) if entry["what"] == what)
    return [*entries[:at], {**entries[at], **facts}, *entries[at + 1 :]]


@pytest.mark.parametrize(
    ("entries", "column"),
    [
        pytest.param(without(produced(), "record"), "lost", id="no outcome on the topic"),
        pytest.param(without(streamed(), "outcome"), "lost", id="no outcome at the client"),
        pytest.param(
            [*streamed(), client("s", "outcome", 23, status="completed", text=TEXT)],
            "visible_twice",
            id="two outcomes at the client",
        ),
        pytest.param(
            [*streamed(), client("s", "piece", 23, text="x", offset=15)], "visible_twice", id="text after the outcome"
        ),
        pytest.param(
            [*without(streamed(), "record"), ended("s", status="failed")], "visible_twice", id="readers disagree"
        ),
        pytest.param(swapped(streamed(), "piece", text="The "), "seams", id="another text than the outcome's"),
        pytest.param(swapped(streamed(), "piece", text="the r"), "seams", id="a repeat"),
        pytest.param(swapped(streamed(), "piece", text="th"), "seams", id="a gap"),
        pytest.param(without(streamed(), "piece"), "seams", id="no text before the outcome"),
        pytest.param([*produced()[:-1], ended("a", "the lake lies ")], "wrong_tokens", id="another text"),
        pytest.param([*produced()[:-1], ended("a", status="failed")], "not_completed", id="failed"),
        pytest.param(without(streamed(), "webhook"), "webhooks_missing", id="no webhook"),
        pytest.param(swapped(streamed(), "webhook", status="failed"), "webhooks_missing", id="another webhook"),
        pytest.param(
            [*streamed(), client("s", "webhook", 24, status="failed")], "webhooks_missing", id="a second webhook"
        ),
        pytest.param(
            [*streamed()[:4], client("s", "snapshot", 4, text="a lake "), *streamed()[4:]],
            "seams",
            id="a snapshot of another text",
        ),
        pytest.param(
            [*polled(), client("p", "outcome_again", 30, status="failed")], "visible_twice", id="polled again: another"
        ),
    ],
)
def test_each_violation_is_found(entries: list[Entry], column: str) -> None:
    row = checked(*entries)
    assert getattr(row, column) == 1
    assert row.verdict == (LOST if column == "lost" else BROKEN)
    assert not row.as_expected


def test_what_is_left_at_the_end_is_found() -> None:
    end = [{**END[0], "reserved": 9}, {**END[1], "records": 3}]
    row = checked(*produced(), end=end)
    assert (row.leaked_grants, row.lag, row.verdict) == (4, 3, BROKEN)


def test_one_figure_does_not_cancel_another() -> None:
    end = [{**END[0], "reserved": 2}, {**END[1], "records": 3}]
    row = checked(*produced(), end=end)
    assert (row.leaked_grants, row.lag, row.verdict) == (-3, 3, BROKEN)


@pytest.mark.parametrize(
    ("end", "missing"),
    [
        pytest.param(END[1:], "no line says grants", id="grants"),
        pytest.param(END[:1], "no line says lag", id="lag"),
        pytest.param(
            [*END, {"what": "not_settled", "at": 31, "how": "not within 240 s"}], "not within 240 s", id="end"
        ),
    ],
)
def test_what_was_not_seen_does_not_count_as_zero(end: list[Entry], missing: str) -> None:
    row = checked(*produced(), end=end)
    assert (row.missing_evidence, row.verdict) == ([missing], BROKEN)
    assert checked(*without(produced(), "record"), end=end, expected=LOST).verdict == BROKEN


def test_each_request_must_have_been_acknowledged() -> None:
    row = check([head(count=2), *produced(), FAULT, *END])
    assert row.missing_evidence == ["1 of 2 requests were acknowledged"]
    assert row.verdict == BROKEN


def test_a_loss_is_expected_of_the_planted_defect_alone() -> None:
    assert checked(*without(produced(), "record"), expected=LOST).as_expected
    assert not checked(*produced(), expected=LOST).as_expected


def test_what_is_not_committed_yet_is_not_lost_for_good() -> None:
    row = checked(*without(produced(), "record"), end=[END[0], {**END[1], "records": 1}], expected=LOST)
    assert (row.lost, row.verdict) == (1, BROKEN)


def test_a_fault_that_did_not_happen_is_unproven() -> None:
    row = checked(*produced(), fault={**FAULT, "proven": False}, expected=UNPROVEN)
    assert not row.proven
    assert row.verdict == UNPROVEN
    assert row.as_expected
    assert not checked(*produced(), fault=None).proven, "a fault was meant, and none was noted"
    assert not checked(*produced(), fault={**FAULT, "proven": False}).as_expected


@pytest.mark.parametrize(
    ("fault", "least", "verdict"),
    [
        ({}, 1, UNPROVEN),
        ({}, 2, BROKEN),
        ({"bystander_gone": False}, 1, BROKEN),
        ({"target": "gateway"}, 1, BROKEN),
        ({"proven": True}, 1, CLEAN),
    ],
)
def test_the_wrong_target_must_have_been_struck(fault: Entry, least: int, verdict: str) -> None:
    aside = {**FAULT, "proven": False, "bystander_gone": True, **fault}
    row = check([head(control="wrong target", least=least, expected=UNPROVEN), *produced(), aside, *END])
    assert row.verdict == verdict
    assert row.as_expected == (verdict == UNPROVEN)


@pytest.mark.parametrize(("least", "proven"), [(2, True), (3, False)])
def test_a_fault_when_little_was_in_flight_proves_little(least: int, proven: bool) -> None:
    assert check([head(least=least, count=2), *streamed(), *produced(), FAULT, *END]).proven == proven


def test_without_a_fault_there_is_nothing_to_prove() -> None:
    row = check([head(faults=False), *produced(), *END])
    assert row.proven
    assert row.verdict == CLEAN
    assert row.recovery_s is None


def test_a_row_without_requests_proves_nothing() -> None:
    assert checked().verdict == BROKEN


def test_a_restart_is_no_seam_and_yet_not_clean() -> None:
    begun = swapped(streamed(), "piece", text="a lake")
    again = [client("s", "restarted", 4), client("s", "piece", 5, text="the ", offset=0)]
    row = checked(*begun[:4], *again, *begun[4:])
    assert (row.seams, row.restarted, row.verdict) == (0, 1, BROKEN)


def test_a_snapshot_goes_on_from_what_was_heard() -> None:
    begun = swapped(streamed(), "piece", text="th")
    assert checked(*begun[:4], client("s", "snapshot", 4, text="the "), *begun[4:]).verdict == CLEAN


def test_a_kept_output_counts_as_the_text() -> None:
    expected = client("a", "expected", 0, text=text_or_digest(LARGE), streams=False, client="avro", webhook=False)
    kept = client("a", "artifact", 25, text=text_or_digest(LARGE))
    outcome = event("a", kind="terminal", status="completed")
    assert checked(expected, produced()[1], outcome, kept).wrong_tokens == 0
    assert checked(expected, produced()[1], outcome).wrong_tokens == 1


@pytest.mark.parametrize("fetched", [LARGE, LARGE[:-1], None])
def test_a_client_compares_the_large_output_that_it_fetched(fetched: str | None) -> None:
    expected = client("p", "expected", 0, text=text_or_digest(LARGE), streams=False, client="poll", webhook=False)
    kept = client("p", "artifact", 25, text=text_or_digest(LARGE))
    outcome = [
        event("p", kind="terminal", status="completed"),
        client("p", "outcome", 21, status="completed", artifact="art"),
        client("p", "outcome_again", 22, status="completed", artifact="art"),
    ]
    if fetched is not None:
        outcome.append(client("p", "fetched", 21.5, artifact="art", text=text_or_digest(fetched)))
    row = checked(expected, produced("p")[1], *outcome, kept)
    assert row.wrong_tokens == row.visible_twice == int(fetched != LARGE)
    assert row.verdict == (CLEAN if fetched == LARGE else BROKEN)


def test_a_record_may_come_before_the_acknowledgement_is_noted() -> None:
    expected, acknowledged, outcome = produced()
    early = {**outcome, "at": 0.5}
    assert checked(early, expected, acknowledged) == checked(expected, acknowledged, early)


def test_what_a_zombie_writes_after_the_outcome_is_not_seen() -> None:
    zombie = ended("s", "another", epoch=1, offset=9, at=40)
    row = checked(*streamed(), zombie)
    assert row.verdict == CLEAN


@given(st.lists(st.sampled_from(["acknowledged", "record"]), min_size=0, max_size=12), st.integers(1, 6))
def test_every_acknowledged_request_without_an_outcome_is_lost(dropped: list[str], count: int) -> None:
    """Whatever lines are missing: acknowledged = outcomes + lost of those whose client reads the topic."""
    histories = [produced(f"a{number}") for number in range(count)]
    for number, what in enumerate(dropped[:count]):
        histories[number] = without(histories[number], what)
    row = checked(*(entry for history in histories for entry in history))
    assert row.acknowledged == count - dropped[:count].count("acknowledged")
    assert row.lost == dropped[:count].count("record") == row.acknowledged - row.outcomes
