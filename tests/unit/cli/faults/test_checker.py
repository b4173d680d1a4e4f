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


def checked(*entries: Entry, fault: Entry | None = FAULT, end: list[Entry] = END, **facts: Any) -> Row:
    faults = [] if fault is None else [fault]
    facts.setdefault("count", sum(entry["what"] == "acknowledged" for entry in entries))
    return check([head(**facts), *entries, *faults, *end])


def without(entries: list[Entry], what: str) -> list[Entry]:
    return [entry for entry in entries if entry["what"] != what]


def swapped(entries: list[Entry], what: str, **facts: Any) -> list[Entry]:
    """The first line of this kind is changed."""
    at = next(number for number, entry in enumerate(entries) if entry["what"] == what)
    return [*entries[:at], {**entries[at], **facts}, *entries[at + 1 :]]


def amid(*added: Entry, text: str = "the ") -> list[Entry]:
    """The stream, whose first piece has this text, with these lines behind that."""
    begun = swapped(streamed(), "piece", text=text)
    return [*begun[:4], *added, *begun[4:]]


def fetched(text: str | None = None) -> list[Entry]:
    """A large output, kept as an artifact, that its client has fetched as `text`."""
    outcome = {"status": "completed", "artifact": "art"}
    history = [
        *asked("p", "poll", text_or_digest(LARGE)),
        event("p", kind="terminal", status="completed"),
        client("p", "outcome", 21, **outcome),
        client("p", "outcome_again", 22, **outcome),
        client("p", "artifact", 25, text=text_or_digest(LARGE)),
    ]
    return history if text is None else [*history, client("p", "fetched", 21.5, artifact="art", text=text)]


def other_target(least: int, **fault: Any) -> Entry:
    aside = {**FAULT, "proven": False, "bystander_gone": True, **fault}
    return {"control": "wrong target", "least": least, "expected": UNPROVEN, "fault": aside}


LOST_ONE, UNDONE = without(produced(), "record"), {**FAULT, "proven": False}
KEPT = [*asked("a", "avro", text_or_digest(LARGE)), event("a", kind="terminal", status="completed")]
CLEAN_FACTS: Entry = {
    "acknowledged": 2, "outcomes": 2, "in_flight": 2, "lost": 0, "visible_twice": 0, "seams": 0, "wrong_tokens": 0,
    "not_completed": 0, "webhooks_missing": 0, "leaked_grants": 0, "lag": 0, "repeated": 0.5, "longest_wait_s": 20.0,
    "recovery_s": 4.0, "recovery_max_s": 4.0, "proven": True, "how": ["pid 7 is gone"], "as_expected": True,
}  # fmt: skip
AGAIN = [client("s", "restarted", 4), client("s", "piece", 5, text="the ", offset=0)]
SNAPSHOT = client("s", "snapshot", 4, text="the ")
NOT_EXPECTED: Entry = {"as_expected": False}
ROWS: dict[str, tuple[list[Entry], Entry, str, Entry]] = {
    "clean": ([*streamed(), *produced()], {}, CLEAN, CLEAN_FACTS),
    "grants leaked": (
        produced(), {"end": [{**END[0], "reserved": 9}, {**END[1], "records": 3}]}, BROKEN,
        {"leaked_grants": 4, "lag": 3},
    ),
    "no figure cancels another": (
        produced(), {"end": [{**END[0], "reserved": 2}, END[1]]}, BROKEN, {"leaked_grants": -3}
    ),
    "no grants": (produced(), {"end": END[1:]}, BROKEN, {"missing_evidence": ["no line says grants"]}),
    "no lag": (produced(), {"end": END[:1]}, BROKEN, {"missing_evidence": ["no line says lag"]}),
    "no end": (produced(), {"end": [*END, NOT_SETTLED]}, BROKEN, {"missing_evidence": ["not within 240 s"]}),
    "a loss without an end": (LOST_ONE, {"end": [*END, NOT_SETTLED], "expected": LOST}, BROKEN, {}),
    "not acknowledged": (
        produced(), {"count": 2}, BROKEN, {"missing_evidence": ["1 of 2 requests were acknowledged"]}
    ),
    "a loss of the planted defect": (LOST_ONE, {"expected": LOST}, LOST, {"as_expected": True}),
    "no loss of it": (produced(), {"expected": LOST}, CLEAN, NOT_EXPECTED),
    "not committed yet": (LOST_ONE, {"end": [END[0], {**END[1], "records": 1}], "expected": LOST}, BROKEN, {"lost": 1}),
    "no fault happened": (
        produced(), {"fault": UNDONE, "expected": UNPROVEN}, UNPROVEN, {"proven": False, "as_expected": True}
    ),
    "no fault was noted": (produced(), {"fault": None}, UNPROVEN, {"proven": False, **NOT_EXPECTED}),
    "no fault, unexpected": (produced(), {"fault": UNDONE}, UNPROVEN, NOT_EXPECTED),
    "another target": (produced(), other_target(1), UNPROVEN, {"as_expected": True}),
    "another, little in flight": (produced(), other_target(2), BROKEN, NOT_EXPECTED),
    "another that runs": (produced(), other_target(1, bystander_gone=False), BROKEN, NOT_EXPECTED),
    "a third target": (produced(), other_target(1, target="gateway"), BROKEN, NOT_EXPECTED),
    "the right target": (produced(), other_target(1, proven=True), CLEAN, NOT_EXPECTED),
    "enough in flight": ([*streamed(), *produced()], {"least": 2}, CLEAN, {"proven": True}),
    "too little in flight": ([*streamed(), *produced()], {"least": 3}, UNPROVEN, {"proven": False}),
    "nothing to prove": (
        produced(), {"faults": False, "fault": None}, CLEAN, {"proven": True, "recovery_s": None}
    ),
    "no requests": ([], {}, BROKEN, {}),
    "a restart is no seam": (amid(*AGAIN, text="a lake"), {}, BROKEN, {"seams": 0, "restarted": 1}),
    "a snapshot goes on": (amid(SNAPSHOT, text="th"), {}, CLEAN, {}),
    "a kept output is the text": ([*KEPT, client("a", "artifact", 25, text=text_or_digest(LARGE))], {}, CLEAN, {}),
    "an output that was not kept": (KEPT, {}, BROKEN, {"wrong_tokens": 1}),
    "a fetched output": (fetched(text_or_digest(LARGE)), {}, CLEAN, {"wrong_tokens": 0, "visible_twice": 0}),
    "another fetched output": (
        fetched(text_or_digest(LARGE[:-1])), {}, BROKEN, {"wrong_tokens": 1, "visible_twice": 1}
    ),
    "an output not fetched": (fetched(), {}, BROKEN, {"wrong_tokens": 1, "visible_twice": 1}),
    "the record comes first": (
        [{**produced()[2], "at": 0.5}, *produced()[:2]], {}, CLEAN, {"acknowledged": 1, "outcomes": 1}
    ),
    "a zombie after the outcome": ([*streamed(), ended("s", "another", epoch=1, offset=9, at=40)], {}, CLEAN, {}),
}  # fmt: skip
VIOLATIONS: dict[str, tuple[str, list[Entry]]] = {
    "no outcome on the topic": ("lost", LOST_ONE),
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
    "a snapshot of another text": ("seams", amid(client("s", "snapshot", 4, text="a lake "))),
    "another text": ("wrong_tokens", [*produced()[:-1], ended("a", "the lake lies ")]),
    "failed": ("not_completed", [*produced()[:-1], ended("a", status="failed")]),
    "no webhook": ("webhooks_missing", without(streamed(), "webhook")),
    "another webhook": ("webhooks_missing", swapped(streamed(), "webhook", status="failed")),
    "a second webhook": ("webhooks_missing", [*streamed(), client("s", "webhook", 24, status="failed")]),
}  # fmt: skip
ROWS |= {
    name: (entries, {}, LOST if column == "lost" else BROKEN, {column: 1, **NOT_EXPECTED})
    for name, (column, entries) in VIOLATIONS.items()
}


@pytest.mark.parametrize(("entries", "options", "verdict", "facts"), ROWS.values(), ids=ROWS)
def test_the_row_of_a_history(entries: list[Entry], options: Entry, verdict: str, facts: Entry) -> None:
    row = checked(*entries, **options)
    assert (row.verdict, {name: getattr(row, name) for name in facts}) == (verdict, facts)


@given(st.lists(st.sampled_from(["acknowledged", "record"]), min_size=0, max_size=12), st.integers(1, 6))
def test_every_acknowledged_request_without_an_outcome_is_lost(dropped: list[str], count: int) -> None:
    """Whatever lines are missing: acknowledged = outcomes + lost of those whose client reads the topic."""
    histories = [produced(f"a{number}") for number in range(count)]
    for number, what in enumerate(dropped[:count]):
        histories[number] = without(histories[number], what)
    row = checked(*(entry for history in histories for entry in history))
    assert row.acknowledged == count - dropped[:count].count("acknowledged")
    assert row.lost == dropped[:count].count("record") == row.acknowledged - row.outcomes
