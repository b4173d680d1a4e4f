"""How a remote model goes on behind text that was delivered: which runs can, in what form, and what is counted. Pure.

The form is that of vLLM and SGLang, which llama.cpp's server has too: the delivered text is the last message, of the
assistant, with `continue_final_message`. A prompt without messages is followed by the text. Text does not determine
tokens, so only runs go on whose next token depends on nothing but the text before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.processors.engines.base import Message, RunSpec, usage_of
from penstock.processors.engines.stops import StopMatcher
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.payloads import NEUTRAL
from penstock.schemas.records import record

Json = dict[str, Any]

PREFIX = "prefix"
"""The value of the option `continue` that asks for this form."""
EXACT_PARAMS = frozenset({"max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed"})
"""Parameters that mean the same behind a prefix. Of `seed` see `can_go_on`."""
EXACT_EXTRA = frozenset({"logit_bias", "verbosity"})
"""The same of `extra`. Whatever else a server knows may count from where its answer begins."""
THOUGHTS = "<think"
"""Chat templates drop or move what begins so."""


def can_go_on(spec: RunSpec, messages: list[Message] | None) -> bool:
    """Whether a server that takes prefixes makes the rest of this run as it would have, but for how text is cut."""
    published, params = spec.published, spec.params
    if published is None or spec.task != "text_generation" or not spec.extra.keys() <= EXACT_EXTRA:
        return False
    if any(name not in EXACT_PARAMS and value not in NEUTRAL.get(name, ()) for name, value in params.items()):
        return False
    if params.get("seed") is not None and params.get("temperature") != 0:
        return False  # the server would draw from the seed's first number again
    if messages is None and params.get("max_tokens") is None:
        return False  # the server's own longest answer to a prompt is short, and would be counted again
    if messages is not None and (not messages or messages[-1]["role"] == "assistant"):
        return False
    # A server that does not hold text back has sent what may begin a stop string. Templates strip white space.
    text = published.text
    whole = not published.call_chars and StopMatcher(params.get("stop") or ()).feed(text) == text
    return whole and bool(text) and not text[-1].isspace() and THOUGHTS not in text


def behind(body: Mapping[str, Any], text: str) -> Json:
    """The body that asks for what follows the text."""
    if "prompt" in body:
        return {**body, "prompt": body["prompt"] + text}
    messages = [*body["messages"], {"role": "assistant", "content": text}]
    return {**body, "messages": messages, "continue_final_message": True, "add_generation_prompt": False}


def counting(body: Mapping[str, Any]) -> Json:
    """A body that is asked only for how many tokens its prompt has."""
    return {**{name: value for name, value in body.items() if name != "stop"}, "max_tokens": 1}


@record
class DeliveredText:
    """What was delivered of an answer, with its tokens as the server counts them, and those of the prompt alone."""

    text: str
    prompt_tokens: int
    tokens: int

    def left(self, body: Mapping[str, Any]) -> Json | None:
        """The body with the tokens that are left of the longest answer; None when none are."""
        most = body.get("max_tokens")
        if most is None:
            return dict(body)
        return {**body, "max_tokens": most - self.tokens} if most > self.tokens else None

    def usage(self, rest: Mapping[str, int]) -> dict[str, int]:
        """Of the whole, each token once. `rest` is what the server says of what it made behind the text."""
        counts = usage_of(self.prompt_tokens, self.tokens + rest.get("completion_tokens", 0))
        if "cached_tokens" in rest:
            counts["cached_tokens"] = min(rest["cached_tokens"], self.prompt_tokens)
        return counts


def delivered(text: str, prompt_tokens: int | None, tokens_with_text: int | None) -> DeliveredText:
    """Raises InvalidRequest when the server's counts say that the text is not part of the prompt."""
    if prompt_tokens is None or tokens_with_text is None or tokens_with_text <= prompt_tokens:
        raise InvalidRequest("the server's count of the prompt does not grow with the prefix")
    return DeliveredText(text=text, prompt_tokens=prompt_tokens, tokens=tokens_with_text - prompt_tokens)


QUESTION = "Count from one to ten in words, with commas."
BEGUN = "One, two, three, four,"
FIRST, NEXT = "One, two", "five"
TRIAL_TOKENS = 8


@record
class Said:
    """An answer of the trial. `thinks`: it has thoughts in a field of their own."""

    text: str
    prompt_tokens: int | None
    thinks: bool = False


def trial_body(model: str) -> Json:
    """A short chat. What the server makes of it with a prefix (`behind`) and with a closed turn is compared."""
    return {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": TRIAL_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def closed(body: Mapping[str, Any]) -> Json:
    """The same with the prefix as a whole turn, which only `continue_final_message` would leave open."""
    return {name: value for name, value in behind(body, BEGUN).items() if name != "continue_final_message"}


def unfit(alone: Said, going_on: Said, closed_turn: Said | None) -> str | None:
    """Why such a server cannot go on from a prefix; None when it can. `closed_turn` is None when it refused that.

    A server that leaves the turn open has fewer tokens to read than for a closed one. One that leaves every last turn
    of the assistant open has the same number: only its answer can tell, and must go on with a space and the next word.
    """
    said = (alone, going_on)
    if any(one.thinks or THOUGHTS in one.text for one in said):
        return "it thinks before it answers, and its thoughts are on no log"
    before, with_prefix = alone.prompt_tokens, going_on.prompt_tokens
    if before is None or with_prefix is None:
        return "it does not say how many tokens a prompt has"
    if with_prefix <= before:
        return "it leaves the prefix out"
    if going_on.text.lstrip().startswith(FIRST):
        return "it begins its answer anew"
    if going_on.text.startswith(NEXT):
        return "it drops the space at the seam"
    opened = closed_turn is None or (closed_turn.prompt_tokens or 0) > with_prefix
    if not opened and not going_on.text.startswith(" " + NEXT):
        return "it closes the prefix, and begins another answer"
    return None
