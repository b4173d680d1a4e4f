"""A stream whose engine or worker is killed goes on where it stopped: its reader sees one text, begun once."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.schemas.fold import ResultFold
from penstock.schemas.records import ResultEvent
from support import engine_processes
from system import Process, System, eventually, free_port
from worker_requests import outcome, send

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 12}},
    "required": ["a"],
}
TOOL = {"type": "function", "function": {"name": "tell", "parameters": SCHEMA}}
TOKENS = 240
CHATS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 11},
    "guided": {
        "temperature": 0.9,
        "seed": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    },
    "call": {"temperature": 0.9, "seed": 5, "tools": [TOOL], "tool_choice": "required"},
}
WORDS = 60
SLOW = {
    "id": "noop",
    "source": "noop",
    "engine": "noop",
    "tasks": ["text_generation"],
    "options": {"tokens": WORDS, "delay_ms": 60, "slots": 64},
}


class Chat:
    """A chat that is streamed over OpenAI's route, as far as it was read."""

    def __init__(self, gateway: str, chat: dict[str, Any]) -> None:
        body = {"model": "tiny", "stream": True, "max_tokens": TOKENS, **chat}
        body |= {
            "messages": [{"role": "user", "content": "Tell me a story."}],
            "stream_options": {"include_usage": True},
        }
        self._client = httpx.Client(base_url=gateway, timeout=120)
        request = self._client.build_request("POST", "/v1/chat/completions", json=body)
        self._answer = self._client.send(request, stream=True)
        assert self._answer.status_code == 200, self._answer.read()
        self._lines = self._answer.iter_lines()
        self.chunks: list[dict[str, Any]] = []

    def read(self, count: int) -> None:
        """Until it has so many chunks."""
        for line in self._lines:
            if line.startswith("data: {"):
                self.chunks.append(json.loads(line[6:]))
                assert "error" not in self.chunks[-1], self.chunks[-1]
                if len(self.chunks) >= count:
                    return

    def whole(self) -> tuple[str, str, str, dict[str, Any]]:
        """Its text, the arguments of its calls, why it ended, and its usage."""
        self.read(1 << 30)
        self._client.close()
        deltas = [choice["delta"] for chunk in self.chunks for choice in chunk["choices"]]
        text = "".join(delta.get("content") or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
        assert sum(call.get("id") is not None for call in calls) <= 1
        (reason,) = {c["finish_reason"] for chunk in self.chunks for c in chunk["choices"] if c["finish_reason"]}
        usage = {name: self.chunks[-1]["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
        return text, "".join(call["function"]["arguments"] for call in calls), reason, usage


def tiny(tiny_lm: Path) -> dict[str, Any]:
    options = {"ignore_eos": True, "window": 4096, "cache_tokens": 16384}
    return {"id": "tiny", "source": str(tiny_lm), "engine": "text", "tasks": ["text_generation"], "options": options}


def kill_engines(worker: Process) -> None:
    engines = engine_processes(worker.popen.pid)
    assert engines
    for engine in engines:
        engine.kill()
    for engine in engines:
        engine.wait(20)


def folds(system: System, ids: Iterable[str]) -> dict[str, ResultFold]:
    """What a reader of the result topic has of each request."""
    found = {one: ResultFold(one, "default") for one in ids}
    for event in system.results():
        if event.request_id in found:
            found[event.request_id].apply(event)
    return found


def began(events: list[ResultEvent]) -> set[str]:
    return {event.request_id for event in events if event.kind == "chunk" and event.text}


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["engine", "worker"])
def test_chats_go_on_after_a_kill(make_system: Callable[..., System], tiny_lm: Path, victim: str) -> None:
    system = make_system(models=[tiny(tiny_lm)])
    worker, gateway = system.worker(), system.gateway().wait_ready()
    worker.wait_ready()
    expected = {name: Chat(gateway.url, chat).whole() for name, chat in CHATS.items()}
    assert expected["plain"][3]["completion_tokens"] == TOKENS
    chats = {name: Chat(gateway.url, chat) for name, chat in CHATS.items()}
    for chat in chats.values():
        chat.read(3)
    if victim == "engine":
        kill_engines(worker)
    else:
        worker.kill9()
        assert not worker.alive()
        worker = system.worker("w2").wait_ready()
    assert {name: chat.whole() for name, chat in chats.items()} == expected
    later = [event for event in system.outcomes().values() if event.since is not None]
    assert len(later) == len(chats), "they were over before the kill"
    assert worker.stop() == 0, worker.tail()


@pytest.mark.slow
def test_a_text_goes_on_when_its_gateway_dies_in_the_same_second(
    make_system: Callable[..., System], tiny_lm: Path
) -> None:
    system = make_system(models=[tiny(tiny_lm)])
    port = free_port()
    worker, gateway = system.worker(), system.gateway(port=port).wait_ready()
    worker.wait_ready()
    payload = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 400, "temperature": 0}
    send(system, {"request_id": "whole", "payload": payload, "stream": True})
    whole = outcome(system, "whole", 90).output_text
    send(system, {"request_id": "cut", "payload": payload, "stream": True})
    frames, cursor = read_frames(gateway.url, "cut", None, most=4)
    worker.kill9()
    gateway.kill9()
    system.worker("w2")
    gateway = system.gateway(port=port).wait_ready()
    more, _ = read_frames(gateway.url, "cut", cursor)
    types = [frame["type"] for frame in [*frames, *more]]
    assert "restarted" not in types
    assert types.count("result") == 1
    assert "".join(frame["text"] for frame in [*frames, *more] if frame["type"] == "chunk") == whole
    assert more[-1]["result"]["text"] == whole


def read_frames(gateway: str, request_id: str, after: str | None, most: int = 1 << 30) -> tuple[list[Any], str | None]:
    """The frames up to the result, or until there are so many chunks; and the last cursor."""
    frames: list[dict[str, Any]] = []
    headers = {"Last-Event-ID": after} if after else {}
    with httpx.stream("GET", f"{gateway}/v1/requests/{request_id}/events", headers=headers, timeout=90) as stream:
        assert stream.status_code == 200, stream.read()
        for line in stream.iter_lines():
            if line.startswith("id:"):
                after = line[3:].strip()
            elif line.startswith("data:"):
                frames.append(json.loads(line[5:]))
                if frames[-1]["type"] == "result" or sum(frame["type"] == "chunk" for frame in frames) >= most:
                    break
    return frames, after


@pytest.mark.parametrize("how", ["killed", "stopped and woken"])
def test_streams_of_a_worker_that_dies_or_sleeps_go_on_in_another(make_system: Callable[..., System], how: str) -> None:
    """One that was only stopped wakes as a zombie, and writes on: nobody hears it."""
    system = make_system(models=[SLOW])
    first, second = system.worker("w1"), system.worker("w2")
    first.wait_ready()
    second.wait_ready()
    ids = [f"r{number}" for number in range(24)]
    send(
        system, *({"request_id": one, "payload": {"prompt": "go", "max_tokens": WORDS}, "stream": True} for one in ids)
    )
    eventually(lambda: began(system.results()) == set(ids), 60, first.tail)
    if how == "killed":
        first.kill9()
    else:
        os.kill(first.popen.pid, signal.SIGSTOP)
    for one in ids:
        assert outcome(system, one, 120).status == "completed", second.tail()
    if how != "killed":
        os.kill(first.popen.pid, signal.SIGCONT)
        eventually(lambda: system.lag() == 0, 60, first.tail)
    found = folds(system, ids)
    whole = "".join(f"word{number} " for number in range(WORDS))
    assert {fold.text for fold in found.values()} == {whole}
    assert [fold.request_id for fold in found.values() if fold.restarts or fold.gap] == []
    assert any(fold.since != fold.place for fold in found.values()), "the first worker ran none of them"
