"""Tickets for pages: what they are narrowed to, on every route, on sockets and on event streams by URL."""

from __future__ import annotations

import dataclasses
import json
import secrets
import time
import uuid
from base64 import b64encode
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from penstock.common.artifacts import ArtifactStore
from penstock.gateway.context import context_of_app
from penstock.gateway.edge.keys import create_key, revoke_key
from penstock.schemas.ids import idempotent_request_id, input_artifact_id
from support import wait_until

PAYLOAD = {"messages": [{"role": "user", "content": "p"}]}
BODY = {"task": "text_generation", "payload": PAYLOAD, "stream": True}
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def key(keys_file: Path) -> dict[str, str]:
    return {"authorization": f"Bearer {create_key(keys_file, tenant='app')}"}


@pytest.fixture(scope="module")
def gateway(place: Any, keys_file: Path, key: dict[str, str]) -> Any:
    return place.gateway("ticketing", auth={"keys_file": keys_file, "ticket_key": "shared"})


def issue(gateway: Any, key: dict[str, str], **asked: Any) -> str:
    answer = gateway.http.post("/v1/tickets", json=asked, headers=key)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["ticket"])


def code(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def session(ticket: str) -> dict[str, str]:
    return {"authorization": f"Bearer {ticket}"}


def end(gateway: Any, scribe: Any, request_id: str) -> None:
    """As its worker ends it, once the gateway has read its record."""
    lookups = context_of_app(gateway.app).service.lookups

    def origin() -> Any:
        entry = lookups.peek("app", request_id)
        return None if entry is None else entry.first_record

    wait_until(origin, 20, f"the record of {request_id} was read")
    dataclasses.replace(scribe.job(request_id, "app"), origin=origin()).end("said")


def test_a_ticket_never_has_more_than_its_key(gateway: Any, keys_file: Path, key: dict[str, str]) -> None:
    reader = {"authorization": f"Bearer {create_key(keys_file, tenant='app', scopes=['read'])}"}

    def refused(**asked: Any) -> tuple[int, str, str | None]:
        return code(gateway.http.post("/v1/tickets", json=asked, headers=reader))

    assert refused(scopes=["submit"]) == (403, "forbidden", None)
    assert refused(scope=["read"]) == (400, "unsupported_parameter", "scope")
    assert refused(scopes=["root"])[:2] == (400, "invalid")
    assert refused(ttl_s=601) == (400, "invalid", "ttl_s")
    assert refused(use="read", ttl_s=86_401, request_id="r") == (400, "invalid", "ttl_s")
    assert refused(use="read") == (400, "invalid", "request_id")
    assert refused(use="read", request_id="r", scopes=["cancel"]) == (400, "invalid", "scopes")
    made = session(issue(gateway, reader, use="session"))
    assert gateway.get("/v1/requests", headers=made).status_code == 200
    assert code(gateway.http.post("/v1/requests", json=BODY, headers=made)) == (403, "forbidden", None)
    assert code(gateway.http.post("/v1/tickets", json={}, headers=made)) == (403, "forbidden", None), "none of its own"


def test_a_session_of_a_conversation_reaches_that_one_only(gateway: Any, key: dict[str, str]) -> None:
    mine = gateway.submit(key, conversation_id="mine")
    other = gateway.submit(key, conversation_id="other")
    page = session(issue(gateway, key, use="session", conversation_id="mine"))
    ask, send = gateway.http.request, gateway.http.post
    reads = [("GET", rest) for rest in ("", "/events", "/result", "/deliveries")]
    routes = [*reads, ("POST", "/cancel"), ("DELETE", "")]
    for method, rest in routes:
        assert code(ask(method, f"/v1/requests/{other}{rest}", headers=page))[:2] == (404, "not_found"), rest
    assert gateway.get(f"/v1/requests/{mine}", headers=page).status_code == 200
    assert code(send(f"/v1/requests/{other}/reprioritize", json={"priority": 9}, headers=page))[0] == 404
    assert [one["request_id"] for one in gateway.get("/v1/requests", headers=page).json()["data"]] == [mine]
    assert gateway.get("/v1/requests?conversation_id=other", headers=page).status_code == 403
    for body in ({"ids": [other]}, {"status": "accepted"}):
        done = send("/v1/requests/cancel", json={**body, "dry_run": True}, headers=page).json()
        assert other not in done["request_ids"]
    assert code(send("/v1/requests", json=BODY, headers=page)) == (403, "forbidden", "conversation_id")
    line = json.dumps(BODY).encode()
    bulk = send("/v1/requests/bulk", content=line, headers={**page, "content-type": "application/x-ndjson"})
    assert json.loads(bulk.text)["error"]["code"] == "forbidden"
    assert send("/v1/requests", json={**BODY, "conversation_id": "mine"}, headers=page).status_code == 202
    conversation = {"id": "mine"}
    for path in ("other", "other/items", "other/events", "other/replay"):
        assert gateway.get(f"/v1/conversations/{path}", headers=page).status_code == 403
    assert gateway.get("/v1/conversations/mine", headers=page).status_code in (200, 404)
    assert send("/v1/conversations/other/items", json={"items": []}, headers=page).status_code == 403
    for path, json_body in (
        ("/v1/conversations", conversation),
        ("/v1/conversations/mine/fork", {"through": 0}),
        ("/v1/embeddings", {"model": "m", "input": "x"}),
        ("/v1/images/generations", {"prompt": "x"}),
        ("/v1/batches", {}),
    ):
        assert code(send(path, json=json_body, headers=page))[:2] == (403, "forbidden"), path
    closed = ("conversations", "stats", "artifacts", "files", "batches", "batches/b", "conversations/mine/tree")
    for path in closed:
        assert gateway.get(f"/v1/{path}", headers=page).status_code == 403, path


OURS = {"user_id": "ann", "conversation_id": "anns"}
TICKETS: dict[str, dict[str, str]] = {
    "conversation": {"conversation_id": "anns"},
    "user": {"user_id": "ann"},
    "both": OURS,
    "other user": {"user_id": "bob"},
    "other conversation": {"conversation_id": "bobs"},
}
GIVEN: list[dict[str, str]] = [
    {},
    {"user_id": "ann"},
    {"user_id": "bob"},
    {"conversation_id": "anns"},
    {"conversation_id": "bobs"},
    OURS,
    {"user_id": "bob", "conversation_id": "anns"},
]
MESSAGES = PAYLOAD["messages"]


def asked(route: str, given: dict[str, str], image: str | None = None) -> dict[str, Any]:
    """A body of a route that submits, for a user and a conversation, with an artifact in it."""
    user, conversation = given.get("user_id"), given.get("conversation_id")
    if route == "responses":
        content: list[dict[str, Any]] = [{"type": "input_text", "text": "x"}]
        content += [{"type": "input_image", "file_id": image}] if image else []
        named = {"conversation": conversation} if conversation else {}
        body = {"input": [{"role": "user", "content": content}], "background": True, **named}
    elif route == "requests":
        parts: list[dict[str, Any]] = [{"type": "text", "text": "x"}]
        parts += [{"type": "image", "image": {"artifact_id": image}}] if image else []
        return {"task": "text_generation", "payload": {"messages": [{"role": "user", "content": parts}]}, **given}
    else:
        said = {"messages": MESSAGES} if route == "chat/completions" else {"prompt": "x"}
        body = {**said, "penstock": {"conversation_id": conversation} if conversation else {}}
    return {"model": "m", "user": user, **body}


@pytest.mark.parametrize("route", ["requests", "responses", "chat/completions", "completions"])
def test_a_session_submits_for_its_user_and_its_conversation_alone(
    gateway: Any, scribe: Any, key: dict[str, str], route: str
) -> None:
    for (name, grant), given in product(TICKETS.items(), GIVEN):
        page, once = session(issue(gateway, key, use="session", **grant)), uuid.uuid4().hex
        request_id = idempotent_request_id("app", once)
        if route == "completions" and "conversation_id" in given:
            continue  # it knows none
        with ThreadPoolExecutor(1) as pool:
            headers = {**page, "Idempotency-Key": once}
            sent = pool.submit(gateway.http.post, f"/v1/{route}", json=asked(route, given), headers=headers)
            if given == grant:  # the answer waits for the outcome
                end(gateway, scribe, request_id)
            answer = sent.result()
        assert answer.status_code == ((202 if route == "requests" else 200) if given == grant else 403), (name, given)
        if given == grant:
            kept = gateway.get(f"/v1/requests/{request_id}", headers=page).json()
            assert {one: kept.get(one) for one in OURS} == {**dict.fromkeys(OURS), **given}, (name, given)


@pytest.fixture(scope="module")
def artifacts(place: Any, gateway: Any, key: dict[str, str]) -> dict[str, tuple[str, set[str]]]:
    """By what they are: an artifact, and the tickets that reach it."""
    store, data = ArtifactStore(place.folder / "artifacts"), secrets.token_bytes(16)
    ann, bob = gateway.submit(key, **OURS), gateway.submit(key, user_id="bob")
    brought = {"task": "image_to_text", "payload": {"image": {"data": b64encode(PNG + data).decode()}}, **OURS}
    assert gateway.http.post("/v1/requests", json=brought, headers=key).status_code == 202
    held = store.put("app", PNG).artifact_id
    store.holds.hold("app", held, "anns")

    def upload(headers: dict[str, str]) -> str:
        return gateway.http.post("/v1/artifacts", content=PNG, headers=headers).json()["id"]

    def uploaded(ticket: str) -> str:
        return upload(session(issue(gateway, key, use="session", **TICKETS[ticket])))

    return {
        "output": (store.put("app", PNG, request_id=ann).artifact_id, {"conversation", "user", "both"}),
        "output of another": (store.put("app", PNG, request_id=bob).artifact_id, {"other user"}),
        "input": (input_artifact_id("app", sha256(PNG + data).hexdigest()), {"conversation", "user", "both"}),
        "image of the conversation": (held, {"conversation"}),
        "upload with a key": (upload(key), set()),
        "upload of the user": (uploaded("user"), {"user"}),
        "upload of the conversation": (uploaded("conversation"), {"conversation"}),
        "upload of both": (uploaded("both"), {"conversation", "user", "both"}),
    }


@pytest.mark.parametrize("ticket", TICKETS)
def test_a_session_reads_and_submits_the_artifacts_that_it_reaches(
    gateway: Any, key: dict[str, str], artifacts: dict[str, tuple[str, set[str]]], ticket: str
) -> None:
    secret = issue(gateway, key, use="session", **TICKETS[ticket])
    page = session(secret)
    for name, (artifact_id, reached_by) in artifacts.items():
        url = f"/v1/artifacts/{artifact_id}"
        wanted = 200 if ticket in reached_by else 404
        for method, path in (("GET", url), ("HEAD", url), ("GET", f"{url}/content"), ("POST", f"{url}/url")):
            answer = gateway.http.request(method, path, headers=page)
            assert answer.status_code == wanted, (name, method, path, answer.text)
        assert gateway.get(f"{url}/content?ticket={secret}").status_code == wanted, name
        assert gateway.http.delete(url, headers=page).status_code == 403
        for route, accepted in (("requests", 202), ("responses", 200)):
            body = asked(route, TICKETS[ticket], artifact_id)
            answer = gateway.http.post(f"/v1/{route}", json=body, headers=page)
            assert answer.status_code == (accepted if wanted == 200 else 404), (name, route, answer.text)


def test_a_ticket_of_one_request_reads_its_artifacts_and_submits_nothing(
    place: Any, gateway: Any, key: dict[str, str]
) -> None:
    mine, other = gateway.submit(key, **OURS), gateway.submit(key, **OURS)
    page = session(issue(gateway, key, use="session", request_id=mine))
    for request_id, wanted in ((mine, 200), (other, 404)):
        made = ArtifactStore(place.folder / "artifacts").put("app", PNG, request_id=request_id)
        assert gateway.get(made.url, headers=page).status_code == wanted
    for route in ("requests", "responses", "chat/completions", "completions"):
        answer = gateway.http.post(f"/v1/{route}", json=asked(route, {}), headers=page)
        assert code(answer)[:2] == (403, "forbidden"), route
    assert code(gateway.http.post("/v1/artifacts", content=b"x", headers=page))[:2] == (403, "forbidden")


def test_a_session_goes_on_from_the_responses_that_it_reaches(gateway: Any, scribe: Any, key: dict[str, str]) -> None:
    page = session(issue(gateway, key, use="session", user_id="ann"))
    for user, wanted in (("ann", 200), ("bob", 404)):
        made = gateway.http.post("/v1/responses", json=asked("responses", {"user_id": user}), headers=key).json()["id"]
        request_id = made.removeprefix("resp_")
        end(gateway, scribe, request_id)
        wait_until(
            lambda path=f"/v1/responses/{made}": gateway.get(path, headers=key).json()["status"] == "completed",
            20,
            made,
        )
        body = asked("responses", {"user_id": "ann"})
        item = {"type": "item_reference", "id": f"msg_{request_id}"}
        for more in ({"previous_response_id": made}, {"input": [item, *body["input"]]}):
            answer = gateway.http.post("/v1/responses", json={**body, **more}, headers=page)
            assert answer.status_code == wanted, (user, more, answer.text)


def test_a_session_of_a_user_reaches_that_ones_requests_only(gateway: Any, key: dict[str, str]) -> None:
    mine = gateway.submit(key, user_id="u1")
    other = gateway.submit(key, user_id="u2")
    page = session(issue(gateway, key, use="session", user_id="u1", scopes=["read", "submit"]))
    since = {"changed_since": gateway.get("/v1/requests", headers=page).json()["cursor"].partition("-")[0] + "-0"}
    changed = gateway.get("/v1/requests", headers={**page, "cache-control": "max-age=1"}, params=since).json()
    assert other not in str(changed), "neither what it is nor that it changed"
    assert gateway.get(f"/v1/requests/{mine}/input", headers=page).status_code == 403, "it may hold what no user reads"
    assert gateway.get(f"/v1/requests/{mine}", headers=page).status_code == 200
    assert gateway.get(f"/v1/requests/{other}", headers=page).status_code == 404
    assert gateway.http.post("/v1/requests", json={**BODY, "user_id": "u1"}, headers=page).status_code == 202
    assert gateway.http.post("/v1/requests", json={**BODY, "user_id": "u2"}, headers=page).status_code == 403
    assert gateway.http.post(f"/v1/requests/{mine}/cancel", headers=page).status_code == 403, "it has no scope cancel"


def test_a_narrowed_socket_is_refused_what_its_ticket_does_not_reach(gateway: Any, key: dict[str, str]) -> None:
    mine = gateway.submit(key, conversation_id="sock")
    other = gateway.submit(key, conversation_id="else")
    frames: list[tuple[dict[str, Any], str | None]] = [
        ({"type": "subscribe", "request_id": other}, "not_found"),
        ({"type": "cancel", "request_id": other}, "not_found"),
        ({"type": "subscribe", "conversation_id": "else"}, "forbidden"),
        ({"type": "submit", "request": BODY}, "forbidden"),
        ({"type": "submit", "request": {**BODY, "conversation_id": "else"}}, "forbidden"),
        ({"type": "cancel", "request_id": mine, "reason": "x"}, "unsupported_parameter"),
        ({"type": "subscribe", "request_id": mine}, None),
    ]
    ticket = issue(gateway, key, conversation_id="sock", ttl_s=30)
    with connect(f"{gateway.ws}?ticket={ticket}") as socket:
        for number, (frame, wanted) in enumerate(frames):
            socket.send(json.dumps({**frame, "id": number}))
            heard = json.loads(socket.recv(timeout=10))
            assert heard.get("error", {}).get("code") == wanted, (frame, heard)
        assert heard["request_id"] == mine
    with connect(f"{gateway.ws}?ticket={ticket}") as again, pytest.raises(ConnectionClosed) as closed:
        again.recv(timeout=10)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 4401


def test_an_event_source_reads_one_request_by_url_and_comes_again(gateway: Any, key: dict[str, str]) -> None:
    """As a browser does it: no headers but Last-Event-ID, the same URL each time."""
    request_id = gateway.submit(key, conversation_id="es")
    other = gateway.submit(key, conversation_id="es")
    url = f"/v1/requests/{request_id}/events?ticket={issue(gateway, key, use='read', request_id=request_id)}"
    for last in (None, "", None):
        headers = {"accept": "text/event-stream", **({} if last is None else {"last-event-id": last})}
        with gateway.http.stream("GET", url, headers=headers) as stream:
            assert stream.status_code == 200, stream.read()
            assert any(line.startswith("data: ") for line in stream.iter_lines())
    assert gateway.get(url.replace(request_id, other)).status_code == 404
    assert gateway.http.post(url.replace("/events", "/cancel")).status_code in (400, 401)
    with pytest.raises(ConnectionClosed), connect(f"{gateway.ws}?{url.partition('?')[2]}") as socket:
        socket.recv(timeout=10)
    of_conversation = issue(gateway, key, use="read", conversation_id="es")
    for path in (f"/v1/requests/{other}/events", f"/v1/requests/{other}"):
        with gateway.http.stream("GET", f"{path}?ticket={of_conversation}") as stream:
            assert stream.status_code == 200, path
    assert gateway.get(f"/v1/conversations/es?ticket={of_conversation}").status_code in (200, 404)


def test_a_stream_ends_when_its_ticket_expires_or_its_key_is_revoked(
    gateway: Any, keys_file: Path, key: dict[str, str]
) -> None:
    request_id = gateway.submit(key)
    secret = create_key(keys_file, tenant="app")
    theirs = {"authorization": f"Bearer {secret}"}
    for ends in ("expires", "revoked"):
        ttl_s = 1 if ends == "expires" else 600
        ticket = issue(gateway, theirs, use="read", request_id=request_id, ttl_s=ttl_s)
        url = f"/v1/requests/{request_id}/events?ticket={ticket}"
        with gateway.http.stream("GET", url) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith(("id: ", "event: "))
            if ends == "revoked":
                assert revoke_key(keys_file, secret.split("_")[1])
            assert any("unauthenticated" in line for line in lines), "the last event says why"
        assert gateway.get(url).status_code == 401


def test_a_page_of_the_gateways_own_origin_has_its_session_as_a_cookie(gateway: Any, key: dict[str, str]) -> None:
    same = {"sec-fetch-site": "same-origin", "origin": gateway.url}
    made = gateway.http.post("/v1/tickets", json={"use": "session", "scopes": ["read"]}, headers={**key, **same})
    (cookie,) = made.headers.get_list("set-cookie")
    assert all(word in cookie for word in ("penstock_session=st_", "HttpOnly", "SameSite=strict", "Path=/v1"))
    gateway.http.cookies.clear()
    page = {"cookie": cookie.split(";")[0]}
    assert gateway.get("/v1/requests", headers={**page, **same}).status_code == 200
    assert gateway.get("/v1/requests", headers={**page, "origin": "https://evil.example"}).status_code == 403
    assert gateway.http.post("/v1/requests", json=BODY, headers={**page, **same}).status_code == 403
    elsewhere = gateway.http.post("/v1/tickets", json={"use": "session"}, headers=key)
    assert "set-cookie" not in elsewhere.headers, "an application's own server needs none"


def test_tickets_that_were_issued_without_keys_end_when_keys_are_turned_on(
    place: Any, keys_file: Path, key: dict[str, str]
) -> None:
    open_one = place.gateway("keyless", auth={"ticket_key": "shared"})
    made = open_one.http.post("/v1/artifacts", content=b"x", headers={"content-type": "text/plain"}).json()
    url = open_one.http.post(f"/v1/artifacts/{made['id']}/url").json()["url"]
    request_id = open_one.submit()
    events = f"/v1/requests/{request_id}?ticket={issue(open_one, {}, use='read', request_id=request_id)}"
    everything = session(issue(open_one, {}, use="session"))
    socket_ticket = issue(open_one, {})
    narrowed = session(issue(open_one, {}, use="session", conversation_id="c"))
    assert open_one.get(url).status_code == 200
    assert open_one.get(events).status_code == 200
    assert open_one.get(f"/v1/requests/{request_id}", headers=narrowed).status_code == 404, "narrow without keys too"
    open_one.stop()
    keyed = place.gateway("keyed", auth={"keys_file": keys_file, "ticket_key": "shared"})
    assert keyed.get(url).status_code == 401
    assert keyed.get(events).status_code == 401
    assert keyed.get("/v1/requests", headers=everything).status_code == 401
    with connect(f"{keyed.ws}?ticket={socket_ticket}") as socket, pytest.raises(ConnectionClosed):
        socket.recv(timeout=10)
    keyed.stop()


def test_a_socket_ticket_has_its_own_time(gateway: Any, key: dict[str, str]) -> None:
    ticket = issue(gateway, key, ttl_s=1)
    ends = time.time() + 1
    wait_until(lambda: time.time() > ends, describe="it has expired")
    with connect(f"{gateway.ws}?ticket={ticket}") as socket, pytest.raises(ConnectionClosed):
        socket.recv(timeout=10)
