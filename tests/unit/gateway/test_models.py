"""Models: names are checked against the models that workers report, and shown in OpenAI's form."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kit.records import model_info, worker
from kit.refusals import refused
from penstock.common.desired import Desired
from penstock.gateway.service.model_states import admin_models, find_one, observing_topic, order_json
from penstock.gateway.service.models import check_abilities, find_model, of_task, public_models
from penstock.gateway.view.fleet import KnownModels
from penstock.schemas.desired import key_of
from penstock.schemas.errors import ContextLengthExceeded, InvalidRequest, ModelNotFound, UnsupportedParameter
from penstock.schemas.records import DesiredState, ModelInfo, ModelState, WorkerState
from penstock.schemas.requests import parse_request

SMOL = model_info("smol", aliases=["default"], context_window=2_048)
BIG = model_info("big", pool="p")
MODELS = [SMOL, model_info("mini", "embedding"), BIG]


# -- names


TEXT, SERVED_ARE = "text_generation", "tasks that are served:"
TWO = [model_info("a", "embedding"), model_info("b", "embedding")]
DECLARED = [model_info("a", worker_id="")]


@pytest.mark.parametrize(
    ("models", "task", "name", "pool", "found", "message"),
    [
        *((MODELS, TEXT, name, None, "smol", None) for name in ("smol", "default", None)),
        (MODELS, "embedding", "mini", None, "mini", None),
        (MODELS, TEXT, "big", "p", "big", None),
        (MODELS, TEXT, "any", "not-reported-yet", None, None),
        (MODELS, "image_generation", None, "not-reported-yet", None, None),
        # A name waits while no model is reported; between two the workers choose.
        *(([], TEXT, name, None, None, None) for name in ("anything", None)),
        (TWO, "embedding", None, None, None, None),
        # Declared, and not by workers.
        *((DECLARED, TEXT, name, None, "a", None) for name in ("a", None)),
        (DECLARED, TEXT, "b", None, None, None),
        (DECLARED, "image_editing", None, None, None, None),
        (MODELS, TEXT, "none", None, None, "does not exist.*for text_generation there are smol"),
        (MODELS, TEXT, "mini", None, None, "does not do text_generation"),
        (MODELS, TEXT, "big", None, None, "does not exist"),
        (MODELS, TEXT, "smol", "p", None, "does not exist"),
        (MODELS, "image_generation", None, None, None,
         f"^no model does image_generation; {SERVED_ARE} embedding, text_generation$"),
        (MODELS, "embedding", None, "p", None,
         f"^no model of the pool p does embedding; {SERVED_ARE} text_generation$"),
    ],
)  # fmt: skip
def test_which_model_a_name_finds(
    models: list[ModelInfo], task: str, name: str | None, pool: str | None, found: str | None, message: str | None
) -> None:
    with refused(None if message is None else ModelNotFound, message, http_status=404, param="model"):
        assert find_model(models, task, name, pool) == found


# -- the public list


def test_the_public_list_has_one_entry_per_model_and_pool() -> None:
    listed = public_models([model_info("b", "x", pool="p"), model_info("b", "y"), model_info("a", "x")], [("b", "p")])
    shown = [(one["id"], one["pool"], one["available"]) for one in listed]
    assert shown == [("a", None, True), ("b", None, True), ("b", "p", False)]
    assert {item["object"] for item in listed} == {"model"}


def test_a_model_has_the_state_of_its_best_engine() -> None:
    states = [
        worker("w1", ModelState(model="smol", state="failed", reason="it died")),
        worker("w2", ModelState(model="smol", state="loading", progress=0.25, reason="downloading")),
        worker("w3", ModelState(model="smol", state="ready"), pool="p"),
    ]
    (shown,) = public_models([SMOL], workers=states)
    assert (shown["state"], shown["progress"], shown["reason"]) == ("loading", 0.25, "downloading")
    (shown,) = public_models([model_info("far", defaults={"stop": '["E"]', "old": "0,5"})])
    assert (shown["state"], shown["defaults"]) == ("ready", {"stop": ["E"], "old": "0,5"})


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
def test_image_tools_are_listed_only_on_request(task: str | None, listed: list[str]) -> None:
    tools = [model_info("imaging", "image_processing"), model_info("draws", "image_generation", "image_processing")]
    models = public_models([*MODELS[:2], *tools, replace(model_info("new"), tasks=[])])
    assert [one["id"] for one in of_task(models, task)] == listed
    with refused(InvalidRequest, "text_generation", param="task"):
        of_task([], "chat")


# -- what operators see


def ordered(name: str, action: str, **fields: Any) -> DesiredState:
    return DesiredState(**{"kind": "model", "name": name, "action": action, "created_at": 1, **fields})


NEW = '{"source": "x", "engine": "noop", "aliases": ["n"], "defaults": {"max_tokens": 3}}'
ORDERS = (
    ordered("smol", "pause", paused=True, pinned=True),
    ordered("mini", "remove", removed=True),
    ordered("new", "add", entry=NEW),
    ordered("odd", "add", entry="[]"),
    ordered("low", "pause", kind="class", paused=True),
)
DESIRED = {key_of(state): Desired(state, revision) for revision, state in enumerate(ORDERS)}


def operators_list(workers: list[WorkerState], unavailable: Any = ()) -> dict[str, dict[str, Any]]:
    return {one["id"]: one for one in admin_models(MODELS, workers, DESIRED, unavailable)}


def test_operators_see_engines_and_orders() -> None:
    shown = operators_list([worker("w2", ModelState(model="smol", state="ready", queued=4)), worker("w1")],
                           [("new", None)])  # fmt: skip
    assert list(shown) == ["new", "smol", "big"], "removed ones are gone; other pools come last"
    smol, new = shown["smol"], shown["new"]
    assert (smol["paused"], smol["pinned"]) == (True, True)
    assert (smol["desired"]["action"], smol["desired"]["revision"]) == ("pause", 0)
    assert [(one["worker_id"], one["queued"]) for one in smol["replicas"]] == [("w2", 4)]
    assert (new["state"], new["aliases"], new["defaults"]) == ("absent", ["n"], {"max_tokens": 3})
    assert not new["available"]


def observing(name: str, revision: int | None, pool: str | None = None, **fields: Any) -> WorkerState:
    return worker(name, pool=pool, observed_revision=revision, **fields)


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
    expected = {"object": "order", "revision": 7, "pool": pool, "observed": observed, "observed_revision": least}
    assert order_json(workers, pool, 7) == {**expected, "waiting_workers": waiting}


@pytest.mark.parametrize(("topic_id", "waiting"), [("two", ["old"]), (None, ["new", "old"])])
def test_offsets_of_another_topic_of_orders_do_not_count(topic_id: str | None, waiting: list[str]) -> None:
    topics = (("old", "one"), ("new", "two"), ("earlier-release", None))
    workers = [observing(name, 9, observed_topic_id=read) for name, read in topics]
    assert order_json(observing_topic(workers, topic_id), None, 7)["waiting_workers"] == waiting


def test_operators_see_which_workers_have_not_observed_the_last_order() -> None:
    shown = operators_list([observing("w1", 1), observing("w2", 4)])
    observed = {name: (one["observed_revision"], one["waiting_workers"]) for name, one in shown.items()}
    assert observed == {"new": (1, ["w1"]), "smol": (1, []), "big": (None, [])}, "big has no worker in its pool"


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ([], "no live worker is in its pool"),
        ([observing("w1", 1), observing("w2", 2)], "the order to add it is not observed yet by w1"),
        ([observing("w1", 2)], "the workers of its pool do not serve it: the log of each says why"),
    ],
)
def test_an_added_model_without_reports_has_the_true_reason(workers: list[WorkerState], reason: str) -> None:
    new = operators_list(workers)["new"]
    assert (new["state"], new["reason"], new["available"]) == ("absent", reason, False)


def test_a_model_without_live_workers_is_absent() -> None:
    """Its record on the topic keeps the state that its last worker gave it."""
    stale, gone = model_info("smol", progress=0.5), [("smol", None)]
    for (shown,) in (public_models([stale], gone), admin_models([stale], [], {}, gone)):
        assert (shown["state"], shown["reason"]) == ("absent", "no live worker serves it")
        assert shown["progress"] is None


def test_the_cause_of_a_failed_load_is_for_operators() -> None:
    reason, cause = "2 loads in a row failed", "OSError: no weights"
    workers = [worker("w", ModelState(model="smol", state="failed", reason=reason, cause=cause))]
    known = model_info("smol", cause=cause)
    (shown,) = admin_models([known], workers, {}, [])
    assert (shown["reason"], shown["cause"], shown["replicas"][0]["cause"]) == (reason, cause, cause)
    (public,) = public_models([known], workers=workers)
    assert public["reason"] == reason
    assert "no weights" not in json.dumps(public)


@pytest.mark.parametrize(("pinned", "shown_pinned"), [(None, True), (False, False)])
def test_an_ordered_entry_says_whether_the_model_is_pinned_and_preloaded(
    pinned: bool | None, shown_pinned: bool
) -> None:
    entry = '{"source": "x", "engine": "noop", "pinned": true, "preload": false}'
    state = ordered("smol", "add", entry=entry, pinned=pinned)
    (shown,) = admin_models([SMOL], [], {key_of(state): Desired(state, 3)}, [])
    assert (shown["pinned"], shown["preload"]) == (shown_pinned, False)
    (unordered,) = admin_models([SMOL], [], {}, [])
    assert (unordered["pinned"], unordered["preload"]) == (False, None)


WITH_P = [*MODELS, model_info("smol", pool="p")]
TWELVE = [model_info(f"m{number}", "x") for number in range(10, 22)]
TEN_OF_TWELVE = "there are m10, m11, m12, m13, m14, m15, m16, m17, m18, m19 and 2 more$"


@pytest.mark.parametrize(
    ("models", "name", "pool", "error", "found"),
    [
        (WITH_P, "default", None, None, ("smol", None)),
        (WITH_P, "smol", None, None, ("smol", None)),
        (WITH_P, "smol", "p", None, ("smol", "p")),
        ([BIG, replace(BIG, pool="q")], "big", None, InvalidRequest, "in the pools p, q"),
        (WITH_P, "mini", "p", ModelNotFound, "there are big, smol"),
        (TWELVE, "q", None, ModelNotFound, TEN_OF_TWELVE),
        ([], "q", None, ModelNotFound, "there is none"),
    ],
)
def test_one_model_is_found_by_id_alias_and_pool_or_refused(
    models: list[ModelInfo], name: str, pool: str | None, error: Any, found: Any
) -> None:
    for listed in (public_models(models), admin_models(models, [], {}, [])):
        with refused(error, None if error is None else found):
            shown = find_one(listed, name, pool)
            assert (shown["id"], shown["pool"]) == found


# -- what a model is able to do

SERVED = [SMOL, model_info("far", engine="remote"), model_info("noop", engine="noop")]
TOOLS = [{"function": {"name": "f"}}]


@pytest.mark.parametrize(
    ("name", "payload", "extra", "param"),
    [
        ("noop", {"tools": TOOLS}, {}, "payload.tools"),
        ("noop", {}, {"min_tokens": "3"}, "extra.min_tokens"),
        ("noop", {"tools": [], "n": 1, "presence_penalty": 0}, {}, None),
        *((name, {"tools": TOOLS}, {}, None) for name in ("smol", "far", None, "not-reported-yet")),
        ("smol", {}, {"verbosity": '"low"'}, "extra.verbosity"),
        ("smol", {}, {"reasoning_effort": '"high"', "min_tokens": "3"}, None),
        ("smol", {"max_tokens": 900_000}, {}, "payload.max_tokens"),
        ("smol", {"max_tokens": 2_048}, {}, None),
        ("far", {"max_tokens": 900_000}, {}, None),
        (None, {"max_tokens": 900_000}, {}, None),
    ],
)
def test_what_a_model_cannot_do_is_refused_by_name(
    name: str | None, payload: dict[str, Any], extra: dict[str, str], param: str | None
) -> None:
    body = {"task": "text_generation", "model": name, "payload": {"prompt": "a", **payload}}
    asked = replace(parse_request(body, now_ms=1), extra=extra)
    error: Any = None if param is None else UnsupportedParameter
    facts: dict[str, Any] = {"param": param}
    if param == "payload.max_tokens":
        error, facts["details"] = ContextLengthExceeded, {"need": 900_000, "capacity": 2_048, "unit": "tokens"}
    with refused(error, None if error is ContextLengthExceeded else f"not supported by {name}", **facts):
        check_abilities(KnownModels(SERVED), asked)


@pytest.mark.parametrize("task", ["image_generation", "image_editing"])
def test_a_local_model_makes_several_images(task: str) -> None:
    payload = {"prompt": "a dam", "n": 2, **({} if task == "image_generation" else {"image": {"artifact_id": "x"}})}
    asked = parse_request({"task": task, "payload": payload}, now_ms=1)
    check_abilities(KnownModels([model_info("painter", task, engine="diffusers")]), asked)
