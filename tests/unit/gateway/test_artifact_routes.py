"""Artifacts over HTTP: how many come and go at once, how much of one is in memory, and what a tenant may keep."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from fastapi import FastAPI

from gateway_parts import artifact_app
from penstock.common.artifacts import ArtifactStore, digests
from penstock.gateway.edge.auth import AuthPolicy
from penstock.gateway.edge.keys import create_key
from penstock.gateway.limits.allowances import Allowances, Totals
from penstock.gateway.limits.callers import ANYBODY
from penstock.gateway.limits.limits import Limits
from penstock.gateway.routes import artifact_uploads
from support import wait_until_async

PATH = "/v1/artifacts"
MIB = 1024 * 1024


def client(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1")


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "artifacts")


def scope_of(path: str) -> dict[str, Any]:
    headers = [(b"host", b"127.0.0.1")]
    empty: dict[str, Any] = {"type": "http", "http_version": "1.1", "scheme": "http", "query_string": b"", "state": {}}
    return {**empty, "method": "GET", "path": path, "raw_path": path.encode(), "headers": headers, "root_path": ""}


async def test_a_download_holds_a_slot_and_some_pieces_until_it_was_read(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "PIECE_BYTES", 1_000)
    allowances = Allowances(totals=Totals(max_transfers=1))
    app = artifact_app(store, allowances)
    data = bytes(range(250)) * 10
    kept = store.put(ANYBODY.tenant, data)
    read, sent = asyncio.Event(), bytearray()
    sizes: list[int] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            sizes.append(len(message["body"]))
            await read.wait()
            sent.extend(message["body"])

    path = f"{PATH}/{kept.artifact_id}/content"
    asked: Any = app
    reading = asyncio.create_task(asked(scope_of(path), receive, send))
    async with client(app) as http:
        await wait_until_async(lambda: bool(sizes), describe="the download has begun")
        assert allowances.transfers.open == 1
        for refused in (await http.get(path), await http.post(PATH, content=b"x")):
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await http.get(f"{PATH}/{kept.artifact_id}")).status_code == 200, "a description takes no slot"
        read.set()
        await reading
        assert bytes(sent) == data
        assert max(sizes) == 1_000
        assert allowances.transfers.open == 0
        assert (await http.get(path)).content == data


async def test_a_tenant_takes_its_share_of_the_transfers(store: ArtifactStore) -> None:
    allowances = Allowances(totals=Totals(max_transfers=4, reserve=0.5))
    given_back = [allowances.open_transfer(ANYBODY) for _ in range(2)]
    async with client(artifact_app(store, allowances)) as http:
        refused = await http.post(PATH, content=b"x")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        given_back.pop()()
        assert (await http.post(PATH, content=b"x")).status_code == 201
    assert allowances.transfers.open == 1


async def test_a_declared_length_without_room_is_refused_before_it_is_read(store: ArtifactStore) -> None:
    allowances = Allowances(defaults=Limits(artifact_bytes=1_000))
    answers: list[dict[str, Any]] = []
    pieces = 0

    async def receive() -> dict[str, Any]:
        nonlocal pieces
        pieces += 1
        return {"type": "http.request", "body": b"x" * 1_000, "more_body": pieces < 5}

    async def send(message: dict[str, Any]) -> None:
        answers.append(message)

    def into_the_store(*_: Any) -> None:
        raise AssertionError("it was read")

    scope = {**scope_of(PATH), "method": "POST"}
    scope["headers"] = [*scope["headers"], (b"content-length", b"5000")]
    app: Any = artifact_app(store, allowances)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifact_uploads.Request, "stream", into_the_store)
        await app(scope, receive, send)
    assert answers[0]["status"] == 429
    assert pieces == 5, "it is read away, so that the client sees the answer"


async def test_an_artifact_that_was_changed_is_an_error_and_never_whole(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "PIECE_BYTES", 1_000)
    app = artifact_app(store, Allowances())
    small, large = (store.put(ANYBODY.tenant, b"a" * size) for size in (500, 2_500))
    for artifact in (small, large):
        file = tmp_path / "artifacts" / ANYBODY.tenant / artifact.artifact_id / "data"
        file.write_bytes(b"b" * artifact.size_bytes)
    async with client(app) as http:
        assert (await http.get(f"{PATH}/{small.artifact_id}/content")).status_code == 500
    answers: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError

    async def send(message: dict[str, Any]) -> None:
        answers.append(message)

    asked: Any = app
    await asked(scope_of(f"{PATH}/{large.artifact_id}/content"), receive, send)
    assert [len(answer["body"]) for answer in answers[1:]] == [1_000, 1_000]
    assert answers[-1]["more_body"], "the broken connection says it"


def test_pieces_are_what_get_gives(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PIECE_BYTES", 10)
    for size in (0, 1, 10, 11, 20):
        kept = store.put("t", bytes(range(size)))
        pieces: Iterator[bytes] = store.pieces(kept)
        assert b"".join(pieces) == store.get("t", kept.artifact_id)


class SlowStore(ArtifactStore):
    """Lists only when told; counts how often."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.listed = 0
        self.go_on = threading.Event()

    def used_bytes(self, tenant: str) -> int:
        used = super().used_bytes(tenant)
        self.listed += 1
        assert self.go_on.wait(10)
        return used


async def test_uploads_at_once_share_a_measurement_and_keep_the_limit(tmp_path: Path) -> None:
    slow = SlowStore(tmp_path / "artifacts")
    app = artifact_app(slow, Allowances(defaults=Limits(artifact_bytes=2_500)))
    async with client(app) as http:
        posts = [asyncio.create_task(http.post(PATH, content=b"x" * 1_000)) for _ in range(8)]
        await wait_until_async(lambda: slow.listed > 0, describe="it is measured")
        slow.go_on.set()
        codes = sorted(answer.status_code for answer in await asyncio.gather(*posts))
    assert codes == [201] * 2 + [429] * 6
    assert slow.listed == 1


async def test_a_measurement_that_fails_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SlowStore(tmp_path / "artifacts")
    slow.go_on.set()
    async with client(artifact_app(slow, Allowances(defaults=Limits(artifact_bytes=2_500)))) as http:
        with monkeypatch.context() as patch:
            patch.setattr(slow, "used_bytes", Mock(side_effect=OSError("no store")))
            assert (await http.post(PATH, content=b"x")).status_code == 500
        assert (await http.post(PATH, content=b"x")).status_code == 201


@pytest.mark.parametrize(("ttl_s", "signed"), [(60, True), (3_600, True), (3_601, False), (7 * 86_400, False)])
async def test_a_url_that_lives_long_ends_with_its_makers_key(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, ttl_s: int, signed: bool
) -> None:
    """What the store has signed nobody can take back: such a URL was good for a week after its key was revoked."""
    monkeypatch.setattr(store, "presigned_url", lambda artifact, ttl_s: f"https://store.example/{ttl_s}")
    kept = store.put(ANYBODY.tenant, b"1")
    async with client(artifact_app(store)) as http:
        answer = await http.post(f"{PATH}/{kept.artifact_id}/url", json={"ttl_s": ttl_s})
    assert answer.json()["url"].startswith("https://store.example/") is signed
    assert ("?ticket=" in answer.json()["url"]) is not signed


async def test_slow_lists_of_one_tenant_keep_nobody_else_waiting(
    store: ArtifactStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six of them took all threads that a gateway had for artifacts, large outputs and its view."""
    keys = tmp_path / "keys.json"
    flood, other = (create_key(keys, tenant=tenant) for tenant in ("flood", "other"))
    let_go, began = threading.Event(), list[str]()
    listed = store.list

    def slow(tenant: str, **options: Any) -> Any:
        began.append(tenant)
        if tenant == "flood":
            assert let_go.wait(30)
        return listed(tenant, **options)

    monkeypatch.setattr(store, "list", slow)
    async with client(artifact_app(store, policy=AuthPolicy.build(keys_file=keys))) as http:
        calls = [asyncio.create_task(http.get(PATH, headers={"x-api-key": flood})) for _ in range(30)]
        await wait_until_async(lambda: len(began) >= 6)
        answer = await asyncio.wait_for(http.get(PATH, headers={"x-api-key": other}), 10)
        assert (answer.status_code, answer.json()["data"]) == (200, [])
        let_go.set()
        assert {answer.status_code for answer in await asyncio.gather(*calls)} == {200}


async def test_what_could_not_be_kept_does_not_count(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async with client(artifact_app(store, Allowances(defaults=Limits(artifact_bytes=1_500)))) as http:
        with monkeypatch.context() as patch:
            patch.setattr(store, "put_stream", Mock(side_effect=OSError("the disk is full")))
            assert (await http.post(PATH, content=b"x" * 1_000)).status_code == 500
        assert (await http.post(PATH, content=b"x" * 1_000)).status_code == 201
