"""What docker-compose.yml and deploy/ say, run here without containers: two workers, three gateways and the proxy."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from websockets.sync.client import connect

from support import wait_until

GATEWAYS = ("gateway", "gateway 2", "gateway 3")
VIEWS = ("view.sqlite", "view-2.sqlite", "view-3.sqlite")

pytestmark = [pytest.mark.slow, pytest.mark.model]


@pytest.fixture(scope="module")
def running(compose: Any) -> Any:
    half = 5 * 4 // 2
    said = [compose.wait_ready(worker, assigned=half) for worker in ("worker", "worker 2")]
    assert said[0]["worker_id"] != said[1]["worker_id"]
    for name in (*GATEWAYS, "proxy"):
        compose.wait_ready(name)
    return compose


def png() -> bytes:
    made = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(made, "PNG")
    return made.getvalue()


def view_of(compose: Any, name: str) -> str:
    """The file that a gateway's process holds."""
    folder: Path = compose.data / "gateway"
    holders = {path.name.removesuffix(".lock"): int(path.read_text()) for path in folder.glob("*.sqlite.lock")}
    return next(view for view, pid in holders.items() if pid == compose.processes[name].pid)


def test_the_containers_serve_and_share_artifacts(running: Any) -> None:
    assert sorted(path.parent.name for path in running.data.glob("*/journal")) == ["worker", "worker-2"]
    with running.client("proxy") as http:
        uploaded = http.post("/v1/artifacts", content=b"mine", headers={"content-type": "text/plain"})
        assert uploaded.status_code == 201, uploaded.text
        assert http.get(uploaded.json()["content_url"]).content == b"mine"
        # 200 embeddings are over 256 KiB: the worker writes them as an artifact, the gateway reads it.
        words = [f"word {number}" for number in range(200)]
        answer = http.post("/v1/embeddings", json={"model": "all-minilm-l6-v2", "input": words})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["data"]) == 200
        picture = http.post("/v1/artifacts", content=png(), headers={"content-type": "image/png"}).json()
        for task, payload in {
            "summarization": {"text": "A long text. " * 20, "max_tokens": 8},
            "image_processing": {
                "image": {"artifact_id": picture["artifact_id"]},
                "operations": [{"op": "resize", "width": 2, "height": 2}],
            },
        }.items():
            sent = http.post("/v1/requests", json={"task": task, "payload": payload}).json()
            done = http.get(f"/v1/requests/{sent['request_id']}", params={"wait": 60}).json()
            assert done["status"] == "completed", done
    kept = list((running.data / "artifacts").rglob("about.json"))
    assert len(kept) == 4, "two uploads, the vectors, the processed image"
    assert {path.stat().st_uid for path in kept} == {10001}


def test_streams_and_tickets_pass_the_proxy_to_any_gateway(running: Any) -> None:
    chat = {"model": "default", "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
    with (
        running.client("proxy") as http,
        http.stream("POST", "/v1/chat/completions", json={**chat, "stream": True}) as stream,
    ):
        lines = [line for line in stream.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    assert len(lines) > 3
    with running.client("gateway") as http:
        ticket = http.post("/v1/tickets", json={"use": "session"}).json()["ticket"]
    for name in (*GATEWAYS, "proxy"):
        with connect(f"{running.url(name).replace('http', 'ws')}/v1/ws?ticket={ticket}", proxy=None) as socket:
            socket.send(json.dumps({"type": "ping"}))
            assert json.loads(socket.recv(10))["type"] == "pong"


def test_gateways_take_a_view_each_and_a_killed_one_its_own_again(running: Any) -> None:
    views = {name: view_of(running, name) for name in GATEWAYS}
    assert sorted(views.values()) == sorted(VIEWS)
    running.processes["gateway 2"].kill()
    running.processes["gateway 2"].wait(20)
    body = {"task": "text_generation", "model": "default", "payload": {"prompt": "Hello", "max_tokens": 1}}
    with running.client("proxy") as http:
        for _ in range(9):  # nginx takes the addresses in turn; the killed one's refuses connections
            sent = http.post("/v1/requests", json=body)
            assert sent.status_code == 202, sent.text
    running.start("gateway 2")
    running.wait_ready("gateway 2")
    assert view_of(running, "gateway 2") == views["gateway 2"]
    request_id = sent.json()["request_id"]
    for name in GATEWAYS:
        with running.client(name) as http:
            done = http.get(f"/v1/requests/{request_id}", params={"wait": 60})
            assert done.json()["status"] == "completed", done.text


def test_the_services_end_in_order(running: Any) -> None:
    for name in ("proxy", *GATEWAYS, "worker", "worker 2"):
        assert running.stop(name) == 0, running.log(name)
    wait_until(lambda: all(one.poll() == 0 for one in running.processes.values()), 10, "all have ended")
