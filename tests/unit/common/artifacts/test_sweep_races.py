"""What a client does between the look of a sweep and its deletions is not lost."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.common_artifacts import DATA, ID, StoreWorld
from penstock.common.artifacts.inputs import INPUT_KEPT_S
from penstock.common.artifacts.sweep import GRACE_MS, MARKED_MS, Key, Sweep, plan
from penstock.common.artifacts.sweeping import Sweeper

AGED_S = 2 * MARKED_MS / 1000
assert INPUT_KEPT_S < AGED_S
assert GRACE_MS < MARKED_MS


class World(StoreWorld):
    """Everything in it can be aged at once."""

    def __init__(self, folder: Path) -> None:
        self.ahead_s = -AGED_S
        super().__init__(folder, lambda: time.time() + self.ahead_s)
        self.sweeper = Sweeper(self.store)

    def age(self) -> None:
        """All files are older than everything that a sweep waits for, and the store has the time of day."""
        then = time.time() - AGED_S
        for file in self.folder.rglob("*"):
            os.utime(file, (then, then))
        self.ahead_s = 0.0

    def planned(self, conversations: set[Key] | None = None) -> Sweep:
        listing, facts = self.sweeper.look()
        return plan(listing, facts, self.sweeper.now_ms(), named={}, conversations=conversations)

    def expired(self) -> Sweep:
        """The plan that deletes the input of the request `first`."""
        self.bring("first")
        self.age()
        swept = self.planned()
        assert [(one.artifact_id, one.reason) for one in swept.doomed] == [(ID, "expired")]
        return swept

    def at_step(self, step: int, act: Callable[[], object], during: Callable[[], object]) -> bool:
        """Runs `during`, and `act` before its call of the store of this number. Whether there was one."""
        acted: list[object] = []
        with self.before_each_call(lambda number, _: acted.append(act()) if number == step else None):
            during()
        return bool(acted)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_marks_of_a_conversation_that_is_created_again_stay(world: World) -> None:
    image = world.store.put("acme", DATA)
    world.store.holds.hold("acme", image.artifact_id, "trip")
    world.age()
    swept = world.planned(set())
    assert swept.released == [("acme", "trip")]
    world.store.holds.hold("acme", image.artifact_id, "trip")
    world.sweeper.apply(swept)
    assert world.store.holds.held_by("acme", "trip") == [image.artifact_id]
    assert world.store.holds.of("acme", image.artifact_id) == ["trip"]


def test_a_mark_that_a_request_makes_again_stays(world: World) -> None:
    """Without it the next request with the same bytes that was erased took the input away."""
    world.bring("first")
    world.age()
    swept = world.planned()
    assert len(swept.stale) == 2
    world.bring("first")
    world.sweeper.apply(swept)
    assert world.store.request_holds.of("acme", ID)
    world.bring("second")
    world.erase("second")
    assert world.has()


def test_bytes_that_are_written_again_are_not_partial(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt had died before its facts were written; the next one's bytes have none yet either."""
    artifact_id = str(uuid.uuid4())
    world.store.put("acme", DATA, artifact_id=artifact_id)
    (world.folder / "acme" / artifact_id / "about.json").unlink()
    world.age()
    swept = world.planned()
    assert [one.reason for one in swept.doomed] == ["partial"]
    real = world.store.by_time.add

    def swept_before_the_facts(artifact: Any) -> None:
        world.sweeper.apply(swept)
        real(artifact)

    monkeypatch.setattr(world.store.by_time, "add", swept_before_the_facts)
    world.store.put("acme", DATA, artifact_id=artifact_id)
    assert world.has(artifact_id)


@given(step=st.integers(0, 25))
def test_an_expired_input_that_is_brought_again_at_any_step_of_a_sweep(tmp_path_factory: Any, step: int) -> None:
    world = World(tmp_path_factory.mktemp("store"))
    swept = world.expired()
    brought = world.at_step(step, lambda: world.bring("second"), lambda: world.sweeper.apply(swept))
    assert world.has() == brought


@given(step=st.integers(0, 12))
def test_an_expired_input_that_is_swept_at_any_step_of_its_being_brought(tmp_path_factory: Any, step: int) -> None:
    world = World(tmp_path_factory.mktemp("store"))
    swept = world.expired()
    world.at_step(step, lambda: world.sweeper.apply(swept), lambda: world.bring("second"))
    assert world.has()


@given(step=st.integers(0, 25))
def test_an_expired_input_that_is_erased_while_it_is_brought_again(tmp_path_factory: Any, step: int) -> None:
    world = World(tmp_path_factory.mktemp("store"))
    world.expired()
    assert not world.has(), "it has expired, and no sweep has seen it yet"
    brought = world.at_step(step, lambda: world.bring("second"), lambda: world.erase("first"))
    assert world.has() == brought
