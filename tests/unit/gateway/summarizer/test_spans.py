"""Which span of a conversation is due: after whole turns or tokens, four turns before the end."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from kit.gateway_records import conversation_message as message
from penstock.gateway.summarizer.spans import Spans, tokens_of
from penstock.schemas.records import SummarizePolicy, Usage

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
TURN = "ua"
EVERY_TWO = SummarizePolicy(every_turns=2)


def fed(spans: Spans, records: Iterable[str | int], offset: int = 0, **fields: Any) -> int:
    """With messages by their roles, and summaries as the offsets that they cover; the next offset."""
    for record in records:
        role, more = (ROLES[record], fields) if isinstance(record, str) else ("assistant", {"covers_through": record})
        spans.add(offset, message(role, **more))
        offset += 1
    return offset


@pytest.mark.parametrize(
    ("covered", "records", "turns", "every_turns", "due"),
    [
        # When four more turns have begun.
        (-1, TURN * 5, 5, 2, None),
        (-1, TURN * 5 + "u", 6, 2, 3),
        # What a summary covers does not count again.
        (-1, [*TURN * 8, 3], 6, 2, 7),
        (-1, [*TURN * 8, 3, 7], 4, 2, None),
        (-1, [*TURN * 8, 3, 7, *TURN * 2], 6, 2, 11),
        # The same is found when reading starts after the last summary.
        (3, [*TURN * 6, 3], 6, 2, 7),
        # A turn whose question is summarized counts as a turn.
        (-1, [*TURN * 6, 2], 5, 1, 3),
        (2, "a" + TURN * 4, 5, 1, 3),
        # System messages and tools begin no turn, nor does a second question.
        (-1, "suuatas" + TURN * 4, 5, 1, 6),
        (-1, TURN * 50, 50, None, None),
        (-1, TURN * 50, 50, 0, None),
    ],
)
def test_a_span_is_due_after_whole_turns(
    covered: int, records: Iterable[str | int], turns: int, every_turns: int | None, due: int | None
) -> None:
    spans = Spans(covered)
    fed(spans, records, covered + 1)
    assert spans.turns == turns
    assert spans.due(SummarizePolicy(every_turns=every_turns)) == due
    assert spans.covered == max([covered, *(one for one in records if isinstance(one, int))])


@pytest.mark.parametrize(
    ("every_tokens", "every_turns", "due"),
    [(50, None, 5), (121, None, None), (50, 2, 3), (20, 2, 1), (0, 0, None), (None, None, None)],
)
def test_the_first_of_turns_and_tokens_counts(
    every_tokens: int | None, every_turns: int | None, due: int | None
) -> None:
    spans = Spans()
    fed(spans, TURN * 10, content="x" * 40)  # 20 tokens a turn
    assert spans.due(SummarizePolicy(every_tokens=every_tokens, every_turns=every_turns)) == due


@pytest.mark.parametrize(
    ("fields", "tokens"),
    [
        ({"content": "12345678"}, 2),
        ({"content": "é" * 4}, 2),
        ({"content": "1"}, 1),
        ({"content": "1" * 400, "usage": Usage(prompt_tokens=9, completion_tokens=7)}, 7),
    ],
)
def test_tokens_are_counted_by_the_model_or_by_four_bytes(fields: dict[str, Any], tokens: int) -> None:
    assert tokens_of(message("assistant", **fields)) == tokens


def test_a_span_that_was_given_up_is_part_of_the_next_span() -> None:
    spans = Spans()
    at = fed(spans, TURN * 7)
    spans.give_up(3)
    assert spans.due(EVERY_TWO) is None
    at = fed(spans, TURN, at)
    assert spans.due(EVERY_TWO) == 7
    fed(spans, [7, *TURN * 2], at)
    assert spans.due(EVERY_TWO) == 11
