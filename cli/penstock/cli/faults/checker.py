"""The checker of the fault table: one row's history in, its figures out. Pure: it sees only what the history holds.

The outcome of a request is what the product's own fold makes of the records of `inference.result`; what each client saw
is held against that, and both against the text that was known before.
"""

from __future__ import annotations

import base64
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.cli.faults.histories import Entry, text_or_digest
from penstock.schemas.codec import default_codec
from penstock.schemas.fold import ResultFold
from penstock.schemas.records import ResultEvent

CLEAN, UNPROVEN, LOST, BROKEN = "clean", "unproven", "lost", "broken"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table. Counts are of requests, times in seconds; None: there was nothing to measure."""

    row: str
    moment: str
    control: str | None
    proven: bool
    """Every fault of the row has been seen to happen while enough was in flight. True where no fault was meant."""
    how: list[str]
    """How each fault was proven, or what was found instead."""
    in_flight: int
    """Requests that were acknowledged and had no outcome when the first fault struck."""
    acknowledged: int
    outcomes: int
    not_completed: int
    """Outcomes other than `completed`."""
    lost: int
    """Acknowledged, and without an outcome: on the topic, or at the client."""
    visible_twice: int
    """A client heard more after its outcome, or two readers saw different outcomes."""
    seams: int
    """The pieces that a client heard have a gap or a repeat, or do not make the outcome's text."""
    restarted: int
    """Times that a client was told to forget its text: the engines of the table can continue."""
    wrong_tokens: int
    """Completed with another text than the known one."""
    repeated: float
    """Runs beyond the first of each request ÷ in flight."""
    longest_wait_s: float | None
    """From the acknowledgement to the client's outcome."""
    recovery_s: float | None
    """From the fault until a stream that had begun is heard again; where none had, until a request is heard: the
    median."""
    recovery_max_s: float | None
    webhooks_missing: int
    """Not called with the outcome, or called with another one."""
    leaked_grants: int | None
    """Bytes of memory that are granted at the end, and not to a loaded model."""
    lag: int | None
    """Records of the request topics that were not committed at the end."""
    missing_evidence: list[str]
    """Why the figures are not to be trusted: the row did not settle, or something was not noted."""
    seed: int
    commit: str
    expected: str
    """The verdict that the row must have."""

    @property
    def verdict(self) -> str:
        """clean, unproven (nothing is wrong, but the fault was not seen), lost, or broken."""
        wrong = (self.visible_twice, self.seams, self.restarted, self.wrong_tokens, self.not_completed)
        if self.missing_evidence or not self.acknowledged:
            return BROKEN
        if any(value != 0 for value in (*wrong, self.leaked_grants, self.lag)):
            return BROKEN
        if self.lost and self.proven:
            return LOST
        if self.lost or self.webhooks_missing:
            return BROKEN
        return CLEAN if self.proven else UNPROVEN

    @property
    def as_expected(self) -> bool:
        return self.verdict == self.expected

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict, "as_expected": self.as_expected}


@dataclass(slots=True)
class _Request:
    """One request: what was known of it, what its client saw, what the topics hold."""

    name: str
    text: str | None = None
    streams: bool = False
    reads_topic: bool = False
    """Its client is a reader of the topic: it sees what the fold makes."""
    webhook: bool = False
    acknowledged_at: float | None = None
    heard: str = ""
    seam: bool = False
    restarts: int = 0
    heard_outcomes: list[Entry] = field(default_factory=list[Entry])
    asked_again: list[Entry] = field(default_factory=list[Entry])
    """Outcomes that a client which polls was told when all was over."""
    fetched: dict[str, str] = field(default_factory=dict[str, str])
    """Texts of large outputs that its client fetched, by artifact."""
    ended_at: float | None = None
    talked_on: bool = False
    heard_at: list[float] = field(default_factory=list[float])
    folded: list[float] = field(default_factory=list[float])
    """When a record of it came, up to its outcome."""
    runs: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    kept: str | None = None
    """The text of an output that lies in the store."""
    hooked: set[str] = field(default_factory=set[str])
    """Statuses with which its webhook was called."""
    fold: ResultFold | None = None

    def hear(self, entry: Entry) -> None:
        """What its client was told, in the order in which it was told."""
        self.heard_at.append(entry["at"])
        self.talked_on = self.talked_on or bool(self.heard_outcomes)
        match entry["what"]:
            case "piece":
                self.seam = self.seam or entry["offset"] != len(self.heard)
                self.heard += entry["text"]
            case "restarted":
                self.heard = ""
                self.restarts += 1
            case "snapshot":
                self.seam = self.seam or not entry["text"].startswith(self.heard)
                self.heard = entry["text"]
            case _:
                self.heard_outcomes.append(entry)
                self.ended_at = self.ended_at or entry["at"]

    def record(self, entry: Entry) -> None:
        event = default_codec().decode(base64.b64decode(entry["value"]), ResultEvent)
        if self.fold is None:
            self.fold = ResultFold(self.name, event.tenant)
        if self.fold.terminal is None:
            self.folded.append(entry["at"])
        self.fold.apply(event, entry["offset"])

    @property
    def outcome(self) -> tuple[str, str] | None:
        """Status and text, as a reader of the topic sees them."""
        if self.fold is None or (event := self.fold.terminal) is None:
            return None
        text = self.kept if self.kept is not None else text_or_digest(event.output_text or "")
        return event.status or "", text

    @property
    def outcomes(self) -> list[tuple[str, str]]:
        """Status and text of each outcome that its client heard."""
        return [self._as_heard(entry) for entry in self.heard_outcomes]

    @property
    def all_outcomes(self) -> set[tuple[str, str]]:
        again = map(self._as_heard, self.asked_again)
        return {*self.outcomes, *again, *([self.outcome] if self.outcome else [])}

    def _as_heard(self, entry: Entry) -> tuple[str, str]:
        text = self.fetched.get(entry["artifact"], "") if "artifact" in entry else entry.get("text", "")
        return entry["status"], text

    @property
    def news(self) -> list[float]:
        return self.folded if self.reads_topic else self.heard_at

    @property
    def seen_at(self) -> float | None:
        """When its client saw its outcome."""
        if not self.reads_topic:
            return self.ended_at
        return self.folded[-1] if self.outcome is not None else None

    @property
    def is_lost(self) -> bool:
        return self.outcome is None or self.seen_at is None

    @property
    def is_visible_twice(self) -> bool:
        return self.talked_on or len(self.heard_outcomes) > 1 or len(self.all_outcomes) > 1

    @property
    def has_seam(self) -> bool:
        status, text = self.outcomes[0] if self.heard_outcomes else (None, "")
        return self.streams and (self.seam or (status == DONE and text_or_digest(self.heard) != text))

    @property
    def is_wrong(self) -> bool:
        return any(status == DONE and text != self.text for status, text in self.all_outcomes)

    @property
    def misses_webhook(self) -> bool:
        return self.webhook and self.hooked != ({self.outcome[0]} if self.outcome else set())


DONE = "completed"
_HEARD = ("piece", "restarted", "snapshot", "outcome")


def check(history: Iterable[Entry]) -> Row:
    """The figures of one row. The first line is its head."""
    lines = iter(history)
    head = next(lines)
    requests: dict[str, _Request] = {}
    others: defaultdict[str, list[Entry]] = defaultdict(list)
    for entry in lines:
        name = entry.get("request_id")
        if name is None:
            others[entry["what"]].append(entry)
        else:
            _take(requests.setdefault(name, _Request(name)), entry)
    return _row(head, list(requests.values()), others)


def _take(request: _Request, entry: Entry) -> None:
    match entry["what"]:
        case "expected":
            request.text, request.streams = entry["text"], entry["streams"]
            request.reads_topic, request.webhook = entry["client"] == "avro", entry["webhook"]
        case "acknowledged":
            request.acknowledged_at = entry["at"]
        case "record":
            request.record(entry)
        case "status" if entry["status"] == "running":
            request.runs.add((entry["epoch"], entry["attempt"]))
        case "artifact":
            request.kept = entry["text"]
        case "webhook":
            request.hooked.add(entry["status"])
        case "fetched":
            request.fetched[entry["artifact"]] = entry["text"]
        case "outcome_again":
            request.asked_again.append(entry)
        case what if what in _HEARD:
            request.hear(entry)
        case _:
            pass


def _row(head: Entry, requests: Sequence[_Request], others: defaultdict[str, list[Entry]]) -> Row:
    taken = [one for one in requests if one.acknowledged_at is not None]
    ended = [outcome for one in taken if (outcome := one.outcome) is not None]
    faults = others["fault"]
    struck_at = min((fault["at"] for fault in faults), default=None)
    in_flight = taken if struck_at is None else [one for one in taken if _in_flight(one, struck_at)]
    known = [] if struck_at is None else _recoveries(in_flight, struck_at)
    grants = others["grants"][-1] if others["grants"] else None
    waits = [one.seen_at - (one.acknowledged_at or 0) for one in taken if one.seen_at is not None]
    return Row(
        row=head["row"],
        moment=head["moment"],
        control=head.get("control"),
        proven=all(fault["proven"] for fault in faults)
        and bool(faults) == head["faults"]
        and len(in_flight) >= head["least_in_flight"],
        how=[fault["how"] for fault in faults],
        in_flight=len(in_flight),
        acknowledged=len(taken),
        outcomes=len(ended),
        not_completed=sum(status != DONE for status, _ in ended),
        lost=sum(one.is_lost for one in taken),
        visible_twice=sum(one.is_visible_twice for one in taken),
        seams=sum(one.has_seam for one in taken),
        restarted=sum(one.restarts for one in taken),
        wrong_tokens=sum(one.is_wrong for one in taken),
        repeated=round(sum(max(0, len(one.runs) - 1) for one in taken) / max(1, len(in_flight)), 3),
        longest_wait_s=_seconds(max(waits, default=None)),
        recovery_s=_seconds(statistics.median(known) if known else None),
        recovery_max_s=_seconds(max(known, default=None)),
        webhooks_missing=sum(one.misses_webhook for one in taken),
        leaked_grants=None if grants is None else grants["reserved"] - grants["of_models"],
        lag=others["lag"][-1]["records"] if others["lag"] else None,
        missing_evidence=_missing_evidence(head, len(taken), len(in_flight), others),
        seed=head["seed"],
        commit=head["commit"],
        expected=head["expected"],
    )


def _missing_evidence(
    head: Entry, acknowledged: int, in_flight: int, others: defaultdict[str, list[Entry]]
) -> list[str]:
    missing = [entry["how"] for entry in others["not_settled"]]
    missing += [f"no line says {what}" for what in ("grants", "lag") if not others[what]]
    if acknowledged != head["count"]:
        missing.append(f"{acknowledged} of {head['count']} requests were acknowledged")
    if head.get("control") == "wrong target":
        struck = any(fault["target"] == head["row"] and fault.get("bystander_gone") for fault in others["fault"])
        if not struck or in_flight < head["least_in_flight"]:
            missing.append("the control did not kill its bystander while enough was in flight")
    return missing


def _in_flight(request: _Request, at: float) -> bool:
    return (request.acknowledged_at or 0) <= at and (request.seen_at is None or request.seen_at > at)


def _recoveries(in_flight: Sequence[_Request], at: float) -> list[float]:
    begun = [one for one in in_flight if any(seen <= at for seen in one.news)]
    first = (next((seen - at for seen in one.news if seen > at), None) for one in begun or in_flight)
    return [seconds for seconds in first if seconds is not None]


def _seconds(value: float | None) -> float | None:
    return None if value is None else round(value, 2)
