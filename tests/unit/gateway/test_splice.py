"""StreamSplice: over any attempts and any chunks the sent text is a prefix of one answer, or an error."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.openai.splice import CallSplice, LogprobSplice, StreamSplice
from penstock.schemas.errors import StreamRestarted

TEXT = st.text(alphabet="abé🙂", max_size=20)


def cut(data: st.DataObject, text: str) -> list[tuple[int, str]]:
    """The text as chunks in sequence, some of them reaching back over what came before."""
    chunks: list[tuple[int, str]] = []
    position = 0
    while position < len(text):
        end = data.draw(st.integers(position + 1, len(text)))
        start = data.draw(st.integers(0, position))
        chunks.append((start, text[start:end]))
        position = end
    return chunks


@given(st.data(), TEXT)
def test_one_attempt_is_sent_exactly(data: st.DataObject, text: str) -> None:
    splice = StreamSplice()
    sent = "".join(splice.chunk(part, offset) for offset, part in cut(data, text))
    assert sent == splice.sent == text
    assert splice.finish(text) == ""


@given(st.data(), TEXT, st.lists(st.integers(0, 20), max_size=4))
def test_attempts_that_agree_are_one_text(data: st.DataObject, text: str, deaths: list[int]) -> None:
    splice = StreamSplice()
    sent = ""
    for length in deaths:
        for offset, part in cut(data, text[:length]):
            sent += splice.chunk(part, offset)
            assert text.startswith(sent)
        splice.restart()
    for offset, part in cut(data, text):
        sent += splice.chunk(part, offset)
    assert sent + splice.finish(text) == text


@given(st.data(), TEXT, TEXT)
def test_another_text_is_a_restart_or_extends_what_was_sent(data: st.DataObject, first: str, second: str) -> None:
    splice = StreamSplice()
    for offset, part in cut(data, first):
        splice.chunk(part, offset)
    splice.restart()
    agrees = second.startswith(first)
    try:
        for offset, part in cut(data, second):
            splice.chunk(part, offset)
            assert splice.sent in (first, second) or second.startswith(splice.sent) or first.startswith(second)
        splice.finish(second)
    except StreamRestarted:
        assert not agrees
        assert splice.sent == first, "nothing may be sent after a contradiction"
    else:
        assert agrees
        assert splice.sent == second


def test_text_after_a_gap_waits_for_the_final_text() -> None:
    splice = StreamSplice()
    assert splice.chunk("ab", 0) == "ab"
    assert splice.chunk("ef", 4) == ""
    assert splice.finish("abcdef") == "cdef"


def test_a_snapshot_stands_for_the_text_so_far() -> None:
    splice = StreamSplice()
    splice.chunk("ab", 0)
    assert splice.snapshot("abcd") == "cd"
    assert splice.chunk("de", 3) == "e"
    with pytest.raises(StreamRestarted):
        splice.snapshot("xbcd")


def tokens(text: str) -> list[dict[str, Any]]:
    return [{"token": letter, "logprob": -1.0} for letter in text]


@given(st.data(), st.lists(st.integers(0, 9), max_size=3), st.sampled_from(["abcdefgh", "abcdxfgh"]))
def test_log_probabilities_are_sent_once_and_for_the_same_tokens(
    data: st.DataObject, deaths: list[int], last: str
) -> None:
    splice, told = LogprobSplice(), ""
    for count in deaths:
        for offset, part in cut(data, "abcdefgh")[:count]:
            told += "".join(one["token"] for one in splice.pieces(tokens(part), offset))
        splice.restart()
    assert "abcdefgh".startswith(told)
    try:
        for offset, part in cut(data, last)[: data.draw(st.integers(0, 9))]:
            told += "".join(one["token"] for one in splice.pieces(tokens(part), offset))
        told += "".join(one["token"] for one in splice.finish(tokens(last)))
    except StreamRestarted:
        assert not last.startswith(told)
    else:
        assert told == last


def test_log_probabilities_after_a_gap_come_with_the_outcome() -> None:
    splice = LogprobSplice()
    assert len(splice.pieces(tokens("ab"), 0)) == 2
    assert splice.pieces(tokens("e"), 4) == []
    assert splice.finish(tokens("abcde")) == tokens("cde")


CALLS: list[dict[str, Any]] = [
    {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": "é🙂"}'}},
    {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
]


def call_pieces(data: st.DataObject) -> list[dict[str, Any]]:
    pieces: list[dict[str, Any]] = []
    for index, call in enumerate(CALLS):
        function = call["function"]
        pieces.append({"index": index, "id": call["id"], "name": function["name"], "arguments": "", "offset": 0})
        for offset, part in cut(data, function["arguments"]):
            pieces.append({"index": index, "id": None, "name": None, "arguments": part, "offset": offset})
    return pieces


@given(st.data(), st.lists(st.integers(0, 12), max_size=3))
def test_calls_are_sent_once_over_attempts_that_agree(data: st.DataObject, deaths: list[int]) -> None:
    splice, told = CallSplice(), list[dict[str, Any]]()
    for count in deaths:
        told += splice.pieces(call_pieces(data)[:count])
        splice.restart()
    told += splice.pieces(call_pieces(data)[: data.draw(st.integers(0, 12))])
    told += splice.finish(CALLS)
    arguments = ["", ""]
    for one in told:
        assert one["offset"] == len(arguments[one["index"]])
        arguments[one["index"]] += one["arguments"]
    assert arguments == [call["function"]["arguments"] for call in CALLS]
    assert [one["id"] for one in told if one["id"]] == ["a", "b"]


@pytest.mark.parametrize(
    "other",
    [[], [{**CALLS[0], "id": "z"}], [{**CALLS[0], "function": {"name": "f", "arguments": "[]"}}]],
    ids=["none", "another", "other arguments"],
)
def test_other_calls_than_were_sent_are_a_restart(other: list[dict[str, Any]]) -> None:
    splice = CallSplice()
    splice.pieces([{"index": 0, "id": "a", "name": "f", "arguments": '{"x"', "offset": 0}])
    with pytest.raises(StreamRestarted):
        splice.finish(other)
