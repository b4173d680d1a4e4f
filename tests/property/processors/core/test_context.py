"""Which messages go into a prompt: within the budget, in order, the newest turns whole, the system prompt kept."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.core.context import Message, build_context, split_turns
from penstock.schemas.errors import ContextLengthExceeded
from penstock.schemas.records import ContextLimits

PER_MESSAGE = 3


def count(messages: Sequence[Message]) -> int:
    return sum(len(message["content"]) + PER_MESSAGE for message in messages) + 1


def messages(roles: st.SearchStrategy[str], *, least: int, most: int) -> st.SearchStrategy[list[Message]]:
    one = st.builds(lambda role, content: {"role": role, "content": content}, roles, st.text("ab", max_size=12))
    return st.lists(one, min_size=least, max_size=most)


HISTORY = messages(st.sampled_from(("system", "user", "user", "assistant", "assistant")), least=0, most=14)
NEW = messages(st.sampled_from(("system", "user", "user", "assistant")), least=1, most=3)
LIMITS = st.none() | st.builds(
    ContextLimits, max_tokens=st.none() | st.integers(1, 200), last_turns=st.none() | st.integers(0, 8)
)


@given(history=HISTORY)
def test_turns_are_the_history_without_system_messages(history: list[Message]) -> None:
    system, turns = split_turns(history)
    assert system == [m for m in history if m["role"] == "system"]
    assert [m for turn in turns for m in turn] == [m for m in history if m["role"] != "system"]
    for turn in turns:
        roles = [m["role"] for m in turn]
        asked = roles.count("user")
        assert roles[:asked] == ["user"] * asked, "the questions come before the answers"
    assert all(turn[0]["role"] == "user" for turn in turns[1:])


@given(history=HISTORY, new=NEW, window=st.integers(1, 250), output=st.integers(1, 60), limits=LIMITS)
def test_the_newest_turns_that_fit(
    history: list[Message], new: list[Message], window: int, output: int, limits: ContextLimits | None
) -> None:
    old_system, turns = split_turns(history)
    system = [m for m in new if m["role"] == "system"] or old_system[-1:]
    fresh = [m for m in new if m["role"] != "system"]
    budget = window - output
    most = len(turns)
    if limits is not None:
        budget = budget if limits.max_tokens is None else min(budget, limits.max_tokens)
        most = most if limits.last_turns is None else min(most, limits.last_turns)

    def prompt(kept: int) -> list[Message]:
        return [*system, *(m for turn in turns[len(turns) - kept :] for m in turn), *fresh]

    def build():
        return build_context(history, new, window_tokens=window, max_output_tokens=output, limits=limits, count=count)

    if count(prompt(0)) > budget:
        with pytest.raises(ContextLengthExceeded) as caught:
            build()
        assert caught.value.details == {"need": count(prompt(0)), "capacity": max(0, budget), "unit": "tokens"}
        return
    context = build()
    kept = max(n for n in range(most + 1) if count(prompt(n)) <= budget)
    assert context.messages == prompt(kept)
    assert context.prompt_tokens == count(context.messages) <= budget
    assert context.dropped_turns == len(turns) - kept
