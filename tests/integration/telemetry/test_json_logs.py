"""In JSON every line of every process is an object, from the start to the stop; one line a request has its outcome."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from support import engine_processes, wait_until
from system import Process, System, eventually
from worker_requests import send

TRACE = "0af7651916cd43dd8448eb211c80319c"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
SECRET_TEXT = "the launch code is violet"
NAMES = {"w1": "worker", "g1": "gateway", "b1": "bridge", "h1": "webhooks", "s1": "summarizer"}


def lines(process: Process) -> list[dict[str, Any]]:
    """The whole lines of its log. Fails at a line that is no object with the stable fields."""
    whole, _, _ = process.log.read_text().rpartition("\n")  # the last line may be half written
    found = [json.loads(line) for line in whole.splitlines()]
    for one in found:
        assert list(one)[:3] == ["time", "level", "logger"], one
        assert one.get("event") or one.get("message"), one
    return found


def events(process: Process, event: str, **fields: Any) -> list[dict[str, Any]]:
    """Those lines of an event that have these fields."""
    wanted = {"event": event, **fields}
    return [one for one in lines(process) if wanted.items() <= one.items()]


def logged(process: Process, event: str, **fields: Any) -> dict[str, Any]:
    """The one line of an event, once it is there: what a caller sees comes before the line."""
    found = wait_until(lambda: events(process, event, **fields), 60, process.tail)
    assert len(found) == 1, found
    return found[0]


@pytest.mark.slow
def test_all_lines_of_all_processes_are_json(make_system: Callable[..., System], tiny_lm: Path, tmp_path: Path) -> None:
    model = {"id": "tiny", "source": str(tiny_lm), "engine": "text", "tasks": ["text_generation"]}
    topics = [f"{tmp_path.name}-{name}" for name in ("jobs", "answers")]
    queue = dict(zip(("topic", "result_topic"), topics, strict=True))
    system = make_system(
        models=[model],
        queues=[queue],
        webhook_options={"secret": SECRET},
    )
    system.create_topics()
    admin = AdminClient({"bootstrap.servers": system.bootstrap})
    for created in admin.create_topics([*map(NewTopic, topics)]).values():
        created.result(30)
    environment = {"PENSTOCK_LOG__FORMAT": "json", "PENSTOCK_LOG__LEVEL": "info,penstock.gateway.edge=debug"}
    starts = {"w": system.worker, "g": system.gateway, "b": system.bridge, "h": system.webhooks, "s": system.summarizer}
    started = [starts[name[0]](name, env=environment) for name in NAMES]
    for process in started:
        process.wait_ready(180)
    worker, gateway = started[:2]

    body = {"model": "tiny", "messages": [{"role": "user", "content": SECRET_TEXT}], "max_tokens": 4}
    headers = {"traceparent": f"00-{TRACE}-00000000000000aa-01"}
    answer = httpx.post(f"{gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=120)
    assert answer.status_code == 200, answer.text
    request_id = answer.headers["x-request-id"]
    ended = logged(worker, "request.ended")
    expected = {"request_id": request_id, "status": "completed", "task": "text_generation", "model": "tiny"}
    expected |= {"tenant": "default", "priority": 5, "priority_class": "medium", "attempt": 1, "trace_id": TRACE}
    assert expected.items() <= ended.items(), ended
    assert ended["completion_tokens"] == answer.json()["usage"]["completion_tokens"]
    assert {"device", "worker_id", "queued_ms", "run_ms", "prompt_tokens"} <= ended.keys()
    answered = logged(gateway, "http.answered", level="INFO")
    expected = {"method": "POST", "route": "/v1/chat/completions", "status": 200, "tenant": "default"}
    expected |= {"request_id": request_id, "trace_id": TRACE}
    assert expected.items() <= answered.items(), answered
    assert answered["ms"] >= ended["run_ms"]
    assert {"/readyz"} == {one["route"] for one in events(gateway, "http.answered", level="DEBUG")}

    ids = [f"r{n}" for n in range(60)]
    send(system, *({"request_id": one, "payload": {**body, "max_tokens": 200}, "stream": True} for one in ids))
    eventually(lambda: any(event.request_id in ids for event in system.results()), 60, worker.tail)
    (engine,) = engine_processes(worker.popen.pid)
    engine.kill()
    eventually(lambda: len(events(worker, "request.ended")) == 61, 120, worker.tail)
    assert [one["exitcode"] for one in events(worker, "engine.exited")] == [-9]
    attempts = {one["request_id"]: one["attempt"] for one in events(worker, "request.ended")}
    assert attempts.keys() == {request_id, *ids}
    assert 2 in attempts.values()
    refused = httpx.get(f"{gateway.url}/v1/requests/none", timeout=30)
    for process in reversed(started):
        assert process.stop() == 0, process.tail()
    (answered,) = events(gateway, "http.answered", status=404)
    assert answered["request_id"] == refused.headers["x-request-id"]
    for process in started:
        assert len(lines(process)) >= 1, process.name
        assert SECRET_TEXT not in (text := process.log.read_text())
        assert text.endswith("\n"), text[-200:]
        assert not [one for one in lines(process) if one["logger"] == "output"]
