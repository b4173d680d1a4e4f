"""Which messages go into a prompt: within the budget, in order, the newest turns whole, the system prompt kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.earlier_messages import (
    MESSAGE_CHARS,
    EarlierMessages,
    Message,
    Summary,
    chars_of,
    turn_begins,
    whole_turns,
)
from penstock.processors.engines.context import SUMMARY_IS, Context, build_context, recent_past
from penstock.schemas.errors import ContextLengthExceeded, InvalidRequest
from penstock.schemas.limits import RECENT_TURNS
from penstock.schemas.records import ContextHeld, ContextLimits

PER_MESSAGE = 3
FAR_CHARS = 2 * (MESSAGE_CHARS + len("far"))
"""Of a turn that stood in front of what an engine gets."""


def split_turns(history: Sequence[Message]) -> tuple[list[Message], list[list[Message]]]:
    """(system messages, turns oldest first) of a history."""
    begins = turn_begins(history)
    ends = [*begins[1:], len(history)] if begins else []
    turns = [
        [message for message in history[begin:end] if message["role"] != "system"]
        for begin, end in zip(begins, ends, strict=True)
    ]
    return [message for message in history if message["role"] == "system"], turns


def count(messages: Sequence[Message]) -> int:
    return sum(len(message["content"]) + PER_MESSAGE for message in messages) + 1


def chars(some: Sequence[Message]) -> int:
    return sum(len(message["content"]) + MESSAGE_CHARS for message in some)


def built(
    past: EarlierMessages | None,
    new: Sequence[Message],
    window: int,
    output: int = 0,
    limits: ContextLimits | None = None,
    count: Callable[[Sequence[Message]], int] = count,
) -> Context:
    return build_context(past, new, window_tokens=window, max_output_tokens=output, limits=limits, count=count)


NOW = [{"role": "user", "content": "And now?"}]


def messages(roles: st.SearchStrategy[str], *, least: int, most: int) -> st.SearchStrategy[list[Message]]:
    one = st.builds(lambda role, content: {"role": role, "content": content}, roles, st.text("ab", max_size=12))
    return st.lists(one, min_size=least, max_size=most)


HISTORY = messages(st.sampled_from(("system", "user", "user", "assistant", "assistant")), least=0, most=14)
NEW = messages(st.sampled_from(("system", "user", "user", "assistant")), least=1, most=3)
BOUNDS = {"max_tokens": st.none() | st.integers(1, 200), "last_turns": st.none() | st.integers(0, 8)}
LIMITS = st.none() | st.builds(ContextLimits, **BOUNDS)


def system_and_fresh(
    old_system: list[Message], history: Sequence[Message], new: Sequence[Message]
) -> tuple[list[Message], list[Message]]:
    """What stands before the turns of a history, and behind them."""
    if not history:
        return [], list(new)
    system = [m for m in new if m["role"] == "system"] or old_system[-1:]
    return system, [m for m in new if m["role"] != "system"]


@given(history=HISTORY)
def test_turns_are_the_history_without_system_messages(history: list[Message]) -> None:
    _, turns = split_turns(history)
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
    system, fresh = system_and_fresh(old_system, history, new)
    budget = window - output
    most = len(turns)
    if limits is not None:
        budget = budget if limits.max_tokens is None else min(budget, limits.max_tokens)
        most = most if limits.last_turns is None else min(most, limits.last_turns)

    def prompt(kept: int) -> list[Message]:
        return [*system, *(m for turn in turns[len(turns) - kept :] for m in turn), *fresh]

    if count(prompt(0)) > budget:
        with pytest.raises(ContextLengthExceeded) as caught:
            built(EarlierMessages(messages=history), new, window, output, limits)
        need, capacity = count(prompt(0)), budget
        if need + output > window:  # then it is the model's window, not the caller's own limit
            need, capacity = need + output, window
        assert caught.value.details == {"need": need, "capacity": max(0, capacity), "unit": "tokens"}
        return
    context = built(EarlierMessages(messages=history), new, window, output, limits)
    kept = max(n for n in range(most + 1) if count(prompt(n)) <= budget)
    assert context.messages == prompt(kept)
    assert context.prompt_tokens == count(context.messages) <= budget
    assert context.held.dropped_turns == len(turns) - kept


def test_without_a_history_the_messages_stay_in_their_order() -> None:
    """A system message in the middle speaks of what comes after it."""
    roles = ("system", "user", "assistant", "system", "user")
    new = [{"role": role, "content": str(number)} for number, role in enumerate(roles)]
    context = built(None, new, 1_000, 1)
    assert context.messages == new
    assert context.prompt_tokens == count(new)


# -- summaries


SUMMARIES = st.none() | st.builds(
    Summary, text=st.text("ab", max_size=30), through=st.integers(0, 99), turns=st.integers(0, 12)
)
USES = st.builds(ContextLimits, **BOUNDS, summary=st.sampled_from([None, False, True]))
OMITTED = st.integers(0, 5)


@given(HISTORY.filter(bool), NEW, st.integers(1, 250), USES, SUMMARIES, OMITTED)
def test_a_summary_stands_for_what_does_not_fit(
    history: list[Message],
    new: list[Message],
    window: int,
    limits: ContextLimits,
    summary: Summary | None,
    omitted: int,
) -> None:
    old_system, turns = split_turns(history)
    system, fresh = system_and_fresh(old_system, history, new)
    budget = window if limits.max_tokens is None else min(window, limits.max_tokens)
    turns_of_all = omitted + len(turns)
    wanted = turns_of_all if limits.last_turns is None else min(limits.last_turns, turns_of_all)
    far = [{"role": role, "content": "far"} for _ in range(omitted) for role in ("user", "assistant")]
    omitted_chars = omitted * FAR_CHARS
    summed_chars = 0 if summary is None else min(omitted, summary.turns) * FAR_CHARS
    omissions = {"omitted_turns": omitted, "omitted_chars": omitted_chars, "omitted_summed_chars": summed_chars}
    past = EarlierMessages(messages=history, summary=summary, **omissions)

    def best(head: list[Message], most: int) -> tuple[list[Message], int] | None:
        prompts = [[*head, *(m for turn in turns[len(turns) - n :] for m in turn), *fresh] for n in range(most + 1)]
        fitting = [n for n, prompt in enumerate(prompts) if count(prompt) <= budget]
        return (prompts[max(fitting)], max(fitting)) if 0 in fitting else None

    if limits.summary and summary is None:
        with pytest.raises(InvalidRequest, match="the conversation has none"):
            built(past, new, window, limits=limits)
        return
    found, held = best(system, min(wanted, len(turns))), None
    if found is not None:
        held = ContextHeld(turns=found[1], dropped_turns=turns_of_all - found[1])
    if summary is not None and limits.summary is not False and (limits.summary or (found and found[1] < wanted)):
        told = "\n\n".join([*(m["content"] for m in system), f"{SUMMARY_IS}\n{summary.text}"])
        after = max(RECENT_TURNS, turns_of_all - summary.turns)
        summed = best([{"role": "system", "content": told}], min(wanted, after, len(turns)))
        if summed is not None or limits.summary:
            found = summed
        if summed is not None:
            told = min(summary.turns, turns_of_all - summed[1])
            dropped = turns_of_all - summed[1] - told
            held = ContextHeld(
                turns=summed[1], summarized_turns=told, dropped_turns=dropped, summary_through=summary.through
            )
    if found is None:
        with pytest.raises(ContextLengthExceeded):
            built(past, new, window, limits=limits)
        return
    context = built(past, new, window, limits=limits)
    begin, every = held.summarized_turns, [*(far[n : n + 2] for n in range(0, len(far), 2)), *turns]
    dropped = [m for turn in every[begin : begin + held.dropped_turns] for m in turn]
    about = round(chars(dropped) * context.prompt_tokens / max(1, chars(context.messages)))
    assert (context.messages, context.held) == (found[0], replace(held, dropped_tokens=about))
    assert context.prompt_tokens == count(context.messages) <= budget


@given(history=HISTORY, cut=st.integers(0, 14))
def test_a_turn_is_whole_once_the_next_begins(history: list[Message], cut: int) -> None:
    cut = min(cut, len(history))
    begins = turn_begins(history)
    ends = [*begins[1:], len(history)] if begins else []
    assert whole_turns(history, cut) == sum(end <= cut for end in ends)


def test_a_past_that_is_cut_for_an_engine_is_known_to_be_cut() -> None:
    """Nobody may take what was handed on for all there is: the summary stands for what was left out."""
    summary = Summary(text="long ago", through=9, turns=4)
    past = recent_past(
        EarlierMessages(messages=conversation(6, (10,)), summary=summary), chars=2 * (10 + MESSAGE_CHARS) * 3
    )
    assert (len(past.messages), past.omitted_turns) == (6, 3)
    context = built(past, NOW, 10_000, 1)
    held = ContextHeld(turns=3, summarized_turns=3, dropped_turns=0, summary_through=9, dropped_tokens=0)
    assert context.held == held
    assert context.messages[0] == {"role": "system", "content": f"{SUMMARY_IS}\nlong ago"}


@given(history=HISTORY, new=NEW, room=st.integers(20, 200), cut=st.integers(0, 400), summary=SUMMARIES)
def test_what_was_dropped_is_the_same_whether_a_past_was_cut_or_not(
    history: list[Message], new: list[Message], room: int, cut: int, summary: Summary | None
) -> None:
    """As long as what fits was left, the engine says the same of a past as the worker, which has all of it."""
    whole = EarlierMessages(messages=history, summary=summary)
    part = recent_past(recent_past(whole, chars=cut + 100), chars=cut)
    limits = ContextLimits(last_turns=min(1, len(turn_begins(part.messages))))

    def held(past: EarlierMessages) -> ContextHeld | None:
        try:
            return built(past, new, room, limits=limits).held
        except ContextLengthExceeded:
            return None

    known = replace(whole, chars=list(itertools.accumulate(map(chars_of, [*history, *new]))))
    assert held(known) == held(whole)
    assert replace(recent_past(known, chars=cut), chars=None) == recent_past(whole, chars=cut)
    if part.messages:
        assert held(part) == held(whole)


@pytest.mark.parametrize("length", [10, 1_000])
def test_what_was_dropped_is_foretold_by_the_density_of_the_prompt(length: int) -> None:
    history = conversation(50, (length,))
    held = built(EarlierMessages(messages=history), NOW, 100_000, 1, ContextLimits(last_turns=5)).held
    assert (held.dropped_turns, held.dropped_tokens) == (45, pytest.approx(count(history[:-10]), rel=0.05))


# -- what it costs, and that it gives what it gave before


def reference_kept(history: Sequence[Message], new: Sequence[Message], budget: int, most: int) -> int:
    """How many turns the former function kept: all when they fit, else bisected."""
    old_system, turns = split_turns(history)
    system, fresh = system_and_fresh(old_system, history, new)

    def tokens(kept: int) -> int:
        return count([*system, *(m for turn in turns[len(turns) - kept :] for m in turn), *fresh])

    if most == 0 or tokens(most) <= budget:
        return most
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if tokens(middle) <= budget else (low, middle)
    return low


class Counter:
    """Counts tokens, and what the counting cost. `tokens_per_char` may differ from message to message."""

    def __init__(self, tokens_per_char: Sequence[float] = (0.25,)) -> None:
        self.rates = tokens_per_char
        self.calls = self.tokens = 0

    def one(self, message: Message) -> int:
        text = message["content"]
        return 4 + round(len(text) * self.rates[len(text) % len(self.rates)])

    def __call__(self, messages: Sequence[Message]) -> int:
        self.calls += 1
        counted = sum(map(self.one, messages)) + 1
        self.tokens += counted
        return counted


@given(history=HISTORY, new=NEW, budget=st.integers(1, 250), most=st.integers(0, 14))
def test_ordinary_histories_are_cut_as_before(
    history: list[Message], new: list[Message], budget: int, most: int
) -> None:
    _, turns = split_turns(history)
    most = min(most, len(turns))
    try:
        context = built(EarlierMessages(messages=history), new, budget, limits=ContextLimits(last_turns=most))
    except ContextLengthExceeded:
        return
    assert len(turns) - context.held.dropped_turns == reference_kept(history, new, budget, most)


def conversation(turns: int, sizes: Sequence[int]) -> list[Message]:
    roles = ("user", "assistant")
    return [
        {"role": role, "content": "x" * sizes[(2 * number + place) % len(sizes)]}
        for number in range(turns)
        for place, role in enumerate(roles)
    ]


@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=30),
    rates=st.sampled_from([(0.25,), (0.25, 0.3, 0.2), (1.0,), (2.5,), (0.02,), (0.02, 2.0), (0.0,)]),
    window=st.sampled_from([256, 2048, 8192]),
)
def test_the_cost_follows_the_window_whatever_the_texts_are(
    sizes: list[int], rates: tuple[float, ...], window: int
) -> None:
    counter = Counter(rates)
    context = built(EarlierMessages(messages=conversation(5000, sizes)), NOW, window, 64, count=counter)
    one_more = conversation(5000, sizes)[2 * (context.held.dropped_turns - 1) :]
    assert context.held.dropped_turns > 0
    assert context.prompt_tokens <= window - 64 < Counter(rates)([*one_more, *NOW])
    assert counter.calls <= 24
    largest_turn = 2 * (3000 * max(rates) + 4)
    assert counter.tokens <= counter.calls * 8 * (window + largest_turn)


@pytest.mark.parametrize("rate", [0.22, 0.25, 0.3, 0.4])
def test_five_thousand_turns_cost_like_fifty(rate: float) -> None:
    costs = [Counter((rate, rate * 0.9, rate * 1.1)) for _ in range(2)]
    for counter, turns in zip(costs, (50, 5000), strict=True):
        built(EarlierMessages(messages=conversation(turns, (120, 480, 60, 900, 240))), NOW, 2048, 256, count=counter)
    assert costs[1].tokens == costs[0].tokens
    assert costs[1].calls == costs[0].calls <= 7
    assert costs[1].tokens <= 6 * 2048


@given(history=HISTORY, chars=st.integers(0, 600))
def test_the_recent_history_is_the_newest_system_message_and_whole_turns(history: list[Message], chars: int) -> None:
    past = recent_past(EarlierMessages(messages=history), chars=chars)
    recent, omitted = list(past.messages), past.omitted_turns
    old_system, turns = split_turns(history)
    if omitted == 0:
        assert recent == history
        return
    kept = turns[omitted:]
    assert recent == [*old_system[-1:], *(message for turn in kept for message in turn)]
    sizes = [sum(len(message["content"]) + MESSAGE_CHARS for message in turn) for turn in turns]
    inner = [m for m in history if m["role"] == "system"]
    if not inner:
        assert sum(sizes[omitted:]) <= chars < sum(sizes[omitted - 1 :])
