"""OpenAI bodies: every field of the stock client is classified, and none that changes the output passes silently."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.resources.chat.completions import Completions as ChatCompletions
from openai.resources.completions import Completions
from openai.resources.embeddings import Embeddings
from openai.resources.responses import Responses
from pydantic import BaseModel, ValidationError

from kit.gateway_http import call, gateway_app
from kit.refusals import refused
from penstock.gateway.app import ROUTERS
from penstock.gateway.edge.validation import invalid_from_validation
from penstock.gateway.limits.callers import Caller
from penstock.gateway.openai import chat_answers as answers
from penstock.gateway.openai import chat_bodies as shapes
from penstock.gateway.openai.other_fields import Anything
from penstock.gateway.openai.responses_bodies import HARMLESS_RESPONSE, WORDS, ResponsesBody
from penstock.schemas.errors import Forbidden, InvalidRequest, TooLarge, UnsupportedParameter

OF_THE_CLIENT = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}


@pytest.mark.parametrize(
    ("method", "body", "harmless"),
    [
        (ChatCompletions.create, shapes.ChatCompletionBody, shapes.HARMLESS_CHAT),
        (Completions.create, shapes.CompletionBody, shapes.HARMLESS_COMPLETION),
        (Embeddings.create, shapes.EmbeddingBody, shapes.HARMLESS_EMBEDDING),
        (Responses.create, ResponsesBody, HARMLESS_RESPONSE),
    ],
)
def test_every_field_of_the_stock_client_is_classified(method: Any, body: Any, harmless: dict[str, Any]) -> None:
    fields = set(inspect.signature(method).parameters) - OF_THE_CLIENT
    assert fields <= set(body.model_fields) | set(harmless), fields - set(body.model_fields) - set(harmless)
    assert not set(body.model_fields) & set(harmless), "a field is either supported or not"


def chat(**fields: Any) -> Any:
    body = shapes.ChatCompletionBody.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})
    return shapes.chat_request(body, Caller(tenant="acme", max_priority=3), now_ms=0)


def test_what_is_passed_on_may_be_as_long_as_a_text() -> None:
    """It travels among `extra`, whose entries together are short; the caller has no idea of that."""
    prediction = {"type": "content", "content": "ä" * 100_000}
    biases = {str(token): 1.0 for token in range(10_000, 12_000)}
    request = chat(prediction=prediction, logit_bias=biases, penstock={"extra": {"note": "x"}})
    assert json.loads(request.extra["prediction"]) == prediction
    assert json.loads(request.extra["logit_bias"]) == biases
    assert request.extra["note"] == "x"


@pytest.mark.parametrize("options", [{}, {"penstock": {"extra": {"note": "x"}}}])
@pytest.mark.parametrize(("content", "error"), [("x" * 4_000_001, TooLarge), ("\ud800", InvalidRequest)])
def test_what_cannot_be_passed_on_is_refused_by_its_name(options: Any, content: str, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        chat(prediction={"type": "content", "content": content}, **options)
    assert (caught.value.param, caught.value.message.split()[0]) == ("prediction", "prediction")  # type: ignore[attr-defined]


NAMES_OF_FIELDS = st.sampled_from(sorted(shapes.HARMLESS_CHAT)) | st.text(min_size=1, max_size=12)


@given(NAMES_OF_FIELDS, st.sampled_from([1.5, True, "x", {"a": 1}, ["x"], -1]))
def test_what_is_not_supported_or_unknown_is_neutral_or_refused(name: str, value: Any) -> None:
    if name in shapes.ChatCompletionBody.model_fields:
        return
    accepted = shapes.HARMLESS_CHAT.get(name, ())
    assert chat(**{name: None}).payload == chat().payload
    if isinstance(accepted, Anything) or any(value is item for item in accepted):
        chat(**{name: value})
        return
    with refused(UnsupportedParameter, param=name):
        chat(**{name: value})
    for neutral in accepted:
        assert chat(**{name: neutral}).payload == chat().payload


@pytest.mark.parametrize(
    ("fields", "priority", "error", "param"),
    [
        ({}, 5, None, None),
        ({"service_tier": "auto"}, 5, None, None),
        ({"service_tier": "flex"}, 8, None, None),
        ({"penstock": {"priority": 3}}, 3, None, None),
        ({"service_tier": "priority"}, None, Forbidden, None),
        ({"service_tier": "fast"}, None, Forbidden, None),
        ({"penstock": {"priority": 1}}, None, Forbidden, "penstock.priority"),
        ({"stream_options": {"include_usage": True}}, None, InvalidRequest, None),
    ],
)
def test_a_tier_is_a_priority_up_to_the_keys(
    fields: dict[str, Any], priority: int | None, error: Any, param: str | None
) -> None:
    with refused(error, **({} if param is None else {"param": param})):
        made = chat(**fields)
        assert (made.priority, made.tenant) == (priority, "acme")


@pytest.mark.parametrize(
    ("result", "reason"), [({"finish_reason": "length"}, "length"), ({"finish_reason": "eos"}, "stop"), ({}, "stop")]
)
def test_unknown_finish_reasons_become_stop(result: dict[str, Any], reason: str) -> None:
    assert answers.finish_reason(result) == reason


MANY: Any = [1] * 200_000
NAMES = {f"a{number}": "x" for number in range(200_000)}
CHAT_WRONG: dict[str, Any] = {"messages": MANY, "tools": MANY, "stop": MANY} | dict.fromkeys(
    ("logit_bias", "metadata", "stream_options", "penstock"), NAMES
)
RESPONSE_WRONG: dict[str, Any] = {"input": MANY, "include": MANY, "tools": MANY} | dict.fromkeys(
    ("metadata", "reasoning", "text", "stream_options"), NAMES
)


@pytest.mark.parametrize(
    ("body", "name", "value"),
    [
        *((shapes.ChatCompletionBody, *item) for item in CHAT_WRONG.items()),
        *((ResponsesBody, *item) for item in RESPONSE_WRONG.items()),
    ],
)
def test_a_very_large_wrong_value_has_few_errors(body: type[BaseModel], name: str, value: Any) -> None:
    """The framework lists every problem before any code of ours runs. A missing field is told in plain words."""
    first = "messages" if body is shapes.ChatCompletionBody else "input"
    with pytest.raises((ValidationError, TooLarge)) as caught:
        body.model_validate({first: [], name: value})
    error = caught.value
    if isinstance(error, ValidationError):
        assert error.error_count() < 10
        error = invalid_from_validation(error, {first: [], name: value})
    assert (error.param or "").startswith(name)
    with pytest.raises(ValidationError) as missing:
        body.model_validate({"model": "m"})
    assert body is ResponsesBody or str(invalid_from_validation(missing.value)) == f"{first} is missing"


@pytest.mark.parametrize(
    ("native", "chat_name", "responses_name"),
    [
        ("messages[0].content[1].image.url", "messages[0].content[1].image_url.url", "input[0].content[1].image_url"),
        ("messages[2].content[0].image_url", "messages[2].content[0].image_url.url", "input[2].content[0].image_url"),
        ("messages[2].content[0]", "messages[2].content[0]", "input[2].content[0]"),
        ("image.url", "image.url", "image.url"),
    ],
)
def test_an_image_has_the_name_that_the_route_gives_it(native: str, chat_name: str, responses_name: str) -> None:
    error = InvalidRequest(f"payload.{native} is not good", param=f"payload.{native}")
    for words, name in (({}, chat_name), (WORDS, responses_name)):
        told = shapes.in_openai_words(error, words=words)
        assert (told.param, told.message) == (name, f"{name} is not good")


@pytest.mark.parametrize(
    ("path", "body", "param", "says"),
    [
        ("responses", {"input": 5}, "input", "must be text or a list"),
        ("responses", {"input": "x", "reasoning": {"summary": "long"}}, "reasoning.summary", "must be auto"),
        ("responses", {"input": "x", "max_output_tokens": "5"}, "max_output_tokens", "must be a whole number"),
        ("responses", {"input": "x", "metadata": {"a": 5}}, "metadata.a", "must be text"),
        ("responses", {"input": "x", "text": 5}, "text", "must be an object"),
        ("responses", {"input": "x", "penstock": {"x": 1}}, "penstock.x", "is not supported"),
        ("chat/completions", {"messages": "x"}, "messages", "must be a list"),
        ("chat/completions", {"messages": [], "stream": "yes"}, "stream", "must be true or false"),
        ("chat/completions", {}, "messages", "is missing"),
        ("completions", {"prompt": {"a": 1}}, "prompt", "must be text or a list"),
        ("embeddings", {"input": {}}, "input", "must be text or a list"),
        ("images/generations", {"prompt": "x", "n": 1.5}, "n", "must be a whole number"),
        ("images/generations", {"prompt": "x", "output_format": "gif"}, "output_format", "must be png, jpeg or webp"),
        ("images/generations", {"prompt": "x", "partial_images": 9}, "partial_images", "must be at most 3"),
    ],
)
async def test_a_wrong_field_is_named_as_it_was_written(path: str, body: dict[str, Any], param: str, says: str) -> None:
    """No form of a union stands in the name, and no message is the framework's."""
    answer = await call(gateway_app(*ROUTERS, hot=True), "POST", f"/v1/{path}", json={"model": "m", **body})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["message"]) == (400, param, f"{param} {says}")
