"""The context of a turn: which of a conversation's messages go into the prompt.

The system prompt is kept, the new messages are kept, and of the history the newest turns that fit, whole. A turn is a
run of user messages with the answers that follow it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.schemas.errors import ContextLengthExceeded
from penstock.schemas.records import ContextLimits

Message = dict[str, Any]
Count = Callable[[Sequence[Message]], int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The messages in order, how many turns were dropped, and the prompt's length in tokens."""

    messages: list[Message]
    dropped_turns: int
    prompt_tokens: int


def split_turns(history: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """(system messages, turns oldest first) of a history."""
    system: list[Message] = []
    turns: list[list[Message]] = []
    answered = True
    for message in history:
        if message["role"] == "system":
            system.append(message)
            continue
        if message["role"] == "user" and answered:
            turns.append([])
            answered = False
        elif not turns:
            turns.append([])  # an answer without its question still is a turn
        turns[-1].append(message)
        answered = answered or message["role"] != "user"
    return system, turns


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

    `count` gives the tokens of a list of messages as the model's template renders it. A newer system message replaces
    older ones. Raises ContextLengthExceeded when the system prompt and the new messages alone do not fit.
    """
    old_system, turns = split_turns(history)
    own_system = [message for message in new if message["role"] == "system"]
    system = own_system or old_system[-1:]
    fresh = [message for message in new if message["role"] != "system"]
    budget = window_tokens - max_output_tokens
    if limits is not None and limits.max_tokens is not None:
        budget = min(budget, limits.max_tokens)
    allowed = len(turns) if limits is None or limits.last_turns is None else min(len(turns), limits.last_turns)

    def tokens(kept: int) -> int:
        return count(assemble(kept))

    def assemble(kept: int) -> list[Message]:
        past = [message for turn in turns[len(turns) - kept :] for message in turn]
        return [*system, *past, *fresh]

    least = tokens(0)
    if least > budget:
        raise ContextLengthExceeded(
            f"the prompt has {least} tokens; with {max_output_tokens} for the answer, {max(0, budget)} fit",
            param="payload.messages",
            details={"need": least, "capacity": max(0, budget), "unit": "tokens"},
        )
    kept, length = _most_that_fit(allowed, budget, tokens, least)
    return Context(messages=assemble(kept), dropped_turns=len(turns) - kept, prompt_tokens=length)


def _most_that_fit(allowed: int, budget: int, tokens: Callable[[int], int], least: int) -> tuple[int, int]:
    """(turns, tokens): the whole history when it fits, else bisected, since counting means rendering the template."""
    if allowed == 0:
        return 0, least
    whole = tokens(allowed)
    if whole <= budget:
        return allowed, whole
    low, high, length = 0, allowed, least  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        found = tokens(middle)
        if found <= budget:
            low, length = middle, found
        else:
            high = middle
    return low, length
