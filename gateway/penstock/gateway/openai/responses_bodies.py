"""The body of POST /v1/responses, and the request that it means. Fields are classified as in `openai_models`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import count
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, Field, PrivateAttr

from penstock.gateway.limits.callers import Caller
from penstock.gateway.openai.chat_bodies import (
    FEW_ENTRIES,
    JUDGED,
    GeneratingBody,
    Json,
    StreamOptions,
    parse_in_openai_words,
    tier_priority,
)
from penstock.gateway.openai.history import thoughts_of, tools_of
from penstock.gateway.openai.other_fields import HARMLESS_RESPONSE, refuse_unsupported
from penstock.gateway.service.brought_images import MAX_IMAGES, BroughtImage, image_of_url
from penstock.schemas.bodies import ListOf
from penstock.schemas.errors import InvalidRequest, PenstockError, TooLarge, UnsupportedParameter
from penstock.schemas.records import InferenceRequest

LOGPROBS = "message.output_text.logprobs"
INCLUDED = frozenset(
    {
        LOGPROBS,
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "file_search_call.results",
        "reasoning.encrypted_content",
        "web_search_call.action.sources",
    }
)
"""What may be asked for. All but log probabilities is of items that no answer here has."""
WORDS = {
    "conversation_id": "conversation",
    "extra.reasoning_effort": "reasoning.effort",
    "extra.verbosity": "text.verbosity",
    "payload.logprobs": "include",
    "payload.max_tokens": "max_output_tokens",
    "payload.messages": "input",
    "payload.response_format.json_schema": "text.format",
    "payload.response_format": "text.format",
}
"""How this route calls the fields of the native request."""
_TEXT_PARTS = ("input_text", "output_text", "text")
IMAGE_PART = "input_image"


class Reasoning(BaseModel):
    """`effort` goes to remote models. No summary of thoughts is made: `auto` asks for one where there is one."""

    model_config = JUDGED

    effort: str | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class TextOptions(BaseModel):
    """The form of the answer."""

    model_config = JUDGED

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(GeneratingBody):
    """The body of POST /v1/responses."""

    input: Annotated[str | ListOf[dict[str, Any]], Field(description="Text, or messages, calls and their outputs.")]
    instructions: str | None = None
    conversation: Annotated[str | dict[str, Any] | None, Field(description="Its id, or {id}.")] = None
    background: Annotated[bool | None, Field(description="Answer at once; the response is fetched later.")] = None
    store: Annotated[bool | None, Field(description="Whether it can be fetched later; true when left out.")] = None
    previous_response_id: Annotated[str | None, Field(description="The input goes on behind that response.")] = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: ListOf[str] | None = None
    stream: bool | None = None
    stream_options: Annotated[StreamOptions | None, FEW_ENTRIES] = None
    metadata: Annotated[dict[str, str] | None, FEW_ENTRIES] = None
    service_tier: str | None = None
    tools: ListOf[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Annotated[Reasoning | None, FEW_ENTRIES] = None
    text: Annotated[TextOptions | None, FEW_ENTRIES] = None
    _earlier: int | None = PrivateAttr(default=None)

    def go_on_behind(self, earlier: list[dict[str, Any]], own: list[dict[str, Any]]) -> None:
        """The items of `previous_response_id` and the body's own are the input."""
        self.input = [*earlier, *own]
        self._earlier = len(earlier)

    @property
    def earlier_items(self) -> int:
        """How many items at the beginning of the input come from `previous_response_id`."""
        return self._earlier or 0

    @property
    def lacks_previous(self) -> bool:
        """Whether a response is named whose items are not in the input."""
        return self.previous_response_id is not None and self._earlier is None


def responses_request(body: ResponsesBody, caller: Caller, now_ms: int) -> InferenceRequest:
    """Raises as `chat_request`."""
    refuse_unsupported(body, HARMLESS_RESPONSE)
    if body.lacks_previous:
        raise UnsupportedParameter(
            "previous_response_id is not supported in a batch: send the earlier items again",
            param="previous_response_id",
        )
    if body.background and body.store is False:
        raise InvalidRequest("background: true needs store: true, which is the default", param="background")
    messages, places = item_messages(body.input, "input", earlier=body.earlier_items)
    if body.instructions is not None:
        messages.insert(0, {"role": "system", "content": body.instructions})
        places.insert(0, "instructions")
    payload: Json = {
        "messages": messages,
        "max_tokens": body.max_output_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.limited_top_k,
        "tools": None if body.tools is None else tools_of(list(map(_tool, body.tools, count()))),
        "tool_choice": _tool_choice(body.tool_choice),
        "response_format": _response_format(body.text),
        **_logprobs(body),
    }
    passed = {
        **body.passed_on,
        "reasoning_effort": None if body.reasoning is None else body.reasoning.effort,
        "verbosity": None if body.text is None else body.text.verbosity,
    }
    more: Json = {"stream": bool(body.stream), "metadata": body.metadata}
    if (conversation := _conversation(body.conversation)) is not None:
        more["conversation_id"] = conversation
    priority = tier_priority(body.service_tier)
    try:
        return parse_in_openai_words(
            "text_generation", body, payload, caller, now_ms, more=more, passed=passed, tier=priority, words=WORDS
        )
    except PenstockError as error:
        raise in_item_places(error, "input", places) from None


def _conversation(value: str | dict[str, Any] | None) -> Any:
    if not isinstance(value, dict):
        return value
    if set(value) != {"id"}:
        raise InvalidRequest("conversation must be an id, or an object with its id", param="conversation")
    return value["id"]


def _logprobs(body: ResponsesBody) -> Json:
    """Asked for by `include`. Raises UnsupportedParameter for what an answer would have to have."""
    for name in body.include or ():
        if name not in INCLUDED:
            raise UnsupportedParameter(f"include: {name} is not supported", param="include")
    if LOGPROBS not in (body.include or ()):
        return {}
    return {"logprobs": True, "top_logprobs": body.top_logprobs}


def item_messages(given: str | list[Any], name: str, *, earlier: int = 0) -> tuple[list[Json], list[str]]:
    """Items as messages, and for each message the place of its first item, as `input[2]`.

    `name`: the field that they stand in, behind `earlier` items of the previous response.
    Raises InvalidRequest, UnsupportedParameter.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}], [name]
    messages: list[Json] = []
    places: list[str] = []
    thoughts: Json = {}  # of the assistant's message that follows
    for number, item in enumerate(given):
        where = f"{name}[{number - earlier}]" if number >= earlier else "previous_response_id"
        if not isinstance(item, dict):
            raise InvalidRequest(f"{where} must be an object", param=where)
        item = cast("Json", item)
        match item.get("type") or "message":
            case "reasoning":
                thoughts = {"reasoning_content": text} if (text := thoughts_of(item)) else {}
                continue
            case "message":
                content = _content(item.get("content"), f"{where}.content", images=True)
                own = thoughts if item.get("role") == "assistant" else {}
                message = {"role": item.get("role"), "content": content, **own}
            case "function_call":
                call = {"id": item.get("call_id"), "type": "function"}
                call["function"] = {"name": item.get("name"), "arguments": item.get("arguments")}
                if messages and "tool_calls" in messages[-1] and not thoughts:
                    messages[-1]["tool_calls"].append(call)
                    continue
                message = {"role": "assistant", "content": None, "tool_calls": [call], **thoughts}
            case "function_call_output":
                output = _content(item.get("output"), f"{where}.output")
                message = {"role": "tool", "tool_call_id": item.get("call_id"), "content": output}
            case other:
                raise UnsupportedParameter(f"{where}: items of type {str(other)[:50]} are not supported", param=where)
        messages.append(message)
        places.append(where)
        thoughts = {}
    return messages, places


def in_item_places(error: PenstockError, name: str, places: Sequence[str]) -> PenstockError:
    """The same error with the place of the item in `param`, in place of the number of the message made of it."""
    found = re.match(rf"{name}\[(\d+)\](.*)", error.param or "")
    if found is None or int(found[1]) >= len(places):
        return error
    place = places[int(found[1])]
    param = place + found[2] if place.endswith("]") else place
    message = error.message.replace(found[0], param)
    return type(error)(message, param=param, details=error.details, retry_after_s=error.retry_after_s)


def _content(value: Any, where: str, *, images: bool = False) -> Any:
    """Text, or the texts of parts joined; with `images` the parts, if some are images. The native body checks the rest.

    Raises UnsupportedParameter, InvalidRequest.
    """
    if not isinstance(value, list):
        return value
    parts: list[Json] = []
    for number, part in enumerate(cast("list[Any]", value)):
        kind: Any = cast("Json", part).get("type") if isinstance(part, dict) else None
        if kind == IMAGE_PART and images:
            parts.append(_image(cast("Json", part), f"{where}[{number}]"))
            continue
        if kind == "refusal" and images:  # to who asked, it was the answer
            part = {"text": part.get("refusal")}
        elif kind not in _TEXT_PARTS:
            wanted = "parts of text and images are" if images else "parts of text are"
            raise UnsupportedParameter(f"{where}: only {wanted} supported", param=where)
        if not isinstance(text := part.get("text"), str):
            raise InvalidRequest(f"{where}: a part of text has no text", param=where)
        parts.append({"type": "text", "text": text})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _image(part: Json, where: str) -> Json:
    """An image by URL, or by the id of an artifact where OpenAI has that of a file. Raises InvalidRequest."""
    url, artifact_id, detail = part.get("image_url"), part.get("file_id"), part.get("detail")
    if (url is None) == (artifact_id is None):
        raise InvalidRequest(f"{where} must have image_url or file_id, one of the two", param=where)
    if url is None:
        return {"type": "image", "image": {"artifact_id": artifact_id}}
    return {"type": "image_url", "image_url": {"url": url, "detail": detail}}


def response_images(body: ResponsesBody, caller: Caller) -> list[BroughtImage]:
    """Take the images out of the input that bring their bytes along; the ids of their artifacts stay.

    Raises InvalidRequest, TooLarge with the field in `param`.
    """
    brought: dict[str, BroughtImage] = {}
    for number, item in enumerate(body.input if isinstance(body.input, list) else ()):
        content: Any = item.get("content")
        for place, part in enumerate(cast("list[Any]", content) if isinstance(content, list) else ()):
            if not isinstance(part, dict) or cast("Json", part).get("type") != IMAGE_PART:
                continue
            shown, where = cast("Json", part), f"input[{number - body.earlier_items}].content[{place}]"
            image = image_of_url(shown.get("image_url"), caller.tenant, f"{where}.image_url")
            if image is not None and shown.get("file_id") is None:
                brought[image.artifact_id] = image
                shown["image_url"], shown["file_id"] = None, image.artifact_id
            if len(brought) > MAX_IMAGES:
                raise TooLarge(f"more than {MAX_IMAGES} images came with the request", param=where)
    return list(brought.values())


def _tool(tool: Json, number: int) -> Json:
    if tool.get("type") != "function":
        raise UnsupportedParameter(
            f"tools[{number}]: only tools of type function are supported", param=f"tools[{number}].type"
        )
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tool_choice(value: str | dict[str, Any] | None) -> Any:
    if not isinstance(value, dict):
        return value
    if value.get("type") != "function" or "name" not in value:
        raise UnsupportedParameter("tool_choice may name a function only", param="tool_choice")
    return {"type": "function", "function": {"name": value["name"]}}


def _response_format(text: TextOptions | None) -> Json | None:
    if text is None or text.format is None:
        return None
    if text.format.get("type") != "json_schema":
        return text.format
    return {"type": "json_schema", "json_schema": {name: v for name, v in text.format.items() if name != "type"}}
