"""Conversations of a real system, as callers and the command line have them: what several tests of them begin with."""

from __future__ import annotations

import json
import uuid
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from typer.testing import CliRunner

from penstock.cli.main import app
from system import Process, System, running

Json = dict[str, Any]


@contextmanager
def worked(kafka: Any, folder: Path, models: Sequence[Json], **options: Any) -> Generator[System]:
    """A system whose worker `w1` and gateway `g1` are ready."""
    prefix = f"{folder.name}{uuid.uuid4().hex[:6]}-"
    made = System(kafka.bootstrap_servers, prefix, folder, models=list(models), **options)
    with running(made):
        yield made.start_all(["w1", "g1"])


def questions(done: Json) -> list[str]:
    """What users said, of all that a model was told that repeats it."""
    assert done["status"] == "completed", done
    return [one["content"] for one in json.loads(done["result"]["text"]) if one["role"] == "user"]


def turn(
    client: httpx.Client, conversation: str, text: str, model: str = "talk", *, wait: int = 30, **fields: Any
) -> Json:
    """A question in a conversation; the request as it is after `wait` seconds at most."""
    body = {
        "task": "text_generation",
        "model": model,
        "conversation_id": conversation,
        "payload": {"messages": [{"role": "user", "content": text}]},
        **fields,
    }
    answer = client.post(f"/v1/requests?wait={wait}", json=body)
    assert answer.status_code in (200, 202), answer.text
    return answer.json()


def ask(gateway: Process, body: Json) -> Json:
    """Any request, to its end."""
    answer = httpx.post(f"{gateway.url}/v1/requests?wait=30", json=body, timeout=60)
    assert (answer.status_code, answer.json().get("status")) == (200, "completed"), answer.text
    return answer.json()


def append(gateway: Process, conversation: str, messages: list[Json]) -> None:
    """Messages as they are, without an answer."""
    ask(gateway, {"task": "conversation_items", "conversation_id": conversation, "payload": {"messages": messages}})


def fork(client: httpx.Client, conversation: str, through: Any, fork_id: str | None = None) -> Json:
    """The new conversation."""
    body = {"through": through} if fork_id is None else {"through": through, "id": fork_id}
    answer = client.post(f"/v1/conversations/{conversation}/fork", json=body)
    assert answer.status_code == 201, answer.text
    return answer.json()


def items(client: httpx.Client, conversation: str) -> list[Json]:
    """In the order of the log."""
    answer = client.get(f"/v1/conversations/{conversation}/items?limit=100&order=asc")
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def penstock(gateway: Process, *words: str) -> Any:
    """What `penstock conversations` makes of these words at a gateway."""
    return CliRunner().invoke(app, ["conversations", *words, "--url", gateway.url])


def output(gateway: Process, *words: str) -> str:
    """What it prints when nothing fails."""
    result = penstock(gateway, *words)
    assert result.exit_code == 0, result.output
    return result.stdout
