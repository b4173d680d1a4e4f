"""Inputs of requests: equal bytes are stored once and erased with the last request that uses them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.common_artifacts import DATA, ID, StoreWorld
from penstock.common.artifacts import holds
from penstock.common.artifacts.inputs import INPUT_KEPT_S
from penstock.schemas.errors import StoreUnavailable


@pytest.fixture
def world(tmp_path: Path) -> StoreWorld:
    return StoreWorld(tmp_path)


@pytest.mark.parametrize("request_id", ["2f1c0b4e-7c55-4a44-9d3c-7a0f7f6f2f10", "..", ".", "a:b", "x" * 128])
def test_an_input_is_erased_with_its_request_and_leaves_nothing(world: StoreWorld, request_id: str) -> None:
    kept = world.bring(request_id)
    assert kept.expires_at_ms == int(world.now_s + INPUT_KEPT_S) * 1000
    world.erase("another")
    assert world.has()
    world.erase(request_id)
    assert world.files() == []
    world.erase(request_id)


def test_two_requests_share_an_input_and_the_last_one_erases_it(world: StoreWorld) -> None:
    world.bring("first")
    world.bring("second")
    world.bring("second", b"another picture")
    before = world.store.describe("acme", ID)
    world.now_s += 1
    world.erase("first")
    assert world.store.describe("acme", ID) == before, "it is not written again"
    assert world.has()
    world.erase("second")
    assert world.files() == []


def test_an_upload_stays(world: StoreWorld) -> None:
    """It is deleted by DELETE /v1/artifacts/{id}, also if a request had the same bytes."""
    uploaded = world.store.put("acme", DATA)
    world.bring("first")
    world.erase("first")
    assert (world.has(uploaded.artifact_id), world.has()) == (True, False)


def test_it_stays_while_another_conversation_holds_it(world: StoreWorld) -> None:
    for conversation in ("own", "other"):
        world.bring("first")
        world.store.holds.hold("acme", ID, conversation)
    world.erase("first", "own")
    assert world.has()
    world.store.holds.let_go("acme", "other", [ID])
    world.bring("second")
    world.erase("second", "own")
    assert world.files() == []


def test_requests_of_a_release_without_marks_keep_their_inputs(world: StoreWorld) -> None:
    """They leave no marks and may still wait when a later request with the same bytes is erased."""
    world.store.put("acme", DATA, artifact_id=ID, ttl_s=INPUT_KEPT_S)
    world.bring("first")
    world.erase("first")
    assert world.has()
    world.bring("second")
    world.now_s += INPUT_KEPT_S - 1
    world.bring("third")
    world.erase("second")
    world.erase("third")
    assert world.has(), "the one without a mark came within three days"
    world.bring("fourth")
    world.now_s += 1
    world.erase("fourth")
    assert world.files() == []


def test_a_store_that_fails_at_any_call_is_asked_again(world: StoreWorld) -> None:
    """After a DELETE that answered 503 the repeat erases all that is left."""
    for calls in range(40):
        world.bring("first")
        world.bring("first", b"another picture")
        world.store.holds.hold("acme", ID, "own")

        def fail(number: int, place: object, calls: int = calls) -> None:
            if number >= calls:
                raise StoreUnavailable("the store is away")

        try:
            with world.before_each_call(fail):
                world.erase("first", "own")
        except StoreUnavailable:
            pass
        else:
            break
        world.erase("first", "own")
        assert not world.has()
        left = [file for file in world.files() if holds.CONVERSATIONS.at_artifact not in file and ".holds" not in file]
        assert left == [], calls
    else:
        pytest.fail("it never got through")
    assert calls > 10


@given(step=st.integers(0, 20))
def test_a_request_that_comes_at_any_step_of_an_erasure_finds_its_input(tmp_path_factory: Any, step: int) -> None:
    world, brought = StoreWorld(tmp_path_factory.mktemp("inputs")), list[object]()
    world.bring("first")
    with world.before_each_call(lambda number, _: brought.append(world.bring("second")) if number == step else None):
        world.erase("first")
    if brought:
        assert world.has()
        world.erase("second")
    assert world.files() == []


def test_a_deletion_that_failed_in_another_store_can_be_repeated(world: StoreWorld) -> None:
    kept = world.store.put("acme", DATA, store="cold", prefix="renders")

    def away(number: int, place: object) -> None:
        if place is world.store.places["cold"]:
            raise StoreUnavailable("the store is away")

    with world.before_each_call(away), pytest.raises(StoreUnavailable):
        world.store.delete("acme", kept.artifact_id)
    world.store.delete("acme", kept.artifact_id)
    assert [file for file in world.cold.rglob("*") if file.is_file()] == []
    assert world.files() == []
