"""Auth: keys, tickets, scopes, Origin and Host, over HTTP and WebSocket alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request, WebSocket
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from gateway_parts import edge_of, routes_with
from penstock.gateway.context import GatewayContext, put_context
from penstock.gateway.edge.auth import AuthPolicy, UnsafeBind, check_bind
from penstock.gateway.edge.edge import install_edge
from penstock.gateway.edge.keys import create_key, list_keys, revoke_key
from penstock.gateway.edge.rules import Rules, Scope
from penstock.gateway.limits.callers import Caller, caller_of
from penstock.gateway.routes.tickets import router as tickets_router
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.errors import Forbidden

HERE = "http://127.0.0.1:8000"


def make_app(policy: AuthPolicy) -> FastAPI:
    app = FastAPI()
    context = GatewayContext(settings=GatewaySettings(), policy=policy)
    put_context(app, context)
    app.include_router(tickets_router)

    @app.api_route("/v1/whoami", methods=["GET", "POST", "DELETE"])
    async def _whoami(request: Request) -> str:  # pyright: ignore[reportUnusedFunction]
        return caller_of(request).tenant

    @app.get("/healthz")
    async def _healthz() -> str:  # pyright: ignore[reportUnusedFunction]
        return "ok"

    @app.websocket("/v1/ws")
    async def _ws(socket: WebSocket) -> None:  # pyright: ignore[reportUnusedFunction]
        await socket.accept("penstock.v1")
        await socket.send_text(caller_of(socket).tenant)
        await socket.close()

    scopes: dict[str, Scope] = {"GET": "read", "POST": "submit", "DELETE": "cancel"}
    routes = routes_with({(method, "/v1/whoami"): Rules(scope=scope) for method, scope in scopes.items()})
    install_edge(app, edge_of(context, routes))
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
    return httpx.AsyncClient(transport=httpx.ASGITransport(make_app(policy)), base_url=HERE, headers=headers)


def socket_close_code(policy: AuthPolicy, url: str, headers: dict[str, str]) -> tuple[str | None, int]:
    """What the socket says first, and the code it is closed with."""
    with (
        TestClient(make_app(policy), base_url=HERE) as client,
        client.websocket_connect(f"ws://127.0.0.1:8000{url}", ["penstock.v1"], headers=headers) as socket,
    ):
        text: str | None = None
        try:
            text = socket.receive_text()
            socket.receive_text()
        except WebSocketDisconnect as closed:
            return text, closed.code
    raise AssertionError("the socket was not closed")


async def test_a_key_lets_in_by_either_header(policy: AuthPolicy, key: str) -> None:
    async with http(policy) as client:
        for headers in ({"authorization": f"Bearer {key}"}, {"authorization": f"bearer  {key}"}, {"x-api-key": key}):
            assert (await client.get("/v1/whoami", headers=headers)).json() == "acme"


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer no"}, {"x-api-key": "no"}, {"authorization": "x"}])
async def test_without_a_good_key_it_is_401(policy: AuthPolicy, headers: dict[str, str]) -> None:
    async with http(policy) as client:
        answer = await client.get("/v1/whoami", headers=headers)
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "unauthenticated"
        assert answer.headers["www-authenticate"] == "Bearer"
        assert (await client.get("/healthz", headers=headers)).status_code == 200


async def test_a_revoked_key_is_refused_at_once(policy: AuthPolicy, keys_file: Path, key: str) -> None:
    async with http(policy, authorization=f"Bearer {key}") as client:
        assert (await client.get("/v1/whoami")).status_code == 200
        revoke_key(keys_file, list_keys(keys_file)[0].key_id)
        assert (await client.get("/v1/whoami")).status_code == 401


async def test_scopes_narrow_what_a_key_does(policy: AuthPolicy, keys_file: Path) -> None:
    reader = create_key(keys_file, tenant="acme", scopes=["read"])
    async with http(policy, authorization=f"Bearer {reader}") as client:
        assert (await client.get("/v1/whoami")).status_code == 200
        for method in ("POST", "DELETE"):
            answer = await client.request(method, "/v1/whoami")
            assert answer.status_code == 403
            assert answer.json()["error"]["code"] == "forbidden"


def test_a_socket_opens_by_key_and_once_by_ticket(policy: AuthPolicy, key: str) -> None:
    assert socket_close_code(policy, "/v1/ws", {"authorization": f"Bearer {key}"}) == ("acme", 1000)
    with TestClient(make_app(policy), base_url=HERE) as client:
        ticket = client.post("/v1/tickets", headers={"x-api-key": key}).json()
    assert ticket["expires_in"] == 60
    url = f"/v1/ws?ticket={ticket['ticket']}"
    assert socket_close_code(policy, url, {}) == ("acme", 1000)
    assert socket_close_code(policy, url, {}) == (None, 4401)


def test_a_socket_without_rights_is_closed_with_4401(policy: AuthPolicy) -> None:
    assert socket_close_code(policy, "/v1/ws", {}) == (None, 4401)
    assert socket_close_code(policy, "/v1/ws?ticket=x.y", {}) == (None, 4401)


def test_the_ticket_of_a_revoked_key_is_refused(policy: AuthPolicy, keys_file: Path) -> None:
    record = list_keys(keys_file)[0]
    ticket, _ = policy.tickets.issue(Caller(tenant="acme", key_id=record.key_id))
    revoke_key(keys_file, record.key_id)
    assert socket_close_code(policy, f"/v1/ws?ticket={ticket}", {}) == (None, 4401)


async def test_a_ticket_is_no_key_over_http(policy: AuthPolicy, key: str) -> None:
    async with http(policy) as client:
        ticket = (await client.post("/v1/tickets", headers={"x-api-key": key})).json()["ticket"]
        assert (await client.get("/v1/whoami", params={"ticket": ticket})).status_code == 401


ORIGINS: list[tuple[str | None, bool]] = [
    (None, True),
    (HERE, True),
    ("https://127.0.0.1:8000", True),
    ("https://app.example", True),
    ("https://APP.example", True),
    ("http://app.example", False),
    ("https://app.example.evil.com", False),
    ("http://127.0.0.1:9999", False),
    ("null", False),
    ("", False),
    ("file://", False),
    ("http://127.0.0.1:99999999", False),
]


@pytest.mark.parametrize(("origin", "allowed"), ORIGINS)
async def test_only_known_origins_get_in(policy: AuthPolicy, key: str, origin: str | None, allowed: bool) -> None:
    headers = {"authorization": f"Bearer {key}", **({} if origin is None else {"origin": origin})}
    async with http(policy) as client:
        assert (await client.get("/v1/whoami", headers=headers)).status_code == (200 if allowed else 403)


@pytest.mark.parametrize(("origin", "allowed"), ORIGINS)
def test_the_same_for_sockets(policy: AuthPolicy, key: str, origin: str | None, allowed: bool) -> None:
    headers = {"authorization": f"Bearer {key}", **({} if origin is None else {"origin": origin})}
    assert socket_close_code(policy, "/v1/ws", headers)[1] == (1000 if allowed else 4403)


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1:8000", True),
        ("localhost", True),
        ("LOCALHOST:80", True),
        ("[::1]:8000", True),
        ("penstock.localhost", True),
        ("inside.example", True),
        ("evil.com", False),
        ("localhost.evil.com", False),
        ("127.0.0.1.nip.io", False),
        ("", False),
        ("[::1", False),
    ],
)
async def test_without_keys_only_this_machines_names_are_served(host: str, allowed: bool) -> None:
    """A rebound name comes with a matching Origin, so that only the Host gives it away."""
    policy = AuthPolicy.build(allowed_hosts=["inside.example"])
    async with http(policy) as client:
        headers = {"host": host, "origin": f"http://{host}"} if host != "[::1" else {"host": host}
        answer = await client.get("/v1/whoami", headers=headers)
        assert answer.status_code == (200 if allowed else 403)
        assert (await client.get("/healthz", headers=headers)).status_code == 200
    if host not in ("", "[::1"):
        code = socket_close_code(policy, "/v1/ws", {"host": host})[1]
        assert code == (1000 if allowed else 4403)


async def test_with_keys_any_host_is_served_and_without_them_any_key(policy: AuthPolicy, key: str) -> None:
    async with http(policy, host="penstock.example", authorization=f"Bearer {key}") as client:
        assert (await client.get("/v1/whoami")).json() == "acme"
    async with http(AuthPolicy.build(), authorization="Bearer unused") as client:
        assert (await client.get("/v1/whoami")).json() == "default"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "penstock.example", ""])
def test_listening_beyond_this_machine_needs_keys(host: str) -> None:
    with pytest.raises(UnsafeBind, match="keys"):
        check_bind(host, keys_file=None)
    check_bind(host, keys_file="keys.json")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8"])
def test_listening_on_loopback_needs_none(host: str) -> None:
    check_bind(host, keys_file=None)


def test_priorities_stay_within_the_key() -> None:
    caller: Any = Caller(max_priority=6)
    assert caller.priority(None) == 6
    assert caller.priority(8) == 8
    assert Caller().priority(None) == 5
    with pytest.raises(Forbidden):
        caller.priority(5)
