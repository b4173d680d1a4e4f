"""What an engine gets of a conversation: the messages before a request's own, and what stands for the oldest. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A text that stands for the oldest `turns` turns, up to the record at the offset `through`."""

    text: str
    through: int
    turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierMessages:
    """Messages in order. `omitted_turns`: so many turns stood in front of them, with so many characters, of which
    `omitted_summed_chars` are of turns that the summary stands for.

    `chars`: of each message, the characters of all up to it (`chars_of`); there may be more than messages. Who does not
    know them leaves them out.
    """

    messages: Sequence[Message]
    summary: Summary | None = None
    omitted_turns: int = 0
    omitted_chars: int = 0
    omitted_summed_chars: int = 0
    chars: Sequence[int] | None = None


NO_EARLIER_MESSAGES = EarlierMessages(messages=())

MESSAGE_CHARS = 16
"""What a message adds to its text in a template, in characters: foretelling needs no more than a guess."""


def chars_of(message: Message) -> int:
    """Characters of a message, with what the template adds. System messages stand for themselves: 0."""
    if message["role"] == "system":
        return 0
    content = message.get("content")
    return MESSAGE_CHARS + (len(content) if isinstance(content, str) else 0)


def turn_begins(messages: Sequence[Message]) -> list[int]:
    """Where turns begin, oldest first: at questions that follow an answer, and at the first message of all."""
    begins: list[int] = []
    before: str | None = None
    for number, message in enumerate(messages):
        role = message["role"]
        if role == "system":
            continue
        if before is None or (role == "user" and before != "user"):
            begins.append(number)
        before = role
    return begins


def whole_turns(messages: Sequence[Message], count: int) -> int:
    """How many turns lie entirely within the first `count` messages."""
    begins = turn_begins(messages)
    return sum(end <= count for end in [*begins[1:], len(messages)]) if begins else 0
