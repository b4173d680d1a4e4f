"""The answers of /v1/completions: texts, with the prompt where it is echoed, and log probabilities as lists."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.gateway.openai.chat_answers import ChunkWriter, answer, choices_of, finish_reason
from penstock.gateway.openai.chat_bodies import CompletionBody, prompts_of

Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a completion shows. `prompts` has one for each `answers` choices."""

    prompts: Sequence[str | list[int]]
    answers: int
    echo: bool
    has_logprobs: bool
    only_prompt: bool
    """No token was asked for: the one that was made is left out."""

    @classmethod
    def of(cls, body: CompletionBody) -> Shape:
        return cls(
            prompts=prompts_of(body),
            answers=body.n or 1,
            echo=bool(body.echo),
            has_logprobs=body.logprobs is not None,
            only_prompt=body.only_prompt,
        )

    @property
    def waits_for_outcome(self) -> bool:
        """Whether the text of a stream begins with what only the outcome has."""
        return self.echo and (self.has_logprobs or not isinstance(self.prompts[0], str))

    def text_and_logprobs(self, choice: Json, result: Json) -> tuple[str, Json | None]:
        text, tokens = "", list[Json]()
        if self.echo:
            tokens += choice.get("prompt_logprobs") or result.get("prompt_logprobs") or []
            prompt = self.prompts[choice["index"] // self.answers]
            text = prompt if isinstance(prompt, str) else _text_of(tokens)
        if not self.only_prompt:
            text += choice.get("text") or ""
            tokens += choice.get("logprobs") or []
        return text, logprob_lists(tokens, text) if self.has_logprobs else None

    def reason(self, choice: Json) -> str:
        return "length" if self.only_prompt else finish_reason(choice)

    def usage(self, result: Json) -> Json:
        usage: Json = result.get("usage") or {}
        return {**usage, "completion_tokens": 0} if self.only_prompt else usage


def completion(request_id: str, created: int, model: str, result: Json, shape: Shape, tier: str | None) -> Json:
    choices: list[Json] = []
    for choice in choices_of(result):
        text, logprobs = shape.text_and_logprobs(choice, result)
        shown = {"index": choice["index"], "text": text, "logprobs": logprobs, "finish_reason": shape.reason(choice)}
        choices.append(shown)
    result = {**result, "usage": shape.usage(result)}
    return answer(f"cmpl-{request_id}", "text_completion", created, model, choices, result, tier)


def logprob_lists(tokens: Sequence[Json], text: str) -> Json:
    """Log probabilities in four lists. `text_offset` is the place of each token in `text`, in characters."""
    return PlacedTokens().take(tokens, text, final=True) or _lists([], [])


def _lists(tokens: Sequence[Json], offsets: list[int]) -> Json:
    names = [_name(one) for one in tokens]
    return {
        "tokens": names,
        "token_logprobs": [one["logprob"] for one in tokens],
        "top_logprobs": [_candidates(name, one) for name, one in zip(names, tokens, strict=True)],
        "text_offset": offsets,
    }


def _candidates(name: str, one: Json) -> Json | None:
    """The likeliest tokens and the one that stands there; None where no candidates were asked for or there are none."""
    top: list[Json] | None = one.get("top_logprobs")
    return {**{_name(each): each["logprob"] for each in top}, name: one["logprob"]} if top else None


def _name(one: Json) -> str:
    """A token's text. One that is a part of a character is shown by its bytes."""
    written = _bytes(one)
    try:
        return written.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)


def _bytes(one: Json) -> bytes:
    given = one.get("bytes")
    return one["token"].encode() if given is None else bytes(given)


def _text_of(tokens: Sequence[Json]) -> str:
    return b"".join(map(_bytes, tokens)).decode(errors="replace")


class PlacedTokens:
    """The place of each token in a text, in characters, where both come in pieces.

    A token that is no part of the text, as the one that begins a prompt, has no width.
    """

    def __init__(self) -> None:
        self._waiting: list[Json] = []
        """Tokens whose text may still come, with those behind them."""
        self._left = ""
        """The text behind the tokens that have their places."""
        self._place = 0
        self._begun = b""
        """Of a character that the next tokens complete."""

    def take(self, tokens: Sequence[Json], text: str, *, final: bool = False) -> Json | None:
        """The four lists of the tokens whose places are known now; None if there are none. `final`: nothing follows."""
        left, at = self._left + text, 0
        self._waiting += tokens
        offsets: list[int] = []
        for one in self._waiting:
            begun = self._begun + _bytes(one)
            try:
                forms = (written := begun.decode(), written.lstrip())  # tokenizers may put a space before a text
            except UnicodeDecodeError:
                forms = ()
            if not final and any(len(left) - at < len(form) and form.startswith(left[at:]) for form in forms):
                break
            offsets.append(self._place + at)
            self._begun = b"" if forms else begun
            at += next((len(form) for form in forms if left.startswith(form, at)), 0)
        self._place, self._left = self._place + at, left[at:]
        placed, self._waiting = self._waiting[: len(offsets)], self._waiting[len(offsets) :]
        return _lists(placed, offsets) if placed else None


class CompletionWriter(ChunkWriter):
    """Makes the chunk objects of one stream of /v1/completions."""

    def __init__(self, *arguments: Any, shape: Shape, **options: Any) -> None:
        super().__init__(*arguments, chat=False, **options)
        self._shape = shape
        self._tokens = PlacedTokens()

    def opening(self) -> list[Json]:
        if not self._shape.echo or self._shape.waits_for_outcome:
            return []
        prompt = self._shape.prompts[0]
        return [self._chunk(prompt, None)] if isinstance(prompt, str) and prompt else []

    def text(self, text: str, logprobs: list[Json]) -> list[Json]:
        if self._shape.waits_for_outcome or self._shape.only_prompt:
            return []
        lists = self._tokens.take(logprobs, text) if self._shape.has_logprobs else None
        return [self._chunk(text, None, logprobs=lists)] if text or lists else []

    def ending(self, result: Json) -> list[Json]:
        chunks: list[Json] = []
        for number, choice in enumerate(choices_of(result)):
            text, logprobs = self._shape.text_and_logprobs(choice, result)
            told = number == 0 and not self._shape.waits_for_outcome
            if told:
                text, logprobs = "", self._tokens.take([], "", final=True)
            if not told or logprobs is not None:
                chunks.append(self._chunk(text, None, number, logprobs))
            chunks.append(self._chunk("", self._shape.reason(choice), number))
        return chunks + self.usage_chunks(self._shape.usage(result))
