"""What goes to an OpenAI-compatible server and what comes back, as values: bodies of requests, answers in pieces."""

from __future__ import annotations

import base64
import codecs
import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.processors.engines.base import Message, Prepared, RunSpec
from penstock.processors.engines.remote.echoed import finite_logprob, tokens_of, with_logprobs
from penstock.processors.images.files import as_sent
from penstock.schemas.bodies import EmbeddingPayload, TextPayload
from penstock.schemas.errors import InvalidRequest, UnsupportedParameter
from penstock.schemas.finite_json import loads_finite, object_of
from penstock.schemas.image_bodies import ImageEditingPayload
from penstock.schemas.payloads import OF_OTHER_SERVERS
from penstock.schemas.tasks import TASKS
from penstock.schemas.texts import encodable

Json = dict[str, Any]

MOST_TOKENS = 1 << 40
MOST_CALLS = 1_000
RESERVED = frozenset(
    {
        "model",
        "stream",
        "stream_options",
        "chat_template",
        *TextPayload.__annotations__,
        *EmbeddingPayload.__annotations__,
    }
    - OF_OTHER_SERVERS
)
"""What `extra` may not set: the request has fields for it, or it is not the caller's to say."""
RESERVED_OF_IMAGES = frozenset(
    {"model", "stream", "partial_images", "size", "image[]", *ImageEditingPayload.__annotations__}
)
"""The same for tasks that make images."""


def check_passable(spec: RunSpec) -> None:
    """Raises InvalidRequest, UnsupportedParameter."""
    reserved = RESERVED_OF_IMAGES if TASKS[spec.task].output == "images" else RESERVED
    for name in spec.extra:
        if name in reserved or not name.isprintable():
            raise InvalidRequest(f"extra.{name} cannot be passed on", param=f"extra.{name}")
    if spec.messages is None:
        for name in ("tools", "response_format"):
            if spec.params.get(name):
                raise UnsupportedParameter(f"payload.{name} goes with messages only", param=f"payload.{name}")
    elif spec.params.get("prompt_logprobs") is not None:
        param = "payload.prompt_logprobs"
        raise UnsupportedParameter(f"{param} goes with prompts only at remote servers", param=param)


def text_body(spec: RunSpec, prepared: Prepared, model: str) -> tuple[str, Json]:
    """(path, body) of a run that makes text."""
    body = _body(spec, model)
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    ids = body.pop("prompt_token_ids", None)
    if prepared.messages is None:
        return "/completions", {**with_logprobs(body), "prompt": spec.prompt if ids is None else ids}
    if "tools" in body:
        body["tools"] = [_tool(tool) for tool in body["tools"]]
    if "tool_choice" in body:
        body["tool_choice"] = json_or_text(body["tool_choice"])
    if body.get("response_format", {}).get("json_schema") is not None:
        form = body["response_format"]
        body["response_format"] = {**form, "json_schema": json_or_text(form["json_schema"])}
    return "/chat/completions", {**body, "messages": [_message(message) for message in prepared.messages]}


def embedding_body(spec: RunSpec, model: str) -> Json:
    body = _body(spec, model)
    ids = body.pop("input_token_ids", None)
    return {**body, "input": spec.inputs if ids is None else ids, "encoding_format": "float"}


def _body(spec: RunSpec, model: str) -> Json:
    extra = {name: json_or_text(value) for name, value in spec.extra.items()}
    return {**extra, **spec.params, "model": model}


def json_or_text(value: str) -> Any:
    """The records have texts; one that is JSON is passed on as what it means (0.5, true, {"a": 1}).

    NaN and infinities are no JSON: whatever holds them stays text.
    """
    try:
        return loads_finite(value)
    except ValueError:
        return value


def _tool(tool: Json) -> Json:
    function = {name: value for name, value in tool["function"].items() if value is not None}
    if "parameters" in function:
        function["parameters"] = json_or_text(function["parameters"])
    return {"type": "function", "function": function}


def _message(message: Message) -> Message:
    """As OpenAI has it: without nulls, and a message that only asks for tools has no content."""
    passed = {name: value for name, value in message.items() if value is not None and value != []}
    if "parts" in passed:
        passed["content"] = passed.pop("parts")
    if "tool_calls" in passed:
        passed["content"] = passed.get("content") or None
        passed["tool_calls"] = [_said_call(call) for call in passed["tool_calls"]]
    return passed


def _said_call(call: Json) -> Json:
    """Servers read the arguments of earlier calls for their templates, and fail at what is no object."""
    text = call["function"]["arguments"]
    if isinstance(json_or_text(text), dict):
        return call
    return {**call, "function": {**call["function"], "arguments": json.dumps(object_of(text), ensure_ascii=False)}}


def with_data_urls(messages: Sequence[Message]) -> list[Message]:
    """Messages whose images are parts as OpenAI has them. Takes the time of encoding: runs in a thread."""
    return [{**one, "parts": [_part(part) for part in one["parts"]]} if one.get("parts") else one for one in messages]


def _part(part: Json) -> Json:
    if part["type"] != "image":
        return part
    data, media_type = as_sent(part["image"])
    return {"type": "image_url", "image_url": {"url": f"data:{media_type};base64,{base64.b64encode(data).decode()}"}}


class EncodableStream:
    """`texts.encodable` for a text in pieces: the first half of a surrogate pair waits for the second."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-16-le")("replace")

    def feed(self, text: str) -> str:
        return self._decoder.decode(text.encode("utf-16-le", "surrogatepass"))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


@dataclass(slots=True)
class _Choice:
    """One answer as it comes."""

    pieces: EncodableStream = field(default_factory=EncodableStream)
    texts: list[str] = field(default_factory=list[str])
    reason: str | None = None
    calls: dict[int, Json] = field(default_factory=dict[int, Json])
    told: dict[int, int] = field(default_factory=dict[int, int])
    """Of the calls that have begun, how many characters of their arguments were emitted."""
    logprobs: list[Json] | None = None
    published_logprobs: int = 0

    def add(self, text: str) -> str:
        if text:
            self.texts.append(text)
        return text

    def output(self) -> Json:
        made: Json = {"text": "".join(self.texts)}
        if self.calls:
            made["tool_calls"] = [_with_id(call) for call in self.calls.values()]
        if self.logprobs is not None:
            made["logprobs"] = self.logprobs
        return made


class Answer:
    """Collects the events of a stream. What a server says may be of any shape: what cannot be read raises."""

    def __init__(self, *, chat: bool, echoes: bool = False) -> None:
        """`echoes`: the answer begins with its prompt; none of its text is emitted before all has come."""
        self._chat = chat
        self._echoes = echoes
        self._choices: dict[int, _Choice] = {0: _Choice()}
        self.usage: dict[str, int] = {}
        self.thinks = False
        """Whether thoughts came in a field of their own; they are no part of the answer."""

    def feed(self, event: Json) -> str:
        self.usage = counts(event.get("usage")) or self.usage
        text = ""
        for place, said in enumerate(event.get("choices") or []):
            index = said.get("index")
            index = index if type(index) is int else place
            choice = self._choices.setdefault(index, _Choice())
            delta: Json = (said.get("delta") or {}) if self._chat else {"content": said.get("text")}
            choice.reason = said.get("finish_reason") or choice.reason
            self.thinks |= bool(delta.get("reasoning_content") or delta.get("reasoning"))
            # A refusal has a field of its own; to who asked it is the answer.
            new = choice.add(choice.pieces.feed((delta.get("content") or "") + (delta.get("refusal") or "")))
            text += new if index == 0 else ""
            _add_calls(choice.calls, delta.get("tool_calls") or [])
            if (logprobs := said.get("logprobs")) is not None:
                tokens = map(_logprob, logprobs.get("content") or []) if self._chat else tokens_of(logprobs)
                choice.logprobs = choice.logprobs or []
                choice.logprobs += tokens
        return "" if self._echoes else text

    def take_pieces(self) -> list[Json]:
        """What is new of the first answer's calls: {index, id, name, arguments, offset}, in the order of `output`."""
        choice = self._choices[0]
        pieces: list[Json] = []
        for index, (number, call) in enumerate(choice.calls.items()):
            function = call["function"]
            begun, arguments = number in choice.told, function["arguments"]
            if not begun and not function["name"]:
                break  # those behind it have their places only when it has begun
            place = choice.told.get(number, 0)
            if begun and place == len(arguments):
                continue
            named = {"id": None, "name": None} if begun else {"id": _with_id(call)["id"], "name": function["name"]}
            pieces.append({"index": index, **named, "arguments": arguments[place:], "offset": place})
            choice.told[number] = len(arguments)
        return pieces

    def take_logprobs(self) -> list[Json]:
        """What is new of the first answer's log probabilities. Those of a prompt, which come first, are left out."""
        choice = self._choices[0]
        if choice.logprobs is None or self._echoes:
            return []
        new = choice.logprobs[choice.published_logprobs :]
        choice.published_logprobs += len(new)
        return new

    def flush(self) -> str:
        """The text that waited for the rest of a character."""
        rests = {index: choice.add(choice.pieces.flush()) for index, choice in self._choices.items()}
        return "" if self._echoes else rests[0]

    @property
    def reason(self) -> str | None:
        """Why it ended; None while an answer has not."""
        reasons = [choice.reason for choice in self._choices.values()]
        return None if None in reasons else encodable(str(reasons[0]))

    @property
    def pieces(self) -> int:
        """How many pieces of text came."""
        return sum(len(choice.texts) for choice in self._choices.values())

    def output(self) -> Json:
        """The first answer; `choices` has all when there are several."""
        made = self._choices[0].output()
        if len(self._choices) > 1:
            made["choices"] = [
                {"index": index, "finish_reason": encodable(str(choice.reason)), **choice.output()}
                for index, choice in sorted(self._choices.items())
            ]
        return made


def _add_calls(calls: dict[int, Json], said: Sequence[Json]) -> None:
    """Pieces of calls; the arguments of each come in many."""
    for place, piece in enumerate(said):
        # What stands side by side, and has no id, belongs to what stood side by side before.
        _add_call(calls, _number_of(calls, piece, unnamed=place if len(said) > 1 else max(calls, default=0)), piece)


def _number_of(calls: Mapping[int, Json], piece: Json, *, unnamed: int) -> int:
    """Which call a piece belongs to: its index says so, or else its id; `unnamed` when it has neither."""
    number, call_id = piece.get("index"), piece.get("id")
    if type(number) is not int:
        known = {call["id"]: known_number for known_number, call in calls.items()}
        following = max(calls, default=-1) + 1
        number = known.get(encodable(call_id), following) if call_id else unnamed
    if not 0 <= number < MOST_CALLS:
        raise ValueError("a call without a place")
    return number


def _with_id(call: Json) -> Json:
    """Some servers give calls no id; clients need one to answer."""
    call["id"] = call["id"] or f"call_{uuid.uuid4().hex[:24]}"
    return call


def _add_call(calls: dict[int, Json], number: int, said: Json) -> None:
    """The first id and name that come are its own: they may have been emitted already."""
    call = calls.setdefault(number, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
    function, new = call["function"], said.get("function") or {}
    call["id"] = call["id"] or encodable(said.get("id") or "")
    function["name"] = function["name"] or encodable(new.get("name") or "")
    function["arguments"] += encodable(new.get("arguments") or "")


def _logprob(said: Json) -> Json:
    found = _candidate(said)
    if said.get("top_logprobs"):
        found["top_logprobs"] = [_candidate(one) for one in said["top_logprobs"]]
    return found


def _candidate(said: Json) -> Json:
    found: Json = {"token": encodable(said["token"]), "logprob": finite_logprob(said["logprob"])}
    given: Sequence[Any] | None = said.get("bytes")
    if given is not None:
        found["bytes"] = [int(byte) for byte in given]
    return found


def as_event(body: Json) -> Json:
    """A whole answer as the one event of a stream."""
    choices = [{**choice, "delta": choice.get("message") or {}} for choice in body.get("choices") or []]
    return {**body, "choices": choices}


def counts(usage: Any) -> dict[str, int]:
    """The numbers of a usage that are counts; some servers tell more, in nested objects."""
    given: Mapping[Any, Any] = usage if isinstance(usage, dict) else {}
    details: Any = given.get("prompt_tokens_details")
    told = {**given, **({"cached_tokens": details.get("cached_tokens")} if isinstance(details, dict) else {})}
    return {
        str(name): int(value) for name, value in told.items() if isinstance(value, int) and 0 <= value < MOST_TOKENS
    }
