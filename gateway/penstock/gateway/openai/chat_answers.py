"""The answers of the OpenAI routes: whole ones, chunks of streams, and embeddings, in the shapes of OpenAI."""

from __future__ import annotations

import base64
import json
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from penstock.gateway.edge.event_stream import server_sent
from penstock.gateway.openai.splice import CallSplice
from penstock.schemas.errors import PenstockError, error_body

Json = dict[str, Any]
SHOWN_TIERS = {"auto": "default", "fast": "priority"}
"""As an answer names the tier that served a request, where that is not what was asked for."""

compact_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
FINISH_REASONS = frozenset({"stop", "length", "content_filter", "tool_calls", "function_call"})


def chat_completion(request_id: str, created: int, model: str, result: Json, tier: str | None) -> Json:
    choices: list[Json] = [
        {
            "index": choice["index"],
            "message": _message(choice),
            "logprobs": _logprobs(choice),
            "finish_reason": finish_reason(choice),
        }
        for choice in choices_of(result)
    ]
    return answer(f"chatcmpl-{request_id}", "chat.completion", created, model, choices, result, tier)


def choices_of(result: Json) -> list[Json]:
    """All answers of a result; one when it has no list of them."""
    return result.get("choices") or [{**result, "index": 0}]


def _message(choice: Json) -> Json:
    message: Json = {"role": "assistant", "content": choice.get("text") or "", "refusal": None}
    if choice.get("tool_calls"):
        message["content"] = choice.get("text") or None
        message["tool_calls"] = choice["tool_calls"]
    return message


def _logprobs(choice: Json) -> Json | None:
    found: list[Json] | None = choice.get("logprobs")
    return None if found is None else {"content": [_token(one) for one in found], "refusal": None}


def _token(one: Json) -> Json:
    return {**one, "top_logprobs": one.get("top_logprobs") or []}


def answer(
    answer_id: str, kind: str, created: int, model: str, choices: list[Json], result: Json, tier: str | None
) -> Json:
    made: Json = {"id": answer_id, "object": kind, "created": created, "choices": choices}
    made["model"] = result.get("model") or model
    made["usage"] = text_usage(result)
    made["system_fingerprint"] = None
    if tier is not None:
        made["service_tier"] = SHOWN_TIERS.get(tier, tier)
    return made


class ChunkWriter:
    """Makes the chunk objects of one stream, chat or completion.

    Text, log probabilities and calls of the first answer come as they are made. Further answers come with the outcome,
    in OpenAI's deltas.
    """

    last = server_sent("[DONE]")

    def __init__(
        self,
        request_id: str,
        created: int,
        model: str,
        *,
        chat: bool,
        includes_usage: bool,
        tier: str | None,
        first_index: int = 0,
    ) -> None:
        """`first_index`: that of its first answer, where the stream has those of other requests too."""
        self._request_id = request_id
        self._chat = chat
        self._first_index = first_index
        self._includes_usage = includes_usage
        self._head: Json = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{request_id}",
            "object": "chat.completion.chunk" if chat else "text_completion",
            "created": created,
            "model": model,
            "system_fingerprint": None,
        }
        if tier is not None:
            self._head["service_tier"] = SHOWN_TIERS.get(tier, tier)

    def encoded(self, events: list[Json], dumps: Callable[[Json], str] = compact_json) -> bytes:
        return b"".join([server_sent(dumps(event)) for event in events])

    def failure(self, error: PenstockError) -> bytes:
        """What ends a stream that cannot be carried on."""
        return server_sent(compact_json(error_body(error, self._request_id)))

    def opening(self) -> list[Json]:
        """What comes before any text: the role, on chat."""
        return [self._opening(0)] if self._chat else []

    def text(self, text: str, logprobs: list[Json]) -> list[Json]:
        """New text, new log probabilities, or both."""
        return [self._chunk(self._delta(text), None, logprobs=_logprobs({"logprobs": logprobs or None}))]

    def calls(self, pieces: list[Json], index: int = 0) -> list[Json]:
        """Pieces of calls of one answer: id and name first, then parts of the arguments."""
        if not self._chat:
            return []
        return [self._chunk({"tool_calls": [delta]}, None, index) for piece in pieces for delta in _call_deltas(piece)]

    def ending(self, result: Json) -> list[Json]:
        """What the outcome adds, the finish reasons, then the usage if it was asked for."""
        first, *others = choices_of(result)
        chunks = [self._end_of({**first, "index": 0})]
        for choice in others:
            index = choice["index"]
            if self._chat:
                chunks.append(self._opening(index))
            if choice.get("text") or choice.get("logprobs"):
                chunks.append(self._chunk(self._delta(choice.get("text") or ""), None, index, _logprobs(choice)))
            chunks += self.calls(CallSplice().finish(choice.get("tool_calls") or []), index)
            chunks.append(self._end_of(choice))
        return chunks + self.usage_chunks(self.usage_of(result))

    def usage_of(self, result: Json) -> Json:
        """The counts that it shows of a result."""
        return result.get("usage") or {}

    def usage_chunks(self, usage: Json) -> list[Json]:
        """The chunk that says the usage, if it was asked for."""
        if not self._includes_usage:
            return []
        return [{**self._head, "choices": [], "usage": text_usage({"usage": usage})}]

    def _end_of(self, choice: Json) -> Json:
        return self._chunk({} if self._chat else "", finish_reason(choice), choice["index"])

    def _opening(self, index: int) -> Json:
        return self._chunk({"role": "assistant", "content": "", "refusal": None}, None, index)

    def _delta(self, text: str) -> Json | str:
        return {"content": text} if self._chat else text

    def _chunk(self, content: Json | str, reason: str | None, index: int = 0, logprobs: Json | None = None) -> Json:
        choice: Json = {
            "index": self._first_index + index,
            "delta" if self._chat else "text": content,
            "logprobs": logprobs,
        }
        choice["finish_reason"] = reason
        chunk: Json = {**self._head, "choices": [choice]}
        if self._includes_usage:
            chunk["usage"] = None
        return chunk


def _call_deltas(piece: Json) -> Iterator[Json]:
    """A call begins with a delta without arguments, as OpenAI's do."""
    if piece["id"] is not None:
        named = {"name": piece["name"], "arguments": ""}
        yield {"index": piece["index"], "id": piece["id"], "type": "function", "function": named}
    if piece["arguments"]:
        yield {"index": piece["index"], "function": {"arguments": piece["arguments"]}}


def embedding_list(model: str, result: Json, encoding_format: str | None) -> Json:
    """The answer of /v1/embeddings; `base64` is little-endian float32, as the stock client asks for."""
    vectors = cast("list[list[float]]", result.get("embeddings") or [])
    as_base64 = encoding_format == "base64"
    data: list[Json] = [
        {"object": "embedding", "index": index, "embedding": _base64_floats(vector) if as_base64 else vector}
        for index, vector in enumerate(vectors)
    ]
    usage = text_usage(result)
    counts = {"prompt_tokens": usage["prompt_tokens"], "total_tokens": usage["total_tokens"]}
    return {"object": "list", "data": data, "model": result.get("model") or model, "usage": counts}


def finish_reason(choice: Json) -> str:
    """One of the reasons that OpenAI's clients know."""
    reason = choice.get("finish_reason")
    return reason if reason in FINISH_REASONS else "stop"


def text_usage(result: Json) -> Json:
    usage: Json = result.get("usage") or {}
    prompt, produced = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
    counts: Json = {"prompt_tokens": prompt, "completion_tokens": produced, "total_tokens": prompt + produced}
    if usage.get("cached_tokens") is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": int(usage["cached_tokens"])}
    return counts


def _base64_floats(vector: Sequence[float]) -> str:
    floats = array("f", vector)
    if sys.byteorder == "big":
        floats.byteswap()
    return base64.b64encode(floats.tobytes()).decode()
