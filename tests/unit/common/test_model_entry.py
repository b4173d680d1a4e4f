"""A `[[models]]` table: its fields, older forms, and refusals that name what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from kit.refusals import refused
from penstock.common.model_entry import ModelEntry, Replicas, check_names, parse_entry, served_by
from penstock.schemas.errors import InvalidRequest


def entry(**fields: Any) -> ModelEntry:
    return parse_entry({"id": "m", "source": "owner/name", "engine": "text", **fields})


def test_older_options_become_fields() -> None:
    options = {
        "device": "cuda:1", "dtype": "float16", "window": 2048, "slots": 8, "cache_tokens": 4096, "temperature": 0.2,
        "default_max_tokens": 99, "defaults": {"top_p": 0.5},
    }  # fmt: skip
    old = entry(options=options)
    assert (old.device, old.dtype, old.window, old.max_batch_size) == ("cuda:1", "float16", 2048, 8)
    assert old.payload_defaults() == {"temperature": 0.2, "max_tokens": 99, "top_p": 0.5}
    assert old.options == {"cache_tokens": 4096}


def test_an_option_and_its_field_may_not_differ() -> None:
    assert entry(window=64, options={"window": 64}).window == 64
    with pytest.raises(InvalidRequest, match="keep one of them"):
        entry(window=64, options={"window": 65})


PAINTER = {"engine": "diffusers", "tasks": ["image_generation", "image_editing"]}
FAR = {"engine": "remote", "source": "http://h/v1", "tasks": ["text_generation", "embedding"]}


@pytest.mark.parametrize(
    ("fields", "given", "defaults"),
    [
        ({}, {"n": 2, "presence_penalty": 0.5}, {"n": 2, "presence_penalty": 0.5}),
        ({}, {"stop": "END", "max_tokens": 5}, {"stop": ["END"], "max_tokens": 5}),
        (PAINTER, {"n": 2}, {"n": 2}),
        (FAR, {"n": 2, "dimensions": 8}, {"n": 2, "dimensions": 8}),
    ],
)
def test_defaults_are_in_the_normal_form_of_payloads(fields: Any, given: Any, defaults: Any) -> None:
    assert entry(**fields, defaults=given).payload_defaults() == defaults


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"sorce": "x"}, "sorce", "there is no such field; the fields are id, source"),
        ({"tasks": ["painting"]}, "tasks", "no engine serves the task painting"),
        ({"aliases": ["m"]}, None, "two models are called m"),
        ({"id": "a@b"}, "id", "without @"),
        ({"defaults": {"dimensions": 3}}, "defaults.dimensions", "text_generation and summarization know"),
        ({"defaults": {"temperature": "hot"}}, "defaults.temperature", "must be"),
        ({"defaults": {"max_tokens": 0}}, "defaults.max_tokens", "at least 1"),
        ({"engine": "noop", "defaults": {"n": 2}}, "defaults.n", "known only to remote and managed models"),
        ({"dtype": "int3"}, "dtype", "float32"),
        ({"keep_alive": "soon"}, "keep_alive", "write it as 300, 30s, 5m or 1h"),
        ({"replicas": {"min": 3, "max": 2}}, "replicas", "less than min"),
        ({"replicas": 0}, "replicas.min", "greater than or equal to 1"),
        ({"priority": -1}, "priority", "greater than or equal to 0"),
        ({"pool": "a.b"}, "pool", "pattern"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], param: str | None, text: str) -> None:
    with refused(InvalidRequest, match=text, param=param):
        entry(**fields)


NOOP, REMOTE, MANAGED = {"engine": "noop"}, {"engine": "remote"}, {"engine": "managed"}


@pytest.mark.parametrize(
    ("fields", "option", "takes"),
    [
        (NOOP, {"tokens": "many"}, "a whole number of at least 0, not 'many'"),
        (NOOP, {"tokens": "two", "cache_tokens": 64}, "a whole number of at least 0, not 'two'"),
        (NOOP, {"tokens": True}, "a whole number of at least 0, not True"),
        (NOOP, {"tokens": 1.5}, "a whole number of at least 0, not 1.5"),
        (NOOP, {"delay_ms": "x"}, "a number of at least 0, not 'x'"),
        (NOOP, {"delay_ms": -1}, "a number of at least 0, not -1"),
        (NOOP, {"load_ms": float("inf")}, "a number of at least 0, not inf"),
        (NOOP, {"echo": "no"}, "true or false, not 'no'"),
        (REMOTE, {"timeout_s": []}, "a number above 0"),
        (REMOTE, {"tokens_per_minute": 0}, "a number above 0, not 0"),
        (REMOTE, {"api_key_env": 3}, "a text, not 3"),
        (REMOTE, {"headers": "x-a: secret"}, 'a table of names, each with a text or {env = "NAME"}'),
        (REMOTE, {"headers": {"x-a": ["secret"]}}, 'each with a text or {env = "NAME"}'),
        (REMOTE, {"headers": {"x-a": {"file": "secret"}}}, 'each with a text or {env = "NAME"}'),
        (REMOTE, {"continue": "always"}, "`none` or `prefix`, not 'always'"),
        (REMOTE, {"continue": True}, "`none` or `prefix`, not True"),
        (MANAGED, {"command": 5}, "a list of texts, or one line, not 5"),
        (MANAGED, {"command": ["a", ["b"]]}, "a list of texts, or one line"),
        (MANAGED, {"env": ["A=1"]}, "a table of names and texts"),
        (MANAGED, {"port": 70_000}, "a whole number from 1 to 65535, not 70000"),
        ({}, {"cache_tokens": 0}, "a whole number of at least 1, not 0"),
        ({"engine": "imaging"}, {"threads": "all"}, "a whole number of at least 1, not 'all'"),
    ],
)
def test_an_option_of_a_wrong_type_is_refused(fields: dict[str, Any], option: dict[str, Any], takes: str) -> None:
    name, *_ = option
    with pytest.raises(InvalidRequest) as caught:
        entry(**fields, options=option)
    assert str(caught.value).startswith(f"options.{name} takes ")
    assert f"{takes} (model m, engine {fields.get('engine', 'text')})" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert caught.value.param == f"options.{name}"


@pytest.mark.parametrize(
    ("fields", "given", "kept"),
    [
        (REMOTE, {"headers": {"x-a": "b", "x-number": 3, "x-token": {"env": "TOKEN"}}, "continue": "prefix"}, None),
        (MANAGED, {"command": ["server", "--port", 80], "env": {"OMP_NUM_THREADS": 4}, "silent_s": 5}, None),
        (MANAGED, {"command": ["server"], "timeout_s": 1.5}, None),
        (NOOP, {"tokens": 4.0, "chars": None}, {"tokens": 4.0}),
        (NOOP, {"cache_tokens": 64, "tokens": 2}, None),  # it replaces an engine with other options
    ],
)
def test_valid_options_are_kept(fields: Any, given: dict[str, Any], kept: dict[str, Any] | None) -> None:
    assert entry(**fields, options=given).options == (given if kept is None else kept)


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with refused(InvalidRequest, match="the options are api_key_env, caller_headers", param="options.api_key"):
        entry(**REMOTE, options={"api_key": "x"})


@pytest.mark.parametrize("given", [None, [], "m", 3])
def test_other_values_than_tables_are_refused(given: Any) -> None:
    with pytest.raises(InvalidRequest):
        parse_entry(given)


@pytest.mark.parametrize(
    ("given", "seconds"), [(30, 30), ("30", 30), ("5m", 300), ("1.5h", 5400), ("250ms", 0.25), (-1, None), ("-1", None)]
)
def test_keep_alive_is_a_number_or_a_duration(given: Any, seconds: float | None) -> None:
    assert entry(keep_alive=given).keep_alive == seconds


@pytest.mark.parametrize(
    ("given", "expected"), [(2, (2, 2)), ({"max": 3}, (1, 3)), ({"min": 2}, (2, 2)), ({"min": 1, "max": 4}, (1, 4))]
)
def test_replicas_are_a_number_or_bounds(given: Any, expected: tuple[int, int]) -> None:
    assert entry(replicas=given).replicas == Replicas(min=expected[0], max=expected[1])


def test_names_differ_among_the_models_that_one_worker_could_serve() -> None:
    check_names([entry(pool="a"), entry(pool="b")])
    with pytest.raises(ValueError, match="two models are called m"):
        check_names([entry(), entry(pool="b")])
    with pytest.raises(ValueError, match="two models are called x"):
        check_names([entry(aliases=["x"]), entry(id="x")])


def test_the_url_of_a_server_holds_no_password() -> None:
    with pytest.raises(InvalidRequest, match=r"a user name or password.*api_key_env") as caught:
        parse_entry({"id": "m", "source": "http://user:hunter2@host/v1", "engine": "remote"})
    assert caught.value.param == "source"
    assert "hunter2" not in caught.value.message


def test_a_worker_serves_the_entries_of_its_pool_and_of_none() -> None:
    every, mine, other = entry(id="every"), entry(id="mine", pool="a"), entry(id="other", pool="b")
    assert served_by([every, mine, other], "a") == [every, mine]
    assert served_by([every, mine, other], None) == [every]


@pytest.mark.parametrize(
    ("defaults", "options", "param"),
    [
        ({"inference_steps": 30}, {}, "defaults.inference_steps"),
        ({"seed": 1}, {"image_fields": {"sampler": "sampler"}}, "defaults.seed"),
        ({"previews": 2}, {"image_fields": {"seed": "seed"}}, "defaults.previews"),
        ({}, {"image_fields": {"size": "size"}}, "options.image_fields"),
        ({}, {"image_fields": {"seed": ""}}, "options.image_fields"),
        ({}, {"image_fields": ["seed"]}, "options.image_fields"),
        ({}, {"caller_headers": "x-a"}, "options.caller_headers"),
        ({}, {"caller_headers": ["Authorization"]}, "options.caller_headers"),
        ({}, {"caller_headers": ["x a"]}, "options.caller_headers"),
        ({}, {"caller_headers": ["X-API-Key"]}, "options.caller_headers"),
        ({}, {"caller_headers": ["X-A"], "headers": {"x-a": {"env": "A"}}}, "options.caller_headers"),
    ],
)
def test_what_a_remote_entry_may_not_say_of_images_and_headers(
    defaults: dict[str, Any], options: dict[str, Any], param: str
) -> None:
    fields = {"id": "m", "source": "http://x", "engine": "remote", "tasks": ["image_generation", "text_generation"]}
    with refused(InvalidRequest, param=param):
        parse_entry({**fields, "defaults": defaults, "options": options})
    taken = {"image_fields": {"inference_steps": "steps", "seed": "penstock.seed"}, "caller_headers": ["X-Objective"]}
    parse_entry({**fields, "defaults": {"inference_steps": 30, "n": 2, "seed": 1}, "options": taken})
