"""Two conversations beside each other, without a gateway."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from penstock.cli.commands import conversation_compare
from penstock.cli.comparisons import Comparison, compared, cost_of, exchanges, pair_json, words_of

Line = dict[str, Any]
CALL = {"id": "c1", "type": "function", "function": {"name": "gate", "arguments": '{"n": 1}'}}
IMAGE = {"artifact_id": "a", "media_type": "image/png", "size_bytes": 3, "sha256": "d"}


def line(role: str, content: str, offset: int = 0, request_id: str = "r", **source: Any) -> Line:
    direction = "out" if source else "in"
    facts = {"offset": offset, "request_id": request_id, "direction": direction, **source}
    return {"type": "message", "role": role, "content": content, "source": facts}


def turns(name: str, *said: tuple[str, str], begin: int = 0) -> list[Line]:
    """Questions with their answers, by requests of `name`."""
    found: list[Line] = []
    for number, (question, answer) in enumerate(said):
        place = begin + 2 * number
        found.append(line("user", question, place, f"{name}{number}"))
        found.append(line("assistant", answer, place + 1, f"{name}{number}", model=name))
    return found


def paired(found: Comparison) -> list[tuple[str, bool | None]]:
    return [(words_of(pair.asked), pair.is_equal) for pair in found.pairs]


def test_an_exchange_ends_with_its_answers() -> None:
    said = "assistant Hello, system s, user q0, assistant a0, assistant a1, tool t, assistant a2, user q1"
    messages = [line(*words.split()) for words in said.split(", ")]
    found = [(words_of(one.asked), words_of(one.answered)) for one in exchanges(messages)]
    assert found == [("", "Hello"), ("s\nq0", "a0\na1"), ("t", "a2"), ("q1", "")]


def test_shared_exchanges_are_left_out() -> None:
    shared = turns("root", ("q0", "a0"))
    one = [*shared, *turns("one", ("q1", "a1"), begin=2)]
    other = [*shared, *turns("other", ("q1", "a1"), begin=3)]
    found = compared(one, other)
    assert (found.shared, paired(found)) == (1, [("q1", True)])
    assert compared(one, one).pairs == []
    copies = compared(shared, turns("copy", ("q0", "a0")))
    assert (copies.shared, paired(copies)) == (0, [("q0", True)]), "at the same offset, and by another request"


def test_a_question_that_both_inherit_has_two_answers() -> None:
    question = line("user", "q0", 0, "r")
    found = compared([question, line("assistant", "a", 1, "r", model="m")], [question, *turns("s", ("q1", "b"))[1:]])
    assert (found.shared, paired(found)) == (0, [("q0", False)])


def test_pairs_are_found_by_their_questions_in_order() -> None:
    one = turns("one", ("q0", "a"), ("only", "a"), ("go on", "a"), ("go on", "a"))
    other = turns("other", ("q0", "b"), ("go on", "a"), ("go on", "b"), ("new", "b"))
    assert paired(compared(one, other)) == [
        ("q0", False), ("only", None), ("go on", True), ("go on", False), ("new", None)
    ]  # fmt: skip


@given(st.lists(st.sampled_from("abc"), max_size=8), st.lists(st.sampled_from("abc"), max_size=8))
def test_each_exchange_stands_once_and_in_its_order(ones: list[str], others: list[str]) -> None:
    one, other = turns("one", *((q, "x") for q in ones)), turns("other", *((q, "x") for q in others))
    found = compared(one, other)
    assert [pair.one for pair in found.pairs if pair.one is not None] == exchanges(one)
    assert [pair.other for pair in found.pairs if pair.other is not None] == exchanges(other)
    for pair in found.pairs:
        assert pair.one is not None or pair.other is not None
        assert (pair.is_equal is None) == (pair.one is None or pair.other is None)
        if pair.one is not None and pair.other is not None:
            assert words_of(pair.one.asked) == words_of(pair.other.asked)
    if ones == others:
        assert all(pair.is_equal for pair in found.pairs)


def test_a_pair_as_json_has_its_messages_and_cost() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}
    one = [line("user", "q", 0, "r1"), line("assistant", "a", 1, "r1", model="m", usage=usage, finish_reason="stop")]
    (pair,) = compared(one, [line("user", "q", 0, "r2")]).pairs
    question = {"role": "user", "content": "q", "offset": 0, "request_id": "r1"}
    facts = {"offset": 1, "request_id": "r1", "model": "m", "usage": usage, "finish_reason": "stop", "run_ms": 40}
    answer = {"role": "assistant", "content": "a", **facts}
    assert pair_json(pair, ("one", "other"), {"r1": 40}) == {
        "asked": [question],
        "equal": False,
        "answers": {"one": [answer], "other": []},
    }
    assert pair.one is not None
    assert cost_of(pair.one, {"r1": 40}) == "m, 3 tokens, 40 ms"
    assert cost_of(pair.one, {}) == "m, 3 tokens"


def test_calls_and_images_as_words() -> None:
    shown = {**line("assistant", "Look."), "tool_calls": [CALL], "images": [IMAGE]}
    assert words_of([shown, line("user", "")]) == '[image a]\nLook.\ngate({"n": 1})'


@pytest.mark.parametrize(("width", "beside"), [(100, True), (60, False)])
def test_answers_are_in_columns_if_the_terminal_is_wide(
    monkeypatch: pytest.MonkeyPatch, width: int, beside: bool
) -> None:
    printed = io.StringIO()
    console = Console(file=printed, width=width, force_terminal=True, color_system=None)
    monkeypatch.setattr(conversation_compare, "console", console)
    (pair,) = compared(turns("one", ("q [b]", "first [/b]")), turns("other", ("q [b]", "second"))).pairs
    conversation_compare.print_pair(7, pair, ("trip", "trip-2"), {})
    lines = [text.rstrip() for text in printed.getvalue().splitlines()]
    assert lines[:2] == ["7. different", "user: q [b]"]
    heads = [text.split() for text in lines[2:] if text]
    both = [["trip", "(one)", "trip-2", "(other)"], ["first", "[/b]", "second"]]
    stacked = [["trip", "(one)"], ["first", "[/b]"], ["trip-2", "(other)"], ["second"]]
    assert heads == (both if beside else stacked)
