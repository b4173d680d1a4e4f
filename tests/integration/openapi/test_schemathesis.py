"""What fits the OpenAPI document, and what nearly does, is sent to a real gateway: no 500, and answers as declared."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from kit.examples import ALL

EXAMPLES = 5 if ALL else 3
"""Of each route and mode."""
TIMEOUT_S = 20
CONFORMING = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
FEW = settings(
    max_examples=EXAMPLES,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
    database=None,
    derandomize=True,
)
Seen = dict[str, list[int]]


@schemathesis.serializer("application/x-ndjson")
def ndjson(ctx: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")


def ask_all(url: str, mode: GenerationMode, known: dict[str, Any]) -> Seen:
    """The statuses by route. Every other case names what there is, and leaves out what no worker here can do."""
    seen: Seen = {}

    def ask(case: Case) -> None:
        codes = seen.setdefault(case.operation.label, [])
        if len(codes) % 2 or (case.operation.path == "/v1/admin/models" and mode is GenerationMode.POSITIVE):
            reachable(case, known)
        answer = case.call(base_url=url, timeout=TIMEOUT_S)
        codes.append(answer.status_code)
        case.validate_response(answer, checks=CONFORMING)

    for operation in operations(url):
        with suppress(Unsatisfiable):  # a route without any parameter cannot be asked wrongly
            FEW(given(case=operation.as_strategy(generation_mode=mode))(ask))()
    return seen


def operations(url: str) -> Iterator[Any]:
    schema: Any = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for found in schema.get_all_operations():
        if found.ok().method != "delete":  # what the others name would be gone
            yield found.ok()


COMMON = ("model", "stream", "metadata", "user", "user_id", "ttl_ms", "priority", "ids", "status", "id")
TEXT = ("messages", "prompt", "input", "max_tokens", "temperature", "top_p", "stop", "instructions", "dimensions")


def reachable(case: Case, known: dict[str, Any]) -> None:
    for name in case.path_parameters or {}:
        case.path_parameters[name] = known[name]
    if case.operation.path == "/v1/admin/models":
        case.body = {"id": known["model_id"], "source": "x", "engine": "noop"}  # it is there: another is not begun
        return
    body: Any = case.body
    if not isinstance(body, dict):
        return
    case.body = body = {name: value for name, value in body.items() if name in (*COMMON, *TEXT, "task", "payload")}
    if "model" in body:
        body["model"] = None
    if body.get("task") is not None:
        body.update(task="text_generation", payload={"prompt": "hello"})
    if isinstance(body.get("messages"), list):
        body["messages"] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def known(url: str) -> dict[str, Any]:
    """Things that there are."""
    body = {"task": "text_generation", "payload": {"prompt": "hello"}}
    request = httpx.post(f"{url}/v1/requests", json=body).json()["request_id"]
    assert httpx.get(f"{url}/v1/requests/{request}", params={"wait": 30}, timeout=60).json()["status"] == "completed"
    turn = {**body, "conversation_id": "c1", "payload": {"messages": [{"role": "user", "content": "hello"}]}}
    assert httpx.post(f"{url}/v1/requests", json=turn).status_code == 202
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"model": "noop", "prompt": "hello"}}
    file = ("lines.jsonl", json.dumps(line).encode())
    file_id = httpx.post(f"{url}/v1/files", data={"purpose": "batch"}, files={"file": file}).json()["id"]
    batch = {"input_file_id": file_id, "endpoint": "/v1/completions", "completion_window": "24h"}
    response = httpx.post(f"{url}/v1/responses", json={"model": "noop", "input": "hello"}, timeout=60).json()["id"]
    return {
        "response_id": response,
        "file_id": file_id,
        "batch_id": httpx.post(f"{url}/v1/batches", json=batch).json()["id"],
        "letter_id": "0/0",
        "key_id": "0" * 12,
        "tenant": "acme",
        "guid": "6f1c4c1e-6a52-4a8e-9d53-5b1a6f2d6a10",
        "request_id": request,
        "conversation_id": "c1",
        "item_id": "msg_0",
        "artifact_id": httpx.post(f"{url}/v1/artifacts", content=b"bytes").json()["id"],
        "model_id": "noop",
        "class_name": "low",
        "revision": 0,
        "action": "resume",
        "subject": "penstock.v1.ResultEvent",
        "schema_id": 0x504E0000,
        "version": "latest",
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "statuses"),
    [(GenerationMode.POSITIVE, range(200, 300)), (GenerationMode.NEGATIVE, range(400, 500))],
    ids=["positive", "negative"],
)
def test_no_body_and_no_parameter_makes_a_500(
    url: str, known: dict[str, Any], mode: GenerationMode, statuses: range
) -> None:
    seen = ask_all(url, mode, known)
    reached = [label for label, codes in seen.items() if any(code in statuses for code in codes)]
    assert len(reached) > 25, seen
