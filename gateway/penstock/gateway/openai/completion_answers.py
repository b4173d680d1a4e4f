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
        """Whether the text of a stream begins with what only the outcome tells."""
        return self.echo and (self.has_logprobs or not isinstance(self.prompts[0], str))

    def text_and_logprobs(self, choice: Json, result: Json) -> tuple[str, Json | None]:
        """Of one choice of a result."""
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
    names = [_name(one) for one in tokens]
    return {
        "tokens": names,
        "token_logprobs": [one["logprob"] for one in tokens],
        "top_logprobs": [_candidates(name, one) for name, one in zip(names, tokens, strict=True)],
        "text_offset": _offsets(tokens, text),
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


def _offsets(tokens: Sequence[Json], text: str) -> list[int]:
    """A token that is no part of the text, as the one that begins a prompt, has no width."""
    offsets: list[int] = []
    place, rest = 0, b""
    for one in tokens:
        offsets.append(place)
        rest += _bytes(one)
        try:
            written = rest.decode()
        except UnicodeDecodeError:
            continue  # of a character that its next tokens complete
        rest = b""
        for form in (written, written.lstrip()):  # tokenizers may put a space before a text
            if text.startswith(form, place):
                place += len(form)
                break
    return offsets


class CompletionWriter(ChunkWriter):
    """Makes the chunk objects of one stream of /v1/completions."""

    def __init__(self, *arguments: Any, shape: Shape, **options: Any) -> None:
        super().__init__(*arguments, chat=False, **options)
        self._shape = shape

    def opening(self) -> list[Json]:
        if not self._shape.echo or self._shape.waits_for_outcome:
            return []
        prompt = self._shape.prompts[0]
        return [self._chunk(prompt, None)] if isinstance(prompt, str) and prompt else []

    def text(self, text: str) -> list[Json]:
        return [] if self._shape.waits_for_outcome or self._shape.only_prompt else super().text(text)

    def ending(self, result: Json) -> list[Json]:
        chunks: list[Json] = []
        for number, choice in enumerate(choices_of(result)):
            text, logprobs = self._shape.text_and_logprobs(choice, result)
            told = number == 0 and not self._shape.waits_for_outcome
            if not told or logprobs is not None:
                chunk = self._chunk("" if told else text, None, number)
                chunk["choices"][0]["logprobs"] = logprobs
                chunks.append(chunk)
            chunks.append(self._chunk("", self._shape.reason(choice), number))
        return chunks + self.usage_chunks(self.usage_of(result))

    def usage_of(self, result: Json) -> Json:
        return self._shape.usage(result)
