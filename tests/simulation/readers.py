"""Readers of the result and status topics, with the product's own folds, and what they must never see."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.schemas.fold import Chunk, ResultFold, StatusFold, Terminal
from penstock.schemas.records import ResultEvent, StatusEvent
from simulation.truth import Subject, Violation

if TYPE_CHECKING:
    from simulation.cluster import Cluster


@dataclass(slots=True)
class Seen:
    """The text and the tokens that one reader of a request has since it began for the last time."""

    text: str = ""
    tokens: list[int] = field(default_factory=list[int])


class Readers:
    """One reader of everything. It sees each event as it is appended."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.results: dict[Subject, ResultFold] = {}
        self.events: dict[Subject, list[ResultEvent]] = defaultdict(list)
        """All that was published of a request."""
        self._seen: dict[Subject, Seen] = defaultdict(Seen)
        self.told_ends: set[Subject] = set()
        """Those of which an outcome was published, whether readers follow it or not."""
        self.statuses: dict[Subject, StatusFold] = {}

    def ended(self, subject: Subject) -> bool:
        fold = self.results.get(subject)
        return fold is not None and fold.terminal is not None

    def outcome(self, subject: Subject) -> ResultEvent | None:
        fold = self.results.get(subject)
        return None if fold is None else fold.terminal

    def result(self, event: ResultEvent) -> None:
        subject = (event.tenant, event.request_id)
        self.events[subject].append(event)
        if event.kind == "terminal":
            self.told_ends.add(subject)
        elif event.text_offset is not None:
            self._published(subject, event)
        fold = self.results.get(subject)
        if fold is None:
            fold = self.results[subject] = ResultFold(event.request_id, event.tenant)
        before = fold.place, fold.text
        step = fold.apply(event)
        if fold.gap:
            raise Violation(f"seam: {subject} has read {self._seen[subject]}, and lacks what is before {event}")
        if isinstance(step, Chunk):
            self._chunk(subject, fold, event, restarted=step.restarted)
        elif isinstance(step, Terminal):
            self._terminal(subject, event, *before)

    def _published(self, subject: Subject, event: ResultEvent) -> None:
        """A chunk, whether anybody reads it or not, is a part of what a run of its (epoch, attempt) has produced."""
        text, tokens = event.text or "", list(event.token_ids or ())
        at, first = event.text_offset or 0, event.first_token_index or 0
        behind = at + len(text), first + len(tokens)
        runs = self._cluster.truth.runs_at(subject, (event.epoch, event.attempt))
        for run in runs:
            same = run.text[at : behind[0]] == text and run.tokens[first : behind[1]] == tokens
            if same and {(at, first), behind} <= run.ends:
                return
        raise Violation(
            f"chunk: {subject} is told {text!r} at {at} with the tokens {tokens} from {first} on in "
            f"{event.epoch}.{event.attempt}, whose runs said {[(run.text, run.tokens) for run in runs]}"
        )

    def _chunk(self, subject: Subject, fold: ResultFold, event: ResultEvent, *, restarted: bool) -> None:
        """A chunk that is read begins where what was read ends, or all begins again."""
        seen = self._seen[subject]
        if restarted:
            seen.text, seen.tokens = "", []
        at = event.text_offset, event.first_token_index, event.first_logprob_index
        if at != (len(seen.text), len(seen.tokens), len(seen.tokens)):
            raise Violation(f"seam: {subject} has read {seen}, and the next chunk begins at {at}")
        seen.text += event.text or ""
        seen.tokens += event.token_ids or ()
        told = [] if fold.logprobs is None else fold.logprobs.tokens()
        held = fold.text, fold.token_count, "".join(one["token"] for one in told), len(told)
        if held != (seen.text, len(seen.tokens), seen.text, len(seen.tokens)):
            raise Violation(f"seam: {subject} has read {seen}, and its fold holds {held}")
        runs = self._cluster.truth.runs_at(subject, fold.place)
        if not any(run.text.startswith(seen.text) and run.tokens[: len(seen.tokens)] == seen.tokens for run in runs):
            raise Violation(
                f"seam: {subject} has read {seen} in {fold.place}, whose runs said {[r.text for r in runs]}"
            )

    def _terminal(self, subject: Subject, event: ResultEvent, place: tuple[int, int], shown: str) -> None:
        if event.status != "completed":
            return
        text = event.output_text or ""
        runs = self._cluster.truth.runs.get(subject, {})
        if not any(run.text == text for there in runs.values() for run in there):
            raise Violation(f"outcome: {subject} is completed with {text!r}, which no run produced")
        if (event.since or (event.epoch, event.attempt)) <= place and not text.startswith(shown):
            raise Violation(f"seam: {subject} read {shown!r}, and its outcome in the same place is {text!r}")

    def status(self, event: StatusEvent) -> None:
        subject = (event.tenant, event.request_id)
        fold = self.statuses.get(subject)
        if fold is None:
            fold = self.statuses[subject] = StatusFold(event.request_id, event.tenant)
        latest = fold.latest
        if not fold.apply(event) or latest is None:
            return
        if latest.done or (event.epoch, event.attempt, event.rank) < (latest.epoch, latest.attempt, latest.rank):
            raise Violation(f"status: {subject} goes from {latest.status} back to {event.status}")
