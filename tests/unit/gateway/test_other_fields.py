"""Fields of other servers and unknown ones: passed on, without effect, refused, or ignored and named."""

from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.gateway.limits.callers import Caller
from penstock.gateway.openai.endpoints import CHAT, COMPLETION, EMBEDDING, IMAGE, RESPONSE, Endpoint
from penstock.gateway.openai.other_fields import UnknownFields, ignored_header
from penstock.schemas.errors import InvalidRequest, UnsupportedParameter
from penstock.schemas.records import InferenceRequest

CALLER = Caller(tenant="acme")
BODIES: dict[str, tuple[Endpoint, dict[str, Any]]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": "a"}]}),
    "completion": (COMPLETION, {"prompt": "a"}),
    "response": (RESPONSE, {"input": "a"}),
    "embedding": (EMBEDDING, {"input": "a"}),
    "image": (IMAGE, {"prompt": "a"}),
}
TEXT = ("chat", "completion", "response")


def asked(kind: str, fields: dict[str, Any], unknown: UnknownFields = "refuse") -> tuple[InferenceRequest, list[str]]:
    endpoint, body = BODIES[kind]
    read = endpoint.body.model_validate({**body, **fields})
    ignored = endpoint.set_aside(read, unknown)
    return endpoint.ask(read, CALLER, 1), ignored


@pytest.mark.parametrize("kind", TEXT)
def test_fields_of_other_servers_are_passed_to_every_model(kind: str) -> None:
    passed = {
        "repetition_penalty": 1.1,
        "min_tokens": 4,
        "ignore_eos": True,
        "truncate_prompt_tokens": 100,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    request, ignored = asked(kind, {"top_k": 40, **passed})
    assert (request.payload["top_k"], ignored) == (40, [])
    assert request.extra == {name: json.dumps(value) for name, value in passed.items()}


@pytest.mark.parametrize("unknown", ["refuse", "ignore"])
@pytest.mark.parametrize(
    ("kinds", "fields"),
    [
        (TEXT, {"top_k": -1, "repetition_penalty": 1.0, "min_tokens": 0, "ignore_eos": False}),
        (TEXT, {"top_k": 0, "chat_template_kwargs": {}, "truncate_prompt_tokens": None}),
        (TEXT, {"best_of": 1, "use_beam_search": False, "add_generation_prompt": True, "skip_special_tokens": True}),
        (TEXT, {"stream": True, "stream_options": {"continuous_usage_stats": True, "include_obfuscation": True}}),
        (("response",), {"truncation": "auto"}),
        (("image",), {"quality": "standard"}),
        (tuple(BODIES), {"whim": None}),
    ],
)
def test_fields_without_effect_are_accepted(
    kinds: tuple[str, ...], fields: dict[str, Any], unknown: UnknownFields
) -> None:
    for kind in kinds:
        request, ignored = asked(kind, fields, unknown)
        assert (request.extra, request.payload.get("top_k"), ignored) == ({}, None, [])


PLAIN = [{"role": "user", "content": text} for text in "ab"]


@pytest.mark.parametrize(
    ("kind", "fields", "param"),
    [
        ("chat", {"use_beam_search": True}, "use_beam_search"),
        ("chat", {"best_of": 2}, "best_of"),
        ("chat", {"guided_json": {}}, "guided_json"),
        ("completion", {"length_penalty": 2}, "length_penalty"),
        ("image", {"quality": "hd"}, "quality"),
        *((kind, {"whim": 1}, "whim") for kind in BODIES),
    ],
)
def test_fields_that_change_the_output_are_refused_or_ignored_and_named(
    kind: str, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        asked(kind, fields)
    assert caught.value.param == param
    plain, _ = asked(kind, {})
    request, ignored = asked(kind, fields, "ignore")
    assert ignored == [param]
    assert (request.payload, request.extra) == (plain.payload, plain.extra)


def test_fields_that_never_change_the_output_are_ignored_in_both_modes_and_named() -> None:
    """Unknown fields of messages are named together."""
    fields = {"store": True, "prompt_cache_key": "k", "cache_salt": None, "whim": 1}
    assert asked("chat", {**fields, "whim": None})[1] == ["store", "prompt_cache_key"]
    assert asked("chat", fields, "ignore")[1] == ["store", "prompt_cache_key", "whim"]
    messages = [{**PLAIN[0], "whim": 1, "id": "x"}, {**PLAIN[1], "whim": 2}]
    request, ignored = asked("chat", {"messages": messages}, "ignore")
    assert (request.payload["messages"], ignored) == (PLAIN, ["messages[].whim"])


@pytest.mark.parametrize(
    ("fields", "param"), [({"top_k": -2}, "top_k"), ({"penstock": {"top_k": 0}}, "penstock.top_k")]
)
def test_known_fields_must_have_their_types_in_both_modes(fields: dict[str, Any], param: str) -> None:
    for unknown in ("refuse", "ignore"):
        with pytest.raises(InvalidRequest) as caught:
            asked("chat", fields, unknown)
        assert caught.value.param == param


def test_a_header_names_plain_names_alone() -> None:
    names = ["store", "messages[].whim", "a\r\nset-cookie: x", "ä", "", "x" * 65]
    assert ignored_header(names) == {"penstock-ignored-fields": "store, messages[].whim"}
    assert ignored_header([]) == {}
    assert ignored_header(["\n"]) == {}
    assert len(ignored_header([f"f{number}" for number in range(2_000)])["penstock-ignored-fields"]) < 300
