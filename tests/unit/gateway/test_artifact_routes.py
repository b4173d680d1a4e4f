"""Artifacts over HTTP: transfers at once, memory of one transfer, and what a tenant may keep."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from kit.gateway_http import artifact_app, client, exchange, scope_of
from penstock.common.artifacts import ArtifactStore, digests
from penstock.gateway.limits.allowances import Allowances, Totals
from penstock.gateway.limits.artifact_bytes import ArtifactBytes
from penstock.gateway.limits.callers import ANYBODY
from penstock.gateway.limits.limits import Limits
from penstock.gateway.routes import artifact_uploads
from support import wait_until_async

PATH = "/v1/artifacts"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArtifactStore:
    monkeypatch.setattr(digests, "PIECE_BYTES", 1_000)
    return ArtifactStore(tmp_path / "artifacts")


def keeps(artifact_bytes: int) -> Allowances:
    return Allowances(defaults=Limits(artifact_bytes=artifact_bytes))


async def test_a_download_holds_a_slot_and_some_pieces_until_it_was_read(store: ArtifactStore) -> None:
    allowances = Allowances(totals=Totals(max_transfers=1))
    app: Any = artifact_app(store, allowances)
    data = bytes(range(250)) * 10
    kept = store.put(ANYBODY.tenant, data)
    path = f"{PATH}/{kept.artifact_id}/content"
    read, sizes = asyncio.Event(), list[int]()

    async def read_slowly(scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body":
                sizes.append(len(message["body"]))
                await read.wait()
            await send(message)

        await app(scope, receive, sent)

    reading = asyncio.create_task(exchange(read_slowly, scope_of("GET", path)))
    async with client(app) as http:
        await wait_until_async(lambda: bool(sizes), describe="the download has begun")
        assert allowances.transfers.open == 1
        for refused in (await http.get(path), await http.post(PATH, content=b"x")):
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (await http.get(f"{PATH}/{kept.artifact_id}")).status_code == 200, "a description takes no slot"
        read.set()
        assert b"".join(message["body"] for message in (await reading)[1:]) == data
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


async def test_a_declared_length_without_room_is_refused_before_it_is_read(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = [{"type": "http.request", "body": b"x" * 1_000, "more_body": number < 4} for number in range(5)]
    receive = AsyncMock(side_effect=pieces)
    monkeypatch.setattr(artifact_uploads.Request, "stream", Mock(side_effect=AssertionError("it was read")))
    start, *_ = await exchange(
        artifact_app(store, keeps(1_000)), scope_of("POST", PATH, [(b"content-length", b"5000")]), receive
    )
    assert start["status"] == 429
    assert receive.await_count == 5, "it is read away, so that the client sees the answer"


async def test_a_changed_artifact_is_an_error_and_is_never_sent_whole(store: ArtifactStore, tmp_path: Path) -> None:
    app = artifact_app(store)
    small, large = (store.put(ANYBODY.tenant, b"a" * size) for size in (500, 2_500))
    for artifact in (small, large):
        file = tmp_path / "artifacts" / ANYBODY.tenant / artifact.artifact_id / "data"
        file.write_bytes(b"b" * artifact.size_bytes)
    async with client(app) as http:
        assert (await http.get(f"{PATH}/{small.artifact_id}/content")).status_code == 500
    _, *bodies = await exchange(app, scope_of("GET", f"{PATH}/{large.artifact_id}/content"))
    assert [len(body["body"]) for body in bodies] == [1_000, 1_000]
    assert bodies[-1]["more_body"], "the broken connection says it"


async def test_uploads_at_once_share_a_measurement_and_keep_the_limit(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, used_bytes = threading.Event(), store.used_bytes
    measured = Mock(side_effect=lambda tenant: (used_bytes(tenant), go_on.wait(10))[0])
    monkeypatch.setattr(store, "used_bytes", measured)
    async with client(artifact_app(store, keeps(2_500))) as http:
        posts = [asyncio.create_task(http.post(PATH, content=b"x" * 1_000)) for _ in range(8)]
        await wait_until_async(lambda: measured.called, describe="it is measured")
        go_on.set()
        codes = sorted(answer.status_code for answer in await asyncio.gather(*posts))
    assert codes == [201] * 2 + [429] * 6
    assert measured.call_count == 1


@pytest.mark.parametrize("method", ["used_bytes", "put_stream"])
async def test_an_upload_that_fails_at_the_store_does_not_count(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    async with client(artifact_app(store, keeps(1_500))) as http:
        with monkeypatch.context() as patch:
            patch.setattr(store, method, Mock(side_effect=OSError("the store is away")))
            assert (await http.post(PATH, content=b"x" * 1_000)).status_code == 500
        assert (await http.post(PATH, content=b"x" * 1_000)).status_code == 201


@pytest.mark.parametrize(("ttl_s", "signed"), [(60, True), (3_600, True), (3_601, False), (7 * 86_400, False)])
async def test_a_url_with_a_long_lifetime_ends_with_the_key_that_made_it(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, ttl_s: int, signed: bool
) -> None:
    monkeypatch.setattr(store, "presigned_url", lambda artifact, ttl_s: f"https://store.example/{ttl_s}")
    kept = store.put(ANYBODY.tenant, b"1")
    async with client(artifact_app(store)) as http:
        url = (await http.post(f"{PATH}/{kept.artifact_id}/url", json={"ttl_s": ttl_s})).json()["url"]
    assert (url.startswith("https://store.example/"), "?ticket=" in url) == (signed, not signed)


# -- what a tenant keeps: measured from time to time, and counted between


def test_artifact_bytes_are_measured_again_after_a_while_and_counted_between() -> None:
    now = 0.0
    kept = ArtifactBytes(measured_for_s=60, clock=lambda: now)
    assert kept.known("t") is None
    kept.measured("t", 100)
    with pytest.raises(OSError, match="full"), kept.adding("t", 7):
        raise OSError("full")
    with kept.adding("t", 20):
        assert kept.known("t") == 120
    now = 59.0
    assert kept.known("t") == 120
    now = 60.0
    assert (kept.known("t"), kept.known("u")) == (None, None)


def test_artifacts_that_a_measurement_may_have_missed_count() -> None:
    kept = ArtifactBytes(clock=lambda: 0.0)
    with kept.adding("t", 1):
        kept.begin("t")
        with kept.adding("t", 20), kept.adding("u", 300):
            pass
        kept.measured("t", 100)
        assert kept.known("t") == 121
    kept.begin("t")
    kept.measured("t", 121)
    assert kept.known("t") == 121
