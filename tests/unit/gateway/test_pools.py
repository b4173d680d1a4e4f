"""Where a request is put: its own pool, its conversation's, or that of the model it names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from penstock.common.model_pools import pool_of
from penstock.gateway.service.facts import Facts
from penstock.gateway.view.hub import Hub
from penstock.gateway.view.store import Store
from penstock.gateway.view.view import View
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.records import InferenceRequest, ModelInfo, Origin
from penstock.schemas.topics import TopicNames


def info(model: str, pool: str | None, *aliases: str, task: str = "text_generation") -> ModelInfo:
    return ModelInfo(
        model=model, tasks=[task], aliases=list(aliases), pool=pool, engine="noop", state="ready", updated_at=1,
        worker_id="w",
    )  # fmt: skip


MODELS = [
    info("smol", None),
    info("big", "b", "large"),
    info("big", "a"),
    info("smol", "a"),
    info("vec", "a", task="embedding"),
]


@pytest.mark.parametrize(
    ("name", "pool"), [("smol", None), ("big", "a"), ("large", "b"), ("vec", None), ("unheard", None)]
)
def test_a_models_pool(name: str, pool: str | None) -> None:
    assert pool_of(MODELS, "text_generation", name) == pool
    assert pool_of(reversed(MODELS), "text_generation", name) == pool


@pytest.fixture
def view(tmp_path: Path) -> Iterator[View]:
    store = Store(tmp_path / "view.sqlite", "cluster")
    view = View(store, Hub(), TopicNames(), 4)
    view.fleet.models = {(model.model, model.pool or ""): model for model in MODELS}
    yield view
    store.close()


def request(request_id: str = "r", **fields: Any) -> InferenceRequest:
    return InferenceRequest(request_id=request_id, tenant="t", task="text_generation", created_at=0, **fields)


def accept(view: View, asked: InferenceRequest, offset: int) -> None:
    view.accepted(asked, Origin(topic="inference.request.medium", partition=0, offset=offset, append_time_ms=1))


def test_a_request_goes_to_its_own_pool_else_to_its_models(view: View) -> None:
    facts = Facts(view, cast("Any", None), Hub())
    assert facts.routed(request()).pool is None  # resolved within the common pool
    assert facts.routed(request(model="large")).pool == "b"
    assert facts.routed(request(model="smol")).pool is None
    assert facts.routed(request(model="large", pool="a")).pool == "a"


def test_a_conversation_stays_in_one_pool(view: View) -> None:
    facts = Facts(view, cast("Any", None), Hub())
    accept(view, request("r1", conversation_id="c1", pool="b"), 0)
    accept(view, request("r2", conversation_id="c2"), 1)
    assert facts.routed(request(conversation_id="c1")).pool == "b"
    assert facts.routed(request(conversation_id="c1", model="smol")).pool == "b"
    assert facts.routed(request(conversation_id="c3", model="large")).pool == "b"
    for conversation, pool, where in (("c1", "a", "the pool b"), ("c2", "a", "the common pool")):
        with pytest.raises(InvalidRequest, match=f"the conversation {conversation} is in {where}") as caught:
            facts.routed(request(conversation_id=conversation, pool=pool))
        assert caught.value.param == "pool"
