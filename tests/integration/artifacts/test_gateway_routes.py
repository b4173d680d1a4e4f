"""Artifacts as an HTTP client finds them, over a real server: the same for a folder and for object stores."""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from artifact_gateway import ArtifactGateway

PATH = "/v1/artifacts"
DATA = bytes(range(250)) * 100


@pytest.fixture
def serving(world: Any, tmp_path: Path) -> Iterator[ArtifactGateway]:
    with ArtifactGateway(world.store(), tmp_path) as started:
        yield started


def test_upload_describe_list_and_delete(serving: ArtifactGateway, world: Any) -> None:
    acme, globex = serving.clients["acme"], serving.clients["globex"]
    png = {"content-type": "image/png"}
    made = [acme.post(PATH, content=DATA, params={"ttl_s": 60}, headers=png).json() for _ in range(3)]
    placed = acme.post(PATH, content=b"cold", params={"store": "cold", "prefix": "a/b"}).json()
    globex.post(PATH, content=b"theirs")
    first = made[0]
    assert acme.get(f"{PATH}/{first['id']}").json() == first
    assert acme.head(f"{PATH}/{first['id']}").status_code == 200
    assert first["sha256"] == hashlib.sha256(DATA).hexdigest()
    assert (first["media_type"], first["bytes"], first["artifact_id"]) == ("image/png", len(DATA), first["id"])
    assert first["expires_at"].startswith("2027-01-15T08:01:00")
    page = acme.get(PATH, params={"limit": 3, "order": "asc"}).json()
    rest = acme.get(PATH, params={"limit": 3, "order": "asc", "after": page["last_id"]}).json()
    assert (page["object"], page["has_more"], rest["has_more"]) == ("list", True, False)
    assert {one["id"] for one in page["data"] + rest["data"]} == {one["id"] for one in [*made, placed]}
    for path in (f"{PATH}/{first['id']}", f"{PATH}/{uuid.uuid4()}"):
        for answer in (
            globex.get(path),
            globex.get(f"{path}/content"),
            globex.delete(path),
            globex.post(f"{path}/url"),
        ):
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert serving.clients["reader"].delete(f"{PATH}/{first['id']}").status_code == 403
    world.store().holds.hold("acme", first["id"], "trip")
    refused = acme.delete(f"{PATH}/{first['id']}")
    assert (refused.status_code, refused.json()["error"]["details"]) == (409, {"conversations": ["trip"]})
    world.store().holds.let_go("acme", "trip", [first["id"]])
    assert acme.delete(f"{PATH}/{first['id']}").json()["deleted"]
    assert acme.get(f"{PATH}/{first['id']}").status_code == 404


def test_an_upload_of_many_pieces_is_refused_when_it_gets_too_large(serving: ArtifactGateway, world: Any) -> None:
    acme = serving.clients["acme"]
    pieces = lambda count: iter([b"x" * 1_000_000] * count)  # noqa: E731
    kept = acme.post(PATH, content=pieces(12)).json()
    assert kept["bytes"] == 12_000_000
    assert world.store().get("acme", kept["id"]) == b"x" * 12_000_000
    refused = acme.post(PATH, content=pieces(12))
    assert (refused.status_code, refused.json()["error"]["details"]["limit"]) == (429, "artifact_bytes")
    assert acme.delete(f"{PATH}/{kept['id']}").status_code == 200
    assert acme.post(PATH, content=pieces(12)).status_code == 201, "what was deleted does not count"
    empty = acme.post(PATH, content=iter([]))
    assert (empty.status_code, empty.json()["error"]["code"]) == (400, "invalid")
    for params, param in (({"store": "warm"}, "output.store"), ({"prefix": "../x"}, "output.prefix")):
        refused = acme.post(PATH, content=b"x", params=params)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


def test_parts_and_conditions(serving: ArtifactGateway) -> None:
    acme = serving.clients["acme"]
    path = f"{PATH}/{acme.post(PATH, content=DATA, headers={'content-type': 'image/png'}).json()['id']}/content"
    whole = acme.get(path)
    etag = whole.headers["etag"]
    assert (whole.status_code, whole.content, whole.headers["accept-ranges"]) == (200, DATA, "bytes")
    head = acme.head(path)
    assert (head.content, head.headers["content-length"], head.headers["etag"]) == (b"", str(len(DATA)), etag)
    part = acme.get(path, headers={"range": "bytes=100-199"})
    assert (part.status_code, part.content) == (206, DATA[100:200])
    assert part.headers["content-range"] == f"bytes 100-199/{len(DATA)}"
    assert acme.get(path, headers={"range": "bytes=-7"}).content == DATA[-7:]
    behind = acme.get(path, headers={"range": f"bytes={len(DATA)}-"})
    assert (behind.status_code, behind.headers["content-range"]) == (416, f"bytes */{len(DATA)}")
    assert behind.json()["error"]["details"] == {"bytes": len(DATA)}
    same = acme.get(path, headers={"if-none-match": etag})
    assert (same.status_code, same.content, same.headers["etag"]) == (304, b"", etag)
    resumed = acme.get(path, headers={"range": "bytes=5-", "if-range": etag})
    assert (resumed.status_code, resumed.content) == (206, DATA[5:])
    changed = acme.get(path, headers={"range": "bytes=5-", "if-range": '"other"'})
    assert (changed.status_code, changed.content) == (200, DATA)


def test_a_url_for_browsers_needs_no_key_and_opens_one_artifact(
    serving: ArtifactGateway, world: Any, caplog: pytest.LogCaptureFixture
) -> None:
    acme, reader = serving.clients["acme"], serving.clients["reader"]
    one, other = (acme.post(PATH, content=data, headers={"content-type": "image/png"}).json() for data in (b"1", b"2"))
    made = reader.post(f"{PATH}/{one['id']}/url", json={"ttl_s": 120}).json()
    if world.kind != "folder":
        assert httpx.get(made["url"], trust_env=False).content == b"1"
        return
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            shown = serving.anybody(made["url"])
            assert (shown.status_code, shown.content, shown.headers["content-type"]) == (200, b"1", "image/png")
        part = serving.anybody(made["url"], headers={"range": "bytes=0-0"})
        assert part.status_code == 206
    path, _, ticket = made["url"].partition("?ticket=")
    names = ("uvicorn.error", "penstock")  # a gateway's process has no access log of uvicorn
    logged = [record.getMessage() for record in caplog.records if record.name.startswith(names)]
    assert [line for line in logged if ticket in line] == []
    elsewhere = (
        made["url"].replace(one["id"], other["id"]),
        path,
        f"{path}?ticket={ticket[:-2]}xx",
        f"/v1/artifacts/{one['id']}?ticket={ticket}",
        f"/v1/artifacts?ticket={ticket}",
    )
    for url in elsewhere:
        assert serving.anybody(url).status_code == 401, url
    for ttl_s in (0.5, 10_000_000, "x", True):
        assert reader.post(f"{PATH}/{one['id']}/url", json={"ttl_s": ttl_s}).status_code == 400, ttl_s
