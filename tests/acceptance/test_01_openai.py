"""Point 1: the stock OpenAI client with its base URL changed, on a real SmolLM2, and what it gets for bad input."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from system import Process, System

pytestmark = pytest.mark.model
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def gateway(make_system: Callable[..., System], smollm2: Path) -> Process:
    model = {
        "id": "smollm2-135m",
        "source": str(smollm2),
        "engine": "text",
        "tasks": ["text_generation"],
        "aliases": ["default"],
    }
    system = make_system(models=[model])
    worker = system.worker()
    gateway = system.gateway().wait_ready()
    worker.wait_ready(180)
    return gateway


@pytest.fixture(scope="module")
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
        "tools",
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}]},
        400,
        "unsupported_parameter",
    ),
    ("temperature 9", {"temperature": 9.0}, 400, None),
    (
        "an over-long prompt",
        {"messages": [{"role": "user", "content": "word " * 20_000}]},
        400,
        "context_length_exceeded",
    ),
    ("an unknown sampling parameter", {"extra_body": {"min_p": 0.1}}, 400, "unsupported_parameter"),
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
