"""The log probabilities that a stream has published so far, each token once, and how far the text was then.

They are kept as JSON text: decoded, a token with 20 candidates takes ten times as much memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class PublishedLogprobs:
    """`count` tokens with log probabilities, in order, each as the record's TokenLogprob.

    `ends` maps where a piece of the text ends to how many were published then. Those of pieces without text count with
    the next piece of text.
    """

    count: int = 0
    ends: dict[int, int] = field(default_factory=dict[int, int])
    pieces: list[str] = field(default_factory=list[str])

    def add(self, tokens: Sequence[dict[str, Any]], first: int) -> Sequence[dict[str, Any]] | None:
        """Take tokens that are behind `first` others. Returns the new ones; None if some before them are missing."""
        if first > self.count:
            return None
        new = tokens[self.count - first :]
        if new:
            self.pieces.append(json.dumps(new))
            self.count += len(new)
        return new

    def tokens(self, first: int = 0) -> list[dict[str, Any]]:
        """Those behind the first so many, decoded."""
        return [token for piece in self.pieces for token in json.loads(piece)][first:]

    def count_at(self, length: int) -> int:
        """How many a reader surely has who knows so many characters of the text."""
        if length in self.ends:
            return self.ends[length]
        return max((count for end, count in self.ends.items() if end < length), default=0)

    def copy(self) -> PublishedLogprobs:
        return PublishedLogprobs(self.count, {**self.ends}, [*self.pieces])
