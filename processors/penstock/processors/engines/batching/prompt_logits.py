"""Log probabilities of prompts: what the model gives for each token of a prompt behind the tokens before it.

A step of the batching loop makes logits only where a new token is sampled. For prompts whose log probabilities are
wanted, the hidden states of the step go through the model's head once more, a few positions at a time: logits of all
positions of a step at once could take gigabytes. Imported in an engine's process only.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from penstock.processors.engines.batching.controls import Control, Logprob

CHUNK_VALUES = 1 << 22
"""Logits at once: 16 MiB of float32, and as much again for their logarithms."""


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of one prompt in a step: the row `first_row + i` predicts the prompt's token `first_token + i`."""

    control: Control
    first_row: int
    first_token: int
    tokens: Sequence[int]
    """Those that are predicted."""


def parts_of(futures: Sequence[Any], controls: dict[str, Control]) -> list[PromptPart]:
    """The parts of a step's prompts whose log probabilities are wanted. The step is prepared and not yet computed."""
    parts: list[PromptPart] = []
    row = 0
    for future in futures:
        state, count = future.state, future.query_length
        control = controls.get(state.request_id)
        if control is not None and control.options.prompt_logprobs is not None:
            first = state.position_offset - count + 1
            tokens = state.initial_tokens[first : min(first + count, control.prompt_tokens)]
            if tokens:
                parts.append(PromptPart(control, row, first, tokens))
        row += count
    return parts


def gives_hidden_states(model: Any) -> bool:
    """Whether a model has a base whose hidden states its head can be asked about by position."""
    return model.base_model is not model and bool(getattr(model, "_supports_logits_to_keep", lambda: False)())


class HiddenStates:
    """What the base of a causal language model gave in one step, for its head to be asked again."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._given: Any = None

    @contextmanager
    def kept(self) -> Generator[None]:
        """While the step runs."""

        def keep(module: Any, arguments: Any, output: Any) -> None:
            self._given = output

        handle = self._model.base_model.register_forward_hook(keep)
        try:
            yield
        finally:
            handle.remove()

    def keep_logprobs(self, parts: Sequence[PromptPart], batch_data: dict[str, Any]) -> None:
        """Store the log probabilities of all parts in their controls."""
        base = self._model.base_model
        former = base.__dict__.get("forward")
        # The model's own forward makes the logits: it may scale or cap what its head gives.
        base.forward = self._give
        try:
            for part in parts:
                self._keep_part(part, batch_data)
        finally:
            del base.forward
            if former is not None:
                base.forward = former
            self._given = None

    def _give(self, *arguments: Any, **options: Any) -> Any:
        return self._given

    def _keep_part(self, part: PromptPart, batch_data: dict[str, Any]) -> None:
        device = batch_data["input_ids"].device
        size = max(1, CHUNK_VALUES // int(self._model.config.get_text_config().vocab_size))
        for start in range(0, len(part.tokens), size):
            tokens = part.tokens[start : start + size]
            rows = torch.arange(len(tokens), device=device) + part.first_row + start
            logits = self._model(**{**batch_data, "logits_to_keep": rows}).logits[0]
            logprobs = torch.log_softmax(logits.float(), dim=-1)
            entries = _entries(logprobs, tokens, part.control)
            part.control.prompt_logprobs.update(enumerate(entries, part.first_token + start))


def _entries(logprobs: torch.Tensor, tokens: Sequence[int], control: Control) -> list[Logprob]:
    index = torch.tensor(tokens, device=logprobs.device).unsqueeze(1)
    values: list[float] = logprobs.gather(1, index).squeeze(1).tolist()
    most = control.options.prompt_logprobs or 0
    top = logprobs.topk(most, dim=-1) if most else (logprobs[:, :0], logprobs[:, :0])
    tops = zip(top[1].tolist(), top[0].tolist(), strict=True)
    return [
        Logprob(token, value, tuple(zip(*pair, strict=True)))
        for token, value, pair in zip(tokens, values, tops, strict=True)
    ]
