"""Two conversations beside each other: what both were asked, and what each answered. Pure.

An exchange is one question, all that was said up to an answer, with that answer. What both conversations inherit from
one log is left out. The others are paired by their questions, in order.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

from penstock.cli.exported import Line, said

RunTimes = Mapping[str, int]
"""Milliseconds by request."""


@dataclass(slots=True)
class Exchange:
    """`asked` is empty where a conversation begins with an answer, `answered` where an answer is missing."""

    asked: list[Line] = field(default_factory=list[Line])
    answered: list[Line] = field(default_factory=list[Line])


@dataclass(frozen=True, slots=True)
class Pair:
    """An exchange of each conversation with the same question; or of one of them alone."""

    one: Exchange | None
    other: Exchange | None

    @property
    def asked(self) -> list[Line]:
        found = self.one or self.other
        return [] if found is None else found.asked

    @property
    def is_equal(self) -> bool | None:
        """Whether both answers say the same; None where only one conversation has the question."""
        if self.one is None or self.other is None:
            return None
        return _key(self.one.answered) == _key(self.other.answered)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    shared: int
    """Exchanges at the beginning that both inherit."""
    pairs: list[Pair]


def exchanges(messages: Iterable[Line]) -> list[Exchange]:
    """Each begins with what is said behind an answer."""
    found: list[Exchange] = []
    for line in messages:
        is_answer = line["role"] == "assistant"
        if not found or (found[-1].answered and not is_answer):
            found.append(Exchange())
        (found[-1].answered if is_answer else found[-1].asked).append(line)
    return found


def compared(one: Iterable[Line], other: Iterable[Line]) -> Comparison:
    """Of the messages of two exports."""
    ones, others = exchanges(one), exchanges(other)
    shared = 0
    for mine, theirs in zip(ones, others, strict=False):
        if _places(mine) != _places(theirs):
            break
        shared += 1
    return Comparison(shared=shared, pairs=_paired(ones[shared:], others[shared:]))


def _paired(ones: Sequence[Exchange], others: Sequence[Exchange]) -> list[Pair]:
    """In the order of both, each exchange once."""
    keys = ([_key(one.asked) for one in ones], [_key(other.asked) for other in others])
    found: list[Pair] = []
    for kind, begin, end, other_begin, other_end in SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        if kind == "equal":
            found += map(Pair, ones[begin:end], others[other_begin:other_end])
        else:
            found += [Pair(one, None) for one in ones[begin:end]]
            found += [Pair(None, other) for other in others[other_begin:other_end]]
    return found


def _key(messages: Iterable[Line]) -> str:
    return json.dumps([said(line) for line in messages], sort_keys=True)


def _places(exchange: Exchange) -> list[tuple[Any, ...]]:
    """A message that two conversations inherit has one place in both, and one request brought it."""
    lines = [*exchange.asked, *exchange.answered]
    return [(line["source"]["offset"], line["source"].get("request_id")) for line in lines]


# -- as JSON and as words


def pair_json(pair: Pair, names: tuple[str, str], run_ms: RunTimes) -> dict[str, Any]:
    """A pair for programs; the answers by the conversations' ids."""
    answers = (
        None if one is None else [_message_json(line, run_ms) for line in one.answered]
        for one in (pair.one, pair.other)
    )
    return {
        "asked": [_message_json(line, run_ms) for line in pair.asked],
        "equal": pair.is_equal,
        "answers": dict(zip(names, answers, strict=True)),
    }


def _message_json(line: Line, run_ms: RunTimes) -> dict[str, Any]:
    source = line["source"]
    facts = {
        name: source[name] for name in ("offset", "request_id", "model", "finish_reason", "usage") if name in source
    }
    if (time_ms := _run_ms(line, run_ms)) is not None:
        facts["run_ms"] = time_ms
    return {**{name: value for name, value in line.items() if name not in ("type", "source")}, **facts}


def _run_ms(line: Line, run_ms: RunTimes) -> int | None:
    source = line["source"]
    return run_ms.get(source.get("request_id", "")) if source["direction"] == "out" else None


def words_of(messages: Iterable[Line]) -> str:
    """What messages say, for people."""
    return "\n".join(filter(None, map(_words, messages)))


def _words(line: Line) -> str:
    calls = (call["function"] for call in line.get("tool_calls", ()))
    parts = [f"[image {image['artifact_id']}]" for image in line.get("images", ())]
    parts += [line["content"], *(f"{call['name']}({call['arguments']})" for call in calls)]
    return "\n".join(filter(None, parts))


def cost_of(exchange: Exchange, run_ms: RunTimes) -> str:
    """Who answered, with how many tokens, in which time; as far as it is known."""
    facts: list[str] = []
    for line in exchange.answered:
        source = line["source"]
        usage, time_ms = source.get("usage") or {}, _run_ms(line, run_ms)
        facts += [source["model"]] if source.get("model") else []
        facts += [f"{usage['completion_tokens']} tokens"] if usage.get("completion_tokens") else []
        facts += [f"{time_ms} ms"] if time_ms is not None else []
    return ", ".join(facts)
