"""Inputs of requests: stored once for equal bytes, erased with the last request that they belong to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.common.artifacts import Artifact, ArtifactStore, Place, holds
from penstock.common.artifacts.inputs import INPUT_KEPT_S, erase_inputs, keep_input
from penstock.schemas.errors import NotFound, StoreUnavailable
from penstock.schemas.ids import input_artifact_id

DATA = b"a picture"
ID = input_artifact_id("acme", hashlib.sha256(DATA).hexdigest())


class World:
    """A store in a folder, its time, and a client that may fail."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 1_800_000_000.0
        self.folder = folder / "store"
        cold = Place(location=str(folder / "cold"), options={})
        self.store = ArtifactStore(self.folder, stores={"cold": cold}, clock=lambda: self.now_s)

    def bring(self, request_id: str, data: bytes = DATA) -> Artifact:
        artifact_id = input_artifact_id("acme", hashlib.sha256(data).hexdigest())
        return keep_input(self.store, "acme", request_id, data, artifact_id=artifact_id, media_type="image/png")

    def erase(self, request_id: str, conversation_id: str | None = None) -> None:
        erase_inputs(self.store, "acme", request_id, conversation_id)

    def there_is(self, artifact_id: str = ID) -> bool:
        try:
            return bool(self.store.get("acme", artifact_id))
        except NotFound:
            return False

    def files(self) -> list[str]:
        return sorted(str(file.relative_to(self.folder)) for file in self.folder.rglob("*") if file.is_file())


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


@pytest.mark.parametrize("request_id", ["2f1c0b4e-7c55-4a44-9d3c-7a0f7f6f2f10", "..", ".", "a:b", "x" * 128])
def test_an_input_is_erased_with_its_request_and_leaves_nothing(world: World, request_id: str) -> None:
    kept = world.bring(request_id)
    assert kept.expires_at_ms == int(world.now_s + INPUT_KEPT_S) * 1000
    world.erase("another")
    assert world.there_is()
    world.erase(request_id)
    assert world.files() == []
    world.erase(request_id)


def test_two_requests_share_an_input_and_the_last_one_erases_it(world: World) -> None:
    world.bring("first")
    world.bring("second")
    world.bring("second", b"another picture")
    before = world.store.describe("acme", ID)
    world.now_s += 1
    world.erase("first")
    assert world.store.describe("acme", ID) == before, "it is not written again"
    assert world.there_is()
    world.erase("second")
    assert world.files() == []


def test_what_a_caller_uploaded_stays(world: World) -> None:
    """He has DELETE /v1/artifacts/{id} for it, also for the same bytes."""
    uploaded = world.store.put("acme", DATA)
    world.bring("first")
    world.erase("first")
    assert (world.there_is(uploaded.artifact_id), world.there_is()) == (True, False)


def test_it_stays_while_another_conversation_holds_it(world: World) -> None:
    for conversation in ("own", "other"):
        world.bring("first")
        world.store.holds.hold("acme", ID, conversation)
    world.erase("first", "own")
    assert world.there_is()
    world.store.holds.let_go("acme", "other", [ID])
    world.bring("second")
    world.erase("second", "own")
    assert world.files() == []


def test_requests_of_a_release_without_marks_keep_their_inputs(world: World) -> None:
    """They leave no marks, and may still wait when a later request with the same bytes is erased."""
    world.store.put("acme", DATA, artifact_id=ID, ttl_s=INPUT_KEPT_S)
    world.bring("first")
    world.erase("first")
    assert world.there_is()
    world.bring("second")
    world.now_s += INPUT_KEPT_S - 1
    world.bring("third")
    world.erase("second")
    world.erase("third")
    assert world.there_is(), "the one without a mark came within three days"
    world.bring("fourth")
    world.now_s += 1
    world.erase("fourth")
    assert world.files() == []


def test_a_store_that_fails_at_any_call_is_asked_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a DELETE that answered 503 the repeat erases all that is left."""
    for calls in range(40):
        world.bring("first")
        world.bring("first", b"another picture")
        world.store.holds.hold("acme", ID, "own")
        with monkeypatch.context() as patch:
            failing = Failing(world.store, calls)
            patch.setattr(world.store.places[None].__class__, "telling_failures", failing.telling_failures)
            try:
                world.erase("first", "own")
            except StoreUnavailable:
                pass
            else:
                assert failing.left >= 0
                break
        world.erase("first", "own")
        assert not world.there_is()
        left = [file for file in world.files() if holds.CONVERSATIONS.at_artifact not in file and ".holds" not in file]
        assert left == [], calls
    else:
        pytest.fail("it never got through")
    assert calls > 10


class Failing:
    """Lets so many calls of the store through."""

    def __init__(self, store: ArtifactStore, calls: int) -> None:
        self.left = calls
        self._real: Callable[..., Any] = type(store.places[None]).telling_failures

    @property
    def telling_failures(self) -> Any:
        def telling_failures(place: Any) -> Any:
            if self.left == 0:
                raise StoreUnavailable("the store is away")
            self.left -= 1
            return self._real(place)

        return telling_failures


@given(st.data())
def test_requests_that_come_and_go_at_once(tmp_path_factory: Any, data: st.DataObject) -> None:
    """A request that comes while another one is erased, at any step of it, finds its input."""
    world = World(tmp_path_factory.mktemp("inputs"))
    world.bring("first")
    real, steps = type(world.store.places[None]).telling_failures, [0]
    at = data.draw(st.integers(0, 20))

    def telling_failures(place: Any) -> Any:
        steps[0] += 1
        if steps[0] == at + 1:
            steps[0] += 1_000
            world.bring("second")
        return real(place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(world.store.places[None]), "telling_failures", telling_failures)
        world.erase("first")
    if steps[0] > 1_000:
        assert world.there_is()
        world.erase("second")
    assert world.files() == []


def test_a_deletion_that_failed_in_another_store_can_be_done_again(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The facts say where the bytes lie; they were deleted first, and the bytes stayed."""
    kept = world.store.put("acme", DATA, store="cold", prefix="renders")
    cold = world.folder.parent / "cold"
    with monkeypatch.context() as patch:

        def away(*_: Any) -> None:
            raise StoreUnavailable("the store is away")

        real = type(world.store.places[None]).telling_failures
        patch.setattr(
            type(world.store.places[None]),
            "telling_failures",
            lambda place: away() if place is world.store.places["cold"] else real(place),
        )
        with pytest.raises(StoreUnavailable):
            world.store.delete("acme", kept.artifact_id)
    world.store.delete("acme", kept.artifact_id)
    assert [file for file in cold.rglob("*") if file.is_file()] == []
    assert world.files() == []
