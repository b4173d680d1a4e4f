"""The table of names that other services use: each form becomes a request, or is refused by the caller's own name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.schemas.aliases import NAMES, PRIORITY_NAMES, TASK_NAMES, translate
from penstock.schemas.errors import PenstockError
from penstock.schemas.records import PAYLOAD_FIELDS, InferenceRequest, Requirements
from penstock.schemas.requests import parse_request_bytes
from penstock.schemas.topics import TopicNames, kind_of_topic, priority_class

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


def test_camel_case_without_a_task() -> None:
    request = read(CAMEL)
    assert (request.request_id, request.user_id, request.conversation_id) == ("r-1", "u-1", "c-1")
    assert (request.task, request.model, request.stream) == ("text_generation", "smollm2", True)
    assert request.requirements == Requirements(vram_bytes=8 * GIB, cpu_memory_bytes=GIB // 2)
    assert request.payload == {"messages": CAMEL["messages"]}
    assert request.created_at == TIME_MS


def test_a_type_with_all_in_the_payload() -> None:
    request = read(TYPED)
    assert (request.request_id, request.task, request.model) == ("made-up", "text_generation", "smollm2")
    assert (request.conversation_id, request.metadata) == ("c-1", {"correlation_id": "k-1"})
    assert request.payload == {"messages": TYPED["payload"]["messages"]}
    assert request.created_at == NOW_MS


def test_a_job_with_a_version() -> None:
    request = read(JOB, "image")
    assert (request.request_id, request.task, request.metadata) == ("t-1", "image_generation", {"version": "1.0"})
    assert (request.priority, request.created_at) == (2, TIME_MS)
    assert request.payload["inference_steps"] == 4
    assert request.payload["prompt"] == "a dam"


def test_the_body_is_not_changed_and_own_names_stay() -> None:
    before = json.dumps(CAMEL)
    translate(CAMEL, "text")
    assert json.dumps(CAMEL) == before
    plain = {"task": "text_generation", "payload": {"prompt": "x"}}
    assert translate(plain) == (plain, {})


@pytest.mark.parametrize("alias", NAMES, ids=lambda alias: alias.name)
def test_two_names_of_one_field_are_refused_with_both(alias: Any) -> None:
    """Equal or different: whoever writes both means something by it that nobody here can know."""
    if alias.name == alias.field:
        return
    value = {"task": "chat", "created_at": TIME_MS}.get(alias.field, "8GB")
    body: dict[str, Any] = {}
    for path in (alias.name, alias.field):
        *holders, last = path.split(".")
        holder = body
        for name in holders:
            holder = holder.setdefault(name, {})
        holder[last] = value
    with pytest.raises(PenstockError) as caught:
        read(body)
    assert (caught.value.code, caught.value.param) == ("invalid", alias.name)
    assert alias.name in caught.value.message
    assert f"{alias.field} and " in caught.value.message


def test_two_foreign_names_of_one_field_are_refused_with_both() -> None:
    with pytest.raises(PenstockError, match="requestId and task_id name the same field"):
        read({**CAMEL, "task_id": "r-1"})
    with pytest.raises(PenstockError, match=r"conversationId and payload\.conversation_id"):
        read({**TYPED, "conversationId": "c-1"})


def test_null_is_no_second_name() -> None:
    assert read({**CAMEL, "task_id": None, "request_id": None}).request_id == "r-1"


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
    ({**CAMEL, "modelProfile": {"modelName": "m", "quantization": "int8"}}, "modelProfile", "not supported"),
    ({**TYPED, "metadata": "x"}, "metadata", "an object"),
    ({"requestId": "r", "payload": {"image": {"url": "x"}, "prompt": "x"}}, "task", "task must be one of"),
]


@pytest.mark.parametrize(("body", "param", "words"), REFUSED, ids=[f"{param}-{words}" for _, param, words in REFUSED])
def test_what_cannot_be_understood_is_refused_by_the_callers_name(body: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(PenstockError) as caught:
        read(body, "image" if param == "task" else "text")
    assert caught.value.param == param
    assert words in caught.value.message


SIZES = [("8GB", 8 * GIB), ("8 GiB", 8 * GIB), ("1.5g", 3 * GIB // 2), ("8192mb", 8 * GIB), (8 * GIB, 8 * GIB), (0, 0)]


@pytest.mark.parametrize(("given", "size"), SIZES)
def test_sizes(given: Any, size: int) -> None:
    profile = {"modelName": "m", "requirements": {"vram": given}}
    assert read({**CAMEL, "modelProfile": profile}).requirements == Requirements(vram_bytes=size)


@pytest.mark.parametrize("given", [8, 8.5, "8", "8 apples", "-1GB", True, ["8GB"], "99999999TB"])
def test_a_size_without_a_unit_is_refused(given: Any) -> None:
    with pytest.raises(PenstockError, match="a size with its unit") as caught:
        read({**CAMEL, "modelProfile": {"requirements": {"vram": given}}})
    assert caught.value.param == "modelProfile.requirements.vram"


TIMES = ["2026-01-01T00:00:00Z", "2026-01-01T01:00:00+01:00", "2026-01-01T00:00:00", TIME_MS, TIME_MS // 1000]


@pytest.mark.parametrize("given", [*TIMES, TIME_MS * 1000, str(TIME_MS), f"{TIME_MS // 1000}.0"])
def test_times(given: Any) -> None:
    assert read({**CAMEL, "timestamp": given}).created_at == TIME_MS


def test_the_conversation_that_is_summed_up_stays_in_the_payload() -> None:
    request = read({"type": "summarize", "correlation_id": 7, "payload": {"conversation_id": "c-1"}})
    assert (request.conversation_id, request.payload["conversation_id"]) == (None, "c-1")
    assert request.metadata == {"correlation_id": "7"}


def test_values_map_to_what_there_is() -> None:
    assert set(TASK_NAMES.values()) == set(PAYLOAD_FIELDS)
    assert {priority_class(value) for value in PRIORITY_NAMES.values()} == {"high", "medium", "low"}


@pytest.mark.parametrize("pool", [None, "coder"])
def test_the_kind_of_a_topic_under_any_prefix(pool: str | None) -> None:
    names = TopicNames("team.inference.")
    kinds = [kind_of_topic(topic) for topic in names.request_topics(pool)]
    assert kinds == ["text", "text", "text", "image", "embedding"]
    assert kind_of_topic(names.result) is None


def test_the_page_has_each_name_in_the_row_of_its_field() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "topics.md").read_text()
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    for alias in NAMES:
        name = f"`{alias.name}`"
        fields = [row[1] for row in rows if name in row[0].removeprefix("| ").split(", ")]
        wanted = "payload" if alias.field == f"payload.{alias.name}" else f"`{alias.field}`"
        assert any(wanted in field for field in fields), alias
    for word in (TASK_NAMES.keys() - set(TASK_NAMES.values())) | PRIORITY_NAMES.keys():
        assert f"`{word}`" in page, word
