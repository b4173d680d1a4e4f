"""JSON from outside: what is taken can be written again, what is not is refused with its place, history is repaired."""

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic_core import from_json, to_json

from kit.examples import examples
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.finite_json import MAX_LEVELS, Flaw, loads_finite, object_of, read_body

ODD = st.sampled_from([float("nan"), float("inf"), -float("inf"), "\ud83d", "a\udc00b"])
PLAIN = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
NAMES = st.text("abc", min_size=1, max_size=2)


def values(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3))


def strict(text: str | bytes) -> Any:
    found = from_json(text, allow_inf_nan=False)
    assert "Infinity" not in json.dumps(found)
    return found


def put(value: Any, path: list[int], odd: Any) -> str:
    """Put `odd` somewhere into a value; its place."""
    place, here = "", value
    for step in path:
        names = list(here) if isinstance(here, dict) else list(range(len(here)))
        name: Any = names[step % len(names)] if names else None
        inner = None if name is None else here[name]
        if not isinstance(inner, dict | list) or not inner:
            break
        place += f"[{name}]" if isinstance(here, list) else f".{name}"
        here = inner
    if isinstance(here, list):
        here.append(odd)
        return f"{place}[{len(here) - 1}]".lstrip(".")
    here["odd"] = odd
    return f"{place}.odd".lstrip(".")


@settings(max_examples=examples(300), deadline=None)
@given(values(PLAIN), st.booleans())
def test_what_can_be_written_is_taken_as_it_is(value: Any, ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=ascii)
    assert loads_finite(text.encode()) == loads_finite(text) == value == loads_finite(to_json(value))


@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(NAMES, values(PLAIN)), st.lists(st.integers(0, 9)), ODD)
def test_what_cannot_be_written_is_refused_with_its_place(value: Any, path: list[int], odd: Any) -> None:
    place = put(value, path, odd)
    with pytest.raises(Flaw) as caught:
        loads_finite(json.dumps(value))
    assert caught.value.place == place
    with pytest.raises(InvalidRequest) as refused:
        read_body(json.dumps(value).encode())
    assert refused.value.param == place
    said = {"messages": [{"role": "assistant", "content": value}, {"type": "function_call", "arguments": odd}]}
    strict(to_json(read_body(json.dumps(said))))
    with pytest.raises(InvalidRequest):
        read_body(json.dumps(said), history=False)


DEEP = 100_000
TEXTS: list[tuple[str, str | None]] = [
    ("1e999", ""),
    ('{"a": [0, -1e999]}', "a[1]"),
    ('{"a": ' + "1" * 5_000 + "}", "a"),
    ('{"\\ud800": 1}', "\\ud800"),
    ('{"a": {"b\\udfff": 1}}', "a.b\\udfff"),
    ('{"a": "\\\\ud83d\\ud83d"}', "a"),
    (r'{"a": "\\ud83d\udc00"}', "a"),
    ("[" * DEEP + "]" * DEEP, ""),
    ("[" * (MAX_LEVELS + 1) + "]" * (MAX_LEVELS + 1), ""),
    ("[" * DEEP, ""),
    ("{", None),
    ("", None),
    ("[1] 2", None),
]


@pytest.mark.parametrize(("text", "place"), TEXTS, ids=[text[:20] for text, _ in TEXTS])
def test_what_is_not_taken(text: str, place: str | None) -> None:
    with pytest.raises(ValueError) as caught:
        loads_finite(text)
    assert (caught.value.place if isinstance(caught.value, Flaw) else None) == place
    with pytest.raises(InvalidRequest) as refused:
        read_body(text.encode())
    assert refused.value.param == (place or None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"\xef\xbb\xbf[1]", [1]),
        ('"\\ud83d\\ude00 \\\\ud83d"', "\U0001f600 \\ud83d"),
        ("[" * MAX_LEVELS + "]" * MAX_LEVELS, None),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ("1" * 400, int("1" * 400)),
    ],
)
def test_what_is_taken(text: str | bytes, value: Any) -> None:
    assert loads_finite(text) == value or value is None


ARGUMENTS: list[tuple[str, dict[str, Any]]] = [
    ('{"a": 1}', {"a": 1}),
    ('{"a": 1, "a": 2}', {"a": 2}),
    *((text, {}) for text in ('{"city": "Ro', "", " ", "5", "null", "[1]", '"x"', "[" * DEEP, '{"a":' * DEEP)),
    ('{"a": "\\ud83d", "\\udc00": "\\ud83d\\ude00"}', {"a": "�", "�": "\U0001f600"}),
    ('{"a": [NaN, -Infinity, 1e999, ' + "9" * 5_000 + "]}", {"a": [None] * 4}),
    ('{"a":' * (MAX_LEVELS + 1) + "1" + "}" * (MAX_LEVELS + 1), {}),
    (json.dumps('{"a": "b"}'), {"a": "b"}),
]


@pytest.mark.parametrize(("text", "value"), ARGUMENTS, ids=[text[:20] for text, _ in ARGUMENTS])
def test_arguments_of_earlier_calls_are_an_object(text: str, value: dict[str, Any]) -> None:
    assert object_of(text) == value


def test_a_flaw_beside_what_is_too_deep_is_refused_not_repaired() -> None:
    for levels in (MAX_LEVELS + 1, 600):
        text = '{"a": NaN, "b": ' + "[" * levels + "]" * levels + "}"
        with pytest.raises(InvalidRequest, match="levels"):
            read_body(text)


def test_places_take_no_memory_until_one_is_told() -> None:
    """Many values far below long names: each place would be kilobytes."""
    names = MAX_LEVELS - 2
    text = ('{"' + "x" * 100 + '":') * names + "[" + "1," * 20_000 + '"\\ud800"' + "]" + "}" * names
    tracemalloc.start()
    try:
        with pytest.raises(Flaw) as caught:
            loads_finite(text)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000
    assert len(caught.value.place) < 400


@settings(max_examples=examples(300), deadline=None)
@given(st.text(max_size=20) | values(PLAIN | ODD).map(json.dumps))
def test_arguments_of_earlier_calls_can_be_written(text: str) -> None:
    found = object_of(text)
    assert strict(to_json(found)) == found
