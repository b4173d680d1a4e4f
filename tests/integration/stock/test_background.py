"""The stock OpenAI client makes responses in the background, resumes them at another gateway, cancels and deletes."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
from typing import Any

import httpx
import openai
import pytest

from stock_clients import SOURCES, installed_by_npm, tool
from support import wait_until
from system import Process, System
from worker_requests import engine

OPENAI_FOR_NODE = "openai@6.49.0"
TOKENS = 200
"""8 s: a stream that was read for a moment is far from its end, on a busy machine too."""


SYSTEM = {
    "models": [engine(tokens=TOKENS, delay_ms=40, slots=8)],
    "tenants": ["acme", "globex"],
    "processes": ["w1"],
}


@pytest.fixture(scope="module")
def gateway(system: System) -> Process:
    return system.gateway("g1").wait_ready()


def client_of(system: System, gateway: Process, tenant: str = "acme") -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.url + "/v1", api_key=system.keys[tenant], max_retries=0, timeout=60)


def create(client: openai.OpenAI, **options: Any) -> Any:
    """In the background, unless said otherwise."""
    given: dict[str, Any] = {"model": "noop", "input": "go", "background": True, **options}
    return client.responses.create(**given)


def text_of(events: list[Any]) -> str:
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


def until(events: Any, count: int) -> list[Any]:
    """So many events."""
    return list(itertools.islice(events, count))


def ended(client: openai.OpenAI, response_id: str) -> Any:
    def found() -> Any:
        response = client.responses.retrieve(response_id)
        return response if response.status not in ("queued", "in_progress") else None

    return wait_until(found, 60, f"{response_id} has ended")


def test_a_stream_goes_on_behind_its_last_event_when_its_gateway_and_its_worker_were_killed(
    system: System, gateway: Process
) -> None:
    first, second = system.gateway("killed").wait_ready(), client_of(system, gateway)
    stream = create(client_of(system, first), stream=True)
    events = until(stream, 20)
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    response_id = events[0].response.id
    first.kill9()
    shown = second.responses.retrieve(response_id)
    assert (shown.status, shown.background, shown.output) == ("in_progress", True, [])
    with contextlib.suppress(httpx.TransportError, openai.APIConnectionError):
        events.extend(stream)  # what came before the kill
    again = second.responses.retrieve(response_id, stream=True, starting_after=events[-1].sequence_number)
    events += until(again, 10)
    again.close()
    worker = system.processes[0]
    worker.kill9()
    system.processes[0] = system.worker("w2").wait_ready()
    events += list(second.responses.retrieve(response_id, stream=True, starting_after=events[-1].sequence_number))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    answer = events[-1].response
    assert text_of(events) == answer.output_text
    assert answer.usage.output_tokens == TOKENS
    late = client_of(system, system.gateway("late").wait_ready())
    for client in (second, late):
        assert client.responses.retrieve(response_id).to_dict() == answer.to_dict()
        told = list(client.responses.retrieve(response_id, stream=True))
        assert [event.to_dict() for event in told[3:]] == [event.to_dict() for event in events[3:]]
        assert list(client.responses.retrieve(response_id, stream=True, starting_after=len(events) - 1)) == []


def test_a_response_is_cancelled_and_deleted_at_every_gateway(system: System, gateway: Process) -> None:
    client, other = client_of(system, gateway), client_of(system, system.gateway("g2").wait_ready())
    created = create(client, metadata={"a": "b"}, instructions="brief")
    assert (created.status, created.background, created.metadata) == ("queued", True, {"a": "b"})
    with pytest.raises(openai.ConflictError):
        other.responses.delete(created.id)
    stranger = client_of(system, gateway, "globex")
    for call in (stranger.responses.retrieve, stranger.responses.cancel, stranger.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(created.id)
    assert other.responses.cancel(created.id).status == "cancelled"
    assert client.responses.cancel(created.id).status == "cancelled"
    shown = ended(other, created.id)
    assert (shown.error, shown.instructions, shown.created_at) == (None, "brief", created.created_at)
    kinds = [event.type for event in client.responses.retrieve(created.id, stream=True)]
    assert kinds[-1] == "response.failed"
    (item,) = other.responses.input_items.list(created.id)
    assert (item.type, item.content[0].text) == ("message", "go")  # pyright: ignore[reportAttributeAccessIssue, reportOptionalSubscript]
    other.responses.delete(created.id)
    for one in (client, other):
        with pytest.raises(openai.NotFoundError):
            one.responses.retrieve(created.id)


def test_what_was_answered_at_once_can_be_fetched_too(system: System, gateway: Process) -> None:
    client = client_of(system, gateway)
    answer = create(client, background=False, max_output_tokens=3)
    assert answer.status == "incomplete"
    other = client_of(system, system.gateway("g3").wait_ready())
    assert other.responses.retrieve(answer.id).to_dict() == answer.to_dict()
    with pytest.raises(openai.BadRequestError):
        other.responses.retrieve(answer.id, stream=True)
    with pytest.raises(openai.BadRequestError):
        other.responses.cancel(answer.id)
    unkept = create(client, background=False, max_output_tokens=3, store=False)
    assert unkept.store is False  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(openai.NotFoundError, match="not stored"):
        other.responses.retrieve(unkept.id)


def test_a_client_that_leaves_cancels_nothing(system: System, gateway: Process) -> None:
    client = client_of(system, gateway)
    stream = create(client, stream=True)
    (first, *_) = until(stream, 8)
    stream.close()
    assert ended(client, first.response.id).status == "completed"


def test_the_client_for_node_resumes_at_another_gateway(system: System, gateway: Process) -> None:
    script = SOURCES / "node" / "background.js"
    folder, first = installed_by_npm(OPENAI_FOR_NODE, script), system.gateway("node").wait_ready()
    key = system.keys["acme"]
    command = [tool("node"), str(folder / script.name), first.url, gateway.url, key, "noop"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdout is not None
        assert client.stdout.readline() == "kill\n"
        first.kill9()
        told = json.loads(client.communicate("killed\n", timeout=60)[0])
    assert told["numbers"] == list(range(len(told["numbers"])))
    assert (told["last"], told["text"]) == ("response.completed", told["output"])
