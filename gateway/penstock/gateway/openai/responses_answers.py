"""The answers of /v1/responses: the response object, and the events of its stream as OpenAI sends them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.gateway.edge.event_stream import server_sent
from penstock.gateway.openai.chat_answers import SHOWN_TIERS, compact_json, text_usage
from penstock.gateway.openai.responses_bodies import ResponsesBody
from penstock.schemas.errors import Cancelled, PenstockError

Json = dict[str, Any]
ID_PREFIX = "resp_"


@dataclass(frozen=True, kw_only=True, slots=True)
class Asked:
    """What the response repeats of its request."""

    request_id: str
    created: int
    model: str
    metadata: Json
    repeated: Json
    """As `repeated_fields`."""

    def response(self, status: str, output: list[Json], **more: Any) -> Json:
        return {
            "id": f"{ID_PREFIX}{self.request_id}",
            "object": "response",
            "created_at": self.created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "metadata": self.metadata,
            "model": self.model,
            "output": output,
            **self.repeated,
            "usage": None,
            **more,
        }


def repeated_fields(body: ResponsesBody) -> Json:
    """What the response repeats of its body, but for the metadata. The schema of Open Responses asks for all of it."""
    more = body.model_extra or {}
    return {
        "background": bool(body.background),
        "frequency_penalty": 0.0,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "presence_penalty": 0.0,
        "previous_response_id": body.previous_response_id,
        "prompt_cache_key": more.get("prompt_cache_key"),
        "reasoning": None if body.reasoning is None else {"effort": body.reasoning.effort, "summary": None},
        "safety_identifier": more.get("safety_identifier"),
        "service_tier": SHOWN_TIERS.get(tier := body.service_tier or "auto", tier),
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": (body.text.format if body.text else None) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [{"description": None, "parameters": None, "strict": None, **tool} for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
    }


def response(asked: Asked, result: Json) -> Json:
    """The whole answer."""
    return _ended(asked, result, items_of(asked.request_id, result))


def ended_otherwise(asked: Asked, error: PenstockError) -> Json:
    """A response that did not complete."""
    if isinstance(error, Cancelled):
        return asked.response("cancelled", [])
    return asked.response("failed", [], error={"code": error.code, "message": error.message})


def _ended(asked: Asked, result: Json, output: list[Json]) -> Json:
    usage = text_usage(result)
    more: Json = {
        "model": result.get("model") or asked.model,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage.get("prompt_tokens_details") or {"cached_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }
    reason = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(result.get("finish_reason") or "")
    if reason is not None:
        return asked.response("incomplete", output, incomplete_details={"reason": reason}, **more)
    return asked.response("completed", output, completed_at=result.get("completed_at"), **more)


def items_of(request_id: str, result: Json) -> list[Json]:
    """A message if there is text, or nothing else; then the calls."""
    calls = [
        _call_item(
            _call_item_id(request_id, number), call["id"], call["function"]["name"], call["function"]["arguments"]
        )
        for number, call in enumerate(result.get("tool_calls") or ())
    ]
    text = result.get("text") or ""
    return [_message(request_id, "completed", [_part(text, _logprobs(result))]), *calls] if text or not calls else calls


def _message(request_id: str, status: str, content: list[Json]) -> Json:
    return {"type": "message", "id": f"msg_{request_id}", "role": "assistant", "status": status, "content": content}


def _call_item_id(request_id: str, number: int) -> str:
    return f"fc_{request_id}_{number}"


def _call_item(item_id: str, call_id: str, name: str, arguments: str, status: str = "completed") -> Json:
    item = {"type": "function_call", "id": item_id, "call_id": call_id, "name": name}
    return {**item, "arguments": arguments, "status": status}


def _part(text: str, logprobs: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _logprobs(result: Json) -> list[Json]:
    return [
        {**one, "bytes": one.get("bytes") or [], "top_logprobs": one.get("top_logprobs") or []}
        for one in result.get("logprobs") or ()
    ]


class ResponseWriter:
    """Makes the events of one stream. Text and calls of tools come as they are made."""

    last = b""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._number = 0
        self._texts: list[str] = []
        self._logprobs: list[Json] = []
        """Emitted before their text: they go with the next one."""
        self._places: list[str] = []

    def encoded(self, events: list[Json], dumps: Callable[[Json], str] = compact_json) -> bytes:
        """Server-sent events, numbered in the order in which they are sent."""
        return b"".join([self._encoded(event, dumps) for event in events])

    def _encoded(self, event: Json, dumps: Callable[[Json], str]) -> bytes:
        numbered = {**event, "sequence_number": self._number}
        self._number += 1
        return server_sent(dumps(numbered), event["type"])

    def failure(self, error: PenstockError) -> bytes:
        """What ends a stream that cannot be carried on."""
        events: list[Json] = [] if self._number else self.opening()
        return self.encoded([*events, {"type": "response.failed", "response": ended_otherwise(self._asked, error)}])

    def opening(self) -> list[Json]:
        begun = self._asked.response("in_progress", [])
        return [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]

    def text(self, text: str, logprobs: list[Json]) -> list[Json]:
        """Each piece of the text is one event. Log probabilities behind the last one come with the end of the text."""
        self._logprobs += logprobs
        if not text:
            return []
        events = [] if self._texts else self._begin_message()
        self._texts.append(text)
        told, self._logprobs = _logprobs({"logprobs": self._logprobs}), []
        return [*events, self._of_text("response.output_text.delta", delta=text, logprobs=told)]

    def _begin_message(self) -> list[Json]:
        item = _message(self._asked.request_id, "in_progress", [])
        return [
            {"type": "response.output_item.added", "output_index": self._place_of("message"), "item": item},
            self._of_text("response.content_part.added", part=_part("", [])),
        ]

    def calls(self, pieces: list[Json]) -> list[Json]:
        """Pieces of calls: each begins with its id and name."""
        return [event for piece in pieces for event in self._call_piece(piece)]

    def _call_piece(self, piece: Json) -> Iterator[Json]:
        item_id = _call_item_id(self._asked.request_id, piece["index"])
        place = self._place_of(item_id)
        if piece["id"] is not None:
            begun = _call_item(item_id, piece["id"], piece["name"], "", "in_progress")
            yield {"type": "response.output_item.added", "output_index": place, "item": begun}
        if piece["arguments"]:
            delta = {"item_id": item_id, "output_index": place, "delta": piece["arguments"]}
            yield {"type": "response.function_call_arguments.delta", **delta}

    def _place_of(self, item: str) -> int:
        """Items stand in the order in which they began."""
        if item not in self._places:
            self._places.append(item)
        return self._places.index(item)

    def ending(self, result: Json) -> list[Json]:
        result = {**result, "text": "".join(self._texts)}
        items = items_of(self._asked.request_id, result)
        events: list[Json] = []
        for item in items:
            events += self._end_message(item) if item["type"] == "message" else self._end_call(item)
        items.sort(key=lambda item: self._place_of("message" if item["type"] == "message" else item["id"]))
        ended = _ended(self._asked, result, items)
        return [*events, {"type": f"response.{ended['status']}", "response": ended}]

    def _end_message(self, item: Json) -> Iterator[Json]:
        if not self._texts:
            yield from self._begin_message()
        (part,) = item["content"]
        yield self._of_text("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._of_text("response.content_part.done", part=part)
        yield {"type": "response.output_item.done", "output_index": self._place_of("message"), "item": item}

    def _end_call(self, item: Json) -> Iterator[Json]:
        place = self._place_of(item["id"])
        said = {"item_id": item["id"], "output_index": place, "arguments": item["arguments"], "name": item["name"]}
        yield {"type": "response.function_call_arguments.done", **said}
        yield {"type": "response.output_item.done", "output_index": place, "item": item}

    def _of_text(self, kind: str, **more: Any) -> Json:
        place = {"item_id": f"msg_{self._asked.request_id}", "output_index": self._place_of("message")}
        return {"type": kind, **place, "content_index": 0, **more}
