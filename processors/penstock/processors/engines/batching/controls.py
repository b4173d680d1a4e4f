"""What one run asks of its logits, and what has come of it so far. Kept by the thread that computes.

Tokens are taken here as soon as they are sampled: a grammar must know a token before the next mask.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from penstock.processors.engines.batching.logit_options import LogitOptions
from penstock.schemas.errors import InvalidRequest, PenstockError
from penstock.schemas.texts import shortened

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Logprob:
    """Of one token as the model gave it, before anything was done to its logits; `top`: the likeliest (id, value)."""

    token: int
    value: float
    top: tuple[tuple[int, float], ...]


class Control:
    """One run's options and the state of its grammar. `matcher` is an LLMatcher of its own."""

    def __init__(self, options: LogitOptions, *, matcher: Any = None, index: int = 0, param: str = "payload") -> None:
        self.options = options
        self.matcher = matcher
        self.param = param
        self.tokens: list[int] = []
        """Those that were made before the run was given to the loop included."""
        self.logprobs: list[Logprob] = []
        """Of the tokens behind the first `begun_with`."""
        self.begun_with = 0
        """How many tokens were made by an earlier run."""
        self.prompt_tokens = 0
        """The length of the run's own prompt."""
        self.prompt_logprobs: dict[int, Logprob] = {}
        """By place in the prompt. The first token has none."""
        self.counts: dict[int, int] = {}
        self.prompt: frozenset[int] = frozenset()
        """The tokens of the prompt, for a repetition penalty."""
        self.end_ids: Sequence[int] = ()
        """The tokens that end the run; they are held back until it has `min_tokens`."""
        self.state: Any = None
        """The loop's own state of the run, which is another one when the run was set back."""
        self._before = 0
        """How many tokens are part of the run's prompt for the loop."""
        self._index = index
        self._random = self._draws()

    @property
    def penalises(self) -> bool:
        return bool(self.options.presence_penalty or self.options.frequency_penalty or self.repeats)

    @property
    def repeats(self) -> bool:
        return self.options.repetition_penalty != 1

    @property
    def holds_end(self) -> bool:
        """Whether the next token must not end the run."""
        return len(self.tokens) < self.options.min_tokens and bool(self.end_ids)

    def _draws(self) -> Random | None:
        """Answers of one request draw differently, and each the same numbers every time.

        A gateway that asks for each answer of a stream by itself counts the seed up in the same way.
        """
        seed = self.options.seed
        return None if seed is None else Random(seed + self._index)

    def draw(self) -> float | None:
        """The next number of this run, 0 ≤ number < 1; None when it has no seed."""
        return None if self._random is None else self._random.random()

    def take(self, token: int) -> PenstockError | None:
        """A token that was sampled. What the run fails of, if it cannot go on."""
        self.tokens.append(token)
        if self.penalises:
            self.counts[token] = self.counts.get(token, 0) + 1
        if self.matcher is None or self.matcher.is_stopped():
            return self.failure()
        self.matcher.consume_token(token)
        return self.failure()

    def failure(self) -> PenstockError | None:
        """What the grammar fails of: as a rule a limit of llguidance that the schema is too complex for."""
        if self.matcher is None or not self.matcher.is_error():
            return None
        logger.debug("grammar.failed error=%s", shortened(str(self.matcher.get_error()), 200))
        return InvalidRequest(f"{self.param} is too complex to be enforced", param=self.param)

    def begin_with(self, tokens: Sequence[int]) -> bool:
        """The run goes on behind these tokens of an earlier one; False when its grammar does not allow them."""
        for token in tokens:
            self.draw()
            if self.take(token) is not None:
                return False
        self._before = self.begun_with = len(tokens)
        return True

    def go_on_behind(self, count: int) -> None:
        """The loop has lost the run: it is given to it again, with its first so many tokens in the prompt."""
        self.set_back(count - self._before)
        self._before = count

    def set_back(self, made: int) -> None:
        """Of the loop's tokens only the first `made` count: it set the run back, and samples the others again."""
        made += self._before
        lost = len(self.tokens) - made
        if lost <= 0:
            return
        del self.tokens[made:], self.logprobs[made - self.begun_with :]
        self.counts = {}
        for token in self.tokens if self.penalises else ():
            self.counts[token] = self.counts.get(token, 0) + 1
        if self.matcher is not None:
            self.matcher.rollback(lost)
        self._random = self._draws()
        for _ in range(made):
            self.draw()
