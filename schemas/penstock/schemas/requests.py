"""The JSON form of requests: strict reading with the field at fault named, and back. One validation for all ways in.

The types are in `bodies`, the payloads' normal forms in `payloads`, the errors' texts in `refusals`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, cast
from urllib.parse import urlsplit

from penstock.schemas import aliases
from penstock.schemas.errors import (
    BadJson,
    InvalidRequest,
    TooLarge,
    UnsupportedParameter,
    UnsupportedTask,
)
from penstock.schemas.finite_json import read_body
from penstock.schemas.ids import (
    DEFAULT_TENANT,
    check_conversation_id,
    check_request_id,
    check_tenant,
    new_request_id,
)
from penstock.schemas.large_inputs import STAND_INS
from penstock.schemas.lifetimes import check_start, start_of, ttl_of_deadline
from penstock.schemas.limits import LIMITS
from penstock.schemas.payloads import PASSED_ON, lone_surrogate, size_within
from penstock.schemas.plain import is_plain, text_bytes
from penstock.schemas.records import (
    PAYLOAD_FIELDS,
    ContextLimits,
    InferenceRequest,
    OutputSpec,
    Record,
    Requirements,
    fields_of,
)
from penstock.schemas.tasks import BUILT_TASKS, TASKS, needs_model

__all__ = [
    "BUILT_TASKS",
    "LIMITS",
    "check_callback_url",
    "content_hash",
    "parse_request",
    "parse_request_bytes",
    "prepare_validation",
    "request_to_json",
    "resubmittable",
    "text_bytes",
    "validate_request",
]

MAX_CALLBACK_CHARS = 2_000
MAX_LABEL_CHARS = 63
_TASKS = frozenset(PAYLOAD_FIELDS)
_OF_THE_RECORD = ("request_id", "tenant", "created_at")
_MAPS = frozenset({"extra", "metadata"})
SUMMARY_USES = {"auto": None, "never": False, "required": True}
"""The words for `context.summary`, and how records have them."""
_RECORDS: dict[str, type[Record]] = {"context": ContextLimits, "requirements": Requirements, "output": OutputSpec}


def prepare_validation() -> None:
    """Make what validation needs, in a quarter of a second. Else the first body would wait for it, with its loop."""
    from penstock.schemas.refusals import prepare

    prepare()


def parse_request(
    body: Mapping[str, Any],
    *,
    tenant: str | None = None,
    request_id: str | Callable[[], str] | None = None,
    now_ms: int,
    cut_deadline: bool = False,
) -> InferenceRequest:
    """A validated request from its JSON form. `tenant` overrides the body's; `request_id` is for one that has none (or
    what makes it then). `cut_deadline`: a deadline beyond the horizon is the horizon; else it is refused.

    Raises InvalidRequest, UnsupportedParameter, UnsupportedTask, TooLarge, each with the field in `param`.
    """
    fields = dict(body)
    for name in _OF_THE_RECORD:
        fields.pop(name, None)
    task = fields.get("task")
    if not isinstance(task, str) or task not in PAYLOAD_FIELDS:
        raise InvalidRequest(f"task must be one of {', '.join(BUILT_TASKS)}", param="task")
    _one_payload(fields, task)
    values = _checked(task, fields)
    values[task] = values.pop("payload")
    own_id, own_tenant = body.get("request_id"), body.get("tenant")
    if own_id is None:
        own_id = request_id() if callable(request_id) else request_id or new_request_id()
    values["request_id"] = check_request_id(own_id)
    values["tenant"] = check_tenant(tenant or (DEFAULT_TENANT if own_tenant is None else own_tenant))
    values["created_at"] = now_ms
    if (deadline := values.pop("deadline", None)) is not None:
        values["ttl_ms"] = ttl_of_deadline(deadline, now_ms, cut=cut_deadline)
    if "start_after" in values:
        values["start_after"] = start_of(values["start_after"])
    request = InferenceRequest(**values)
    check_start(request, now_ms)
    _across_fields(request)
    return request


def _one_payload(fields: dict[str, Any], task: str) -> None:
    """Put the payload under `payload`. It may be there, or as in Avro under the name of its task; not in both."""
    named = {name: value for name in fields.keys() & _TASKS if (value := fields.pop(name)) is not None}
    if not named:
        return
    if named.keys() != {task} or fields.get("payload") is not None:
        raise InvalidRequest(
            f"give payload, or {task}, and nothing beside it", param=min(named.keys() - {task}, default=task)
        )
    fields["payload"] = named[task]


def parse_request_bytes(
    value: bytes,
    *,
    tenant: str | None = None,
    request_id: str | Callable[[], str] | None = None,
    now_ms: int,
    topic_kind: str | None = None,
) -> InferenceRequest:
    """As `parse_request`, from the bytes of a record, which may use the names of `aliases`. Raises BadJson too.

    `topic_kind` is that of its topic, as `topics.kind_of_topic` has it.
    """
    if len(value) > LIMITS.max_record_bytes:
        raise TooLarge(f"the record has {len(value)} bytes; the limit is {LIMITS.max_record_bytes}")
    try:
        body = read_body(value, "the record")
    except InvalidRequest as error:
        if error.param:
            raise
        raise BadJson(error.message) from error
    if not isinstance(body, dict):
        raise BadJson("not a JSON object")
    own, given = aliases.translate(aliases.with_payload(cast("dict[str, Any]", body)), topic_kind)
    with aliases.naming(given):
        request = parse_request(own, tenant=tenant, request_id=request_id, now_ms=now_ms, cut_deadline=True)
    return replace(request, created_at=own["created_at"]) if "created_at" in given else request


def validate_request(request: InferenceRequest) -> None:
    """Hold an Avro arrival to the same rules, and give its payload the same normal form. Raises as `parse_request`."""
    if not is_plain(request):
        _validate(request)


def _validate(request: InferenceRequest) -> None:
    check_request_id(request.request_id)
    check_tenant(request.tenant)
    if request.task not in PAYLOAD_FIELDS:
        raise UnsupportedTask(f"the task {request.task} is not known to this release", param="task")
    given = [name for name in PAYLOAD_FIELDS if getattr(request, name) is not None]
    if given != [request.task]:
        raise InvalidRequest(f"exactly the payload {request.task} must be set, not {given or 'none'}", param="payload")
    payload = {name: value for name, value in request.payload.items() if value is not None}
    stored = request.input_artifact is not None  # the text is validated where it is read
    if stored and (request.task not in STAND_INS or request.conversation_id is not None):
        raise InvalidRequest(f"input_artifact does not go with {request.task} here", param="input_artifact")
    if stored:
        payload.update(STAND_INS[request.task])
    fields: dict[str, Any] = {"task": request.task, "payload": payload}
    from penstock.schemas.refusals import FIELDS

    for name in FIELDS:
        if (value := getattr(request, name, None)) is not None:
            fields[name] = value.to_dict() if isinstance(value, Record) else value
    checked = _checked(request.task, fields)["payload"]
    if not stored:
        request.payload.update(checked)
    _across_fields(request)


def _checked(task: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request in their normal form, those that are null left out. Raises as `parse_request`."""
    normal_form = TASKS[task].normal_form
    if normal_form is None:
        raise UnsupportedTask(f"the task {task} is not built yet", param="task")
    for name in fields.keys() & _MAPS:
        if isinstance(fields[name], dict) and len(fields[name]) > LIMITS.max_map_entries:
            raise _map_too_large(name)  # before each entry is looked at
    values = {name: value for name, value in _validator()(task, fields).items() if value is not None}
    payload = values.get("payload")
    if payload is None:
        raise InvalidRequest("payload must be an object", param="payload")
    given = {name: value for name, value in payload.items() if value is not None}
    values["payload"] = normal_form(given)
    if "conversation_id" in values:
        values["conversation_id"] = check_conversation_id(values["conversation_id"])
    for name in values.keys() & _MAPS:
        map_within(values[name], name)
    for name in values.keys() & _RECORDS.keys():
        given = {key: item for key, item in values[name].items() if item is not None}
        if isinstance(use := given.get("summary"), str):
            given["summary"] = SUMMARY_USES[use]
        values[name] = _RECORDS[name](**given)
    return values


@cache
def _validator() -> Callable[[str, Mapping[str, Any]], dict[str, Any]]:
    from penstock.schemas.refusals import validated_request

    return validated_request


def map_within(texts: Mapping[str, str], param: str) -> None:
    """Check a request's `extra` or `metadata`. Raises TooLarge, InvalidRequest."""
    passed_on = texts.keys() & PASSED_ON if param == "extra" else frozenset[str]()
    for name in passed_on:  # fields of OpenAI's, as long as any text
        size_within(texts[name], f"{param}.{name}")
    try:
        size = sum(text_bytes(text) for pair in texts.items() for text in pair if pair[0] not in passed_on)
    except UnicodeEncodeError as error:
        raise lone_surrogate(param) from error
    if len(texts) > LIMITS.max_map_entries or size > LIMITS.max_map_bytes:
        raise _map_too_large(param)


def _map_too_large(param: str) -> TooLarge:
    return TooLarge(
        f"{param} has more than {LIMITS.max_map_entries} entries or {LIMITS.max_map_bytes} bytes", param=param
    )


def _across_fields(request: InferenceRequest) -> None:
    if request.callback_url is not None:
        check_callback_url(request.callback_url)
    elif request.callback_statuses:
        raise InvalidRequest("callback_statuses needs a callback_url", param="callback_statuses")
    if request.output is not None:
        _output_fits(request.task, request.output)
    if request.conversation_id is not None and not TASKS[request.task].in_conversation:
        raise UnsupportedParameter(f"conversation_id does not go with {request.task}", param="conversation_id")
    if request.conversation_id is None and request.task == "conversation_items":
        raise InvalidRequest("conversation_items needs a conversation_id", param="conversation_id")
    if request.model is not None and not needs_model(request.task):
        raise UnsupportedParameter(f"model does not go with {request.task}: no model is asked", param="model")
    if request.context is not None and request.conversation_id is None:
        raise InvalidRequest("context needs a conversation_id", param="context")
    if request.context is not None and request.task != "text_generation":
        raise UnsupportedParameter(f"context does not go with {request.task}", param="context")
    if request.task == "summarization":
        _about_one_text(request)
    if request.conversation_id is None and request.payload.get("image") == {}:
        raise InvalidRequest(
            "payload.image is missing: it must be an object; only in a conversation it may be left out",
            param="payload.image",
        )
    if request.conversation_id is not None and request.task == "text_generation":
        _plain_turn(request.payload)


def _about_one_text(request: InferenceRequest) -> None:
    """A summary is of a text, of a conversation that it reads, or of the conversation to which it is added."""
    named = [name for name in ("conversation_id", "text") if request.payload.get(name) is not None]
    if request.conversation_id is None and not named and request.input_artifact is None:
        raise InvalidRequest("payload needs text or conversation_id, one of the two", param="payload.text")
    if request.conversation_id is not None and named:
        raise InvalidRequest(
            f"payload.{named[0]} does not go with conversation_id: the summary of that conversation is added to it",
            param=f"payload.{named[0]}",
        )


def check_callback_url(url: str) -> None:
    """Hold a callback_url to what it must be at any installation. Raises InvalidRequest.

    Which hosts and addresses may be called is a matter of settings: the gateway and `penstock webhooks` look at them.
    """
    try:
        parts = urlsplit(url)
        named = _is_host(parts.hostname or "") and parts.port != 0
    except ValueError:  # brackets without an address, a port that is none
        parts, named = urlsplit(""), False
    if len(url) > MAX_CALLBACK_CHARS or not (url.isascii() and url.isprintable()) or " " in url:
        raise InvalidRequest(
            f"callback_url must be a URL of at most {MAX_CALLBACK_CHARS} ASCII characters, the others encoded",
            param="callback_url",
        )
    if not named or parts.scheme not in ("http", "https"):
        raise InvalidRequest("callback_url must be an http or https URL that names a host", param="callback_url")
    if parts.username is not None or parts.password is not None:
        raise InvalidRequest("callback_url must hold no user name and no password", param="callback_url")


def _is_host(host: str) -> bool:
    """Whether it can be resolved: the standard library raises UnicodeError for labels that DNS does not have."""
    return all(0 < len(label) <= MAX_LABEL_CHARS for label in host.removesuffix(".").split("."))


def _output_fits(task: str, output: OutputSpec) -> None:
    if TASKS[task].output != "images":
        raise UnsupportedParameter(f"output does not go with {task}", param="output")
    if output.quality is not None and output.format not in ("jpeg", "webp"):
        raise InvalidRequest("output.quality goes with format jpeg or webp", param="output.quality")


def _plain_turn(payload: Mapping[str, Any]) -> None:
    """Conversations keep one answer of text a turn: others would be lost with the turn's end."""
    if payload.get("messages") is None:
        raise InvalidRequest("a conversation's turn needs messages", param="payload.messages")
    if payload.get("n") not in (None, 1):
        raise UnsupportedParameter("payload.n does not go with conversation_id yet", param="payload.n")


def request_to_json(request: InferenceRequest) -> dict[str, Any]:
    """The JSON form; unset fields are left out."""
    values = request.to_dict()
    payload = values.pop(request.task, None) or {}
    for name in PAYLOAD_FIELDS:
        values.pop(name, None)
    found = {name: value for name, value in values.items() if value is not None and value != {}}
    found["payload"] = {name: value for name, value in payload.items() if value is not None}
    return found


_OF_ITS_FIRST_RUN = (*_OF_THE_RECORD, "history", "redriven_from", "response_object", "input_artifact", "start_after")


def resubmittable(request: InferenceRequest) -> dict[str, Any]:
    """The JSON form without what belongs to this request alone: a body that asks for the same again."""
    values = request_to_json(request)
    kept = {name: value for name, value in values.items() if name not in _OF_ITS_FIRST_RUN}
    if not request.max_attempts:
        kept.pop("max_attempts", None)
    return _bare(kept)


# A `deadline` becomes a time to live, which is another one at each repeat.
_sorted_json = json.JSONEncoder(sort_keys=True).encode
_NOT_CONTENT = frozenset({"request_id", "created_at", "tenant", "ttl_ms", "history", *PAYLOAD_FIELDS})
_CONTENT = tuple(name for name in fields_of(InferenceRequest) if name not in _NOT_CONTENT)


def content_hash(request: InferenceRequest) -> str:
    """Hex digest of what was asked for, whenever and under which id: equal for a repeat, different for another body."""
    values: dict[str, Any] = {"payload": request.payload}
    for name in _CONTENT:
        value = getattr(request, name)
        if value is not None and value != {}:
            values[name] = value.to_dict() if isinstance(value, Record) else value
    text = _sorted_json(values)
    if "null" in text:  # as of what Avro brought; what was parsed here has none as a rule
        text = _sorted_json(_bare(values))
    return hashlib.sha256(text.encode()).hexdigest()


def _bare(value: Any) -> Any:
    """Without nulls at any depth: Avro writes what JSON left out."""
    if isinstance(value, dict):
        found = cast("dict[str, Any]", value)
        return {key: _bare(item) for key, item in found.items() if item is not None}
    if isinstance(value, list):
        return [_bare(item) for item in cast("list[Any]", value)]
    return value
