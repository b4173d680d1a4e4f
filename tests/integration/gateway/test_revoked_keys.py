"""Open exchanges whose key is revoked, loses rights or becomes another tenant's do nothing more with them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from penstock.cli.main import app as cli
from penstock.gateway.context import context_of_app
from penstock.gateway.edge.keys import create_key, list_keys, revoke_key
from support import wait_until

LINE = json.dumps({"task": "text_generation", "payload": {"prompt": "p"}}).encode() + b"\n"
NDJSON = {"content-type": "application/x-ndjson"}


class Keys:
    """A keys file with one key to be changed, and another of the same tenant that observes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        create_key(path, tenant="first")

    def make(self, tenant: str, **rights: Any) -> tuple[str, dict[str, str]]:
        """Its id, and the headers that send it."""
        secret = create_key(self.path, tenant=tenant, **rights)
        return secret.split("_")[1], {"authorization": f"Bearer {secret}"}

    def change(self, key_id: str, **fields: Any) -> None:
        document = json.loads(self.path.read_text())
        for entry in document["keys"]:
            if entry["id"] == key_id:
                entry |= fields
        self.path.write_text(json.dumps(document))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys") / "keys.json")


@pytest.fixture(scope="module")
def gateway(place: Any, keys: Keys) -> Any:
    auth = {"keys_file": keys.path, "ticket_key": "shared"}
    return place.gateway("revoking", auth=auth, limits={"calls_per_s": None, "requests_per_s": 10_000})


def accepted(gateway: Any, headers: dict[str, str]) -> int:
    return gateway.get("/v1/stats", headers=headers).json()["inflight"]


REVOKE = "revoke"
CHANGES = [
    (REVOKE, "unauthenticated"),
    ({"scopes": ["read"]}, "forbidden"),
    ({"tenant": "others"}, "unauthenticated"),
    ({"limits": {"models": ["none"]}}, "forbidden"),
]


def changed(keys: Keys, key_id: str, change: Any) -> None:
    if change == REVOKE:
        assert revoke_key(keys.path, key_id)
    else:
        keys.change(key_id, **change)


@pytest.mark.parametrize(("change", "code"), CHANGES, ids=["revoked", "scopes", "tenant", "limits"])
def test_lines_of_an_open_bulk_are_not_accepted_after_the_change(
    gateway: Any, keys: Keys, change: Any, code: str
) -> None:
    tenant = f"bulk-{code}-{CHANGES.index((change, code))}"
    key_id, headers = keys.make(tenant)
    _, observer = keys.make(tenant)

    def lines() -> Iterator[bytes]:
        yield LINE * 15
        wait_until(lambda: accepted(gateway, observer) == 15, describe="15 lines are accepted")
        changed(keys, key_id, change)
        for _ in range(25):
            yield LINE

    answer = gateway.http.post("/v1/requests/bulk", content=lines(), headers={**NDJSON, **headers})
    found = [json.loads(line) for line in answer.text.splitlines()]
    assert [("request_id" in one) for one in found[:16]] == [True] * 15 + [False]
    assert {one["error"]["code"] for one in found[15:]} == {code}
    assert accepted(gateway, observer) == 15


def test_lines_that_wait_for_their_rate_are_not_accepted_after_the_revocation(gateway: Any, keys: Keys) -> None:
    key_id, headers = keys.make("rated", rate=5)
    _, observer = keys.make("rated")

    def revoke_after_some() -> None:
        wait_until(lambda: accepted(gateway, observer) >= 5, describe="some lines are accepted")
        assert revoke_key(keys.path, key_id)

    revoking = threading.Thread(target=revoke_after_some)
    revoking.start()
    answer = gateway.http.post("/v1/requests/bulk", content=LINE * 40, headers={**NDJSON, **headers})
    revoking.join()
    found = [json.loads(line) for line in answer.text.splitlines()]
    refused = [one for one in found if "error" in one]
    assert len(found) == 40
    assert len(refused) >= 20
    assert {one["error"]["code"] for one in refused} == {"unauthenticated"}
    wait_until(lambda: accepted(gateway, observer) == 40 - len(refused), describe="the others are accepted")


@pytest.mark.parametrize("route", ["/v1/artifacts", "/v1/files"])
def test_an_upload_ends_with_its_key(gateway: Any, keys: Keys, route: str) -> None:
    key_id, headers = keys.make("uploads")
    _, observer = keys.make("uploads")
    parts = (b"--b\r\ncontent-disposition: form-data; name=purpose\r\n\r\nbatch\r\n--b\r\n", b"\r\n--b--\r\n")
    head, tail = parts if route == "/v1/files" else (b"", b"")
    if head:
        head += b"content-disposition: form-data; name=file; filename=f\r\n\r\n"
        headers = {**headers, "content-type": "multipart/form-data; boundary=b"}

    def content() -> Iterator[bytes]:
        yield head + b"x" * 200_000
        transfers = context_of_app(gateway.app).allowances.http
        wait_until(lambda: transfers.open >= 1, describe="the upload has begun")
        assert revoke_key(keys.path, key_id)
        yield b"x" * 200_000 + tail

    answer = gateway.http.post(route, content=content(), headers=headers)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "unauthenticated")
    assert gateway.get(route, headers=observer).json()["data"] == []


def test_a_download_ends_with_its_key(gateway: Any, keys: Keys) -> None:
    key_id, headers = keys.make("downloads")
    size = 60_000_000
    made = gateway.http.post("/v1/artifacts", content=b"x" * size, headers=headers).json()
    with gateway.http.stream("GET", f"/v1/artifacts/{made['id']}/content", headers=headers) as stream:
        pieces = stream.iter_bytes()
        assert next(pieces)
        assert revoke_key(keys.path, key_id)
        with pytest.raises(httpx.RemoteProtocolError, match="closed"):
            list(pieces)


def test_a_frame_on_an_open_socket_is_refused_after_the_change(gateway: Any, keys: Keys) -> None:
    key_id, headers = keys.make("socket", scopes=["submit", "read"])
    _, observer = keys.make("socket")
    submit = json.dumps({"type": "submit", "request": json.loads(LINE)})
    with connect(gateway.ws, additional_headers=headers) as socket:
        socket.send(submit)
        assert json.loads(socket.recv(timeout=10))["type"] == "accepted"
        keys.change(key_id, limits={"models": ["none"]})
        socket.send(submit)
        errors = (frame for frame in map(json.loads, socket) if frame["type"] == "error")
        assert next(errors)["error"]["code"] == "forbidden"
        assert revoke_key(keys.path, key_id)
        socket.send(submit)
        with pytest.raises(ConnectionClosed):
            list(socket)
        assert socket.close_code == 4401
    assert accepted(gateway, observer) == 1


def test_a_broken_keys_file_is_reported(gateway: Any, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    """A revocation that was written into it is not in force: whoever wrote it must hear of it."""
    _, operator = keys.make("ops", scopes=["admin"])
    assert gateway.get("/v1/admin/stats", headers=operator).status_code == 200
    lines: Callable[[list[str]], str] = lambda args: CliRunner().invoke(cli, args).output  # noqa: E731
    good = keys.path.read_text()
    keys.path.write_text(good[: len(good) // 2])
    try:
        shown = gateway.get("/readyz").json()
        assert shown["status"] == "degraded"
        assert "keys file is broken" in shown["reason"]
        assert str(keys.path) not in json.dumps(shown), "probes are not told where it lies"
        assert str(keys.path) in gateway.get("/readyz", headers=operator).json()["reason"]
        assert "keys file is broken" in lines(["status", "--url", gateway.url])
        monkeypatch.setenv("PENSTOCK_URL", gateway.url)
        monkeypatch.setenv("PENSTOCK_AUTH__KEYS_FILE", str(keys.path))
        found = {one["name"]: one for one in json.loads(lines(["doctor", "--json"]))}
        assert "keys file is broken" in found["readiness"]["detail"]
        assert (found["keys"]["state"], str(keys.path) in found["keys"]["detail"]) == ("fail", True)
    finally:
        keys.path.write_text(good)
    assert "keys" not in (gateway.get("/readyz").json()["reason"] or "")
    assert len(list_keys(keys.path)) > 1


def test_calls_with_wrong_keys_are_limited_by_address(gateway: Any, keys: Keys) -> None:
    _, good = keys.make("guessed")
    wrong = {"authorization": "Bearer pk_000000000000_guess", "x-forwarded-for": "203.0.113.7"}
    answers = [gateway.get("/v1/models", headers=wrong) for _ in range(60)]
    statuses = [one.status_code for one in answers]
    assert statuses[0] == 401
    assert set(statuses) == {401, 429}
    refused = answers[statuses.index(429)]
    assert refused.json()["error"]["code"] == "tenant_limit"
    assert int(refused.headers["retry-after"]) >= 1
    here = {"x-forwarded-for": "203.0.113.7"}
    assert gateway.get("/v1/models", headers={**good, **here}).status_code == 200, "a good key is not held up"
    other = gateway.get("/v1/models", headers={**wrong, "x-forwarded-for": "203.0.113.8"})
    assert other.status_code == 401, "a trusted proxy names the client"
    for address in ("2001:db8::1", "2001:db8::2"):
        many = [gateway.get("/v1/models", headers={**wrong, "x-forwarded-for": address}) for _ in range(12)]
    assert 429 in [one.status_code for one in many], "addresses of one network of IPv6 count as one"
