"""The context of a turn: which of a conversation's messages go into the prompt.

The system prompt is kept, the new messages are kept, and of the history the newest turns that fit, whole. A turn is a
run of user messages with the answers that follow it. Where not all turns fit, a summary stands for the oldest, and the
turns after it follow: that prompt begins alike from turn to turn, so that engines know its beginning already.

The cost follows the window, not the history. Counting renders the model's template and tokenizes what it gives, so few
candidates are counted, none of them much larger than what fits: the tokens of those counted before foretell those of
the next by their characters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from penstock.processors.earlier_messages import NO_EARLIER_MESSAGES, EarlierMessages, Message, chars_of, turn_begins
from penstock.schemas.errors import ContextLengthExceeded, InvalidRequest
from penstock.schemas.limits import RECENT_TURNS
from penstock.schemas.records import ContextHeld, ContextLimits

Count = Callable[[Sequence[Message]], int]

FIRST_TOKENS_PER_CHAR = 0.35
"""Before anything is counted. English has 0.25; a guess that is too low costs more than one that is too high."""
SUMMARY_IS = "Summary of the conversation so far:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """The messages in order, what they hold of the past, and the prompt's length in tokens."""

    messages: list[Message]
    held: ContextHeld
    prompt_tokens: int


class _History:
    """A history seen from its end: the newest turns, found as far as they are asked for."""

    def __init__(self, past: EarlierMessages) -> None:
        history = past.messages
        self._history, self._chars_through = history, past.chars
        self._begins = turn_begins(history)
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
            self._chars.append(self._chars[-1] + sum(map(chars_of, messages)))
        return self._chars[turns]

    def chars_between(self, first: int, last: int) -> int:
        """Characters of the turns from number `first` to before `last`, counted from the oldest, 0."""
        if first >= last:
            return 0
        begin, end = self._begins[first], self._begins[last] if last < self.turns else len(self._history)
        if (through := self._chars_through) is None:
            return sum(map(chars_of, self._history[begin:end]))
        return through[end - 1] - (through[begin - 1] if begin else 0)

    def within(self, chars: float, low: int, high: int) -> int:
        """The most turns, low ≤ n ≤ high, whose characters stay within the limit; `low` if none does."""
        turns = low
        while turns < high and self.chars(turns + 1) <= chars:
            turns += 1
        return turns


def recent_past(past: EarlierMessages, *, chars: int) -> EarlierMessages:
    """The newest system message and the newest turns within so many characters, with the summary of older ones.

    For a past that is handed on before anybody can count its tokens.
    """
    told = _History(past)
    kept = told.within(chars, 0, told.turns)
    if kept == told.turns:
        return past
    cut = told.turns - kept
    summed = 0 if past.summary is None else min(cut, past.summary.turns - past.omitted_turns)
    return replace(
        past,
        messages=[*told.system(), *told.newest(kept)],
        omitted_turns=past.omitted_turns + cut,
        omitted_chars=past.omitted_chars + told.chars_between(0, cut),
        omitted_summed_chars=past.omitted_summed_chars + told.chars_between(0, summed),
        chars=None,
    )


@dataclass(frozen=True, slots=True)
class _Room:
    """What a prompt may take, and how it is refused."""

    window_tokens: int
    max_output_tokens: int
    limits: ContextLimits

    @property
    def budget(self) -> int:
        room, most = self.window_tokens - self.max_output_tokens, self.limits.max_tokens
        return room if most is None else min(room, most)

    def check(self, least: int) -> None:
        """Raises ContextLengthExceeded for a prompt that cannot be made shorter than `least`, in tokens."""
        budget = self.budget
        if least <= budget:
            return
        if (need := least + self.max_output_tokens) > self.window_tokens:
            capacity = self.window_tokens
            message = (
                f"the prompt has {least} tokens and {self.max_output_tokens} shall follow; the window is {capacity}"
            )
        else:
            need, capacity = least, max(0, budget)
            message = f"the prompt has {least} tokens; context.max_tokens allows {capacity}"
        details = {"need": need, "capacity": capacity, "unit": "tokens"}
        raise ContextLengthExceeded(message, param="payload.messages", details=details)


def build_context(
    past: EarlierMessages | None,
    new: Sequence[Message],
    *,
    window_tokens: int,
    max_output_tokens: int,
    limits: ContextLimits | None,
    count: Count,
) -> Context:
    """The prompt's messages within window - output and the caller's limits.

    `count` gives the tokens of a list of messages as the model's template renders it; more turns never have fewer. A
    newer system message replaces older ones, and is before the history; without a history all messages stay where
    they are. The summary stands with the system message.

    Raises ContextLengthExceeded when the system prompt and the new messages alone do not fit, InvalidRequest when the
    limits require a summary and there is none.
    """
    past, limits = past or NO_EARLIER_MESSAGES, limits or ContextLimits()
    history, room = _History(past), _Room(window_tokens, max_output_tokens, limits)
    context = _chosen(past, history, new, room, count)
    return replace(context, held=replace(context.held, dropped_tokens=_dropped_tokens(past, history, context)))


def _dropped_tokens(past: EarlierMessages, history: _History, context: Context) -> int:
    """About how many tokens the turns have that were left out, as dense as the prompt. To count them would cost more
    than the prompt."""
    held, omitted = context.held, past.omitted_turns
    if held.dropped_turns == 0:
        return 0
    end = held.summarized_turns + held.dropped_turns
    chars = history.chars_between(max(held.summarized_turns, omitted) - omitted, end - omitted)
    if held.summarized_turns < omitted:
        chars += past.omitted_chars - (past.omitted_summed_chars if held.summarized_turns else 0)
    return round(chars * context.prompt_tokens / max(1, sum(map(_prompt_chars, context.messages))))


def _prompt_chars(message: Message) -> int:
    """As `chars_of`, also of a system message."""
    return chars_of({**message, "role": "user"}) if message["role"] == "system" else chars_of(message)


def _chosen(past: EarlierMessages, history: _History, new: Sequence[Message], room: _Room, count: Count) -> Context:
    """The context, without the tokens of what was dropped. Raises as `build_context`."""
    summary, limits = past.summary, room.limits
    if limits.summary and summary is None:
        raise InvalidRequest("context.summary is required, and the conversation has none", param="context.summary")
    system, fresh = _around(history, new) if past.messages or summary else ([], list(new))
    all_turns = past.omitted_turns + history.turns
    most = all_turns if limits.last_turns is None else limits.last_turns
    plain = None
    if not limits.summary:
        plain = _fitted(history, system, fresh, room, min(most, history.turns), count)
        dropped = all_turns - plain.held.turns
        plain = replace(plain, held=replace(plain.held, dropped_turns=dropped))
        if summary is None or limits.summary is False or plain.held.turns >= min(most, all_turns):
            return plain
    assert summary is not None
    after = max(RECENT_TURNS, all_turns - summary.turns)
    summed = [_with_summary(system, summary.text)]
    try:
        context = _fitted(history, summed, fresh, room, min(most, after, history.turns), count)
    except ContextLengthExceeded:
        if plain is None:
            raise
        return plain
    left_out = all_turns - context.held.turns
    summarized = min(summary.turns, left_out)
    held = replace(
        context.held,
        summarized_turns=summarized,
        dropped_turns=left_out - summarized,
        summary_through=summary.through,
    )
    return replace(context, held=held)


def _fitted(
    history: _History, system: list[Message], fresh: list[Message], room: _Room, most: int, count: Count
) -> Context:
    """The newest turns that fit between two lists of messages, `most` at most. Raises ContextLengthExceeded."""

    def assemble(kept: int) -> list[Message]:
        return [*system, *history.newest(kept), *fresh]

    def tokens(kept: int) -> int:
        return count(assemble(kept))

    room.check(least := tokens(0))
    kept, length = _most_that_fit(history, most, room.budget, tokens, least)
    return Context(messages=assemble(kept), held=ContextHeld(turns=kept), prompt_tokens=length)


def _with_summary(system: Sequence[Message], text: str) -> Message:
    """One system message: templates allow a single one, at the beginning."""
    told = "\n\n".join([*(str(message["content"]) for message in system), f"{SUMMARY_IS}\n{text}"])
    return {"role": "system", "content": told}


def identity(messages: Sequence[Message]) -> tuple[int, ...]:
    """Distinguishes equal lists of messages while one context is built."""
    return tuple(map(id, messages))


def _around(history: _History, new: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """What is before the turns of a history, and behind them."""
    system = [message for message in new if message["role"] == "system"] or history.system()
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
                # So far everything fits: what was counted gives the density of the text.
                rate = max(counted - least, 1) / max(1, past.chars(middle))
            low, length = middle, counted
        else:
            high, beyond = middle, counted
        foretell = high - low <= gap // 2 or not foretell
    return low, length
