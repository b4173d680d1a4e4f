"""The table of names that other services use: each form becomes a request, or is refused by the caller's own name."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kit.refusals import refused
from penstock.schemas.aliases import (
    MANY_NAMES,
    MESSAGE_TYPES,
    NAMES,
    PRIORITY_NAMES,
    TASK_NAMES,
    Alias,
    identity,
    named,
    names_in,
    translate,
)
from penstock.schemas.errors import InvalidRequest, PenstockError
from penstock.schemas.limits import LIMITS
from penstock.schemas.records import PAYLOAD_FIELDS, InferenceRequest, OutputSpec, Requirements
from penstock.schemas.requests import parse_request_bytes
from penstock.schemas.topics import HEADER_NAMES, TopicNames, kind_of_topic, priority_class

NOW_MS = 1_760_000_000_000
TIME_MS = 1_767_225_600_000  # 2026-01-01T00:00:00Z
GIB = 2**30
CAMEL: dict[str, Any] = {
    "requestId": "r-1", "userId": "u-1", "conversationId": "c-1", "streamResponse": True,
    "modelProfile": {"modelName": "smollm2", "requirements": {"vram": "8GB", "cpuMemory": "512 MiB"}},
    "messages": [{"role": "user", "content": "hi"}], "timestamp": "2026-01-01T00:00:00Z",
}  # fmt: skip
TYPED: dict[str, Any] = {
    "correlation_id": "k-1", "type": "chat",
    "payload": {"model": "smollm2", "conversation_id": "c-1", "messages": [{"role": "user", "content": "hi"}]},
}  # fmt: skip
JOB: dict[str, Any] = {
    "version": "1.0", "task_id": "t-1", "type": "text-to-image", "priority": "high",
    "submitted_at": TIME_MS, "payload": {"prompt": "a dam", "steps": 4},
}  # fmt: skip


def read(body: dict[str, Any], kind: str | None = "text") -> InferenceRequest:
    return parse_request_bytes(json.dumps(body).encode(), request_id="made-up", now_ms=NOW_MS, topic_kind=kind)


def test_the_body_is_not_changed_and_own_names_stay() -> None:
    before = json.dumps(CAMEL)
    translate(CAMEL, "text")
    assert json.dumps(CAMEL) == before
    plain = {"task": "text_generation", "payload": {"prompt": "x"}}
    assert translate(plain) == (plain, {})


VALUES: dict[str, Any] = {"task": "chat", "created_at": TIME_MS, "payload.image": "/a.png", "payload.mask": "/a.png"}


def spread(**values: Any) -> dict[str, Any]:
    """A body of values by their dotted paths."""
    body: dict[str, Any] = {}
    for path, value in values.items():
        *holders, last = path.split(".")
        holder = body
        for name in holders:
            holder = holder.setdefault(name, {})
        holder[last] = value
    return body


@pytest.mark.parametrize("alias", [alias for alias in NAMES if alias.name != alias.field], ids=lambda alias: alias.name)
def test_two_names_of_one_field_are_refused_with_both(alias: Alias) -> None:
    """Equal or different: whoever writes both means something by it that nobody here can know."""
    value = VALUES.get(alias.field, "8GB")
    own = alias.field.removesuffix("[0].op")
    with pytest.raises(PenstockError) as caught:
        read(spread(**{alias.name: value, own: value}))
    assert (caught.value.code, caught.value.param) == ("invalid", alias.name)
    assert caught.value.message == f"{own} and {alias.name} name the same field: give one of them"


def test_two_foreign_names_of_one_field_are_refused_with_both() -> None:
    with pytest.raises(PenstockError, match="requestId and task_id name the same field"):
        read({**CAMEL, "task_id": "r-1"})
    with pytest.raises(PenstockError, match=r"payload\.conversation_id and conversationId"):
        read({**TYPED, "conversationId": "c-1"})


DRAW = {"id": "r", "type": "text2image", "prompt": "x"}
EDIT = {"id": "r", "type": "image2image", "prompt": "x"}
PROCESS: dict[str, Any] = {"id": "r", "type": "image_processing", "image_path": "/a.png", "operation": "resize"}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({**TYPED, "type": "dance"}, "type", "chat"),
    ({**JOB, "priority": "urgent"}, "priority", "high"),
    ({**JOB, "submitted_at": "yesterday"}, "submitted_at", "RFC 3339"),
    ({**JOB, "submitted_at": float("inf")}, "submitted_at", "infinite"),
    ({**JOB, "submitted_at": True}, "submitted_at", "RFC 3339"),
    ({**JOB, "version": {"major": 1}}, "version", "text"),
    ({**TYPED, "correlation_id": "x" * 201}, "correlation_id", "200"),
    ({**CAMEL, "conversationId": "a b"}, "conversationId", "conversationId must match"),
    ({**CAMEL, "streamResponse": "yes"}, "streamResponse", "true or false"),
    ({**TYPED, "payload": {**TYPED["payload"], "steps": 4}}, "payload.steps", "not supported"),
    (
        {**CAMEL, "modelProfile": {"modelName": "m", "quantization": "int8"}},
        "modelProfile.quantization",
        "not supported",
    ),
    ({**TYPED, "metadata": "x"}, "metadata", "an object"),
    ({"requestId": "r", "payload": {"image": {"url": "x"}, "prompt": "x"}}, "task", "task must be one of"),
    ({**DRAW, "steps": 0}, "steps", "steps"),
    ({**DRAW, "parameters": {"steps": "many"}}, "parameters.steps", "parameters.steps"),
    ({**DRAW, "parameters": {"loras": []}}, "parameters.loras", "parameters.loras"),
    ({**DRAW, "parameters": 5}, "parameters", "parameters"),
    ({**DRAW, "payload": {"guidanceScale": "high"}}, "payload.guidanceScale", "payload.guidanceScale"),
    ({**DRAW, "width": 60_000, "height": 60_000}, "width", "width"),
    ({**DRAW, "resultBucket": 5}, "resultBucket", "resultBucket"),
    ({**DRAW, "callbackUrl": "ftp://x"}, "callbackUrl", "callbackUrl"),
    ({**DRAW, "image_path": "/a.png"}, "image_path", "image_path"),
    ({**EDIT, "inputImage": "photo.png"}, "inputImage", "inputImage"),
    ({**EDIT, "inputImage": "/a.png", "image_path": "/b.png"}, "image_path", "image_path"),
    ({**PROCESS, "operation": "sharpen"}, "operation", "operation"),
    ({**PROCESS, "parameters": {"width": "wide"}}, "parameters.width", "parameters.width"),
    ({**PROCESS, "parameters": {"blur": 1}}, "parameters.blur", "parameters.blur"),
    ({**PROCESS, "operations": [{"op": "resize"}]}, "operation", "operation"),
    ({"id": "r", "payload": {"negativePrompt": None}}, "payload.prompt", "payload.prompt"),
    ({"id": "r", "deadline": "soon", "payload": {"prompt": "x"}}, "deadline", "deadline"),
    ({"id": "r", "surprise": 1, "payload": {"prompt": "x"}}, "surprise", "surprise"),
    ({"id": "r", "payload": {"prompt": "x", "surprise": 1}}, "payload.surprise", "payload.surprise"),
]


@pytest.mark.parametrize(("body", "param", "words"), REFUSED, ids=[f"{param}-{words}" for _, param, words in REFUSED])
def test_what_cannot_be_understood_is_refused_by_the_callers_name(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(PenstockError) as caught:
        read(body, "image" if ("id" in body and "deadline" not in body) or param == "task" else "text")
    assert caught.value.param == param
    assert words in caught.value.message
    assert words != param or param.startswith("payload.") or "payload." not in caught.value.message


SIZES = {"8GB": 8 * GIB, "8 GiB": 8 * GIB, "1.5g": 3 * GIB // 2, "8192mb": 8 * GIB, 8 * GIB: 8 * GIB, 0: 0}
NO_SIZES = [8, 8.5, "8", "8 apples", "-1GB", True, ["8GB"], "99999999TB"]


@pytest.mark.parametrize(("given", "size"), [*SIZES.items(), *((given, None) for given in NO_SIZES)])
def test_a_size_has_its_unit(given: Any, size: int | None) -> None:
    asked = {**CAMEL, "modelProfile": {"modelName": "m", "requirements": {"vram": given}}}
    wrong = None if size is not None else PenstockError
    with refused(wrong, match="a size with its unit", param="modelProfile.requirements.vram"):
        assert read(asked).requirements == Requirements(vram_bytes=size)


TIMES = ["2026-01-01T00:00:00Z", "2026-01-01T01:00:00+01:00", "2026-01-01T00:00:00", TIME_MS, TIME_MS // 1000]


@pytest.mark.parametrize("given", [*TIMES, TIME_MS * 1000, str(TIME_MS), f"{TIME_MS // 1000}.0"])
def test_times(given: Any) -> None:
    assert read({**CAMEL, "timestamp": given}).created_at == TIME_MS


def test_values_map_to_what_there_is() -> None:
    assert set(TASK_NAMES.values()) == set(PAYLOAD_FIELDS)
    assert {priority_class(value) for value in PRIORITY_NAMES.values()} == {"high", "medium", "low"}


@pytest.mark.parametrize("pool", [None, "coder"])
def test_the_kind_of_a_topic_under_any_prefix(pool: str | None) -> None:
    names = TopicNames("team.inference.")
    kinds = [kind_of_topic(topic) for topic in names.request_topics(pool)]
    assert kinds == ["text", "text", "text", "image", "embedding"]
    assert kind_of_topic(names.result) is None


MESSAGES = Path(__file__).parents[2] / "messages"
FILE = {"url": "file:///data/in/photo.png"}


def sent(name: str) -> dict[str, Any]:
    return json.loads((MESSAGES / f"{name}.json").read_bytes())


RESIZE = {"op": "resize", "arguments": {"width": "64", "height": "64", "fit": "exact"}}
FOOD = {"prompt": "hi", "max_tokens": 10, "temperature": 0}
SAY = {"prompt": "Say hi", "max_tokens": 8, "temperature": 0}
MEANT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "camel case without a task": (CAMEL, {
        "request_id": "r-1", "user_id": "u-1", "conversation_id": "c-1", "task": "text_generation", "model": "smollm2",
        "stream": True, "requirements": Requirements(vram_bytes=8 * GIB, cpu_memory_bytes=GIB // 2),
        "payload": {"messages": CAMEL["messages"]}, "created_at": TIME_MS,
    }),
    "a type with all in the payload": (TYPED, {
        "request_id": "made-up", "task": "text_generation", "model": "smollm2", "conversation_id": "c-1",
        "metadata": {"correlation_id": "k-1"}, "payload": {"messages": TYPED["payload"]["messages"]},
        "created_at": NOW_MS,
    }),
    "a job with a version": (JOB, {
        "request_id": "t-1", "task": "image_generation", "metadata": {"version": "1.0"}, "priority": 2,
        "created_at": TIME_MS, "payload.inference_steps": 4, "payload.prompt": "a dam",
    }),
    "a summary": ({"type": "summarize", "correlation_id": 7, "payload": {"conversation_id": "c-1"}}, {
        "conversation_id": None, "payload.conversation_id": "c-1", "metadata": {"correlation_id": "7"},
    }),
    "image_editing_000": (sent("image_editing_000"), {
        "task": "image_editing", "priority": 10, "conversation_id": "789", "metadata": {"correlation_id": "uuid-123"},
        "payload.image": {"url": sent("image_editing_000")["payload"]["image"]}, "payload.inference_steps": 30,
    }),
    "text_000": (sent("text_000"), {
        "request_id": "uuid-123", "user_id": "user-456", "conversation_id": "789", "model": "qwen3-30b", "stream": True,
        "requirements": Requirements(vram_bytes=10 * GIB, cpu_memory_bytes=2_000_000_000),
    }),
    "async_001": (sent("async_001"), {
        "request_id": "19933123533434", "ttl_ms": LIMITS.max_ttl_ms, "model": "food-review", "payload": FOOD,
    }),
    "image_generation_003": (sent("image_generation_003"), {
        "task": "image_generation", "output": OutputSpec(store="my-generation-results"), "payload.sampler": "DDIM",
        "callback_url": "https://client.example.com/notify", "metadata": {"version": "1.0"},
    }),
    "text2image_002": (sent("text2image_002"), {
        "request_id": "t-2", "task": "image_generation", "payload.negative_prompt": "blurry",
        "payload.inference_steps": 4, "payload.width": 64, "payload.height": 64,
    }),
    "a null is no second name": ({**CAMEL, "task_id": None, "request_id": None}, {"request_id": "r-1"}),
    "an image, its type in the payload": ({"type": "request", "payload": DRAW}, {"task": "image_generation"}),
    **{
        f"an image, of the kind {kind}": ({**DRAW, "type": kind, "task": "text2image"}, {"task": "image_generation"})
        for kind in (*MESSAGE_TYPES, "job.submitted")
    },
    "text2text_002": (sent("text2text_002"), {"payload": SAY, "callback_url": None}),
    "image2text_002": (sent("image2text_002"), {"payload": {"image": FILE, "max_tokens": 8}}),
    "image_processing_002": (sent("image_processing_002"), {"payload": {"image": FILE, "operations": [RESIZE]}}),
}  # fmt: skip


@pytest.mark.parametrize(("name", "body", "facts"), [(name, *row) for name, row in MEANT.items()], ids=MEANT)
def test_each_message_of_another_service_is_the_request_that_it_means(
    name: str, body: dict[str, Any], facts: dict[str, Any]
) -> None:
    """What is not shown here is as in the message, or its default."""
    request = read(body, "image" if "image" in name or "job" in name else "text")
    payload = {f"payload.{field}": value for field, value in request.payload.items()}
    assert {field: payload[field] if field in payload else getattr(request, field) for field in facts} == facts


def camel(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    words = {name: name.split("_") for name in value}
    return {"".join([first, *map(str.title, more)]): camel(value[name]) for name, (first, *more) in words.items()}


def snake(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {re.sub("[A-Z]", lambda part: f"_{part[0].lower()}", name): snake(item) for name, item in value.items()}


def lifted(body: dict[str, Any]) -> dict[str, Any]:
    """Without the objects around its names."""
    inner = {name: body.get(name) or {} for name in ("payload", "parameters")}
    return {
        **{name: value for name, value in body.items() if name not in inner},
        **inner["payload"],
        **inner["parameters"],
    }


FORMS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "camelCase": camel, "snake_case": snake, "wrapped": lambda body: {"payload": body}, "lifted": lifted,
    "kebab-case": lambda body: {name.replace("_", "-"): value for name, value in snake(body).items()},
    "with nulls": lambda body: {**dict.fromkeys(NULLS), **body},
}  # fmt: skip
NULLS = (
    "callback_url", "callbackUrl", "deadline", "metadata", "stream", "user_id", "pool", "result_bucket", "seed", "mask",
    "modelProfile", "parameters", "negativePrompt", "sampler", "operation", "image_path",
)  # fmt: skip


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("name", [path.stem for path in sorted(MESSAGES.glob("*.json")) if path.stem != "models_002"])
def test_the_same_message_in_another_form_is_the_same_request(
    name: str, form: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    kind = "image" if name.startswith(("image", "text2image")) else "text"
    assert read(form(sent(name)), kind) == read(sent(name), kind)


@pytest.mark.parametrize("write", [str, lambda text: base64.b64encode(text.encode()).decode()], ids=["text", "base64"])
def test_a_payload_may_be_written_as_text(write: Callable[[str], str]) -> None:
    message = sent("async_001")
    assert read({**message, "payload": write(json.dumps(message["payload"]))}) == read(message)
    with pytest.raises(PenstockError, match=r"payload\.temperature"):
        read({**message, "payload": write('{"prompt": "x", "temperature": NaN}')})


def test_names_are_known_after_a_record_was_moved() -> None:
    """The header of the moved record has them; one that is no object of ours is passed over."""
    value, error = json.dumps({**EDIT, "inputImage": "/a.png"}).encode(), InvalidRequest("x", param="payload.image.url")
    names = names_in(value)
    moved = names_in(b"\0\0\0\0\1", [(HEADER_NAMES, json.dumps(names).encode())])
    assert [named(error, found).param for found in (names, moved)] == ["inputImage", "inputImage"]
    for odd in (b"[]", b"{", b"\xff", b""):
        assert names_in(b"\0\0\0\0\1", [(HEADER_NAMES, odd)]) == {}


LATER = NOW_MS + 60_000
SAME = [LATER, LATER // 1000, str(LATER), f"{LATER // 1000}.0", "2025-10-09T08:54:20Z", "2025-10-09T08:54:20"]
DEADLINES: list[tuple[Any, int]] = [
    *((given, 60_000) for given in [*SAME, "2025-10-09T10:54:20+02:00"]),
    (NOW_MS / 1000 + 0.5, 500),
    (0, 1),
    ("1970-01-01T00:00:00Z", 1),
    *((given, LIMITS.max_ttl_ms) for given in ("9999999999", 9_999_999_999_999, "9" * 30)),
]


@pytest.mark.parametrize(("given", "ttl_ms"), DEADLINES)
def test_a_deadline_in_any_form_is_a_time_to_live_up_to_the_horizon(given: Any, ttl_ms: int) -> None:
    assert read({**CAMEL, "deadline": given}).ttl_ms == ttl_ms


def test_the_page_has_each_name_in_the_row_of_its_field() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "topics.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    for alias in NAMES:
        if alias.name == alias.field:
            continue
        name = f"`{alias.name}`"
        fields = [row[1] for row in rows if name in row[0].removeprefix("| ").split(", ")]
        assert any(f"`{alias.field}`" in field for field in fields), alias
    for word in (TASK_NAMES.keys() - set(TASK_NAMES.values())) | PRIORITY_NAMES.keys() | set(MESSAGE_TYPES):
        assert f"`{word}`" in page, word


MANY = {f"n{number}": 1 for number in range(MANY_NAMES + 1)}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"request_id": "r", "payload": {"tenant": "b", "bogus": 1}}, ("r", "b", None)),
        ({"payload": '{"requestId": "zz", "callbackUrl": "u", "bogus": 1}'}, ("zz", None, "u")),
        ({"payload": {"parameters": {"task-id": 7}}}, ("7", None, None)),
        ({**MANY, "request_id": "z"}, ("z", None, None)),
        ({"payload": {**MANY, "requestId": "z"}}, ("z", None, None)),
        ({"id": "other", "request_id": "z"}, ("z", None, None)),
        ({"RequestID": "z", "Payload": {"Tenant": "b", "bogus": 1}}, ("z", "b", None)),
        ({"request_id": "z", "payload": '{"tenant": "b", "x": NaN}'}, ("z", "b", None)),
        ({"id": 10**4_500, "task_id": None}, (None, None, None)),
        ({"payload": [1], "parameters": 3, "metadata": "x"}, (None, None, None)),
    ],
)
def test_whose_a_body_is_that_is_no_request(body: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert identity(body)[:3] == expected


def test_names_are_counted_where_they_are_read() -> None:
    holders = {"task": "text", **{"Payload"[:at] + "PAYLOAD"[at:]: MANY for at in range(7)}}
    with pytest.raises(InvalidRequest, match="more than 1000 names"):
        translate(holders)
    bias = {"task": "text", "payload": {"prompt": "x", "logit_bias": dict.fromkeys(map(str, range(2_000)), 1)}}
    assert translate(bias)[0]["task"] == "text_generation"
    assert translate({"task": "text", "prompt": "x", "timestamp": 1e300})[0]["payload"] == {"prompt": "x"}
