"""How long runs of each model take, as their outcomes tell: exponentially weighted means, for estimates."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from penstock.schemas.costs import drawing_cost
from penstock.schemas.records import InferenceRequest, ResultEvent

WEIGHT = 0.1
"""Of the newest outcome."""
MOST_MODELS = 10_000
"""A bound for what is remembered: names of models come from records."""
MOST_UNDER_WAY = 50_000
"""So many requests for images are remembered until they end."""
DRAWN = frozenset({"image_generation", "image_editing"})
"""Tasks whose runs take as long as their images are large and their steps many."""


@dataclass(slots=True)
class Means:
    """Of one model: milliseconds of a run, tokens of an answer; and of runs that drew, with their cost in tokens."""

    run_ms: float
    tokens: float
    drawn_ms: float | None = None
    drawn_cost: float = 0.0

    def add(self, run_ms: float, tokens: int) -> None:
        self.run_ms += WEIGHT * (run_ms - self.run_ms)
        self.tokens += WEIGHT * (tokens - self.tokens)

    def add_drawn(self, run_ms: float, cost: int) -> None:
        if self.drawn_ms is None:
            self.drawn_ms, self.drawn_cost = run_ms, cost
        self.drawn_ms += WEIGHT * (run_ms - self.drawn_ms)
        self.drawn_cost += WEIGHT * (cost - self.drawn_cost)


class RunTimes:
    """Hears of requests and outcomes; answers what a run of a model will take."""

    def __init__(self) -> None:
        self._models: dict[str, Means] = {}
        self._costs: OrderedDict[tuple[str, str], int] = OrderedDict()

    def on_request(self, request: InferenceRequest) -> None:
        """A request stands on its topic: an outcome does not tell what was asked for."""
        if request.task not in DRAWN:
            return
        self._costs[request.tenant, request.request_id] = drawing_cost(request.payload)
        if len(self._costs) > MOST_UNDER_WAY:
            self._costs.popitem(last=False)

    def on_outcome(self, event: ResultEvent) -> None:
        """A request has ended; only completed runs count."""
        cost = self._costs.pop((event.tenant, event.request_id), None) if self._costs else None
        if event.status != "completed" or event.model is None or event.timings is None:
            return
        run_ms = event.timings.run_ms
        tokens = 0 if event.usage is None else event.usage.completion_tokens
        means = self._models.get(event.model)
        if means is None:
            if len(self._models) >= MOST_MODELS:
                return
            means = self._models[event.model] = Means(run_ms, tokens)
        else:
            means.add(run_ms, tokens)
        if cost is not None:
            means.add_drawn(run_ms, cost)

    def run_ms(self, model: str, request: InferenceRequest | None = None) -> float | None:
        """Milliseconds of a run of a model, of this request if one is given; None before the model's first outcome.

        What is drawn takes time in proportion to its cost. Text of at most so many tokens takes no longer than these.
        """
        means = self._models.get(model)
        if means is None or request is None:
            return None if means is None else means.run_ms
        if request.task in DRAWN:
            known = means.drawn_ms
            return means.run_ms if known is None else known * drawing_cost(request.payload) / means.drawn_cost
        max_tokens = request.payload.get("max_tokens")
        if max_tokens is not None and 0 < max_tokens < means.tokens:
            return means.run_ms * max_tokens / means.tokens
        return means.run_ms
