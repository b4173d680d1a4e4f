"""What runs say while they run: pieces of their output, steps, previews."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.processors.core.effects import Effect, ShowPreview
from penstock.processors.core.requests.registry import Registry
from penstock.processors.core.requests.streams import Streams
from penstock.processors.core.runs.progress import Steps
from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Subject


@dataclass(eq=False)
class RunOutput:
    """What is said of a run that is over changes nothing."""

    _registry: Registry
    _streams: Streams
    _steps: Steps
    _emit: Callable[[Effect], None]

    def goes_on_from(self, subject: Subject, run_id: str, published: PublishedPrefix) -> None:
        """Its engine begins the run behind what earlier attempts have published."""
        work = self._registry.of_run(subject, run_id, Stage.RUNNING)
        if work is not None and work.run is not None:
            self._streams.go_on_from(work.run, published)

    def delta(
        self,
        subject: Subject,
        run_id: str,
        text: str,
        token_ids: list[int],
        now: float,
        calls: Sequence[dict[str, Any]] = (),
        logprobs: Sequence[dict[str, Any]] = (),
    ) -> float | None:
        """As `Streams.delta`.

        Returns the seconds from the request's arrival to the first token of the run, if it came with this.
        """
        work = self._registry.of_run(subject, run_id, Stage.RUNNING)
        if work is None or (run := work.run) is None:
            return None
        first = run.first_token_at is None
        self._streams.delta(work, run, text, token_ids, now, calls, logprobs)
        return now - work.arrived_at if first else None

    def stepped(self, subject: Subject, run_id: str, step: int, steps: int, now: float) -> None:
        work = self._registry.of_run(subject, run_id, Stage.RUNNING)
        if work is not None and (run := work.run) is not None:
            self._steps.done(work, run, step, steps, now)

    def previewed(self, subject: Subject, run_id: str, preview: Any) -> None:
        """There is something to show of a run's output; it is passed on untouched."""
        if (work := self._registry.of_run(subject, run_id, Stage.RUNNING)) is not None:
            self._emit(ShowPreview(work.subject, run_id, preview))
