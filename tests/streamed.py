"""Streams as their readers have them: over OpenAI's route, as native events, and on the result topic."""

from __future__ import annotations

import json
import uuid
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from penstock.schemas.fold import ResultFold
from penstock.schemas.records import ResultEvent
from support import engine_processes
from system import Process, System, running


@dataclass
class Serving:
    """A system that serves one model by one worker, which is another one after a kill."""

    system: System
    worker: Process
    gateway: Process

    def kill(self, victim: str) -> None:
        """The `engine` of the model, or the `worker` with it."""
        if victim == "engine":
            engines = engine_processes(self.worker.popen.pid)
            assert engines
            for process in engines:
                process.kill()
            for process in engines:
                process.wait(20)
        else:
            self.worker.kill9()
            self.worker = self.system.worker(f"{self.worker.name}-next").wait_ready()

    def gone_on(self) -> list[ResultEvent]:
        """Outcomes that are not of one attempt alone."""
        return [event for event in self.system.outcomes().values() if event.since is not None]


@contextmanager
def serving_tiny(kafka: Any, tiny_lm: Path, folder: Path) -> Generator[Serving]:
    """The model `tiny`, with cache for all streams of a test. Its last worker ends in order."""
    options = {"ignore_eos": True, "window": 4096, "cache_tokens": 16384}
    tiny = {"id": "tiny", "source": str(tiny_lm), "engine": "text", "tasks": ["text_generation"], "options": options}
    with running(System(kafka.bootstrap_servers, f"s{uuid.uuid4().hex[:6]}-", folder, models=[tiny])) as system:
        worker, gateway = system.worker(), system.gateway()
        serving = Serving(system, worker.wait_ready(), gateway.wait_ready())
        yield serving
        assert serving.worker.stop() == 0, serving.worker.tail()


class Chat:
    """A chat that is streamed over OpenAI's route, as far as it was read."""

    def __init__(self, gateway: str, chat: dict[str, Any]) -> None:
        messages = [{"role": "user", "content": "Tell me a story."}]
        body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, **chat}
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


def folds(system: System, ids: Iterable[str]) -> dict[str, ResultFold]:
    """What a reader of the result topic has of each request."""
    found = {one: ResultFold(one, "default") for one in ids}
    for event in system.results():
        if event.request_id in found:
            found[event.request_id].apply(event)
    return found


def began(events: list[ResultEvent]) -> set[str]:
    return {event.request_id for event in events if event.kind == "chunk" and event.text}
