"""Calls of tools in texts: found in every form that models write, in whatever pieces the text comes."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.engines.guidance.calls import CallReader
from penstock.processors.engines.guidance.dialects import DIALECTS, HERMES

NAMES = {"add", "look-up"}
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, "ü"]}}'
LOOK = '{"name": "look-up", "arguments": {}}'


def read(dialect: str, pieces: list[str], **options: Any) -> tuple[str, list[tuple[str, Any]]]:
    """(the text for the reader, the calls)."""
    reader = CallReader(DIALECTS[dialect], NAMES, "run", **options)
    shown = "".join(map(reader.feed, pieces)) + reader.flush()
    ids = [call["id"] for call in reader.calls]
    assert len(set(ids)) == len(ids)
    return shown, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in reader.calls]


ARGUMENTS: dict[str, Any] = {"a": 1, "b": [2, "ü"]}
OTHER = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'
BOTH: list[tuple[str, Any]] = [("add", ARGUMENTS), ("look-up", {})]
CASES: list[tuple[str, str, str, list[tuple[str, Any]]]] = [
    ("hermes", f"<tool_call>\n{ADD}\n</tool_call>", "", BOTH[:1]),
    ("hermes", f"<tool_call>\n{ADD}\n</tool_call>\n<tool_call>{LOOK}</tool_call>", "", BOTH),
    ("hermes", f"I look. <tool_call>{ADD}</tool_call>", "I look. ", BOTH[:1]),
    ("hermes", f"<tool_call>{ADD}", "", BOTH[:1]),
    ("hermes", ADD, "", BOTH[:1]),
    ("hermes", "2 < 3, <tool> and <tool_cal", "2 < 3, <tool> and <tool_cal", []),
    ("hermes", "<tool_call>no JSON</tool_call> so", "<tool_call>no JSON</tool_call> so", []),
    ("hermes", OTHER, OTHER, []),
    ("hermes", '{"a": 1}', '{"a": 1}', []),
    ("hermes", f"{ADD} adds.", "adds.", BOTH[:1]),
    ("hermes", '{"arguments": {"a": 1, "b": [2, "ü"]}, "name": "add"}', "", BOTH[:1]),
    ("hermes", '<tool_call>{"name": "add", "arguments": "{}"}</tool_call> so', "so", [("add", {})]),
    ("hermes", '{"name": "other", "arguments": {"a": NaN}}', '{"name": "other", "arguments": {"a": NaN}}', []),
    ("hermes", '{"arguments": {"a": "\\ud83d"}, "name": "add"}', "", [("add", {"a": "�"})]),
    ("mistral", f"[TOOL_CALLS][{ADD}, {LOOK}]", "", BOTH),
    ("mistral", f"[{ADD}]", "", BOTH[:1]),
    ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": [2, "ü"]}', "", BOTH[:1]),
    ("mistral", "[1] is a source", "[1] is a source", []),
    ("llama", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": [2, "ü"]}}', "", BOTH[:1]),
    ("llama", f"{ADD}; {LOOK}", "", BOTH),
    ("json", f"[{ADD}, {LOOK}]", "", BOTH),
    ("json", f"The call is {ADD}", f"The call is {ADD}", []),
    ("json", "plain", "plain", []),
]  # fmt: skip


@pytest.mark.parametrize(("dialect", "text", "shown", "calls"), CASES)
def test_what_is_a_call_and_what_is_text(dialect: str, text: str, shown: str, calls: list[tuple[str, Any]]) -> None:
    assert read(dialect, [text]) == (shown, calls)
    assert read(dialect, list(text)) == (shown, calls)


@pytest.mark.parametrize("call", ['{"arguments": {"a": %s}, "name": "add"}', "[%s]", '{"a": %s', '; {"a": {"b": %s}}'])
@pytest.mark.parametrize("levels", [330, 495, 990, 5_000])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_depth_of_what_a_model_writes_is_an_error(dialect: str, levels: int, call: str) -> None:
    """Reading, repairing and writing fail at different depths. What fails is text, as the model wrote it."""
    for nested in ("[" * levels + "]" * levels, '{"a":' * levels + "NaN" + "}" * levels, "[" * levels):
        text = DIALECTS[dialect].prefix + call.replace("%s", nested) + DIALECTS[dialect].suffix
        reader = CallReader(DIALECTS[dialect], NAMES, "run")
        shown = reader.feed(text) + reader.flush()
        assert shown == text or (levels < 5_000 and reader.calls)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 120), max_size=6))
def test_pieces_give_what_the_whole_gives(case: tuple[str, str, str, Any], cuts: list[int]) -> None:
    dialect, text, shown, calls = case
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in pairwise(places)]
    assert read(dialect, pieces) == (shown, calls)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_forced_calls_stand_between_prefix_and_suffix(dialect: str) -> None:
    assert read(dialect, [ADD], forced=True) == ("", BOTH[:1])
    separator = DIALECTS[dialect].separator
    if separator:
        assert read(dialect, [ADD + separator, LOOK], forced=True) == ("", BOTH)
        # What was cut by length: the calls that are whole count.
        assert read(dialect, [ADD + separator + LOOK[:9]], forced=True) == ("", BOTH[:1])
    assert read(dialect, [ADD[:20]], forced=True) == (ADD[:20], [])


@pytest.mark.parametrize(
    ("text", "arguments", "shown"),
    [
        (ADD[: ADD.index(": [")], '{"a": 1, "b"', ""),
        ('{"name": "add", "arguments": {"a": NaN}}', '{"a": NaN}', ""),
        ('<tool_call>{"name": "add", "arguments": {"a": "no end\n}}</tool_call>text', '{"a": "no end', "text"),
    ],
)
def test_a_call_that_has_begun_is_one_even_if_it_is_cut_or_no_json(text: str, arguments: str, shown: str) -> None:
    for pieces in ([text], list(text)):
        reader = CallReader(HERMES, NAMES, "run")
        assert "".join(map(reader.feed, pieces)) + reader.flush() == shown
        (call,) = reader.calls
        assert call["function"] == {"name": "add", "arguments": arguments}


@pytest.mark.parametrize("case", [case for case in CASES if case[3]])
def test_arguments_come_in_pieces_as_they_are_written(case: tuple[str, str, str, Any]) -> None:
    dialect, text, _, _ = case
    reader = CallReader(DIALECTS[dialect], NAMES, "run")
    told: list[dict[str, Any]] = []
    for char in text:
        reader.feed(char)
        told += reader.take_pieces()
    reader.flush()
    told += reader.take_pieces()
    arguments = ["" for _ in reader.calls]
    for piece in told:
        index = piece["index"]
        assert piece["offset"] == len(arguments[index])
        assert (piece["id"] is None) == (piece["name"] is None) == (piece["offset"] > 0)
        arguments[index] += piece["arguments"]
    assert arguments == [call["function"]["arguments"] for call in reader.calls]
    if text.startswith(f"I look. <tool_call>{ADD}"):
        assert len(told) > 20
    assert {piece["id"] for piece in told} - {None} == {call["id"] for call in reader.calls}


def test_without_bare_calls_only_the_marker_begins_one() -> None:
    assert read("hermes", [ADD], bare=False) == (ADD, [])
    assert read("hermes", [f"<tool_call>{ADD}</tool_call>"], bare=False) == ("", BOTH[:1])


def test_one_call_when_calls_shall_not_be_parallel() -> None:
    text = f"<tool_call>{ADD}</tool_call><tool_call>{LOOK}</tool_call>"
    assert read("hermes", [text], parallel=False) == ("", BOTH[:1])


def test_ids_are_the_same_for_the_same_answer_and_short_for_mistral() -> None:
    def call_id(dialect: str, answer: str) -> str:
        reader = CallReader(DIALECTS[dialect], NAMES, answer)
        reader.feed(ADD)
        reader.flush()
        return reader.calls[0]["id"]

    assert call_id("hermes", "a") == call_id("hermes", "a") != call_id("hermes", "b")
    assert len(call_id("mistral", "a")) == 9


@given(st.text(alphabet="<tool_call>/[]{} \n", max_size=80))
def test_no_text_is_lost(text: str) -> None:
    assert read(HERMES.name, list(text)) == (text, [])
