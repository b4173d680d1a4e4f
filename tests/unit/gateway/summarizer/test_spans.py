"""Which span of a conversation is due: after whole turns or tokens, four turns before the end."""

from __future__ import annotations

from typing import Any

from kit.gateway_records import conversation_message
from penstock.gateway.summarizer.spans import Spans, tokens_of
from penstock.schemas.records import ConversationMessage, SummarizePolicy, Usage

EVERY_TWO = SummarizePolicy(every_turns=2)


message = conversation_message


def summary(through: int) -> ConversationMessage:
    return conversation_message("assistant", covers_through=through)


def turns(spans: Spans, count: int, offset: int = 0, **more: Any) -> int:
    """That many turns of a question and an answer; the next offset."""
    for number in range(count):
        spans.add(offset + 2 * number, message("user", **more))
        spans.add(offset + 2 * number + 1, message("assistant", **more))
    return offset + 2 * count


def test_a_span_is_due_when_four_more_turns_have_begun() -> None:
    spans = Spans()
    at = turns(spans, 5)
    assert spans.due(EVERY_TWO) is None
    spans.add(at, message("user"))
    assert spans.due(EVERY_TWO) == 3


def test_messages_of_a_summary_do_not_count_again() -> None:
    spans = Spans()
    at = turns(spans, 8)
    spans.add(at, summary(3))
    assert spans.covered == 3
    assert spans.due(EVERY_TWO) == 7
    spans.add(at + 1, summary(7))
    assert spans.due(EVERY_TWO) is None
    turns(spans, 2, at + 2)
    assert spans.due(EVERY_TWO) == 11


def test_the_same_span_is_found_when_reading_starts_after_the_last_summary() -> None:
    spans = Spans(covered=3)
    at = turns(spans, 6, 4)
    spans.add(at, summary(3))
    assert spans.due(EVERY_TWO) == 7


def test_a_turn_whose_question_is_already_summarized_counts_as_a_turn() -> None:
    whole, resumed = Spans(), Spans(covered=2)
    at = turns(whole, 6)
    whole.add(at, summary(2))
    for offset in range(3, at):
        resumed.add(offset, message("user" if offset % 2 == 0 else "assistant"))
    assert whole.turns == resumed.turns == 5
    assert whole.due(SummarizePolicy(every_turns=1)) == resumed.due(SummarizePolicy(every_turns=1)) == 3


def test_system_messages_and_tools_begin_no_turn() -> None:
    spans = Spans()
    for offset, role in enumerate(["system", "user", "user", "assistant", "tool", "assistant", "system"]):
        spans.add(offset, message(role))
    assert spans.turns == 1
    turns(spans, 4, 7)
    assert spans.due(SummarizePolicy(every_turns=1)) == 6


def test_tokens_are_counted_by_the_model_or_by_four_bytes() -> None:
    assert tokens_of(message("user", content="12345678")) == 2
    assert tokens_of(message("user", content="é" * 4)) == 2
    assert tokens_of(message("user", content="1")) == 1
    assert tokens_of(message("assistant", content="1" * 400, usage=Usage(prompt_tokens=9, completion_tokens=7))) == 7


def test_tokens_make_a_span_due_and_the_first_of_both_counts() -> None:
    spans = Spans()
    turns(spans, 10, content="x" * 40)  # 20 tokens a turn
    assert spans.due(SummarizePolicy(every_tokens=50)) == 5
    assert spans.due(SummarizePolicy(every_tokens=121)) is None
    assert spans.due(SummarizePolicy(every_tokens=50, every_turns=2)) == 3
    assert spans.due(SummarizePolicy(every_tokens=20, every_turns=2)) == 1


def test_without_turns_and_tokens_nothing_is_ever_due() -> None:
    spans = Spans()
    turns(spans, 50)
    assert spans.due(SummarizePolicy()) is None
    assert spans.due(SummarizePolicy(every_turns=0, every_tokens=0)) is None


def test_a_span_that_was_given_up_is_part_of_the_next_span() -> None:
    spans = Spans()
    at = turns(spans, 7)
    spans.give_up(3)
    assert spans.due(EVERY_TWO) is None
    at = turns(spans, 1, at)
    assert spans.due(EVERY_TWO) == 7
    spans.add(at, summary(7))
    turns(spans, 2, at + 1)
    assert spans.due(EVERY_TWO) == 11
