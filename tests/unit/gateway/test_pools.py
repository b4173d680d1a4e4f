"""Where a request is put: its own pool, its conversation's, or that of the model it names."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest

from kit.gateway_records import ORIGIN, model_info, request
from penstock.common.model_pools import pool_of
from penstock.gateway.service.facts import Facts
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.view import View
from penstock.schemas.errors import InvalidRequest

MODELS = [
    model_info("smol"),
    model_info("big", pool="b", aliases=["large"]),
    model_info("big", pool="a"),
    model_info("smol", pool="a"),
    model_info("vec", "embedding", pool="a"),
]


@pytest.mark.parametrize(
    ("name", "pool"), [("smol", None), ("big", "a"), ("large", "b"), ("vec", None), ("unheard", None)]
)
def test_a_models_pool(name: str, pool: str | None) -> None:
    assert pool_of(MODELS, "text_generation", name) == pool
    assert pool_of(reversed(MODELS), "text_generation", name) == pool


@pytest.fixture
def facts(view: View) -> Facts:
    """The conversation c1 is in the pool b, c2 in the common pool."""
    view.fleet.models = {(model.model, model.pool or ""): model for model in MODELS}
    view.accepted(request("r1", conversation_id="c1", pool="b"), ORIGIN)
    view.accepted(request("r2", conversation_id="c2"), replace(ORIGIN, offset=1))
    return Facts(view, cast("Any", None), Hub())


@pytest.mark.parametrize(
    ("fields", "pool"),
    [
        ({}, None),  # resolved within the common pool
        ({"model": "large"}, "b"),
        ({"model": "smol"}, None),
        ({"model": "large", "pool": "a"}, "a"),
        ({"conversation_id": "c1"}, "b"),
        ({"conversation_id": "c1", "model": "smol"}, "b"),
        ({"conversation_id": "c3", "model": "large"}, "b"),
    ],
)
def test_a_request_goes_to_its_own_pool_its_conversations_or_its_models(
    facts: Facts, fields: dict[str, str], pool: str | None
) -> None:
    assert facts.routed(request(**fields)).pool == pool


@pytest.mark.parametrize(("conversation_id", "where"), [("c1", "the pool b"), ("c2", "the common pool")])
def test_a_conversation_stays_in_one_pool(facts: Facts, conversation_id: str, where: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the conversation {conversation_id} is in {where}") as caught:
        facts.routed(request(conversation_id=conversation_id, pool="a"))
    assert caught.value.param == "pool"
