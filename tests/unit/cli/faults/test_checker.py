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


def event(name: str, *, epoch: int = 1, offset: int = 0, at: float = 20, **facts: Any) -> Entry:
    common: Entry = {"tenant": "default", "attempt": 1, "task": "text_generation", "created_at": 0}
    origin = Origin(topic="t", partition=0, offset=0, append_time_ms=0)
    made = ResultEvent(request_id=name, origin=origin, epoch=epoch, worker_id=f"w{epoch}", **common, **facts)
    value = base64.b64encode(default_codec().encode(made)).decode()
    return {"what": "record", "at": at, "request_id": name, "partition": 0, "offset": offset, "value": value}


def ended(name: str, text: str = TEXT, status: str = "completed", **facts: Any) -> Entry:
    return event(name, kind="terminal", status=status, text_generation={"text": text}, **facts)


def client(name: str, what: str, at: float, **facts: Any) -> Entry:
    return {"what": what, "at": at, "request_id": name, **facts}


def asked(name: str, client_kind: str, text: str = TEXT, *, streams: bool = False) -> list[Entry]:
    facts = {"text": text, "streams": streams, "client": client_kind, "webhook": streams}
    return [client(name, "expected", 0, **facts), client(name, "acknowledged", 1)]


def streamed(name: str = "s") -> list[Entry]:
    """A stream that was struck in its middle and continued."""
    return [
        *asked(name, "sse", streams=True),
        client(name, "status", 2, status="running", epoch=1, attempt=1),
        client(name, "piece", 3, text="the ", offset=0),
        client(name, "status", 12, status="running", epoch=2, attempt=1),
        client(name, "piece", 14, text="river runs ", offset=4),
        ended(name, epoch=2),
        client(name, "outcome", 21, status="completed", text=TEXT),
        client(name, "webhook", 22, status="completed"),
    ]


def produced(name: str = "a") -> list[Entry]:
    """A request that was produced as Avro: its client reads the result topic."""
    return [*asked(name, "avro"), ended(name)]


def polled(name: str = "p") -> list[Entry]:
    return [*asked(name, "poll"), ended(name), client(name, "outcome", 21, status="completed", text=TEXT)]


LARGE = "x" * 300_000
FAULT = {"what": "fault", "at": STRUCK_AT, "target": "worker", "how": "pid 7 is gone", "proven": True}
END = [{"what": "grants", "at": 30, "reserved": 5, "of_models": 5}, {"what": "lag", "at": 30, "records": 0}]
NOT_SETTLED = {"what": "not_settled", "at": 31, "how": "not within 240 s"}


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
    assert (row.proven, row.how, row.verdict, row.as_expected) == (True, ["pid 7 is gone"], CLEAN, True)


def without(entries: list[Entry], what: str) -> list[Entry]:
    return [entry for entry in entries if entry["what"] != what]


def swapped(entries: list[Entry], what: str, **facts: Any) -> list[Entry]:
    """The first line of this kind is changed."""
    at = next(number for number, entry in enumerate(entries) if entry["what"] == what)
    return [*entries[:at], {**entries[at], **facts}, *entries[at + 1 :]]


VIOLATIONS: dict[str, tuple[str, list[Entry]]] = {
    "no outcome on the topic": ("lost", without(produced(), "record")),
    "no outcome at the client": ("lost", without(streamed(), "outcome")),
    "two outcomes at the client": (
        "visible_twice", [*streamed(), client("s", "outcome", 23, status="completed", text=TEXT)]
    ),
    "text after the outcome": ("visible_twice", [*streamed(), client("s", "piece", 23, text="x", offset=15)]),
    "readers disagree": ("visible_twice", [*without(streamed(), "record"), ended("s", status="failed")]),
    "polled again: another": ("visible_twice", [*polled(), client("p", "outcome_again", 30, status="failed")]),
    "another text than the outcome's": ("seams", swapped(streamed(), "piece", text="The ")),
    "a repeat": ("seams", swapped(streamed(), "piece", text="the r")),
    "a gap": ("seams", swapped(streamed(), "piece", text="th")),
    "no text before the outcome": ("seams", without(streamed(), "piece")),
    "a snapshot of another text": (
        "seams", [*streamed()[:4], client("s", "snapshot", 4, text="a lake "), *streamed()[4:]]
    ),
    "another text": ("wrong_tokens", [*produced()[:-1], ended("a", "the lake lies ")]),
    "failed": ("not_completed", [*produced()[:-1], ended("a", status="failed")]),
    "no webhook": ("webhooks_missing", without(streamed(), "webhook")),
    "another webhook": ("webhooks_missing", swapped(streamed(), "webhook", status="failed")),
    "a second webhook": ("webhooks_missing", [*streamed(), client("s", "webhook", 24, status="failed")]),
}  # fmt: skip


@pytest.mark.parametrize(("column", "entries"), VIOLATIONS.values(), ids=VIOLATIONS)
def test_each_violation_is_found(column: str, entries: list[Entry]) -> None:
    row = checked(*entries)
    assert getattr(row, column) == 1
    assert row.verdict == (LOST if column == "lost" else BROKEN)
    assert not row.as_expected


@pytest.mark.parametrize(("reserved", "leaked"), [(9, 4), (2, -3)], ids=["leaked", "no figure cancels another"])
def test_grants_and_records_left_at_the_end_break_the_row(reserved: int, leaked: int) -> None:
    row = checked(*produced(), end=[{**END[0], "reserved": reserved}, {**END[1], "records": 3}])
    assert (row.leaked_grants, row.lag, row.verdict) == (leaked, 3, BROKEN)


@pytest.mark.parametrize(
    ("end", "missing"),
    [(END[1:], "no line says grants"), (END[:1], "no line says lag"), ([*END, NOT_SETTLED], "not within 240 s")],
    ids=["grants", "lag", "end"],
)
def test_a_missing_figure_does_not_count_as_zero(end: list[Entry], missing: str) -> None:
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
    assert (row.proven, row.verdict, row.as_expected) == (False, UNPROVEN, True)
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
    assert (row.proven, row.verdict, row.recovery_s) == (True, CLEAN, None)


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
    kept = client("a", "artifact", 25, text=text_or_digest(LARGE))
    history = [*asked("a", "avro", text_or_digest(LARGE)), event("a", kind="terminal", status="completed")]
    assert checked(*history, kept).wrong_tokens == 0
    assert checked(*history).wrong_tokens == 1


@pytest.mark.parametrize("fetched", [LARGE, LARGE[:-1], None])
def test_a_client_compares_the_large_output_that_it_fetched(fetched: str | None) -> None:
    history = [
        *asked("p", "poll", text_or_digest(LARGE)),
        event("p", kind="terminal", status="completed"),
        client("p", "outcome", 21, status="completed", artifact="art"),
        client("p", "outcome_again", 22, status="completed", artifact="art"),
        client("p", "artifact", 25, text=text_or_digest(LARGE)),
    ]
    if fetched is not None:
        history.append(client("p", "fetched", 21.5, artifact="art", text=text_or_digest(fetched)))
    row = checked(*history)
    assert row.wrong_tokens == row.visible_twice == int(fetched != LARGE)
    assert row.verdict == (CLEAN if fetched == LARGE else BROKEN)


def test_a_record_may_come_before_the_acknowledgement_is_noted() -> None:
    expected, acknowledged, outcome = produced()
    early = {**outcome, "at": 0.5}
    assert checked(early, expected, acknowledged) == checked(expected, acknowledged, early)


def test_what_a_zombie_writes_after_the_outcome_is_not_seen() -> None:
    zombie = ended("s", "another", epoch=1, offset=9, at=40)
    assert checked(*streamed(), zombie).verdict == CLEAN


@given(st.lists(st.sampled_from(["acknowledged", "record"]), min_size=0, max_size=12), st.integers(1, 6))
def test_every_acknowledged_request_without_an_outcome_is_lost(dropped: list[str], count: int) -> None:
    """Whatever lines are missing: acknowledged = outcomes + lost of those whose client reads the topic."""
    histories = [produced(f"a{number}") for number in range(count)]
    for number, what in enumerate(dropped[:count]):
        histories[number] = without(histories[number], what)
    row = checked(*(entry for history in histories for entry in history))
    assert row.acknowledged == count - dropped[:count].count("acknowledged")
    assert row.lost == dropped[:count].count("record") == row.acknowledged - row.outcomes
