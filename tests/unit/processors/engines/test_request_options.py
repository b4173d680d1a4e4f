"""Options of a request, as batches take them: what is accepted is within bounds, the rest is refused by name."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.refusals import refused
from penstock.processors.engines.batching.logit_options import NONE, LogitOptions, logit_options_of
from penstock.processors.engines.batching.sampling import GREEDY, Sampling, sampling_of
from penstock.processors.engines.text.prompt_options import PromptOptions, prompt_options_of
from penstock.schemas.errors import InvalidRequest

VOCABULARY = 512


def logits(params: dict[str, Any], *, greedy: bool = False, **extra: str) -> LogitOptions:
    return logit_options_of(params, extra, vocabulary=100, greedy=greedy)


def sampling(params: dict[str, Any]) -> Sampling:
    return sampling_of(params, vocabulary=VOCABULARY)


def prompt(_: dict[str, Any], **extra: str) -> PromptOptions:
    return prompt_options_of(extra, room=90)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, Sampling(temperature=1.0, top_k=VOCABULARY, top_p=1.0)),
        ({"temperature": 0}, GREEDY),
        ({"temperature": 0, "seed": 7}, GREEDY),
        ({"temperature": 1e-9, "top_k": 40}, GREEDY),
        ({"temperature": 2, "top_k": 10_000}, Sampling(temperature=2.0, top_k=VOCABULARY, top_p=1.0)),
        ({"top_k": 0}, Sampling(temperature=1.0, top_k=VOCABULARY, top_p=1.0)),
        ({"temperature": 0.7, "top_p": 0.0}, Sampling(temperature=0.7, top_k=VOCABULARY, top_p=1e-6)),
        ({"temperature": None, "top_k": None, "top_p": None, "seed": None}, sampling({})),
    ],
)
def test_sampling_that_is_accepted(params: dict[str, object], expected: Sampling) -> None:
    assert sampling(params) == expected


def test_a_plain_request_wants_nothing_of_the_logits() -> None:
    assert logits({"temperature": 1, "top_p": 0.5, "presence_penalty": 0, "logprobs": False, "seed": None}) == NONE
    assert logits({"seed": 3, "min_p": 0.5}, greedy=True) == NONE
    assert logits({}, repetition_penalty="1.0", min_tokens="0") == NONE


def test_what_is_wanted_of_the_logits() -> None:
    params = {"presence_penalty": 1, "frequency_penalty": -2, "min_p": 0.1, "seed": -7, "logprobs": True}
    assert logits(params, logit_bias='{"5": -100, "7": 1.5}', other="x") == LogitOptions(
        presence_penalty=1.0, frequency_penalty=-2.0, min_p=0.1, seed=-7, top_logprobs=0, bias={5: -100.0, 7: 1.5}
    )
    assert logits({"logprobs": True, "top_logprobs": 4}).top_logprobs == 4
    assert logits({}, repetition_penalty="1.2", min_tokens="3") == LogitOptions(repetition_penalty=1.2, min_tokens=3)


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [
        ({}, PromptOptions()),
        ({"note": "{", "ignore_eos": "null", "truncate_prompt_tokens": "null"}, PromptOptions()),
        ({"ignore_eos": "true"}, PromptOptions(ignore_eos=True)),
        ({"truncate_prompt_tokens": "5"}, PromptOptions(last_tokens=5)),
        ({"truncate_prompt_tokens": "-1"}, PromptOptions(last_tokens=90)),
        ({"reasoning_effort": '"low"'}, PromptOptions(variables={"reasoning_effort": "low"})),
        (
            {"chat_template_kwargs": '{"a": 1, "reasoning_effort": "high"}', "reasoning_effort": '"low"'},
            PromptOptions(variables={"a": 1, "reasoning_effort": "high"}),
        ),
    ],
)
def test_options_of_a_prompt(extra: dict[str, str], wanted: PromptOptions) -> None:
    assert prompt({}, **extra) == wanted


def test_the_last_tokens_are_read() -> None:
    assert PromptOptions(last_tokens=2).cut([1, 2, 3]) == [2, 3]
    assert PromptOptions(last_tokens=9).cut([1, 2, 3]) == [1, 2, 3]
    assert PromptOptions().cut([1, 2, 3]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("read", "name", "value"),
    [
        *((sampling, "temperature", value) for value in (-1, math.nan, "hot")),
        (sampling, "top_p", 1.5),
        *((sampling, "top_k", value) for value in (-1, 1.5, True)),
        (logits, "presence_penalty", 3),
        (logits, "frequency_penalty", math.nan),
        (logits, "min_p", "much"),
        *((logits, "extra.logit_bias", text) for text in ("[]", "{", '{"100": 1}', '{"1": 101}', '{"1": NaN}')),
        *((logits, "extra.repetition_penalty", text) for text in ("0", "true", "much")),
        *((logits, "extra.min_tokens", text) for text in ("1.5", "-1")),
        *((prompt, "extra.ignore_eos", text) for text in ("1", "yes")),
        *((prompt, "extra.truncate_prompt_tokens", text) for text in ("0", "-2", "true", "1.5")),
        *((prompt, "extra.chat_template_kwargs", text) for text in ("[]", '{"a": NaN}')),
        (prompt, "extra.reasoning_effort", "5"),
    ],
)
def test_refused_by_name(read: Callable[..., Any], name: str, value: Any) -> None:
    of_extra = name.startswith("extra.")
    with refused(InvalidRequest, param=name if of_extra else f"payload.{name}"):
        read({} if of_extra else {name: value}, **({name.removeprefix("extra."): value} if of_extra else {}))


_VALUES = st.none() | st.integers(-5, 10**9) | st.floats() | st.booleans() | st.text(max_size=3)


@given(st.dictionaries(st.sampled_from(["temperature", "top_p", "top_k", "seed"]), _VALUES))
def test_whatever_sampling_is_accepted_is_within_bounds(params: dict[str, object]) -> None:
    try:
        found = sampling(params)
    except InvalidRequest:
        return
    assert 0.01 <= found.temperature <= 100
    assert 1 <= found.top_k <= VOCABULARY
    assert 0 < found.top_p <= 1
