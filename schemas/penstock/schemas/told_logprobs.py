"""The log probabilities that a stream has told so far, each token once, and how far the text was then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ToldLogprobs:
    """Tokens with log probabilities, in order. `ends` maps where a piece of the text ends to how many were told then.

    Pieces without text may bring some too: they count with the next piece of text.
    """

    __slots__ = ("ends", "tokens")

    def __init__(self) -> None:
        self.tokens: list[dict[str, Any]] = []
        self.ends: dict[int, int] = {}

    def add(self, tokens: Sequence[dict[str, Any]], first: int) -> Sequence[dict[str, Any]] | None:
        """Take tokens that stand behind `first` others. Returns the new ones; None if some before them are missing."""
        known = len(self.tokens)
        if first > known:
            return None
        new = tokens[known - first :]
        self.tokens += new
        return new

    def count_at(self, length: int) -> int:
        """How many were told for certain to a reader who knows so many characters of the text."""
        if length in self.ends:
            return self.ends[length]
        return max((count for end, count in self.ends.items() if end < length), default=0)

    def copy(self) -> ToldLogprobs:
        made = ToldLogprobs()
        made.tokens, made.ends = [*self.tokens], {**self.ends}
        return made
