"""What every place of artifacts does alike: a local folder and servers of object stores run the same tests."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from penstock.common.artifacts import ArtifactStore, StorePlace, digests
from penstock.common.artifacts.by_time import path_of
from penstock.common.artifacts.configured import configured_store
from penstock.common.artifacts.places import OpenPlace
from penstock.common.artifacts.sweeping import Sweeper
from penstock.producers import AsyncClient, KafkaSettings
from penstock.schemas.errors import Conflict, InternalError, InvalidRequest, NotFound, TooLarge

DATA = bytes(range(256)) * 40


def test_what_was_put_is_got_with_its_facts_by_another_process(world: Any) -> None:
    made = str(uuid.uuid4())
    kept = world.store().put(
        "acme", DATA, media_type="image/png", artifact_id=made, width=64, height=32, seed=7, request_id="r1"
    )
    other = world.store()
    assert other.get("acme", made, sha256=kept.sha256) == DATA
    assert other.describe("acme", made) == kept
    assert kept.reference() == {
        "artifact_id": made,
        "url": f"/v1/artifacts/{made}/content",
        "media_type": "image/png",
        "bytes": len(DATA),
        "sha256": hashlib.sha256(DATA).hexdigest(),
        "width": 64,
        "height": 32,
        "seed": 7,
        "expires_at": None,
    }
    assert kept.uri.endswith(f"/acme/{made}/data")
    assert "://" in kept.uri


def test_a_changed_byte_and_a_wrong_digest_are_noticed(world: Any) -> None:
    store = world.store()
    kept = store.put("acme", DATA)
    with pytest.raises(InternalError, match="digest"):
        store.get("acme", kept.artifact_id, sha256="0" * 64)
    world.write(f"acme/{kept.artifact_id}/data", DATA[:-1] + b"!")
    with pytest.raises(InternalError, match="digest"):
        store.get("acme", kept.artifact_id)
    with pytest.raises(InternalError, match="digest"):
        list(store.pieces(kept))


async def test_a_client_sees_its_own_tenants_artifacts(world: Any) -> None:
    """No broker is asked for artifacts."""
    kafka = KafkaSettings(bootstrap_servers="127.0.0.1:1")
    async with AsyncClient(kafka, tenant="acme", artifacts=world.store()) as client:
        artifacts = client.artifacts
        kept = await artifacts.put(DATA, media_type="image/png", ttl_s=60)
        assert kept.expires_at_ms == kept.created_at_ms + 60_000
        assert await artifacts.get(kept.artifact_id, sha256=kept.sha256) == DATA
        assert (await artifacts.list()).artifacts == [kept] == [await artifacts.describe(kept.artifact_id)]
        assert world.store().list("globex").artifacts == []
        await artifacts.delete(kept.artifact_id)
        assert (await artifacts.list()).artifacts == []


def test_foreign_unknown_and_deleted_look_the_same(world: Any) -> None:
    store = world.store()
    kept, deleted = store.put("acme", b"secret"), store.put("acme", b"gone")
    for _ in range(2):
        store.delete("acme", deleted.artifact_id)
    for tenant, artifact_id in (
        ("globex", kept.artifact_id),
        ("acme", deleted.artifact_id),
        ("acme", str(uuid.uuid4())),
    ):
        with pytest.raises(NotFound, match=f"^there is no artifact {artifact_id}$"):
            store.get(tenant, artifact_id)
    assert not [path for path in world.paths() if deleted.artifact_id in path]


def test_parts_are_what_the_whole_has_there(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "PIECE_BYTES", 1_000)
    store = world.store()
    kept = store.put("acme", DATA)
    for start, end in ((0, None), (0, 1), (999, 1_001), (5_000, None), (len(DATA) - 1, len(DATA)), (3, 99_999)):
        assert b"".join(store.pieces(kept, start, end)) == DATA[start:end]


async def pieces_of(size: int, fail: bool = False) -> AsyncIterator[bytes]:
    for start in range(0, size, 999_999):
        yield b"x" * min(999_999, size - start)
    if fail:
        raise ConnectionError("the client has gone")


@pytest.mark.parametrize("size", [0, 1, 12_000_000])
async def test_an_upload_in_pieces_is_kept_as_a_whole(world: Any, size: int) -> None:
    store = world.store()
    kept = await store.put_stream("acme", pieces_of(size), media_type="image/png", ttl_s=60)
    assert (kept.size_bytes, kept.sha256) == (size, hashlib.sha256(b"x" * size).hexdigest())
    assert world.store().get("acme", kept.artifact_id) == b"x" * size
    assert world.store().describe("acme", kept.artifact_id) == kept


@pytest.mark.parametrize(("size", "error"), [(7_000_000, ConnectionError), (12_000_000, TooLarge)])
async def test_an_upload_that_breaks_off_leaves_nothing(world: Any, size: int, error: type[Exception]) -> None:
    store = world.store(max_bytes=10_000_000)
    with pytest.raises(error):
        await store.put_stream("acme", pieces_of(size, fail=True))
    assert world.paths() == []
    assert store.used_bytes("acme") == 0


def test_over_the_limit_is_refused_by_name(world: Any) -> None:
    with pytest.raises(TooLarge, match="1000"):
        world.store(max_bytes=1_000).put("acme", b"x" * 1_001)


def test_a_list_has_every_artifact_once_in_both_orders(world: Any) -> None:
    store = world.store()
    made = [store.put("acme", b"x").artifact_id for _ in range(7)]
    store.put("globex", b"y")
    store.put("acme", b"z", prefix="renders/2026", store="cold")
    for newest_first in (True, False):
        seen: list[str] = []
        after = None
        while True:
            page = store.list("acme", after=after, limit=3, newest_first=newest_first)
            seen += [one.artifact_id for one in page.artifacts]
            assert page.has_more == (len(seen) < 8)
            if not page.has_more:
                break
            after = seen[-1]
        assert len(set(seen)) == len(seen) == 8
        assert set(made) < set(seen)
    with pytest.raises(InvalidRequest, match="after"):
        store.list("acme", after=str(uuid.uuid4()))
    assert store.list("nobody").artifacts == []


def ids_of(store: ArtifactStore, *, limit: int = 3, newest_first: bool = True) -> list[str]:
    """All of a tenant's artifacts, page by page."""
    seen: list[str] = []
    while True:
        page = store.list("acme", after=seen[-1] if seen else None, limit=limit, newest_first=newest_first)
        seen += [one.artifact_id for one in page.artifacts]
        if not page.has_more:
            return seen


def test_a_list_is_in_the_order_of_making(world: Any) -> None:
    """Over several folders of the index, two at one time, and one that was written again."""
    store, made = world.store(), list[str]()
    Sweeper(store, world.clock).index()
    for number in range(9):
        made.append(store.put("acme", b"x").artifact_id)
        if number != 4:
            world.clock.now_s += 40_000
    store.put("acme", b"y", artifact_id=made[1])
    again = [made[0], *made[2:], made[1]]
    again[3:5] = sorted(again[3:5], reverse=True)  # at one time, the order is that of the ids
    assert ids_of(store, newest_first=False) == again
    assert ids_of(world.store()) == again[::-1]
    store.delete("acme", again[-2])
    assert ids_of(store) == [again[-1], *again[-3::-1]]
    with pytest.raises(InvalidRequest, match="after"):
        store.list("acme", after="../x")


def test_a_page_costs_the_store_a_page(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It read all that the tenant has: thousands of calls of S3 for each page of a large tenant."""
    store = world.store()
    Sweeper(store, world.clock).index()
    for _ in range(300):
        world.write(f"acme/{uuid.uuid4()}/data", b"x")
    world.clock.now_s += 400_000
    for _ in range(20):
        world.clock.now_s += 40_000
        store.put("acme", b"x")
    read: list[str] = []
    items = OpenPlace.items

    def counted(place: OpenPlace, *under: Any) -> Any:
        for item in items(place, *under):
            read.append(item["path"])
            yield item

    monkeypatch.setattr(OpenPlace, "items", counted)
    for newest_first in (True, False):
        for page in (store.list("acme", limit=3, newest_first=newest_first) for _ in range(2)):
            assert (len(page.artifacts), page.has_more) == (3, True)
        store.list("acme", after=page.artifacts[-1].artifact_id, limit=3, newest_first=newest_first)
    assert len(read) < 6 * 20


def test_a_store_of_an_older_release_is_listed_and_indexed(world: Any) -> None:
    store, made = world.store(), list[str]()
    for _ in range(5):
        world.clock.now_s += 40_000
        made.append(store.put("acme", b"x").artifact_id)
    for path in world.paths():
        if ".by_time" in path:
            world.client().delete(path)
    assert sorted(ids_of(store)) == sorted(made)
    Sweeper(store, world.clock).index()
    assert store.by_time.is_complete()
    assert ids_of(world.store()) == made[::-1]
    assert ids_of(world.store(), newest_first=False) == made


def test_an_expired_one_is_gone_unless_a_conversation_holds_it(world: Any) -> None:
    store = world.store(ttl_s=100)
    usual, long, held = store.put("acme", b"a"), store.put("acme", b"b", ttl_s=1_000), store.put("acme", b"c")
    store.holds.hold("acme", held.artifact_id, "trip")
    store.holds.hold("acme", held.artifact_id, "trip")
    world.clock.now_s += 99
    assert {one.artifact_id for one in store.list("acme").artifacts} == {one.artifact_id for one in (usual, long, held)}
    world.clock.now_s += 2
    with pytest.raises(NotFound):
        store.get("acme", usual.artifact_id)
    assert store.get("acme", held.artifact_id) == b"c"
    assert {one.artifact_id for one in store.list("acme").artifacts} == {long.artifact_id, held.artifact_id}
    with pytest.raises(Conflict, match="trip"):
        store.delete("acme", held.artifact_id)
    assert store.holds.held_by("globex", "trip") == []
    assert store.holds.held_by("acme", "trip") == [held.artifact_id]
    store.holds.let_go("acme", "trip", [held.artifact_id])
    with pytest.raises(NotFound):
        store.describe("acme", held.artifact_id)


def test_deleting_takes_the_marks_along(world: Any) -> None:
    store = world.store()
    kept = store.put("acme", b"a")
    for conversation in ("one", "two"):
        store.holds.hold("acme", kept.artifact_id, conversation)
    assert store.holds.of("acme", kept.artifact_id) == ["one", "two"]
    store.delete("acme", kept.artifact_id, even_held=True)
    assert world.paths() == []
    assert store.holds.held_by("acme", "one") == []


def test_a_named_store_and_a_prefix_choose_where_the_bytes_lie(world: Any) -> None:
    store = world.store()
    kept = store.put("acme", DATA, store="cold", prefix="renders/2026/")
    assert kept.uri.endswith(f"{world.cold.location}/acme/renders/2026/{kept.artifact_id}/data")
    assert world.paths() == sorted([path_of(kept), f"acme/{kept.artifact_id}/about.json"])
    assert world.store().get("acme", kept.artifact_id) == DATA
    assert store.used_bytes("acme") > len(DATA)
    store.delete("acme", kept.artifact_id)
    assert store.used_bytes("acme") == 0


OUTSIDE = (
    "..",
    "../globex",
    "/etc",
    "a//b",
    "a/../../b",
    ".holds",
    "a/.x",
    "a\\b",
    "a b",
    "é",
    "a\n",
    str(uuid.uuid4()),
)


def test_a_prefix_that_could_leave_the_tenant_is_refused_by_name(world: Any) -> None:
    store = world.store()
    for prefix in OUTSIDE:
        for refuse in (store.check_place, lambda name, prefix: store.put("acme", b"x", store=name, prefix=prefix)):
            with pytest.raises(InvalidRequest, match=r"output\.prefix") as refused:
                refuse(None, prefix)
            assert refused.value.param == "output.prefix"
    assert world.paths() == []


def test_an_unknown_store_is_refused_by_name(world: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"'warm'.*there are: cold") as refused:
        world.store().put("acme", b"x", store="warm")
    assert refused.value.param == "output.store"
    kept = world.store().put("acme", b"x", store="cold")
    with pytest.raises(InvalidRequest, match="none besides"):
        world.store(stores={}).get("acme", kept.artifact_id)


SIGNATURES = {"s3": "X-Amz-Signature", "azure": "sig", "gcs": "X-Goog-Signature"}


def test_a_store_that_can_gives_urls_of_its_own(world: Any) -> None:
    store = world.store()
    image, page = store.put("acme", b"png", media_type="image/png"), store.put("acme", b"<p>", media_type="text/html")
    urls = [store.presigned_url(one, 60) for one in (image, page)]
    if world.kind == "folder":
        assert urls == [None, None]
        return
    assert all(httpx.URL(url).params[SIGNATURES[world.kind]] for url in urls)
    found = [httpx.get(url, trust_env=False) for url in urls]
    assert [answer.content for answer in found] == [b"png", b"<p>"]
    assert found[0].headers["content-type"] == "image/png"
    assert found[1].headers["content-type"] == "application/octet-stream", "no page of a caller runs there"
    assert "attachment" in found[1].headers["content-disposition"]
    assert world.store(presigned=False).presigned_url(image, 60) is None


def test_one_setting_opens_the_same_store_everywhere(
    bucket: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "penstock.toml"
    options = "\n".join(f'{name} = "{value}"' for name, value in bucket.options.items() if name != "allow_http")
    config.write_text(
        f'[artifacts]\nlocation = "{bucket.location}"\nttl_s = 60\nmax_bytes = 1000\n'
        f"[artifacts.options]\nallow_http = true\n{options}\n"
        f'[artifacts.stores.cold]\nlocation = "{tmp_path}/cold"\n'
    )
    monkeypatch.setenv("PENSTOCK_CONFIG", str(config))
    store = configured_store()
    kept = store.put("acme", b"x", store="cold")
    assert kept.expires_at_ms == kept.created_at_ms + 60_000
    assert store.get("acme", kept.artifact_id) == b"x"
    with pytest.raises(TooLarge):
        store.put("acme", b"x" * 1_001)


def test_credentials_are_never_shown(bucket: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    from penstock.gateway.settings import GatewaySettings

    monkeypatch.setenv("PENSTOCK_ARTIFACTS__LOCATION", "s3://nowhere/x")
    for name, value in {**bucket.options, "aws_endpoint": "http://127.0.0.1:1"}.items():
        monkeypatch.setenv(f"PENSTOCK_ARTIFACTS__OPTIONS__{name.upper()}", value)
    section = GatewaySettings().artifacts
    shown = [repr(section), section.model_dump_json(), repr(StorePlace(location="s3://b", options=bucket.options))]
    with pytest.raises(InvalidRequest) as refused:
        ArtifactStore("s3://b/x", options={**bucket.options, "aws_regoin": "SECRETTHATNOBODYMAYSEE"})
    assert "aws_regoin" in str(refused.value)
    for text in (*shown, str(refused.value), caplog.text):
        assert "NOBODYMAYSEE" not in text


@pytest.mark.parametrize("location", ["ftp://host/x", "s3:///x", "nonsense://x"])
def test_a_location_that_cannot_be_is_refused_by_name(location: str) -> None:
    with pytest.raises(InvalidRequest, match=location):
        ArtifactStore(location)
