"""The context of a turn: which of a conversation's messages go into the prompt.

The system prompt is kept, the new messages are kept, and of the history the newest turns that fit, whole. A turn is a
run of user messages with the answers that follow it.

The cost follows the window, not the history. Counting renders the model's template and tokenizes what it gives, so few
candidates are counted, none of them much larger than what fits: the tokens of those counted before foretell those of
the next by their characters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.schemas.errors import ContextLengthExceeded
from penstock.schemas.records import ContextLimits

Message = dict[str, Any]
Count = Callable[[Sequence[Message]], int]

MESSAGE_CHARS = 16
"""What a message adds to its text in a template, in characters: foretelling needs no more than a guess."""
FIRST_TOKENS_PER_CHAR = 0.35
"""Before anything is counted. English has 0.25; a guess that is too low costs more than one that is too high."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The messages in order, how many turns were dropped, and the prompt's length in tokens."""

    messages: list[Message]
    dropped_turns: int
    prompt_tokens: int


class _History:
    """A history seen from its end: the newest turns, found as far as they are asked for."""

    def __init__(self, history: Sequence[Message]) -> None:
        self._history = history
        self._begins = _turn_begins(history)
        self._chars = [0]
        """By number of turns, newest first: their characters together."""

    @property
    def turns(self) -> int:
        return len(self._begins)

    def newest(self, turns: int) -> list[Message]:
        """The messages of so many turns."""
        if turns == 0:
            return []
        begin = self._begins[-turns]
        return [message for message in self._history[begin:] if message["role"] != "system"]

    def system(self) -> list[Message]:
        """The newest system message."""
        for message in reversed(self._history):
            if message["role"] == "system":
                return [message]
        return []

    def chars(self, turns: int) -> int:
        """Characters of so many turns, with what the template adds."""
        while len(self._chars) <= turns:
            number = len(self._chars)
            end = None if number == 1 else self._begins[-number + 1]
            messages = self._history[self._begins[-number] : end]
            self._chars.append(self._chars[-1] + sum(map(_chars_of, messages)))
        return self._chars[turns]

    def within(self, chars: float, low: int, high: int) -> int:
        """The most turns, low ≤ n ≤ high, whose characters stay within the limit; `low` if none does."""
        turns = low
        while turns < high and self.chars(turns + 1) <= chars:
            turns += 1
        return turns


def _turn_begins(history: Sequence[Message]) -> list[int]:
    """Where turns begin, oldest first: at questions that follow an answer, and at the first message of all."""
    begins: list[int] = []
    before: str | None = None
    for number, message in enumerate(history):
        role = message["role"]
        if role == "system":
            continue
        if before is None or (role == "user" and before != "user"):
            begins.append(number)
        before = role
    return begins


def _chars_of(message: Message) -> int:
    content = message.get("content")
    return MESSAGE_CHARS + (len(content) if isinstance(content, str) else 0)


def recent_history(history: Sequence[Message], *, chars: int) -> tuple[list[Message], int]:
    """(the newest system message and the newest turns within so many characters, how many turns were left out).

    For histories that are handed on before anybody can count their tokens.
    """
    told = _History(history)
    kept = told.within(chars, 0, told.turns)
    if kept == told.turns:
        return list(history), 0
    return [*told.system(), *told.newest(kept)], told.turns - kept


def build_context(
    history: Sequence[Message],
    new: Sequence[Message],
    *,
    window_tokens: int,
    max_output_tokens: int,
    limits: ContextLimits | None,
    count: Count,
) -> Context:
    """The prompt's messages within window - output and the caller's limits.

    `count` gives the tokens of a list of messages as the model's template renders it; more turns never have fewer. A
    newer system message replaces older ones, and stands before the history; without a history all messages stay where
    they are. Raises ContextLengthExceeded when the system prompt and the new messages alone do not fit.
    """
    past = _History(history)
    system, fresh = _around(past, new) if history else ([], list(new))
    budget = window_tokens - max_output_tokens
    if limits is not None and limits.max_tokens is not None:
        budget = min(budget, limits.max_tokens)
    allowed = past.turns if limits is None or limits.last_turns is None else min(past.turns, limits.last_turns)

    def assemble(kept: int) -> list[Message]:
        return [*system, *past.newest(kept), *fresh]

    def tokens(kept: int) -> int:
        return count(assemble(kept))

    least = tokens(0)
    if least > budget:
        if least + max_output_tokens > window_tokens:
            message = (
                f"the prompt has {least} tokens and {max_output_tokens} shall follow; the window is {window_tokens}"
            )
            details = {"need": least + max_output_tokens, "capacity": window_tokens, "unit": "tokens"}
        else:
            message = f"the prompt has {least} tokens; context.max_tokens allows {max(0, budget)}"
            details = {"need": least, "capacity": max(0, budget), "unit": "tokens"}
        raise ContextLengthExceeded(message, param="payload.messages", details=details)
    kept, length = _most_that_fit(past, allowed, budget, tokens, least)
    return Context(messages=assemble(kept), dropped_turns=past.turns - kept, prompt_tokens=length)


def _around(past: _History, new: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """What stands before the turns of a history, and behind them."""
    system = [message for message in new if message["role"] == "system"] or past.system()
    return system, [message for message in new if message["role"] != "system"]


def _most_that_fit(
    past: _History, allowed: int, budget: int, tokens: Callable[[int], int], least: int
) -> tuple[int, int]:
    """(turns, their prompt's tokens): the most turns within the budget.

    Between `low`, which fits, and `high`, which does not, the next number of turns to count is foretold from the
    characters of both. When that does not halve the gap it is bisected, so that the number of counts stays small
    whatever the texts are.
    """
    low, length = 0, least
    high, beyond = allowed + 1, 0  # `beyond`: tokens of `high`, 0 while nothing was too long
    rate = FIRST_TOKENS_PER_CHAR
    foretell = True
    while high - low > 1:
        gap = high - low
        if beyond:
            rate = (beyond - length) / max(1, past.chars(high) - past.chars(low))
        if foretell or not beyond:
            room = (budget - length) / max(rate, 1e-9)
            middle = past.within(past.chars(low) + room, low + 1, high - 1)
        else:
            middle = (low + high) // 2
        counted = tokens(middle)
        if counted <= budget:
            if not beyond:
                # So far everything fits: what was counted tells how dense the text is.
                rate = max(counted - least, 1) / max(1, past.chars(middle))
            low, length = middle, counted
        else:
            high, beyond = middle, counted
        foretell = high - low <= gap // 2 or not foretell
    return low, length
