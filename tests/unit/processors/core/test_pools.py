"""Whose request a record is."""

from __future__ import annotations

import pytest

from penstock.processors.core.pools import Pools
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
    ],
)
def test_whose_request_it_is(own: str | None, pool: str | None, model: str | None, other: str | None) -> None:
    request = InferenceRequest(request_id="r", tenant="t", task="text_generation", created_at=0, pool=pool, model=model)
    assert Pools.of(own, MODELS).other_pool(request) == other
