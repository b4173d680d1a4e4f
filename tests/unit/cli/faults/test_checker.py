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


def head(*, faults: bool = True, expected: str = CLEAN, least: int = 0) -> Entry:
    facts = {"row": "worker", "moment": "mid_stream", "faults": faults, "least_in_flight": least, "expected": expected}
    return {"what": "row", "at": 0, "seed": 1, "commit": "abc", **facts}


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
        client(name, "webhook", 22),
    ]


def produced(name: str = "a") -> list[Entry]:
    """A request that went to its topic as Avro: its client is a reader of the results."""
    return [
        client(name, "expected", 0, text=TEXT, streams=False, client="avro", webhook=False),
        client(name, "acknowledged", 1),
        ended(name),
    ]


FAULT = {"what": "fault", "at": STRUCK_AT, "target": "worker", "how": "pid 7 is gone", "proven": True}
END = [
    {"what": "grants", "at": 30, "reserved": 5, "of_models": 5},
    {"what": "lag", "at": 30, "records": 0},
]


def checked(*entries: Entry, fault: Entry | None = FAULT, end: list[Entry] = END, expected: str = CLEAN) -> Row:
    faults = [] if fault is None else [fault]
    return check([head(expected=expected), *entries, *faults, *end])


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


def test_a_loss_is_expected_of_the_planted_defect_alone() -> None:
    assert checked(*without(produced(), "record"), expected=LOST).as_expected
    assert not checked(*produced(), expected=LOST).as_expected


def test_a_fault_that_did_not_happen_is_unproven() -> None:
    row = checked(*produced(), fault={**FAULT, "proven": False}, expected=UNPROVEN)
    assert not row.proven
    assert row.verdict == UNPROVEN
    assert row.as_expected
    assert not checked(*produced(), fault=None).proven, "a fault was meant, and none was noted"
    assert not checked(*produced(), fault={**FAULT, "proven": False}).as_expected


@pytest.mark.parametrize(("least", "proven"), [(2, True), (3, False)])
def test_a_fault_when_little_was_in_flight_proves_little(least: int, proven: bool) -> None:
    assert check([head(least=least), *streamed(), *produced(), FAULT, *END]).proven == proven


def test_without_a_fault_there_is_nothing_to_prove() -> None:
    row = check([head(faults=False), *produced(), *END])
    assert row.proven
    assert row.verdict == CLEAN
    assert row.recovery_s is None


def test_a_row_without_requests_proves_nothing() -> None:
    assert checked().verdict == BROKEN


def test_a_restart_and_a_snapshot_begin_the_text_anew() -> None:
    begun = swapped(streamed(), "piece", text="a lake")
    at = next(number for number, entry in enumerate(begun) if entry["what"] == "piece") + 1
    again = [client("s", "restarted", 4), client("s", "piece", 5, text="the ", offset=0)]
    assert checked(*begun[:at], *again, *begun[at:]).seams == 0
    assert checked(*begun[:at], client("s", "snapshot", 4, text="the "), *begun[at:]).seams == 0


def test_a_kept_output_counts_as_the_text() -> None:
    long = "x" * 300_000
    expected = client("a", "expected", 0, text=text_or_digest(long), streams=False, client="avro", webhook=False)
    kept = client("a", "artifact", 25, text=text_or_digest(long))
    outcome = event("a", kind="terminal", status="completed")
    assert checked(expected, produced()[1], outcome, kept).wrong_tokens == 0
    assert checked(expected, produced()[1], outcome).wrong_tokens == 1


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
