"""Point 10: a caller reaches only what is its tenant's; foreign and unknown look the same on every route and socket."""

from __future__ import annotations

import json

import httpx
import pytest
from websockets.sync.client import connect

from system import Process, System

ECHO = {"id": "noop", "source": "noop", "engine": "noop", "tasks": ["text_generation"], "options": {"echo": True}}


SYSTEM = {"models": [ECHO], "tenants": ["acme", "globex"]}


@pytest.fixture
def keys(system: System) -> dict[str, str]:
    return system.keys


def client(gateway: Process, key: str) -> httpx.Client:
    return httpx.Client(base_url=gateway.url, headers={"Authorization": f"Bearer {key}"}, timeout=40)


def turn(http: httpx.Client, text: str) -> dict[str, object]:
    body = {
        "task": "text_generation",
        "conversation_id": "shared",
        "payload": {"messages": [{"role": "user", "content": text}]},
    }
    accepted = http.post("/v1/requests", json=body)
    assert accepted.status_code == 202, accepted.text
    found = http.get(accepted.json()["status_url"], params={"wait": 30})
    assert found.json()["status"] == "completed", found.text
    return found.json()


def test_the_same_conversation_id_is_two_conversations(gateway: Process, keys: dict[str, str]) -> None:
    with client(gateway, keys["acme"]) as acme, client(gateway, keys["globex"]) as globex:
        turn(acme, "the acme secret")
        answer = turn(globex, "what do you know?")
        assert "acme secret" not in json.dumps(answer)
        items = globex.get("/v1/conversations/shared/items").json()
        assert "acme secret" not in json.dumps(items)
        assert "what do you know?" in json.dumps(items)
        assert "acme secret" in json.dumps(acme.get("/v1/conversations/shared/items").json())


def test_a_foreign_request_is_unknown_on_every_route(gateway: Process, keys: dict[str, str]) -> None:
    with client(gateway, keys["acme"]) as acme, client(gateway, keys["globex"]) as globex:
        request_id = str(turn(acme, "mine")["request_id"])
        unknown = "00000000-0000-4000-8000-000000000000"
        for method, path in [
            ("GET", "/v1/requests/{}"),
            ("GET", "/v1/requests/{}/events"),
            ("POST", "/v1/requests/{}/cancel"),
            ("DELETE", "/v1/requests/{}"),
        ]:
            answers = [globex.request(method, path.format(some)) for some in (request_id, unknown)]
            assert [a.status_code for a in answers] == [404, 404], (method, path, [a.text for a in answers])
            assert {a.json()["error"]["code"] for a in answers} == {"not_found"}
        listed = globex.get("/v1/requests", params={"limit": 100}).json()["data"]
        assert request_id not in {item["request_id"] for item in listed}
        assert acme.get(f"/v1/requests/{request_id}").json()["done"] is True


def test_a_foreign_request_is_unknown_on_the_socket(gateway: Process, keys: dict[str, str]) -> None:
    with client(gateway, keys["acme"]) as acme:
        request_id = str(turn(acme, "mine too")["request_id"])
    url = gateway.url.replace("http", "ws") + "/v1/ws"
    headers = {"Authorization": f"Bearer {keys['globex']}"}
    with connect(url, additional_headers=headers, subprotocols=["penstock.v1"]) as socket:  # type: ignore[list-item]
        for kind in ("subscribe", "cancel"):
            socket.send(json.dumps({"type": kind, "request_id": request_id}))
            frame = json.loads(socket.recv(timeout=20))
            assert frame["type"] == "error", frame
            assert frame["error"]["code"] == "not_found"


def test_without_a_key_nothing_is_served(gateway: Process) -> None:
    answer = httpx.get(gateway.url + "/v1/requests")
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "unauthenticated"
