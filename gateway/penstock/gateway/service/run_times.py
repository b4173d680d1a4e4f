"""How long runs of each model take, as their outcomes tell: exponentially weighted means, for estimates."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schemas.records import ResultEvent

WEIGHT = 0.1
"""Of the newest outcome."""
MOST_MODELS = 10_000
"""A bound for what is remembered: names of models come from records."""


@dataclass(slots=True)
class Means:
    """Of one model: milliseconds of a run, tokens of an answer."""

    run_ms: float
    tokens: float


class RunTimes:
    """Hears of outcomes; answers what a run of a model will take."""

    def __init__(self) -> None:
        self._models: dict[str, Means] = {}

    def on_outcome(self, event: ResultEvent) -> None:
        """A request has ended; only completed runs count."""
        if event.status != "completed" or event.model is None or event.timings is None:
            return
        tokens = 0 if event.usage is None else event.usage.completion_tokens
        means = self._models.get(event.model)
        if means is None:
            if len(self._models) < MOST_MODELS:
                self._models[event.model] = Means(event.timings.run_ms, tokens)
            return
        means.run_ms += WEIGHT * (event.timings.run_ms - means.run_ms)
        means.tokens += WEIGHT * (tokens - means.tokens)

    def run_ms(self, model: str, max_tokens: int | None = None) -> float | None:
        """Milliseconds of a run of at most so many tokens; None before the first outcome of the model."""
        means = self._models.get(model)
        if means is None:
            return None
        if max_tokens is not None and 0 < max_tokens < means.tokens:
            return means.run_ms * max_tokens / means.tokens
        return means.run_ms
