"""Models: names are checked against what workers told, and shown in OpenAI's shape."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from typing import Any

import pytest

from penstock.common.desired import Desired
from penstock.gateway.service.model_states import admin_models, find_one, observing_topic, order_json
from penstock.gateway.service.models import check_abilities, find_model, of_task, public_models
from penstock.schemas.desired import key_of
from penstock.schemas.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, UnsupportedParameter
from penstock.schemas.records import DesiredState, ModelInfo, ModelState, WorkerState
from penstock.schemas.requests import parse_request


def model(
    name: str,
    *tasks: str,
    aliases: tuple[str, ...] = (),
    pool: str | None = None,
    at: int = 1000,
    engine: str = "text",
    window: int | None = None,
) -> ModelInfo:
    return ModelInfo(
        model=name,
        tasks=list(tasks),
        aliases=list(aliases),
        pool=pool,
        engine=engine,
        context_window=window,
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
    assert find_model([], "image_generation", None, None) is None


@pytest.mark.parametrize(
    ("task", "pool", "words"),
    [
        ("image_generation", None, "no model does image_generation; tasks that are served: embedding, text_generation"),
        ("embedding", "p", "no model of the pool p does embedding; tasks that are served: text_generation"),
    ],
)
def test_a_task_that_no_model_does_is_refused_at_once(task: str, pool: str | None, words: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        find_model(MODELS, task, None, pool)
    assert (str(caught.value), caught.value.http_status, caught.value.param) == (words, 404, "model")


def test_a_pool_whose_models_nobody_told_of_is_a_queue() -> None:
    assert find_model(MODELS, "image_generation", None, "not-told-yet") is None


def test_of_two_models_for_a_task_the_workers_choose() -> None:
    assert find_model([model("a", "embedding"), model("b", "embedding")], "embedding", None, None) is None


def test_the_public_form_is_one_per_model_and_pool() -> None:
    listed = public_models([model("b", "x", pool="p"), model("b", "y"), model("a", "x")], [("b", "p")])
    assert [(item["id"], item["pool"], item["available"]) for item in listed] == [
        ("a", None, True),
        ("b", None, True),
        ("b", "p", False),
    ]
    assert {item["object"] for item in listed} == {"model"}


def test_a_model_is_as_good_as_its_best_engine() -> None:
    """Of two workers with one model the last to speak was believed."""
    states = [
        worker("w1", ModelState(model="smol", state="failed", reason="it died")),
        worker("w2", ModelState(model="smol", state="loading", progress=0.25, reason="downloading")),
        worker("w3", ModelState(model="smol", state="ready"), pool="p"),
    ]
    (shown,) = public_models([model("smol", "x")], workers=states)
    assert (shown["state"], shown["progress"], shown["reason"]) == ("loading", 0.25, "downloading")
    (shown,) = public_models([dataclasses.replace(model("far", "x"), defaults={"stop": '["E"]', "old": "0,5"})])
    assert (shown["state"], shown["defaults"]) == ("ready", {"stop": ["E"], "old": "0,5"})


def worker(name: str, *models: ModelState, pool: str | None = None) -> WorkerState:
    return WorkerState(worker_id=name, state="running", started_at=1, updated_at=1, pool=pool, models=list(models))


DESIRED = {
    key_of(state): Desired(state, revision)
    for revision, state in enumerate(
        (
            DesiredState(kind="model", name="smol", action="pause", created_at=1, paused=True, pinned=True),
            DesiredState(kind="model", name="mini", action="remove", created_at=1, removed=True),
            DesiredState(
                kind="model",
                name="new",
                action="add",
                created_at=1,
                entry='{"source": "x", "engine": "noop", "aliases": ["n"], "defaults": {"max_tokens": 3}}',
            ),
            DesiredState(kind="model", name="odd", action="add", created_at=1, entry="[]"),
            DesiredState(kind="class", name="low", action="pause", created_at=1, paused=True),
        )
    )
}


def test_operators_see_engines_and_what_was_ordered() -> None:
    states = [worker("w2", ModelState(model="smol", state="ready", queued=4)), worker("w1")]
    shown = {one["id"]: one for one in admin_models(MODELS, states, DESIRED, [("new", None)])}
    assert list(shown) == ["new", "smol", "big"], "removed ones are gone; other pools come last"
    assert (shown["smol"]["paused"], shown["smol"]["pinned"]) == (True, True)
    assert (shown["smol"]["desired"]["action"], shown["smol"]["desired"]["revision"]) == ("pause", 0)
    assert [(one["worker_id"], one["queued"]) for one in shown["smol"]["replicas"]] == [("w2", 4)]
    assert (shown["new"]["state"], shown["new"]["aliases"], shown["new"]["defaults"]) == (
        "absent",
        ["n"],
        {"max_tokens": 3},
    )
    assert not shown["new"]["available"]


def observing(name: str, revision: int | None, pool: str | None = None) -> WorkerState:
    return dataclasses.replace(worker(name, pool=pool), observed_revision=revision)


@pytest.mark.parametrize(
    ("workers", "pool", "observed", "least", "waiting"),
    [
        ([], None, False, None, []),
        ([observing("a", 7), observing("b", 9)], None, True, 7, []),
        ([observing("a", 6), observing("b", 9)], None, False, 6, ["a"]),
        ([observing("b", None), observing("a", 2)], None, False, None, ["a", "b"]),
        ([observing("a", 1), observing("b", 7, "p")], "p", True, 7, []),
        ([observing("a", 9)], "p", False, None, []),
    ],
)
def test_an_order_is_observed_when_all_workers_of_its_pool_have_followed_it(
    workers: list[WorkerState], pool: str | None, observed: bool, least: int | None, waiting: list[str]
) -> None:
    assert order_json(workers, pool, 7) == {
        "object": "order",
        "revision": 7,
        "pool": pool,
        "observed": observed,
        "observed_revision": least,
        "waiting_workers": waiting,
    }


def test_what_was_observed_of_another_topic_of_orders_does_not_count() -> None:
    """A worker stayed at offset 9 of a topic that was deleted, and order 7 of the new one counted as observed."""
    workers = [
        dataclasses.replace(observing(name, 9), observed_topic_id=topic_id)
        for name, topic_id in (("old", "one"), ("new", "two"), ("earlier-release", None))
    ]
    assert order_json(observing_topic(workers, "two"), None, 7)["waiting_workers"] == ["old"]
    assert order_json(observing_topic(workers, None), None, 7)["waiting_workers"] == ["new", "old"]


def test_operators_see_who_has_not_observed_the_last_order_about_a_model() -> None:
    workers = [observing("w1", 1), observing("w2", 4)]
    shown = {one["id"]: one for one in admin_models(MODELS, workers, DESIRED, [])}
    assert (shown["new"]["observed_revision"], shown["new"]["waiting_workers"]) == (1, ["w1"])
    assert (shown["smol"]["observed_revision"], shown["smol"]["waiting_workers"]) == (1, [])
    assert (shown["big"]["observed_revision"], shown["big"]["waiting_workers"]) == (None, []), "no worker in its pool"


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ([], "no live worker is in its pool"),
        ([observing("w1", 1), observing("w2", 2)], "the order to add it is not observed yet by w1"),
        ([observing("w1", 2)], "the workers of its pool do not serve it: the log of each says why"),
    ],
)
def test_of_an_added_model_that_nobody_reports_the_true_reason_is_told(workers: list[WorkerState], reason: str) -> None:
    """It said "no worker has told of it yet" for ever, also of an entry that the workers had passed over."""
    (new,) = (one for one in admin_models(MODELS, workers, DESIRED, []) if one["id"] == "new")
    assert (new["state"], new["reason"], new["available"]) == ("absent", reason, False)


def test_a_model_whose_workers_are_gone_is_not_ready() -> None:
    """Its record on the topic keeps the state that its last worker gave it."""
    stale = dataclasses.replace(model("smol", "x"), progress=0.5)
    (shown,) = public_models([stale], [("smol", None)])
    assert (shown["state"], shown["reason"], shown["progress"]) == ("absent", "no live worker serves it", None)
    (shown,) = admin_models([stale], [], {}, [("smol", None)])
    assert (shown["state"], shown["reason"]) == ("absent", "no live worker serves it")


def test_the_cause_of_a_failed_load_is_for_operators() -> None:
    failed = ModelState(model="smol", state="failed", reason="2 loads in a row failed", cause="OSError: no weights")
    known = dataclasses.replace(model("smol", "x"), cause="OSError: no weights")
    (shown,) = admin_models([known], [worker("w", failed)], {}, [])
    assert (shown["reason"], shown["cause"]) == ("2 loads in a row failed", "OSError: no weights")
    assert shown["replicas"][0]["cause"] == "OSError: no weights"
    (told,) = public_models([known], workers=[worker("w", failed)])
    assert told["reason"] == "2 loads in a row failed"
    assert "no weights" not in json.dumps(told)


def test_an_ordered_entry_says_whether_the_model_is_pinned_and_preloaded() -> None:
    entry = '{"source": "x", "engine": "noop", "pinned": true, "preload": false}'
    state = DesiredState(kind="model", name="smol", action="add", created_at=1, entry=entry)
    known = model("smol", "x")
    assert not known.pinned, "no worker has reported the new entry yet"
    for pinned, shown_pinned in ((None, True), (False, False)):
        desired = {key_of(state): Desired(dataclasses.replace(state, pinned=pinned), 3)}
        (shown,) = admin_models([known], [], desired, [])
        assert (shown["pinned"], shown["preload"]) == (shown_pinned, False)
    (shown,) = admin_models([known], [], {}, [])
    assert shown["preload"] is None


def test_a_model_is_found_by_id_alias_and_pool() -> None:
    shown = admin_models([*MODELS, model("big", "x", pool="q"), model("smol", "x", pool="p")], [], {}, [])
    assert find_one(shown, "default", None)["id"] == "smol"
    assert find_one(shown, "smol", None)["pool"] is None
    assert find_one(shown, "smol", "p")["pool"] == "p"
    with pytest.raises(InvalidRequest, match="in the pools p, q"):
        find_one(shown, "big", None)
    with pytest.raises(ModelNotFound, match="there are big, smol"):
        find_one(shown, "mini", "p")


def test_an_unknown_name_is_told_the_models_there_are() -> None:
    with pytest.raises(ModelNotFound, match="for text_generation there are smol"):
        find_model(MODELS, "text_generation", "none", None)
    many = [model(f"m{number:02}", "x") for number in range(12)]
    with pytest.raises(ModelNotFound, match=r"there are m00, m01, m02, m03, m04, m05, m06, m07, m08, m09 and 2 more$"):
        find_one(public_models(many), "q", None)
    with pytest.raises(ModelNotFound, match="there is none"):
        find_one([], "q", None)


def asked(model: str | None = None, **payload: Any) -> Any:
    body = {"task": "text_generation", "model": model, "payload": {"prompt": "a", **payload}}
    return parse_request(body, now_ms=1)


SERVED = [
    model("smol", "text_generation", aliases=("default",), window=2_048),
    model("far", "text_generation", engine="remote"),
]


def test_what_a_model_does_not_know_is_refused_by_name() -> None:
    tools = [{"function": {"name": "f"}}]
    served = [*SERVED, model("noop", "text_generation", engine="noop")]
    with pytest.raises(UnsupportedParameter, match="not supported by noop") as caught:
        check_abilities(served, asked("noop", tools=tools))
    assert caught.value.param == "payload.tools"
    # What its engine knows, the model here takes as remote ones do; what travels in extra, it may not know.
    for name in ("smol", "far", None, "not-told-yet"):
        check_abilities(served, asked(name, tools=tools))
    check_abilities(served, asked("noop", tools=[], n=1, presence_penalty=0))
    with pytest.raises(UnsupportedParameter, match="not supported by smol") as caught:
        check_abilities(served, replace(asked("smol"), extra={"verbosity": '"low"'}))
    assert caught.value.param == "extra.verbosity"
    others = {"reasoning_effort": '"high"', "min_tokens": "3"}
    check_abilities(served, replace(asked("smol"), extra=others))
    with pytest.raises(UnsupportedParameter, match="not supported by noop") as caught:
        check_abilities(served, replace(asked("noop"), extra={"min_tokens": "3"}))
    assert caught.value.param == "extra.min_tokens"


@pytest.mark.parametrize("task", ["image_generation", "image_editing"])
def test_several_images_are_no_matter_of_remote_models(task: str) -> None:
    """`n` of texts and `n` of images are two fields with one name: a gateway refused two images of a local model."""
    painter = model("painter", task, engine="diffusers")
    payload = {"prompt": "a dam", "n": 2, **({} if task == "image_generation" else {"image": {"artifact_id": "x"}})}
    check_abilities([painter], parse_request({"task": task, "payload": payload}, now_ms=1))


def test_an_answer_longer_than_the_window_is_refused_with_its_figures() -> None:
    """It was cut silently to the window, and then refused with the figures of the cut."""
    with pytest.raises(ContextLengthExceeded) as caught:
        check_abilities(SERVED, asked("smol", max_tokens=900_000))
    assert caught.value.param == "payload.max_tokens"
    assert caught.value.details == {"need": 900_000, "capacity": 2_048, "unit": "tokens"}
    check_abilities(SERVED, asked("smol", max_tokens=2_048))
    check_abilities(SERVED, asked("far", max_tokens=900_000))
    check_abilities(SERVED, asked(None, max_tokens=900_000))


@pytest.mark.parametrize(
    ("task", "listed"),
    [
        (None, ["draws", "mini", "new", "smol"]),
        ("text_generation", ["smol"]),
        ("image_processing", ["draws", "imaging"]),
        ("all", ["draws", "imaging", "mini", "new", "smol"]),
        ("summarization", []),
    ],
)
def test_tools_are_listed_only_for_who_asks_for_them(task: str | None, listed: list[str]) -> None:
    models = [
        model("smol", "text_generation"),
        model("mini", "embedding"),
        model("imaging", "image_processing"),
        model("draws", "image_generation", "image_processing"),
        model("new"),
    ]
    assert [one["id"] for one in of_task(public_models(models), task)] == listed


def test_a_task_that_there_is_not_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        of_task([], "chat")
    assert caught.value.param == "task"
    assert "text_generation" in caught.value.message
