"""Readers of the result and status topics, with the product's own folds, and what they must never see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.schemas.fold import Chunk, ResultFold, StatusFold, Terminal
from penstock.schemas.records import ResultEvent, StatusEvent
from simulation.truth import Subject, Violation

if TYPE_CHECKING:
    from simulation.cluster import Cluster


class Readers:
    """One reader of everything. It sees each event as it is appended."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.results: dict[Subject, ResultFold] = {}
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
        if event.kind == "terminal":
            self.told_ends.add(subject)
        fold = self.results.get(subject)
        if fold is None:
            fold = self.results[subject] = ResultFold(event.request_id, event.tenant)
        before = fold.place, fold.text
        step = fold.apply(event)
        if isinstance(step, Chunk):
            self._chunk(subject, fold, before[1], step)
        elif isinstance(step, Terminal):
            self._terminal(subject, event, *before)

    def _chunk(self, subject: Subject, fold: ResultFold, before: str, step: Chunk) -> None:
        """What is shown is a beginning of what one run produced, and only grows or is said to begin anew."""
        if not step.restarted and not fold.text.startswith(before):
            raise Violation(f"seam: the text of {subject} did not grow")
        tokens = [] if fold.logprobs is None else fold.logprobs.tokens()
        if "".join(one["token"] for one in tokens) != fold.text:
            raise Violation(f"seam: {subject} reads {fold.text!r} with the tokens {tokens}")
        runs = self._cluster.truth.runs_at(subject, (fold.epoch, fold.attempt))
        if fold.text and not any(run.text.startswith(fold.text) for run in runs):
            raise Violation(
                f"seam: {subject} reads {fold.text!r} in {fold.epoch}.{fold.attempt}, "
                f"whose runs said {[run.text for run in runs]}"
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
