"""A sweep of a folder and of object stores: what goes, what stays, and that a dry one touches nothing."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path
from typing import Any

from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.by_time import COMPLETE, path_of
from penstock.common.artifacts.inputs import keep_input
from penstock.common.artifacts.sweep import plan
from penstock.common.artifacts.sweeping import Sweeper

DAY_S = 86_400


def test_a_sweep_takes_what_is_over_and_nothing_else(world: Any) -> None:
    world.clock.now_s = time.time()
    store = world.store()
    kept = store.put("acme", b"kept", request_id="done")
    upload = store.put("globex", b"upload")
    held = store.put("acme", b"held", ttl_s=60)
    store.holds.hold("acme", held.artifact_id, "trip")
    store.holds.hold("acme", kept.artifact_id, "gone")
    staying = set(world.paths()) - {path for path in world.paths() if "gone" in path}
    expired = store.put("acme", b"expired", ttl_s=60, store="cold", prefix="a/b")
    orphan = store.put("acme", b"attempt 1", request_id="done")
    half = str(uuid.uuid4())
    world.write(f"acme/{half}/data", b"half")
    world.write("acme/notes.txt", b"not ours")
    sweeper = Sweeper(store, world.clock)

    def planned() -> Any:
        listing, facts = sweeper.look()
        return plan(
            listing,
            facts,
            sweeper.now_ms(),
            named={("acme", "done"): {kept.artifact_id}},
            conversations={("acme", "trip")},
        )

    assert planned().doomed == [], "all of it is younger than an hour"
    world.clock.now_s += DAY_S
    before = world.paths()
    swept = planned()
    assert {(one.artifact_id, one.reason) for one in swept.doomed} == {
        (expired.artifact_id, "expired"),
        (orphan.artifact_id, "orphan"),
        (half, "partial"),
    }
    assert world.paths() == before, "a plan touches nothing"
    assert {one.artifact_id for one in sweeper.apply(swept)} == {expired.artifact_id, orphan.artifact_id, half}
    assert set(world.paths()) == staying | {"acme/notes.txt", COMPLETE}
    assert store.get("acme", held.artifact_id) == b"held"
    assert store.get("globex", upload.artifact_id) == b"upload"
    assert planned().doomed == []


def test_what_changed_since_the_look_stays(world: Any) -> None:
    world.clock.now_s = time.time()
    store = world.store()
    again, held = store.put("acme", b"1", ttl_s=60), store.put("acme", b"2", ttl_s=60)
    late = str(uuid.uuid4())
    world.write(f"acme/{late}/data", b"3")
    world.clock.now_s += DAY_S
    sweeper = Sweeper(store, world.clock)
    listing, facts = sweeper.look()
    swept = plan(listing, facts, sweeper.now_ms(), named={})
    assert len(swept.doomed) == 3
    store.put("acme", b"1", artifact_id=again.artifact_id)
    store.put("acme", b"3", artifact_id=late)
    store.holds.hold("acme", held.artifact_id, "trip")
    assert sweeper.apply(swept) == []
    for artifact_id, data in ((again.artifact_id, b"1"), (held.artifact_id, b"2"), (late, b"3")):
        assert store.get("acme", artifact_id) == data


def test_marks_of_requests_that_nobody_knows_are_taken_away(world: Any) -> None:
    world.clock.now_s = time.time()
    store, sweeper = world.store(), Sweeper(world.store(), world.clock)
    artifact_id = str(uuid.uuid4())
    for request_id in ("first", ".."):
        keep_input(store, "acme", request_id, b"1", artifact_id=artifact_id, media_type="image/png")
    store.request_holds.hold("acme", str(uuid.uuid4()), "third")
    assert (len(world.paths()), store.request_holds.held_by("acme", "..")) == (9, [artifact_id])
    for days, left in ((0, 10), (1, 8), (4, 5), (7, 1)):
        world.clock.now_s = time.time() + days * DAY_S
        listing, facts = sweeper.look()
        sweeper.apply(plan(listing, facts, sweeper.now_ms(), named={}))
        assert len(world.paths()) == left, days


def test_the_index_by_time_is_mended(world: Any) -> None:
    """Entries of artifacts that are gone or written again go after an hour; what has none gets one at once."""
    world.clock.now_s = time.time()
    store, sweeper = world.store(), Sweeper(world.store(), world.clock)
    lacking, gone, twice = (store.put("acme", b"1") for _ in range(3))
    store.by_time.remove(lacking)
    for path in (f"acme/{gone.artifact_id}/about.json", f"acme/{gone.artifact_id}/data"):
        world.client().delete(path)
    world.clock.now_s += 1
    again = store.put("acme", b"2", artifact_id=twice.artifact_id)
    expected = {path_of(one) for one in (lacking, again)}
    for hours, stale in ((0, {path_of(gone), path_of(twice)}), (2, set[str]())):
        world.clock.now_s = time.time() + hours * 3_600
        listing, facts = sweeper.look()
        sweeper.apply(plan(listing, facts, sweeper.now_ms(), named={}))
        assert {path for path in world.paths() if "/.by_time/" in path} == expected | stale
    assert [one.artifact_id for one in store.list("acme").artifacts] == [again.artifact_id, lacking.artifact_id]


def test_what_no_listing_of_a_folder_shows_goes_after_an_hour(tmp_path: Path) -> None:
    store = ArtifactStore(tmp_path)
    kept, deleted, lately = (store.put("acme", b"x") for _ in range(3))
    folder = tmp_path / "acme" / kept.artifact_id
    old, young, other = folder / "data#1", folder / "data#2", folder / "other#1"
    for file in (old, young, other):
        file.write_bytes(b"part")
    for artifact in (deleted, lately):
        store.holds.hold("acme", artifact.artifact_id, "trip")
        store.delete("acme", artifact.artifact_id, even_held=True)
    empty, just_emptied = (tmp_path / "acme" / artifact.artifact_id for artifact in (deleted, lately))
    for path in (old, other, empty / "held", empty):
        os.utime(path, (1, 1))
    sweeper = Sweeper(store)
    listing, facts = sweeper.look()
    sweeper.apply(plan(listing, facts, sweeper.now_ms(), named={}))
    assert (old.exists(), young.exists(), other.exists()) == (False, True, True)
    assert just_emptied.exists()
    assert not (empty / "held").exists()
    os.utime(empty, (1, 1))
    sweeper.apply(plan(listing, facts, sweeper.now_ms(), named={}))
    assert not empty.exists()
    assert store.get("acme", kept.artifact_id) == b"x"
