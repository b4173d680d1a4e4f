"""What a request wants of its tokens: read, held within bounds, and nothing when it wants nothing."""

from typing import Any

import pytest

from penstock.processors.engines.batching.logit_options import NONE, LogitOptions, logit_options_of
from penstock.schemas.errors import InvalidRequest


def read(params: dict[str, Any], extra: dict[str, str] | None = None, *, greedy: bool = False) -> LogitOptions:
    return logit_options_of(params, extra or {}, vocabulary=100, greedy=greedy)


def test_a_plain_request_wants_nothing() -> None:
    assert read({"temperature": 1, "top_p": 0.5, "presence_penalty": 0, "logprobs": False, "seed": None}) == NONE
    assert read({"seed": 3, "min_p": 0.5}, greedy=True) == NONE


def test_what_is_wanted() -> None:
    params = {"presence_penalty": 1, "frequency_penalty": -2, "min_p": 0.1, "seed": -7, "logprobs": True}
    assert read(params, {"logit_bias": '{"5": -100, "7": 1.5}', "other": "x"}) == LogitOptions(
        presence_penalty=1.0, frequency_penalty=-2.0, min_p=0.1, seed=-7, top_logprobs=0, bias={5: -100.0, 7: 1.5}
    )
    assert read({"logprobs": True, "top_logprobs": 4}).top_logprobs == 4
    others = {"repetition_penalty": "1.2", "min_tokens": "3"}
    assert read({}, others) == LogitOptions(repetition_penalty=1.2, min_tokens=3)
    assert read({}, {"repetition_penalty": "1.0", "min_tokens": "0"}) == NONE


@pytest.mark.parametrize(
    ("params", "extra", "param"),
    [
        ({"presence_penalty": 3}, {}, "payload.presence_penalty"),
        ({"frequency_penalty": float("nan")}, {}, "payload.frequency_penalty"),
        ({"min_p": "much"}, {}, "payload.min_p"),
        ({}, {"logit_bias": "[]"}, "extra.logit_bias"),
        ({}, {"logit_bias": "{"}, "extra.logit_bias"),
        ({}, {"logit_bias": '{"100": 1}'}, "extra.logit_bias"),
        ({}, {"logit_bias": '{"1": 101}'}, "extra.logit_bias"),
        ({}, {"logit_bias": '{"1": NaN}'}, "extra.logit_bias"),
        ({}, {"repetition_penalty": "0"}, "extra.repetition_penalty"),
        ({}, {"repetition_penalty": "true"}, "extra.repetition_penalty"),
        ({}, {"repetition_penalty": "much"}, "extra.repetition_penalty"),
        ({}, {"min_tokens": "1.5"}, "extra.min_tokens"),
        ({}, {"min_tokens": "-1"}, "extra.min_tokens"),
    ],
)
def test_what_would_break_the_loop_is_refused(params: dict[str, Any], extra: dict[str, str], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(params, extra)
    assert caught.value.param == param
