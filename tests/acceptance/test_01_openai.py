"""Point 1: the stock OpenAI client with its base URL changed, on a real SmolLM2, and what it gets for bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

import openai
import pydantic
import pytest

from kit.assets import prepared
from system import Process

pytestmark = pytest.mark.model
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


def SYSTEM() -> dict[str, Any]:
    model = {
        "id": "smollm2-135m",
        "source": str(prepared("smollm2-135m")),
        "engine": "text",
        "tasks": ["text_generation"],
        "aliases": ["default"],
    }
    return {"models": [model]}


@pytest.fixture
def client(gateway: Process) -> openai.OpenAI:
    return openai.OpenAI(base_url=gateway.url + "/v1", api_key="unused", max_retries=0, timeout=120)


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(
        **{"model": "smollm2-135m", "messages": QUESTION, "max_tokens": 24, "temperature": 0, **options}
    )


def test_a_greedy_answer_names_paris_with_the_right_usage(client: openai.OpenAI, smollm2: Path) -> None:
    from transformers import AutoTokenizer

    answer = ask(client)
    choice = answer.choices[0]
    assert "Paris" in choice.message.content
    assert choice.finish_reason in {"stop", "length"}
    tokenizer = AutoTokenizer.from_pretrained(str(smollm2))
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert answer.usage.prompt_tokens == len(prompt["input_ids"])
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert 0 < answer.usage.completion_tokens <= 24


def test_streamed_and_plain_texts_are_equal(client: openai.OpenAI) -> None:
    plain = ask(client)
    stream = ask(client, stream=True, stream_options={"include_usage": True})
    text, reasons, usage = "", [], None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            text += choice.delta.content or ""
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    assert text == plain.choices[0].message.content
    assert reasons == [plain.choices[0].finish_reason]
    assert usage is not None
    assert usage.completion_tokens == plain.usage.completion_tokens


def test_completions_and_models(client: openai.OpenAI) -> None:
    done = client.completions.create(model="default", prompt="The capital of France is", max_tokens=6, temperature=0)
    assert "Paris" in done.choices[0].text
    assert "smollm2-135m" in {model.id for model in client.models.list()}


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    whole = ask(client).choices[0].message.content
    cut = ask(client, stop=["Paris"]).choices[0]
    assert cut.message.content == whole[: whole.index("Paris")]
    assert cut.finish_reason == "stop"


BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("a wrong model", {"model": "no-such-model"}, 404, "model_not_found"),
    ("negative max_tokens", {"max_tokens": -1}, 400, None),
    ("n=1000", {"n": 1000}, 400, "unsupported_parameter"),
    (
        "a form that cannot be enforced",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {"not": {}}}}},
        400,
        "invalid",
    ),
    (
        "the same beside the type",
        {"response_format": {"type": "json_object", "schema": {"not": {}}}},
        400,
        "invalid",
    ),
    ("a call without tools", {"tool_choice": "required"}, 400, "invalid"),
    ("temperature 9", {"temperature": 9.0}, 400, None),
    (
        "an over-long prompt",
        {"messages": [{"role": "user", "content": "word " * 20_000}]},
        400,
        "context_length_exceeded",
    ),
    ("what only remote models know", {"verbosity": "low"}, 400, "unsupported_parameter"),
    ("a chat template", {"extra_body": {"chat_template": "{{ x }}"}}, 400, "unsupported_parameter"),
]


@pytest.mark.parametrize(("options", "status", "code"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_bad_input_gets_its_code_and_the_engine_serves_on(
    client: openai.OpenAI, options: dict[str, Any], status: int, code: str | None
) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, **options)
    assert caught.value.status_code == status, caught.value.body
    if code is not None:
        assert caught.value.code == code
    assert ask(client, max_tokens=2).usage.completion_tokens >= 1


def test_a_10_mb_body_is_too_large(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        ask(client, messages=[{"role": "user", "content": "x" * 10_000_000}])
    assert caught.value.status_code == 413
    assert caught.value.code == "too_large"
    assert ask(client, max_tokens=2).usage.completion_tokens >= 1


class City(pydantic.BaseModel):
    name: Annotated[str, pydantic.Field(max_length=20)]
    people: Annotated[int, pydantic.Field(ge=0, le=99_999_999)]
    known_for: list[Literal["food", "art", "rivers"]] = pydantic.Field(max_length=3)


WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
FORCED: dict[str, Any] = {
    "tools": [WEATHER],
    "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
    "max_tokens": 60,
}


def test_an_answer_is_parsed_into_the_class_that_was_asked_for(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="smollm2-135m", messages=QUESTION, response_format=City, max_tokens=120, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, City)


@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
def test_a_schema_beside_the_type_is_obeyed(client: openai.OpenAI, kind: str) -> None:
    form = {"type": kind, "schema": City.model_json_schema()}
    answer = ask(client, response_format=form, max_tokens=120).choices[0]
    assert answer.finish_reason == "stop"
    City.model_validate_json(answer.message.content)


def test_a_json_object_without_schema_is_any_object(client: openai.OpenAI) -> None:
    # The longest answer is short: a small model may write members without an end.
    answer = ask(client, response_format={"type": "json_object"}, max_tokens=40).choices[0]
    assert answer.message.content.startswith("{")
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)


def test_a_call_of_a_tool_comes_plain_and_streamed_and_its_answer_goes_back(client: openai.OpenAI) -> None:
    asked = ask(client, **FORCED).choices[0]
    (call,) = asked.message.tool_calls
    assert (asked.finish_reason, asked.message.content, call.function.name) == ("tool_calls", None, "get_weather")
    assert set(json.loads(call.function.arguments)) == {"city"}
    pieces: list[str] = []
    with client.chat.completions.stream(model="smollm2-135m", messages=QUESTION, temperature=0, **FORCED) as stream:
        for event in stream:
            if event.type == "tool_calls.function.arguments.delta":
                pieces.append(event.arguments_delta)
        (streamed,) = stream.get_final_completion().choices[0].message.tool_calls or ()
    assert streamed.function.arguments == call.function.arguments == "".join(pieces)
    assert len(pieces) > 1, "they come as they are made"
    said = [*QUESTION, asked.message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    assert ask(client, messages=said, tools=[WEATHER], max_tokens=8).usage.prompt_tokens > 60


def test_a_conversation_keeps_calls_and_what_tools_said(client: openai.OpenAI) -> None:
    in_it: Any = {"extra_body": {"penstock": {"conversation_id": "weather"}}}
    first = ask(client, **FORCED, **in_it)
    (call,) = first.choices[0].message.tool_calls
    told = [{"role": "tool", "tool_call_id": call.id, "content": "It is sunny."}]
    second = ask(client, messages=told, max_tokens=8, **in_it)
    # The question, the call and what the tool said; the system block of the tools is not there any more.
    apart = ask(client, messages=[{"role": "user", "content": "It is sunny."}], max_tokens=8)
    assert second.usage.prompt_tokens > apart.usage.prompt_tokens + 20


def test_the_next_turn_of_a_chat_reuses_what_was_computed(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "Tell me of the rivers of France. " * 30}]
    first = ask(client, messages=long, max_tokens=8)
    said = [
        *long,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "So?"},
    ]
    usage = ask(client, messages=said, max_tokens=4).usage
    assert first.usage.prompt_tokens / 2 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


def test_a_turn_of_a_conversation_has_one_answer(client: openai.OpenAI) -> None:
    in_it: Any = {"extra_body": {"penstock": {"conversation_id": "several"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, n=2, **in_it)
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "n")


def test_several_answers_with_seeds_and_log_probabilities(client: openai.OpenAI) -> None:
    options: Any = {"n": 2, "seed": 5, "temperature": 1, "max_tokens": 12, "logprobs": True, "top_logprobs": 2}
    first, again = ask(client, **options), ask(client, **options)
    texts = [choice.message.content for choice in first.choices]
    assert texts == [choice.message.content for choice in again.choices]
    assert len(set(texts)) == 2
    for choice in first.choices:
        assert "".join(one.token for one in choice.logprobs.content).strip() == choice.message.content.strip()
        assert all(len(one.top_logprobs) == 2 and one.logprob <= 0 for one in choice.logprobs.content)
