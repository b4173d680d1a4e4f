"""What a request asks of its tokens beyond temperature, top_k and top_p: checked here, obeyed by `controls`.

Continuous batching knows none of it. A request that wants nothing of it costs nothing more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.schemas.errors import InvalidRequest
from penstock.schemas.finite_json import loads_finite

MAX_BIASED = 1024
MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitOptions:
    """`top_logprobs`: None when no log probabilities are wanted; `prompt_logprobs`: the same for the prompt.

    `bias`: added to the logits of these tokens. `repetition_penalty` divides the logits of tokens of the prompt and of
    the text so far. `min_tokens`: how many come before the text may end.
    """

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_p: float = 0.0
    seed: int | None = None
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    bias: Mapping[int, float] = field(default_factory=dict[int, float])
    repetition_penalty: float = 1.0
    min_tokens: int = 0


NONE = LogitOptions()


def logit_options_of(
    params: Mapping[str, Any], extra: Mapping[str, str], *, vocabulary: int, greedy: bool
) -> LogitOptions:
    """Of a request. A greedy one draws nothing: its seed and min_p change nothing. Raises InvalidRequest."""
    seed = params.get("seed")
    return LogitOptions(
        presence_penalty=_within(params, "presence_penalty", -2, 2),
        frequency_penalty=_within(params, "frequency_penalty", -2, 2),
        min_p=0.0 if greedy else _within(params, "min_p", 0, 1),
        seed=None if greedy or seed is None else int(seed),
        top_logprobs=int(params.get("top_logprobs") or 0) if params.get("logprobs") else None,
        prompt_logprobs=params.get("prompt_logprobs"),
        bias=_bias(extra["logit_bias"], vocabulary) if "logit_bias" in extra else {},
        repetition_penalty=float(passed_number(extra, "repetition_penalty", 0.1, 10) or 1.0),
        min_tokens=int(passed_number(extra, "min_tokens", 0, MAX_TOKENS, whole=True) or 0),
    )


def passed_on(extra: Mapping[str, str], name: str) -> Any:
    """The value of a field that travels as JSON text; None when it is left out. Raises InvalidRequest."""
    if (text := extra.get(name)) is None:
        return None
    try:
        return loads_finite(text)
    except ValueError as error:
        raise InvalidRequest(f"extra.{name} must be JSON", param=f"extra.{name}") from error


def passed_number(
    extra: Mapping[str, str], name: str, least: float, most: float, *, whole: bool = False
) -> int | float | None:
    """The same of a number within bounds."""
    value = passed_on(extra, name)
    if value is None:
        return None
    kinds = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        raise InvalidRequest(
            f"extra.{name} must be {'a whole' if whole else 'a'} number from {least:g} to {most:g}",
            param=f"extra.{name}",
        )
    return value


def _within(params: Mapping[str, Any], name: str, least: float, most: float) -> float:
    value = params.get(name)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise InvalidRequest(f"{name} must be from {least:g} to {most:g}", param=f"payload.{name}")
    return float(value)


def _bias(text: str, vocabulary: int) -> dict[int, float]:
    param = "extra.logit_bias"
    try:
        given = loads_finite(text)
        bias = {int(token): float(value) for token, value in given.items()}
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise InvalidRequest(f"{param} must be an object of token ids and numbers", param=param) from error
    if len(bias) > MAX_BIASED:
        raise InvalidRequest(f"{param} has more than {MAX_BIASED} tokens", param=param)
    for token, value in bias.items():
        if not 0 <= token < vocabulary:
            raise InvalidRequest(f"{param}: there is no token {token}; the model has {vocabulary}", param=param)
        if not (math.isfinite(value) and -100 <= value <= 100):
            raise InvalidRequest(f"{param} must have numbers from -100 to 100", param=param)
    return bias
