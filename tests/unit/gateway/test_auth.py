"""Authentication: keys, tickets, scopes, Origin and Host, over HTTP and WebSocket alike."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI, Request, WebSocket
from starlette.datastructures import Headers
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from gateway_parts import routes_with
from kit.gateway_http import client, gateway_app
from penstock.gateway.edge.auth import AuthPolicy, UnsafeBind, check_bind
from penstock.gateway.edge.keys import create_key, list_keys, revoke_key
from penstock.gateway.edge.rules import Rules, Scope
from penstock.gateway.limits.callers import Caller, Grant, caller_of
from penstock.gateway.routes.tickets import router as tickets_router
from penstock.schemas.errors import Unauthenticated

HERE = "http://127.0.0.1:8000"
SCOPES: dict[str, Scope] = {"GET": "read", "POST": "submit", "DELETE": "cancel"}


def make_app(policy: AuthPolicy) -> FastAPI:
    routes = routes_with({(method, "/v1/whoami"): Rules(scope=scope) for method, scope in SCOPES.items()})
    app = gateway_app(tickets_router, policy=policy, routes=routes)

    @app.api_route("/v1/whoami", methods=list(SCOPES))
    async def _whoami(request: Request) -> str:
        return caller_of(request).tenant

    @app.get("/healthz")
    async def _healthz() -> str:
        return "ok"

    @app.websocket("/v1/ws")
    async def _ws(socket: WebSocket) -> None:
        await socket.accept("penstock.v1")
        await socket.send_text(caller_of(socket).tenant)
        await socket.close()

    return app


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def key(keys_file: Path) -> str:
    return create_key(keys_file, tenant="acme")


@pytest.fixture
def policy(keys_file: Path, key: str) -> AuthPolicy:
    return AuthPolicy.build(keys_file=keys_file, ticket_key="shared", allowed_origins=["https://app.example/"])


def http(policy: AuthPolicy, **headers: str) -> httpx.AsyncClient:
    return client(make_app(policy), HERE, **headers)


def socket_end(policy: AuthPolicy, query: str = "", **headers: str) -> tuple[str | None, int]:
    """The first text that the socket sends, and the code it is closed with."""
    url = f"ws://127.0.0.1:8000/v1/ws{query}"
    with (
        TestClient(make_app(policy), base_url=HERE) as client,
        client.websocket_connect(url, ["penstock.v1"], headers=headers) as socket,
    ):
        text: str | None = None
        try:
            text = socket.receive_text()
            socket.receive_text()
        except WebSocketDisconnect as closed:
            return text, closed.code
    raise AssertionError("the socket was not closed")


GOOD_KEYS = [("authorization", "Bearer {key}"), ("authorization", "bearer  {key}"), ("x-api-key", "{key}")]
BAD_KEYS = [("x-other", "{key}"), ("authorization", "Bearer no"), ("authorization", "x"), ("x-api-key", "no")]


@pytest.mark.parametrize(("header", "value"), [*GOOD_KEYS, *BAD_KEYS])
async def test_a_call_needs_a_good_key(policy: AuthPolicy, key: str, header: str, value: str) -> None:
    async with http(policy, **{header: value.format(key=key)}) as calls:
        answer = await calls.get("/v1/whoami")
        if (header, value) in GOOD_KEYS:
            assert (answer.status_code, answer.json()) == (200, "acme")
        else:
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthenticated")
            assert answer.headers["www-authenticate"] == "Bearer"
        assert (await calls.get("/healthz")).status_code == 200


async def test_a_revoked_key_and_its_tickets_are_refused_at_once(policy: AuthPolicy, keys_file: Path, key: str) -> None:
    (record,) = list_keys(keys_file)
    ticket, _ = policy.tickets.issue(Caller(tenant="acme", key_id=record.key_id))
    async with http(policy, authorization=f"Bearer {key}") as calls:
        assert (await calls.get("/v1/whoami")).status_code == 200
        revoke_key(keys_file, record.key_id)
        assert (await calls.get("/v1/whoami")).status_code == 401
    assert socket_end(policy, f"?ticket={ticket}") == (None, 4401)


async def test_a_ticket_opens_one_socket_and_is_no_key_over_http(policy: AuthPolicy, key: str) -> None:
    assert socket_end(policy, authorization=f"Bearer {key}") == ("acme", 1000)
    async with http(policy) as calls:
        ticket = (await calls.post("/v1/tickets", headers={"x-api-key": key})).json()
        assert (await calls.get("/v1/whoami", params={"ticket": ticket["ticket"]})).status_code == 401
    assert ticket["expires_in"] == 60
    assert socket_end(policy, f"?ticket={ticket['ticket']}") == ("acme", 1000)
    for query in (f"?ticket={ticket['ticket']}", "?ticket=x.y", ""):
        assert socket_end(policy, query) == (None, 4401)


SERVED_ORIGINS = [None, HERE, "https://127.0.0.1:8000", "https://app.example", "https://APP.example"]
OTHER_ORIGINS = ["http://app.example", "https://app.example.evil.com", "http://127.0.0.1:9999", "null", "", "file://"]


@pytest.mark.parametrize("origin", [*SERVED_ORIGINS, *OTHER_ORIGINS, "http://127.0.0.1:99999999"])
async def test_only_known_origins_are_served(policy: AuthPolicy, key: str, origin: str | None) -> None:
    headers = {"authorization": f"Bearer {key}", **({} if origin is None else {"origin": origin})}
    async with http(policy, **headers) as calls:
        status = (await calls.get("/v1/whoami")).status_code
    expected = (200, 1000) if origin in SERVED_ORIGINS else (403, 4403)
    assert (status, socket_end(policy, **headers)[1]) == expected


LOCAL_HOSTS = ["127.0.0.1:8000", "localhost", "LOCALHOST:80", "[::1]:8000", "penstock.localhost", "inside.example"]
OTHER_HOSTS = ["evil.com", "localhost.evil.com", "127.0.0.1.nip.io", "", "[::1"]


@pytest.mark.parametrize("host", [*LOCAL_HOSTS, *OTHER_HOSTS])
async def test_without_keys_only_local_host_names_are_served(host: str) -> None:
    """A rebound name comes with a matching Origin, so that only the Host gives it away."""
    policy = AuthPolicy.build(allowed_hosts=["inside.example"])
    headers = {"host": host, "origin": f"http://{host}"} if host != "[::1" else {"host": host}
    async with http(policy, **headers) as calls:
        assert (await calls.get("/v1/whoami")).status_code == (200 if host in LOCAL_HOSTS else 403)
        assert (await calls.get("/healthz")).status_code == 200
    if host not in ("", "[::1"):
        assert socket_end(policy, host=host)[1] == (1000 if host in LOCAL_HOSTS else 4403)


async def test_with_keys_any_host_is_served_and_without_keys_any_key(policy: AuthPolicy, key: str) -> None:
    async with http(policy, host="penstock.example", authorization=f"Bearer {key}") as calls:
        assert (await calls.get("/v1/whoami")).json() == "acme"
    async with http(AuthPolicy.build(), authorization="Bearer unused") as calls:
        assert (await calls.get("/v1/whoami")).json() == "default"


def test_listening_beyond_this_machine_needs_keys() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8"):
        check_bind(host, keys_file=None)
    for host in ("0.0.0.0", "::", "192.168.1.5", "penstock.example", ""):
        check_bind(host, keys_file="keys.json")
        with pytest.raises(UnsafeBind, match="keys"):
            check_bind(host, keys_file=None)


def test_the_rights_of_a_caller_are_those_that_its_key_has_now(policy: AuthPolicy, keys_file: Path, key: str) -> None:
    operator = create_key(keys_file, tenant="ops", scopes=["admin"])
    acting = policy.authenticate(Headers({"x-api-key": operator})).on_behalf_of("acme")
    narrow = policy.authenticate(Headers({"x-api-key": key})).narrowed(Grant(scopes=frozenset({"read", "admin"})))
    assert policy.current(acting) == acting
    assert policy.current(narrow).scopes == {"read"}, "never more than the key has"
    keys_file.write_text(keys_file.read_text().replace('"admin"', '"read"').replace('"acme"', '"else"'))
    for caller in (acting, narrow):
        with pytest.raises(Unauthenticated):
            policy.current(caller)
    assert policy.caller_of_work("acme", narrow.key_id) is None
