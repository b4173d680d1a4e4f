"""How much of prompts a step of the batching loop computes. Pure.

A step makes one token for each run whose prompt is done, and computes parts of prompts with what is left of its
tokens (chunked prefill, Agrawal et al. 2023, arXiv:2308.16369). A run does not stand still for prompts of less urgent
ones: in a step that they share these get the tokens of `STEP_S`.
"""

from __future__ import annotations

STEP_S = 0.25
"""So long may a step take in which a run is beside prompts of less urgent ones."""
LEAST_PROMPT_TOKENS = 64
"""Of these prompts in such a step, however slow the model is: with fewer the whole batch would make much less."""
_NOTHING_S = 1e-9
_WEIGHT = 0.2
"""Of the newest step among all that were measured."""


class Pace:
    """What a step without prompts takes, and what a token of a prompt adds: exponential averages."""

    def __init__(self) -> None:
        self._plain_s: float | None = None
        self._token_s: float | None = None

    def observe(self, made: int, prompt_tokens: int, seconds: float) -> None:
        """A step has made so many tokens and computed so many of prompts."""
        if not prompt_tokens:
            self._plain_s = _averaged(self._plain_s, seconds)
        elif prompt_tokens >= LEAST_PROMPT_TOKENS // 2:  # what few tokens take says little of one
            plain_s = self._plain_s if made and self._plain_s is not None else 0.0
            self._token_s = _averaged(self._token_s, max(0.0, seconds - plain_s) / prompt_tokens)

    @property
    def prompt_tokens(self) -> int | None:
        """How many fit into a step of `STEP_S`; None when that is not known yet, or nothing bounds it."""
        if self._token_s is None or self._token_s < _NOTHING_S:
            return None
        return max(LEAST_PROMPT_TOKENS, int((STEP_S - (self._plain_s or 0.0)) / self._token_s))


def _averaged(known: float | None, new: float) -> float:
    return new if known is None else known + _WEIGHT * (new - known)
