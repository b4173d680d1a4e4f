"""Models: names are checked against what workers told, and shown in OpenAI's shape."""

from __future__ import annotations

import pytest

from penstock.gateway.models import find_model, public_models
from penstock.schemas.errors import ModelNotFound
from penstock.schemas.records import ModelInfo


def model(name: str, *tasks: str, aliases: tuple[str, ...] = (), pool: str | None = None, at: int = 1000) -> ModelInfo:
    return ModelInfo(
        model=name,
        tasks=list(tasks),
        aliases=list(aliases),
        pool=pool,
        engine="text",
        state="ready",
        updated_at=at,
        worker_id="w",
    )


MODELS = [
    model("smol", "text_generation", aliases=("default",)),
    model("mini", "embedding"),
    model("big", "text_generation", pool="p"),
]


@pytest.mark.parametrize(
    ("task", "name", "pool", "found"),
    [
        ("text_generation", "smol", None, "smol"),
        ("text_generation", "default", None, "smol"),
        ("text_generation", None, None, "smol"),
        ("embedding", "mini", None, "mini"),
        ("text_generation", "big", "p", "big"),
        ("text_generation", "any", "not-told-yet", None),
    ],
)
def test_names_that_are_found(task: str, name: str | None, pool: str | None, found: str | None) -> None:
    assert find_model(MODELS, task, name, pool) == found


@pytest.mark.parametrize(
    ("task", "name", "pool", "why"),
    [
        ("text_generation", "none", None, "does not exist"),
        ("text_generation", "mini", None, "does not do text_generation"),
        ("text_generation", "big", None, "does not exist"),
        ("text_generation", "smol", "p", "does not exist"),
    ],
)
def test_names_that_are_not(task: str, name: str, pool: str | None, why: str) -> None:
    with pytest.raises(ModelNotFound, match=why) as caught:
        find_model(MODELS, task, name, pool)
    assert caught.value.param == "model"


def test_before_any_worker_told_its_models_every_name_waits() -> None:
    assert find_model([], "text_generation", "anything", None) is None


def test_of_two_models_for_a_task_the_workers_choose() -> None:
    assert find_model([model("a", "embedding"), model("b", "embedding")], "embedding", None, None) is None


def test_the_public_form_is_one_per_model_the_newest() -> None:
    listed = public_models([model("b", "x", at=9000), model("a", "x"), model("b", "y", at=2000)])
    assert [(item["id"], item["created"], item["tasks"]) for item in listed] == [("a", 1, ["x"]), ("b", 9, ["x"])]
    assert {item["object"] for item in listed} == {"model"}
