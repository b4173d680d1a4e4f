"""What happens between the look of a sweep and its deletions: nobody loses what came meanwhile."""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.artifacts import ArtifactStore
from penstock.common.artifacts.inputs import INPUT_KEPT_S, erase_inputs, keep_input
from penstock.common.artifacts.sweep import GRACE_MS, MARKED_MS, Key, Sweep, plan
from penstock.common.artifacts.sweeping import Sweeper
from penstock.schemas.errors import NotFound
from penstock.schemas.ids import input_artifact_id

DATA = b"a picture"
ID = input_artifact_id("acme", hashlib.sha256(DATA).hexdigest())
AGED_S = 2 * MARKED_MS / 1000


class World:
    """A store in a folder, in which all that was put there grows old at once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ahead_s = -AGED_S
        self.store = ArtifactStore(folder, clock=lambda: time.time() + self.ahead_s)
        self.sweeper = Sweeper(self.store)

    def grow_old(self) -> None:
        """All that is there is older than everything that a sweep waits for, and the store has the time of day."""
        then = time.time() - AGED_S
        for file in self.folder.rglob("*"):
            os.utime(file, (then, then))
        self.ahead_s = 0.0

    def bring(self, request_id: str) -> None:
        keep_input(self.store, "acme", request_id, DATA, artifact_id=ID, media_type="image/png")

    def planned(self, conversations: set[Key] | None = None) -> Sweep:
        listing, facts = self.sweeper.look()
        return plan(listing, facts, self.sweeper.now_ms(), named={}, conversations=conversations)

    def there_is(self, artifact_id: str = ID) -> bool:
        try:
            return bool(self.store.get("acme", artifact_id))
        except NotFound:
            return False

    def acting_at(self, step: int, act: Callable[[], object]) -> Any:
        """A client of the store that acts once, right before the call of this number."""
        real, steps = type(self.store.places[None]).telling_failures, [0]

        def telling_failures(place: Any) -> Any:
            steps[0] += 1
            if steps[0] == step + 1:
                act()
            return real(place)

        patch = pytest.MonkeyPatch()
        patch.setattr(type(self.store.places[None]), "telling_failures", telling_failures)
        return patch


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_the_marks_of_a_conversation_that_is_begun_anew_stay(world: World) -> None:
    """They were let go of with those of the former one, and its images expired while it lived."""
    image = world.store.put("acme", DATA)
    world.store.holds.hold("acme", image.artifact_id, "trip")
    world.grow_old()
    swept = world.planned(set())
    assert swept.released == [("acme", "trip")]
    world.store.holds.hold("acme", image.artifact_id, "trip")
    world.sweeper.apply(swept)
    assert world.store.holds.held_by("acme", "trip") == [image.artifact_id]
    assert world.store.holds.of("acme", image.artifact_id) == ["trip"]


def test_a_mark_that_a_request_makes_anew_stays(world: World) -> None:
    """Without it the next request with the same bytes that was erased took the input away."""
    world.bring("first")
    world.grow_old()
    swept = world.planned()
    assert len(swept.stale) == 2
    world.bring("first")
    world.sweeper.apply(swept)
    assert world.store.request_holds.of("acme", ID)
    world.bring("second")
    erase_inputs(world.store, "acme", "second", None)
    assert world.there_is()


def test_bytes_that_are_written_anew_are_no_partial_ones(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt had died before its facts were written; the next one's bytes have none yet either."""
    artifact_id = str(uuid.uuid4())
    world.store.put("acme", DATA, artifact_id=artifact_id)
    (world.folder / "acme" / artifact_id / "about.json").unlink()
    world.grow_old()
    swept = world.planned()
    assert [one.reason for one in swept.doomed] == ["partial"]
    real = world.store.by_time.add

    def swept_before_the_facts(artifact: Any) -> None:
        world.sweeper.apply(swept)
        real(artifact)

    monkeypatch.setattr(world.store.by_time, "add", swept_before_the_facts)
    world.store.put("acme", DATA, artifact_id=artifact_id)
    assert world.there_is(artifact_id)


@given(step=st.integers(0, 25))
def test_an_expired_input_that_is_brought_again_at_any_step(tmp_path_factory: Any, step: int) -> None:
    """It was accepted, and the sweep took the bytes that its request had just brought."""
    world = World(tmp_path_factory.mktemp("store"))
    world.bring("first")
    world.grow_old()
    swept = world.planned()
    assert [(one.artifact_id, one.reason) for one in swept.doomed] == [(ID, "expired")]
    brought: list[bool] = []

    def bring() -> None:
        brought.append(True)
        world.bring("second")

    patch = world.acting_at(step, bring)
    try:
        world.sweeper.apply(swept)
    finally:
        patch.undo()
    assert world.there_is() == bool(brought)


@given(step=st.integers(0, 12))
def test_an_expired_input_that_is_taken_at_any_step_of_its_being_brought(tmp_path_factory: Any, step: int) -> None:
    world = World(tmp_path_factory.mktemp("store"))
    world.bring("first")
    world.grow_old()
    swept = world.planned()
    patch = world.acting_at(step, lambda: world.sweeper.apply(swept))
    try:
        world.bring("second")
    finally:
        patch.undo()
    assert world.there_is()


@given(step=st.integers(0, 25))
def test_an_expired_input_that_is_erased_while_it_is_brought_again(tmp_path_factory: Any, step: int) -> None:
    world = World(tmp_path_factory.mktemp("store"))
    world.bring("first")
    world.grow_old()
    assert not world.there_is(), "it has expired, and no sweep has seen it yet"
    brought: list[bool] = []

    def bring() -> None:
        brought.append(True)
        world.bring("second")

    patch = world.acting_at(step, bring)
    try:
        erase_inputs(world.store, "acme", "first", None)
    finally:
        patch.undo()
    assert world.there_is() == bool(brought)


assert INPUT_KEPT_S < AGED_S
assert GRACE_MS < MARKED_MS
