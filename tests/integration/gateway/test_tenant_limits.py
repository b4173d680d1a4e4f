"""Limits of tenants and keys at real gateways: counted from the log, so that two gateways count the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from penstock.gateway.edge.keys import create_key, list_keys, revoke_key
from penstock.gateway.limits.limits import Limits
from penstock.schemas.records import Usage
from support import wait_until

BODY = {"task": "text_generation", "payload": {"messages": [{"role": "user", "content": "p"}]}}
LIMITS = {"outstanding": 3, "conversations": 2, "artifact_bytes": 3_000, "tokens_per_minute": 600}


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def keys(keys_file: Path) -> dict[str, dict[str, str]]:
    """Headers by name."""
    made = {
        "acme": create_key(keys_file, tenant="acme"),
        "globex": create_key(keys_file, tenant="globex"),
        "narrow": create_key(keys_file, tenant="wide", limits=Limits(models=("only",))),
        "operator": create_key(keys_file, tenant="ops", scopes=["admin"]),
        "passing": create_key(keys_file, tenant="passing"),
    }
    return {name: {"authorization": f"Bearer {key}"} for name, key in made.items()}


@pytest.fixture(scope="module")
def pair(place: Any, keys_file: Path, keys: dict[str, dict[str, str]]) -> tuple[Any, Any]:
    """Two gateways with the same limits."""
    first, second = (
        place.gateway(name, auth={"keys_file": keys_file}, limits=LIMITS) for name in ("limited1", "limited2")
    )
    return first, second


def submit(gateway: Any, headers: dict[str, str], **fields: Any) -> Any:
    return gateway.http.post("/v1/requests", json={**BODY, **fields}, headers=headers)


def inflight(gateway: Any, headers: dict[str, str]) -> int:
    return gateway.get("/v1/stats", headers=headers).json()["inflight"]


def test_outstanding_requests_are_counted_from_the_log(
    pair: tuple[Any, Any], keys: dict[str, dict[str, str]], scribe: Any
) -> None:
    first, second = pair
    acme = keys["acme"]
    accepted = [submit(first, acme), submit(second, acme)]
    straight = scribe.request(tenant="acme")  # what a service puts on Kafka counts too
    for gateway in pair:
        wait_until(lambda g=gateway: inflight(g, acme) == 3, describe="it has read all three")
        refused = submit(gateway, acme)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_limit")
        assert refused.json()["error"]["details"] == {"limit": "outstanding", "value": 3}
        assert int(refused.headers["retry-after"]) >= 1
        assert submit(gateway, keys["globex"]).status_code == 202, "others go on"
    with connect(first.ws, additional_headers=acme, subprotocols=["penstock.v1"]) as socket:  # type: ignore[list-item]
        socket.send(json.dumps({"type": "submit", "request": BODY}))
        error = json.loads(socket.recv(timeout=10))["error"]
        assert error["code"] == "tenant_limit"
        assert error["details"]["retry_after_s"] >= 1, "a socket has no header for it"
    straight.end("x")
    for gateway in pair:
        wait_until(lambda g=gateway: inflight(g, acme) == 2, describe="it has read the end")
    assert submit(second, acme).status_code == 202
    for answer in accepted:
        scribe.job(answer.json()["request_id"], tenant="acme").end("x")


def test_tokens_are_counted_from_the_log(pair: tuple[Any, Any], keys: dict[str, dict[str, str]], scribe: Any) -> None:
    first, second = pair
    globex = keys["globex"]
    answer = submit(first, globex)
    assert answer.headers["x-ratelimit-remaining-tokens"] == "600"
    used = Usage(prompt_tokens=500, completion_tokens=400, total_tokens=900)
    scribe.job(answer.json()["request_id"], tenant="globex").end("x", usage=used)
    for gateway in pair:
        # A request that is no request costs nothing, and its answer has the headers too.
        wait_until(lambda g=gateway: submit(g, globex, task="?").headers["x-ratelimit-remaining-tokens"] == "0")
    refused = submit(second, globex)
    assert refused.json()["error"]["details"] == {"limit": "tokens_per_minute", "value": 600}
    assert 20 <= int(refused.headers["retry-after"]) <= 31
    assert refused.headers["x-ratelimit-remaining-tokens"] == "0"


def test_conversations_and_artifacts_have_their_limits(pair: tuple[Any, Any], keys: dict[str, dict[str, str]]) -> None:
    first, second = pair
    passing = keys["passing"]
    for name in ("a", "b"):
        assert first.http.post("/v1/conversations", json={"id": name}, headers=passing).status_code == 200
    refused = first.http.post("/v1/conversations", json={"id": "c"}, headers=passing)
    assert (refused.status_code, refused.json()["error"]["details"]["limit"]) == (429, "conversations")
    assert submit(first, passing, conversation_id="a").status_code == 202
    assert submit(first, passing, conversation_id="c").status_code == 429
    assert first.http.delete("/v1/conversations/b", headers=passing).status_code == 200
    assert submit(first, passing, conversation_id="c").status_code == 202
    assert first.http.post("/v1/artifacts", content=b"x" * 2_000, headers=passing).status_code == 201
    for gateway in (first, second):
        refused = gateway.http.post("/v1/artifacts", content=b"x" * 2_000, headers=passing)
        assert (refused.status_code, refused.json()["error"]["details"]["limit"]) == (429, "artifact_bytes")


def test_a_key_may_ask_for_its_models_only(pair: tuple[Any, Any], keys: dict[str, dict[str, str]]) -> None:
    for path, body in (
        ("/v1/requests", {**BODY, "model": "other"}),
        ("/v1/chat/completions", {"model": "other", "messages": [{"role": "user", "content": "hi"}]}),
    ):
        refused = pair[0].http.post(path, json=body, headers=keys["narrow"])
        assert (refused.status_code, refused.json()["error"]["param"]) == (403, "model"), refused.text
    assert submit(pair[0], keys["narrow"], model="only").status_code == 202


def test_all_tenants_are_told_of_to_operators_only(pair: tuple[Any, Any], keys: dict[str, dict[str, str]]) -> None:
    gateway = pair[0]
    mine = gateway.get("/v1/stats", headers=keys["narrow"]).json()
    assert mine["tenant"] == "wide"
    assert "workers" not in mine
    assert mine["limits"]["outstanding"] == 3
    for path in ("/v1/admin/stats", "/v1/admin/devices"):
        assert gateway.get(path, headers=keys["acme"]).status_code == 403
        assert gateway.get(path, headers=keys["operator"]).status_code == 200
    assert gateway.get("/v1/admin/stats", headers=keys["operator"]).json()["inflight"] >= 1


def test_a_list_behind_an_unknown_request_is_an_error(pair: tuple[Any, Any], keys: dict[str, dict[str, str]]) -> None:
    answer = pair[0].get("/v1/requests", params={"after": "gone"}, headers=keys["acme"])
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "after")


def test_a_socket_hears_that_its_request_is_accepted_before_any_news_of_it(gateway: Any) -> None:
    """Also when it follows the conversation, of which the topic may tell before the broker has answered."""
    with connect(gateway.ws, subprotocols=["penstock.v1"]) as socket:  # type: ignore[list-item]
        socket.send(json.dumps({"type": "subscribe", "conversation_id": "mine"}))
        for number in range(20):
            request = {**BODY, "conversation_id": "mine"}
            socket.send(json.dumps({"type": "submit", "id": number, "request": request}))
        accepted: set[str] = set()
        told: set[str] = set()
        while len(told) < 20:
            frame = json.loads(socket.recv(10))
            if frame["type"] == "accepted":
                accepted.add(frame["request_id"])
            else:
                assert frame["request_id"] in accepted, frame
                told.add(frame["request_id"])


def test_the_socket_of_a_revoked_key_is_closed_within_a_second(
    pair: tuple[Any, Any], keys_file: Path, keys: dict[str, dict[str, str]]
) -> None:
    assert keys["acme"]
    key = create_key(keys_file, tenant="leaving")
    with connect(pair[0].ws, additional_headers={"x-api-key": key}, subprotocols=["penstock.v1"]) as socket:  # type: ignore[list-item]
        socket.send('{"type": "ping"}')
        assert json.loads(socket.recv(5))["type"] == "pong"
        revoke_key(keys_file, list_keys(keys_file)[-1].key_id)
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(10)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 4401


def test_a_request_that_no_worker_moves_says_so(gateway: Any) -> None:
    waiting = gateway.get(f"/v1/requests/{gateway.submit()}").json()
    assert waiting["waiting_for"]["reason"] == "no_worker"
    assert waiting["detail"] == "no worker is alive"
    ready = gateway.get("/readyz").json()
    assert (ready["status"], ready["reason"]) == ("degraded", "no worker is alive")
    assert gateway.get("/readyz?require=workers").status_code == 503
