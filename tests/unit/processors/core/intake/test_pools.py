"""Whose request a record is."""

from __future__ import annotations

import pytest

from penstock.processors.core.intake.pools import Pools
from penstock.schemas.records import InferenceRequest

MODELS = [(None, ["common"]), ("a", ["big", "large"]), ("b", ["big", "code"]), ("b", ["common"])]


@pytest.mark.parametrize(
    ("own", "pool", "model", "other"),
    [
        (None, None, None, None),
        (None, None, "common", None),
        (None, None, "large", "a"),  # an alias
        (None, None, "big", "a"),  # the first pool that is told of
        (None, None, "unheard", None),  # it fails here, by name
        (None, "b", "common", "b"),
        (None, "x", None, "x"),
        ("a", None, None, None),  # it stands on this pool's topic
        ("a", "a", "big", None),
        ("a", "b", "big", "b"),
        ("a", None, "big", None),
        ("a", None, "code", "b"),
        ("b", None, "large", "a"),
        ("b", "b", "large", "a"),  # it has left the pool that the request names
        ("b", "b", "unheard", None),
    ],
)
def test_whose_request_it_is(own: str | None, pool: str | None, model: str | None, other: str | None) -> None:
    request = InferenceRequest(request_id="r", tenant="t", task="text_generation", created_at=0, pool=pool, model=model)
    assert Pools.of(own, MODELS).other_pool(request) == other


@pytest.mark.parametrize(("moved", "conversation_id"), [(True, None), (False, "c")])
def test_a_request_that_names_this_pool_stays_if_it_was_moved_or_is_a_turn(
    moved: bool, conversation_id: str | None
) -> None:
    """Two workers whose files give a model to each other's pool must not exchange a request for ever."""
    request = InferenceRequest(
        request_id="r", tenant="t", task="text_generation", created_at=0, pool="b", model="large",
        conversation_id=conversation_id,
    )  # fmt: skip
    assert Pools.of("b", MODELS).other_pool(request, moved=moved) is None
