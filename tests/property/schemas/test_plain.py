"""The fast check of common requests against the full validation: what it accepts is valid, and in its normal form."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kit.examples import examples
from penstock.schemas import payloads, plain
from penstock.schemas import requests as checking
from penstock.schemas.errors import PenstockError
from penstock.schemas.limits import Limits
from penstock.schemas.plain import is_plain
from penstock.schemas.records import ContextLimits, InferenceRequest, OutputSpec, Requirements
from penstock.schemas.requests import _validate, content_hash

LIMITS = Limits(max_text_bytes=20, max_messages=2, max_inputs=2, max_tokens=50)
ODD: dict[str, tuple[Any, ...]] = {
    "request_id": ("", "x" * 200, "\ud800", 5),
    "task": ("UNKNOWN", "summarization", "image_generation"),
    "tenant": ("A", "", "acme", None),
    "priority": (0, 1_000, 1_001, -1, True, 1.0),
    "model": ("", "x" * 201, "ü", "\ud800", b"m"),
    "pool": ("", "a.b"),
    "user_id": ("", "\ud800"),
    "session_id": ("", 1),
    "ttl_ms": (0, 1, 86_400_000, 86_400_001, True),
    "start_after": (-1, 0, 1_800_000_000_000),
    "execution_timeout_ms": (0, 86_400_001),
    "max_attempts": (-1, 0, 1, 10, 11, True),
    "stream": (True, None, 1),
    "conversation_id": ("c", "", "ü"),
    "context": (ContextLimits(), ContextLimits(summary=True)),
    "requirements": (Requirements(vram_bytes=-1),),
    "output": (OutputSpec(),),
    "callback_url": ("https://a.b",),
    "extra": ({"a": 1}, {"a": "x" * 20_000}),
    "metadata": ({"a": "b"}, {"a": 1}),
    "text_generation": ({}, {"prompt": "a"}),
    "embedding": ({"input": ["a"]},),
    "image_generation": ({},),
    "image_editing": ({},),
    "image_to_text": ({},),
    "image_processing": ({},),
    "summarization": ({},),
}
LONG = (["b" * 21], ["b" * 11] * 2)
NULLS = ("name", "tool_calls", "tool_call_id", "parts", "reasoning_content")
"""Fields of a message that Avro writes though nobody has set them."""
SAID = {"role": "user", "content": "a"}
ODD_PARTS: dict[str, tuple[Any, ...]] = {
    "prompt": (None, "", "ü" * 10, "ü" * 11, "a" * 21, "\ud800", 5),
    "messages": (
        *(None, [], (SAID,), [SAID] * 2, [SAID] * 3, ["a"], [{"role": "user"}]),
        *([{**SAID, "content": "b" * 11}] * 2, [{**SAID, "content": "ü" * 11}]),
        *([{**SAID, "content": content}] for content in (1, "\ud800")),
        *([{**SAID, "role": role}] for role in ("developer", [])),
        *([{**SAID, "name": name}] for name in (None, "")),
        *([{**SAID, "other": None}], [{**SAID, "name": None, "other": 1}]),
        *([{**SAID, **dict.fromkeys(NULLS), name: ""}] for name in NULLS),
    ),
    "max_tokens": (None, 0, 1, 50, 51, True, 1.0),
    "temperature": (None, 0.0, 2.0, 2.5, -0.1, float("nan"), "hot"),
    "top_p": (0, 1.0, 1.5),
    "top_k": (0, 5),
    "seed": (None, 2**63, -(2**63), -(2**63) - 1, True),
    "stop": (["x"], [""], "x"),
    "input": (None, [], "a", ("a",), [""], ["a", ""], *(["a"] * n for n in (2, 3)), ["\ud800"], [1], *LONG),
    "dimensions": (None, 0, 3),
    "other": (None, 1),
}
GOOD_ONES: list[dict[str, Any]] = [
    {"task": "text_generation", "text_generation": {"prompt": "a"}},
    {"task": "text_generation", "text_generation": {"messages": [SAID]}},
    {"task": "embedding", "embedding": {"input": ["a"]}},
]


def nearly_good() -> Iterator[dict[str, Any]]:
    """Good requests with one field, or one part of the payload, as it may not be."""
    for good in GOOD_ONES:
        for name, values in ODD.items():
            for value in values:
                yield {"request_id": "r", "created_at": 1, **good, name: value}
        for part, values in ODD_PARTS.items():
            for value in values:
                asked = {"request_id": "r", "created_at": 1, **good, good["task"]: {**good[good["task"]], part: value}}
                yield from (asked, {"conversation_id": "c", **asked})


TEXTS = st.sampled_from(("", "a", "ü" * 5, "b" * 10, "ü" * 10, "ü" * 11, "\ud800"))
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(("system", "user", "assistant", "developer", "tool")), "content": TEXTS}
)
AVRO_MESSAGE = st.builds(
    lambda message, names, value: {**message, **dict.fromkeys(NULLS), **dict.fromkeys(names, value)},
    MESSAGE,
    st.lists(st.sampled_from(NULLS), max_size=1),
    st.sampled_from(("", 1)),
)
PARTS: dict[str, st.SearchStrategy[Any]] = {name: st.sampled_from(values) for name, values in ODD_PARTS.items()}
PARTS["messages"] |= st.lists(MESSAGE | AVRO_MESSAGE, min_size=1, max_size=3)
PARTS["prompt"] |= TEXTS
PARTS["input"] |= st.lists(TEXTS, min_size=1, max_size=3)
FIELDS = {name: st.sampled_from(values) for name, values in ODD.items()}


COMMON = st.sampled_from(("max_tokens", "temperature", "seed"))


@pytest.fixture(autouse=True, scope="module")
def small_limits() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for module in (payloads, plain, checking):
            patch.setattr(module, "LIMITS", LIMITS)
        yield


@st.composite
def requests(draw: st.DrawFn) -> InferenceRequest:
    """Common requests, a few of whose fields may be uncommon or wrong."""
    values = {"request_id": "r", "created_at": 1, **deepcopy(draw(st.sampled_from(GOOD_ONES)))}
    parts = st.sampled_from(tuple(values[values["task"]])) | COMMON | st.sampled_from(tuple(PARTS))
    for name in draw(st.lists(parts, max_size=3)):
        values[values["task"]][name] = draw(PARTS[name])
    for name in draw(st.lists(st.sampled_from(tuple(FIELDS)), max_size=1)):
        values[name] = draw(FIELDS[name])
    return InferenceRequest(**values)


def holds(request: InferenceRequest) -> bool:
    """What the fast check accepts is valid, and the full validation would not change it."""
    if not is_plain(request):
        return True
    before = deepcopy(request)
    try:
        _validate(request)
    except PenstockError:
        return False
    return content_hash(request) == content_hash(before)  # without the nulls that Avro writes


@settings(max_examples=examples(2_000), deadline=None)
@given(request=requests())
def test_what_the_fast_check_accepts_is_valid_and_in_its_normal_form(request: InferenceRequest) -> None:
    assert holds(request)


def test_no_single_wrong_field_passes_the_fast_check() -> None:
    assert [values for values in nearly_good() if not holds(InferenceRequest(**values))] == []


def test_the_fast_check_accepts_common_requests() -> None:
    for values in GOOD_ONES:
        assert is_plain(InferenceRequest(request_id="r", created_at=1, **values))
