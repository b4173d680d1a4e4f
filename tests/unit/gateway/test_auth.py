"""Authentication over HTTP and WebSocket: keys, tickets, scopes, Origin and Host."""

from __future__ import annotations

import json
import logging
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from fastapi import FastAPI, Request, WebSocket
from starlette.datastructures import Headers
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from gateway_parts import routes_with
from kit.gateway_http import client, gateway_app, gateway_context
from penstock.gateway.edge import tickets
from penstock.gateway.edge.auth import AuthPolicy, UnsafeBind, check_bind, key_id_of
from penstock.gateway.edge.key_book import KeyBook
from penstock.gateway.edge.key_records import new_key
from penstock.gateway.edge.keys import KeyRing, KeysFileError, create_key, list_keys, revoke_key, rotate_key
from penstock.gateway.edge.rules import Rules, Scope
from penstock.gateway.edge.tickets import (
    SESSION_PREFIX,
    TTL_S,
    Redeemed,
    TicketMask,
    TicketOffice,
    Use,
    mask_server_logs,
    mask_tickets,
)
from penstock.gateway.limits.callers import Caller, Grant, caller_of
from penstock.gateway.limits.limits import Limits
from penstock.gateway.routes.tickets import router as tickets_router
from penstock.schemas.errors import Overloaded, Unauthenticated

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
BAD_KEYS = [
    ("x-other", "{key}"),
    ("authorization", "Basic {key}"),
    ("authorization", "Bearer no"),
    ("authorization", "x"),
    ("x-api-key", "no"),
]


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


@pytest.mark.parametrize(("unread", "status"), [(None, 401), ("not read yet", 503)])
async def test_guesses_are_slowed_and_logged_once(
    keys_file: Path, key: str, unread: str | None, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    policy = AuthPolicy.build(keys_file=keys_file, book=KeyBook(unread=unread))
    began = time.monotonic()
    async with http(policy, **{"x-api-key": "pk_aabbccddeeff_guess"}) as calls:
        found = [(await calls.get("/v1/whoami")).status_code for _ in range(26)]
        refused = found.count(429)
        assert time.monotonic() - began >= (refused - 11) / 10
        assert (set(found), found[0], refused > 11) == ({status, 429}, status, True)
        assert (await calls.get("/v1/whoami", headers={"x-api-key": key})).status_code == 200
    lines = [record.getMessage() for record in caplog.records if "auth.refused" in record.getMessage()]
    assert lines == ["auth.refused address=127.0.0.1 key=aabbccddeeff"]


@pytest.mark.parametrize(
    ("headers", "key_id"),
    [
        ({}, None),
        ({"x-api-key": "sk-of-another-service"}, None),
        ({"authorization": "Bearer pk_my_secret"}, None),
        ({"authorization": "Bearer pk_aabbccddeeff_my_secret"}, "aabbccddeeff"),
    ],
)
def test_no_secret_is_logged_as_an_id(headers: dict[str, str], key_id: str | None) -> None:
    assert key_id_of(Headers(headers)) == key_id


def test_without_the_keys_file_no_key_of_the_topic_is_in_force(keys_file: Path, key: str) -> None:
    book = KeyBook()
    record, secret = new_key(1, tenant="acme")
    book.keys[record.key_id] = record
    ring = KeyRing(keys_file, book)
    assert ring.find(secret) == record
    kept = keys_file.read_text()
    keys_file.unlink()
    assert ring.find(secret) is None
    assert "no key is in force" in getattr(ring.problem(), "text", "")
    keys_file.write_text(kept)
    assert (ring.find(secret), ring.problem()) == (record, None)


async def test_a_revoked_key_and_its_tickets_are_refused_at_once(policy: AuthPolicy, keys_file: Path, key: str) -> None:
    kept, (record,) = create_key(keys_file), list_keys(keys_file)[:1]
    ticket, _ = policy.tickets.issue(Caller(tenant="acme", key_id=record.key_id))

    async def statuses() -> list[int]:
        async with http(policy) as calls:
            return [(await calls.get("/v1/whoami", headers={"x-api-key": one})).status_code for one in (key, kept)]

    assert await statuses() == [200, 200]
    assert [revoke_key(keys_file, record.key_id) for _ in range(2)] == [True, False]
    assert await statuses() == [401, 200]
    assert socket_end(policy, f"?ticket={ticket}") == (None, 4401)
    assert KeyRing(keys_file).record(record.key_id) is None


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


@pytest.mark.parametrize(
    ("asked_from", "is_kept"),
    [
        ({}, False),
        ({"origin": HERE}, True),
        ({"origin": "https://app.example"}, False),
        ({"origin": HERE, "sec-fetch-site": "same-origin"}, True),
        ({"origin": HERE, "sec-fetch-site": "cross-site"}, False),
    ],
)
async def test_a_session_is_kept_as_a_cookie_for_the_gateways_own_pages(
    policy: AuthPolicy, key: str, asked_from: dict[str, str], is_kept: bool
) -> None:
    async with http(policy, **asked_from) as calls:
        answer = await calls.post("/v1/tickets", json={"use": "session"}, headers={"x-api-key": key})
    assert answer.status_code == 200
    assert ("set-cookie" in answer.headers) is is_kept


@pytest.mark.parametrize(("origin", "status"), [(None, 200), (HERE, 200), ("https://app.example", 401)])
async def test_the_session_cookie_counts_for_the_gateways_own_pages_alone(
    policy: AuthPolicy, key: str, origin: str | None, status: int
) -> None:
    session, _ = policy.tickets.issue(policy.authenticate(Headers({"x-api-key": key})), use="session")
    headers = {"cookie": f"other=a; penstock_session={session}", **({} if origin is None else {"origin": origin})}
    async with http(policy, **headers) as calls:
        assert (await calls.get("/v1/whoami")).status_code == status
    assert socket_end(policy, **headers)[1] == (1000 if status == 200 else 4401)


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
    acting = policy.authenticate(Headers({"x-api-key": operator})).on_behalf_of("acme", None)
    narrow = policy.authenticate(Headers({"x-api-key": key})).narrowed(Grant(scopes=frozenset({"read", "admin"})))
    assert policy.current(acting) == acting
    assert policy.current(narrow).scopes == {"read"}, "never more than the key has"
    keys_file.write_text(keys_file.read_text().replace('"admin"', '"read"').replace('"acme"', '"else"'))
    for caller in (acting, narrow):
        with pytest.raises(Unauthenticated):
            policy.current(caller)
    assert policy.caller_of_work("acme", narrow.key_id) is None


def test_a_caller_ends_with_its_secret_and_with_its_ticket(policy: AuthPolicy, keys_file: Path, key: str) -> None:
    caller = policy.authenticate(Headers({"x-api-key": key}))
    assert policy.current(replace(caller, user="u")).user == "u"
    with pytest.raises(Unauthenticated, match="expired"):
        policy.current(caller.narrowed(Grant(scopes=caller.scopes, expires_at=time.time())))
    rotate_key(keys_file, list_keys(keys_file)[0].key_id, 0)
    with pytest.raises(Unauthenticated, match="rotated"):
        policy.current(caller)
    without_key, _ = policy.tickets.issue(Caller(tenant="acme"))
    with pytest.raises(Unauthenticated, match="no keys"):
        policy.authenticate(Headers(), without_key, ["socket"])


# -- keys: hashed at rest, followed when the file changes


def test_no_folder_is_made(tmp_path: Path) -> None:
    keys_file = tmp_path / "mistyped" / "keys.json"
    for change in (lambda: create_key(keys_file), lambda: revoke_key(keys_file, "a")):
        with pytest.raises(KeysFileError, match=rf"the folder {keys_file.parent} does not exist"):
            change()
    assert [*tmp_path.iterdir()] == []


def test_the_file_holds_rights_and_no_secret_and_only_its_owner_reads_it(
    keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The folder of temporary files can be on another file system, from which no file is moved.
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    limits = Limits(outstanding=5, models=("a",))
    rights: dict[str, Any] = {"scopes": ["read"], "max_priority": 4, "rate": 2.5, "limits": limits}
    secret = create_key(keys_file, tenant="acme", name="laptop", **rights)
    assert secret.split("_", 2)[2] not in keys_file.read_text()
    assert keys_file.stat().st_mode & 0o077 == 0
    (record,) = list_keys(keys_file)
    assert KeyRing(keys_file).find(secret) == record
    assert (record.tenant, record.name, record.limits) == ("acme", "laptop", limits)
    assert (record.scopes, record.max_priority, record.rate) == (("read",), 4, 2.5)
    assert record.digest not in repr(record)
    caller = AuthPolicy.build(keys_file=keys_file).authenticate(Headers({"x-api-key": secret}))
    assert (caller.limits, caller.max_priority) == (replace(limits, requests_per_s=2.5), 4)
    assert (caller.key_id, caller.key_name) == (record.key_id, "laptop")
    keys_file.write_text(keys_file.read_text().replace("outstanding", "outstandig"))
    with pytest.raises(KeysFileError, match="outstandig"):
        list_keys(keys_file)


@pytest.mark.parametrize("wrong", ["", "pk", "pk_", "pk__", "pk_000000000000_x", "nonsense", "pk_é_\udcff", "x" * 5000])
def test_other_secrets_are_not_found(keys_file: Path, wrong: str) -> None:
    secret = create_key(keys_file)
    ring = KeyRing(keys_file)
    assert ring.find(wrong) is None
    assert ring.find(secret + "x") is None
    assert ring.find(secret[:-1]) is None


def test_a_file_that_cannot_be_read_keeps_the_last_good_keys_and_a_missing_one_keeps_none(
    keys_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = create_key(keys_file), create_key(keys_file)
    ring = KeyRing(keys_file)
    with monkeypatch.context() as broken:
        broken.setattr(Path, "stat", Mock(side_effect=PermissionError(13, "Permission denied")))
        assert ring.find(first) is not None
    revoke_key(keys_file, first.split("_")[1])
    assert ring.find(first) is None, "it is read again"
    for half, says in (("{ half", "is broken: the keys of before are in force"), (None, "missing: no key is in force")):
        _ = keys_file.unlink() if half is None else keys_file.write_text(half)
        assert (ring.find(second) is None) is (half is None)
        assert says in getattr(ring.problem(), "text", "")
    assert ring.find(create_key(keys_file)) is not None


def test_a_change_is_in_force_although_nobody_called_before_the_file_broke(keys_file: Path) -> None:
    secret = create_key(keys_file)
    policy = AuthPolicy.build(keys_file=keys_file)
    connections = gateway_context(policy=policy).connections
    revoke_key(keys_file, list_keys(keys_file)[0].key_id)
    connections.look()
    keys_file.write_text("{ half")
    assert policy.keys is not None
    assert policy.keys.find(secret) is None


@pytest.mark.parametrize("content", ["", "[]", '{"keys": [{"id": "x"}]}', '{"keys": 3}'])
def test_a_file_that_is_something_else_is_refused_at_start(keys_file: Path, tmp_path: Path, content: str) -> None:
    keys_file.write_text(content)
    with pytest.raises(KeysFileError, match="not a keys file"):
        KeyRing(keys_file)
    with pytest.raises(KeysFileError, match="penstock keys create"):
        KeyRing(tmp_path / "missing.json")


def test_writers_do_not_lose_each_others_keys(keys_file: Path) -> None:
    with ThreadPoolExecutor(12) as threads:
        secrets = [*threads.map(lambda number: create_key(keys_file, name=str(number)), range(12))]
    assert {record.name for record in list_keys(keys_file)} == {str(number) for number in range(12)}
    assert len(set(secrets)) == 12
    assert json.loads(keys_file.read_text())["version"] == 1


# -- tickets


CALLER = Caller(tenant="acme", scopes=frozenset({"read"}), max_priority=3, key_id="k1")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def office(clock: Clock) -> TicketOffice:
    return TicketOffice("shared", clock)


def test_a_ticket_carries_the_rights_to_another_gateway(office: TicketOffice, clock: Clock) -> None:
    ticket, expires_at = office.issue(CALLER)
    assert expires_at == clock.now + TTL_S["socket"][0]
    grant = Grant(scopes=CALLER.scopes)
    for one in (office, TicketOffice("shared", clock)):
        assert one.redeem(ticket) == Redeemed(tenant="acme", key_id="k1", grant=grant)
        with pytest.raises(Unauthenticated, match="used before"):
            one.redeem(ticket)
    clock.now = expires_at
    with pytest.raises(Unauthenticated, match="expired"):
        TicketOffice("shared", clock).redeem(ticket)


@pytest.mark.parametrize("use", ["read", "session"])
def test_a_ticket_keeps_what_it_is_narrowed_to_and_is_good_until_it_expires(
    office: TicketOffice, clock: Clock, use: Use
) -> None:
    caller = replace(CALLER, scopes=frozenset({"read", "cancel"}))
    ticket, expires_at = office.issue(caller, use=use, scopes=["read"], ttl_s=9, conversation_id="c", user_id="u")
    assert expires_at == clock.now + 9
    assert ticket.startswith(SESSION_PREFIX) is (use == "session"), "it is told from a key by that"
    grant = Grant(scopes=frozenset({"read"}), conversation_id="c", user_id="u", expires_at=expires_at)
    for _ in range(2):
        assert office.redeem(ticket, [use]).grant == grant
    with pytest.raises(Unauthenticated, match="for this route"):
        office.redeem(ticket, ["read" if use == "session" else "session", "socket", "artifact"])
    clock.now += 9
    with pytest.raises(Unauthenticated, match="expired"):
        office.redeem(ticket, [use])


def test_a_ticket_of_another_kind_or_that_nobody_gave_out_is_none(office: TicketOffice, clock: Clock) -> None:
    for_socket, _ = office.issue(CALLER)
    for_artifact, _ = office.issue_for_artifact(CALLER, "a1", 300)
    body, signature = for_socket.split(".")
    changed = [body[:-2] + "AA." + signature, body + "." + signature[:-2] + "AA", body + "."]
    malformed = ["", ".", "a.b", "e30.e30", "\udcff.x", "=.=", "é.é"]
    for ticket in (*changed, *malformed, for_artifact):
        with pytest.raises(Unauthenticated, match="none of this gateway"):
            office.redeem(ticket)
    for ticket in (*malformed, for_socket, for_artifact[:-2]):
        with pytest.raises(Unauthenticated, match="none of this gateway"):
            office.redeem(ticket, ["artifact"], "a1")
    for issued_by, redeemed_by in (("shared", "other"), (None, None)):  # without a secret each office has its own
        ticket, _ = TicketOffice(issued_by, clock).issue(CALLER)
        with pytest.raises(Unauthenticated):
            TicketOffice(redeemed_by, clock).redeem(ticket)


def test_used_tickets_are_remembered_up_to_a_number(
    office: TicketOffice, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tickets, "_MAX_REMEMBERED", 2)
    many = [office.issue(CALLER, ttl_s=ttl_s)[0] for ttl_s in (1, 9, 9, 9)]
    office.redeem(many[0])
    office.redeem(many[1])
    with pytest.raises(Overloaded):
        office.redeem(many[2])
    clock.now += 1
    office.redeem(many[2])
    for ticket, error in ((many[1], Unauthenticated), (many[3], Overloaded)):
        with pytest.raises(error):
            office.redeem(ticket)


def test_tickets_are_masked_in_server_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert mask_tickets("/v1/ws?a=1&ticket=abc.def&b=2") == "/v1/ws?a=1&ticket=***&b=2"
    record = logging.LogRecord(
        "uvicorn.error", 20, "", 0, '%s - "WebSocket %s" [accepted]', ("1.2.3.4:5", "/v1/ws?ticket=s.t"), None
    )
    assert TicketMask().filter(record)
    assert record.getMessage() == '1.2.3.4:5 - "WebSocket /v1/ws?ticket=***" [accepted]'
    whole = logging.LogRecord("uvicorn.error", 20, "", 0, "/v1/ws?ticket=s.t", None, None)
    assert TicketMask().filter(whole)
    assert whole.getMessage() == "/v1/ws?ticket=***"
    server = logging.getLogger("uvicorn.error")
    monkeypatch.setattr(server, "filters", [])
    mask_server_logs()
    mask_server_logs()
    assert [type(item) for item in server.filters] == [TicketMask]


def test_a_ticket_for_an_artifact_reads_that_one_until_it_expires(office: TicketOffice, clock: Clock) -> None:
    of_session = CALLER.narrowed(Grant(scopes=CALLER.scopes, expires_at=clock.now + 5))
    assert office.issue_for_artifact(of_session, "a1", 300)[1] == clock.now + 5
    ticket, expires_at = TicketOffice("shared", clock).issue_for_artifact(CALLER, "a1", 300)
    assert expires_at == clock.now + 300
    for _ in range(2):  # an image is shown more than once
        reader = office.redeem(ticket, ["artifact"], "a1")
        assert (reader.tenant, reader.grant.scopes, reader.key_id) == ("acme", frozenset({"read"}), "k1")
    with pytest.raises(Unauthenticated, match="another"):
        office.redeem(ticket, ["artifact"], "a2")
    clock.now += 300
    with pytest.raises(Unauthenticated, match="expired"):
        office.redeem(ticket, ["artifact"], "a1")
