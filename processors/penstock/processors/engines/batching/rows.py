"""A batch of prompts in one call of transformers' `generate`: each row with its own sampling, length and end.

Imported in an engine's process only, where torch is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from penstock.processors.engines.batching.sampling import GREEDY, Sampling

PADDED = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""Tensors with an entry for each token."""

Inputs = dict[str, Any]
Key = tuple[tuple[str, str, tuple[int, ...]], ...]


class Row:
    """One prompt of a batch. The thread that computes writes `made` and then `ended`; the event loop writes `over`."""

    def __init__(self, run_id: str, inputs: Inputs, new_tokens: int, sampling: Sampling, seed: int | None) -> None:
        self.run_id = run_id
        self.inputs = inputs
        self.new_tokens = new_tokens
        self.sampling = sampling
        self.made: list[int] = []
        self.step = 0
        """Tokens that the batch of now has come to: one that is computed again repeats what it had made."""
        self.ended = False
        self.is_read = True
        """Whether somebody wants its tokens as they come."""
        self.over = False
        """Nobody wants more of it: it was cancelled, or a stop string has come."""
        self.random: torch.Generator | None = None
        if sampling is not GREEDY:
            self.random = torch.Generator()
            self.random.manual_seed(seed % (1 << 64)) if seed is not None else self.random.seed()

    def took(self, token: int, is_end: Callable[[int], bool]) -> None:
        if self.ended:
            return
        self.step += 1
        if self.step <= len(self.made):
            return  # it is repeated
        self.made.append(token)
        self.ended = is_end(token) or len(self.made) >= self.new_tokens


def batch_key(inputs: Inputs, *, pads: bool) -> Key:
    """Prompts with equal keys go into one batch. Without `pads` only those of equal length do."""
    return tuple(
        (name, str(tensor.dtype), tuple(tensor.shape[2:] if pads and name in PADDED else tensor.shape[1:]))
        for name, tensor in sorted(inputs.items())
    )


def joined(rows: Sequence[Row], pad_id: int) -> Inputs:
    """The inputs of rows with equal keys as one batch, shorter prompts padded on the left."""
    batch: Inputs = {}
    for name in rows[0].inputs:
        tensors = [row.inputs[name] for row in rows]
        if name in PADDED:
            longest = max(tensor.shape[1] for tensor in tensors)
            filler = pad_id if name == "input_ids" else 0
            tensors = [
                torch.nn.functional.pad(tensor, (longest - tensor.shape[1], 0), value=filler) for tensor in tensors
            ]
        batch[name] = torch.cat(tensors)
    return batch


class RowSampling(LogitsProcessor):
    """Chooses the tokens of the rows that are not greedy; `generate` itself then only takes the most likely one.

    A row whose batch memory ran out under is computed again from its beginning: it gets the tokens that it had made,
    since they may have been published, and continues from there.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        for row in rows:
            row.step = 0

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        for number, row in enumerate(self._rows):
            if row.step < len(row.made):
                token = row.made[row.step]
            elif row.random is not None:
                token = sample(scores[number].float().cpu(), row.sampling, row.random)
            else:
                continue
            scores[number] = -torch.inf
            scores[number, token] = 0.0
        return scores


def sample(scores: torch.Tensor, sampling: Sampling, random: torch.Generator) -> int:
    values, tokens = torch.topk(scores / sampling.temperature, min(sampling.top_k, scores.shape[0]))
    shares = torch.softmax(values, 0)
    before = shares.cumsum(0) - shares
    shares = torch.where(before < sampling.top_p, shares, 0.0)
    return int(tokens[torch.multinomial(shares, 1, generator=random)])


class RowEnds(StoppingCriteria):
    """Hears each step's tokens, and ends each row by itself. `on_step` is called in the thread that computes."""

    def __init__(self, rows: Sequence[Row], is_end: Callable[[int], bool], on_step: Callable[[], None]) -> None:
        self._rows = rows
        self._is_end = is_end
        self._on_step = on_step

    def __call__(self, input_ids: Any, scores: Any, **named: Any) -> Any:
        for row, token in zip(self._rows, input_ids[:, -1].tolist(), strict=True):
            row.took(token, self._is_end)
        self._on_step()
        ends = [row.ended or row.over for row in self._rows]
        return torch.tensor(ends, dtype=torch.bool, device=input_ids.device)
