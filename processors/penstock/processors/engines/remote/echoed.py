"""Log probabilities of /completions, and prompts that a server echoes with them: bodies, and what comes back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from penstock.schemas.errors import UnsupportedParameter
from penstock.schemas.texts import encodable

Json = dict[str, Any]

LEAST_LOGPROB = -9999.0
"""What stands for the logarithm of 0, as OpenAI writes it, and for one that a server does not give."""


def with_logprobs(body: Json) -> Json:
    """A body with the fields of /completions in place of ours."""
    body = {**body}
    wanted, top, of_prompt = (body.pop(name, None) for name in ("logprobs", "top_logprobs", "prompt_logprobs"))
    if wanted or of_prompt is not None:
        body["logprobs"] = max(top or 0, of_prompt or 0)
    return body if of_prompt is None else {**body, "echo": True}


def tokens_of(lists: Json) -> list[Json]:
    """The tokens of a choice's four lists, as outputs have them."""
    names, values = lists["tokens"], lists["token_logprobs"]
    tops: Sequence[Json | None] = lists.get("top_logprobs") or [None] * len(names)
    tokens: list[Json] = []
    for name, value, top in zip(names, values, tops, strict=True):
        token: Json = {"token": encodable(name), "logprob": finite_logprob(value)}
        if top:
            candidates = sorted(((one, finite_logprob(said)) for one, said in top.items()), key=lambda one: -one[1])
            token["top_logprobs"] = [{"token": encodable(one), "logprob": said} for one, said in candidates]
        tokens.append(token)
    return tokens


def finite_logprob(said: float | None) -> float:
    """A log probability as records can hold it."""
    return float(said) if said is not None and math.isfinite(said) else LEAST_LOGPROB


def without_prompt(output: Json, prompt: str | None, prompt_tokens: int, *, has_logprobs: bool) -> Json:
    """An output that begins with its prompt as one that does not, with the prompt's log probabilities beside it.

    Raises UnsupportedParameter where the server has not echoed it.
    """
    of_prompt: list[Json] = (output.get("logprobs") or [])[:prompt_tokens]
    text = "".join(one["token"] for one in of_prompt) if prompt is None else prompt
    choices = [_rest(choice, text, prompt_tokens, has_logprobs) for choice in output.get("choices") or ()]
    left = {**_rest(output, text, prompt_tokens, has_logprobs), **({"choices": choices} if choices else {})}
    # As the model's own engine has it: a server may give the first token a probability all the same.
    return {**left, "prompt_logprobs": [{"token": of_prompt[0]["token"], "logprob": None}, *of_prompt[1:]]}


def _rest(choice: Json, prompt: str, prompt_tokens: int, has_logprobs: bool) -> Json:
    tokens: list[Json] = choice.get("logprobs") or []
    if not 0 < prompt_tokens <= len(tokens) or not choice["text"].startswith(prompt):
        raise UnsupportedParameter("the model's server does not echo prompts", param="payload.prompt_logprobs")
    rest = {**choice, "text": choice["text"].removeprefix(prompt)}
    if has_logprobs:
        return {**rest, "logprobs": tokens[prompt_tokens:]}
    del rest["logprobs"]
    return rest
