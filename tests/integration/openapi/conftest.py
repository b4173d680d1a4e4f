"""One worker and one gateway, with the limits that they have by default: a no-op model, and one of a remote server."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from kit.http_server import Answer, Call, serving_http
from system import NOOP, System, running

Json = dict[str, Any]


@dataclass
class Remote:
    """An OpenAI-compatible server that keeps what it is asked, and answers in pieces as real ones do."""

    url: str = ""
    asked: list[Json] = field(default_factory=list[Json])

    def answer(self, body: Json) -> Iterator[Json]:
        self.asked.append(body)
        if "input" in body:
            yield {"data": [{"index": n, "embedding": [0.5, 1.0]} for n in range(len(body["input"]))], "usage": {}}
            return
        reason = "stop"
        for index in range(body.get("n") or 1):
            if body.get("tools") and body["messages"][-1]["role"] != "tool":
                reason = "tool_calls"
                function = {"name": body["tools"][0]["function"]["name"], "arguments": ""}
                yield _delta(index, tool_calls=[{"index": 0, "id": "c1", "type": "function", "function": function}])
                for piece in ('{"ci', 'ty": "P', 'aris"}'):
                    yield _delta(index, tool_calls=[{"index": 0, "function": {"arguments": piece}}])
            else:
                yield _delta(index, content="Hel")
                yield _delta(index, content=f"lo {index}")
            yield {"choices": [{"index": index, "delta": {}, "finish_reason": reason}]}
        yield {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}}


def _delta(index: int, **delta: Any) -> Json:
    return {"choices": [{"index": index, "delta": delta, "finish_reason": None}]}


@pytest.fixture(scope="package")
def remote() -> Iterator[Remote]:
    made = Remote()

    def answer(call: Call) -> Answer:
        events = list(made.answer(call.json))
        if "stream" not in call.json:
            return 200, events[0]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return 200, text.encode(), {"content-type": "text/event-stream"}

    with serving_http(answer) as server:
        made.url = server.url
        yield made


@pytest.fixture(scope="package")
def system(kafka: Any, remote: Remote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder: Path = tmp_path_factory.mktemp("openapi")
    far = {"id": "far", "source": remote.url, "engine": "remote", "tasks": ["text_generation", "embedding"]}
    prefix = f"o{uuid.uuid4().hex[:6]}-"
    answers = f"{prefix}answers"
    queues = [{"topic": f"{prefix}{form}", "format": form, "result_topic": answers} for form in ("llm-d", "penstock")]
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap_servers})
    for created in admin.create_topics([NewTopic(answers), *(NewTopic(one["topic"]) for one in queues)]).values():
        created.result(30)
    options = {"secret": "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"}
    with running(
        System(kafka.bootstrap_servers, prefix, folder, models=(NOOP, far), queues=queues, webhook_options=options)
    ) as made:
        made.worker().wait_ready()
        yield made


@pytest.fixture(scope="package")
def url(system: System) -> str:
    return system.gateway().wait_ready().url
