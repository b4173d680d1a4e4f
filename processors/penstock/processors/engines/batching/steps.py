"""transformers' scheduler of the batching loop, with prompts by their turns and sizes by `pace`. Imported where torch
is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers.generation.continuous_batching.requests import RequestStatus
from transformers.generation.continuous_batching.scheduler import SCHEDULER_MAPPING, FIFOScheduler

from penstock.processors.engines.batching.pace import Pace

SCHEDULER = "penstock"
"""Its name for transformers."""


class PromptOrder(NamedTuple):
    """A run's priority, and its turn among prompts."""

    priority: int
    turn: float


NOWHERE = PromptOrder(1_000, 0.0)
"""Of a run that is over."""


class UrgentFirst(FIFOScheduler):
    """Decides in the loop's thread, which also measures. `places` is filled by others."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.pace = Pace()
        self.places: dict[str, PromptOrder] = {}
        """By run."""
        self.scheduled = (0, 0)
        """(tokens made, tokens of prompts) of the last step."""

    def _process_candidates(
        self,
        candidates: list[Any],
        token_budget: int,
        cache_budget: int,
        request_ids_to_remove_from_waiting: set[str],
    ) -> Any:
        decoding = [one for one in candidates if one.status == RequestStatus.DECODING]
        prompts = [one for one in candidates if one.status != RequestStatus.DECODING]
        if prompts:
            prompts.sort(key=lambda one: self._place(one).turn)
            token_budget = min(token_budget, self._most_tokens(decoding, prompts) or token_budget)
        taken = super()._process_candidates(
            decoding + prompts, token_budget, cache_budget, request_ids_to_remove_from_waiting
        )
        made = min(len(decoding), taken[3])
        self.scheduled = made, taken[3] - made
        return taken

    def _place(self, one: Any) -> PromptOrder:
        return self.places.get(one.request_id, NOWHERE)

    def _most_tokens(self, decoding: list[Any], prompts: list[Any]) -> int | None:
        """Of the step, if some of these prompts are less urgent than others or than those that make tokens."""
        most_urgent = min(self._place(one).priority for one in decoding + prompts)
        urgent = [one for one in prompts if self._place(one).priority == most_urgent]
        if len(urgent) == len(prompts) or (most := self.pace.prompt_tokens) is None:
            return None
        return len(decoding) + max(most, sum(len(one.remaining_prefill_tokens) for one in urgent))


SCHEDULER_MAPPING[SCHEDULER] = UrgentFirst
