"""Which runs of a remote model go on behind delivered text, in what form, what is counted, and what the trial tells."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.processors.engines.base import RunSpec
from penstock.processors.engines.remote.prefix import (
    BEGUN,
    QUESTION,
    DeliveredText,
    Said,
    behind,
    can_go_on,
    closed,
    counting,
    delivered,
    trial_body,
    unfit,
)
from penstock.schemas.errors import InvalidRequest

USER = {"role": "user", "content": "Hi"}
CHAT = {"model": "m", "messages": [USER], "max_tokens": 10, "stream": True, "stop": ["END"]}


def goes_on(text: str = "Once upon", *, calls: tuple[int, ...] = (), **fields: Any) -> bool:
    fields = {"messages": [USER], "task": "text_generation", **fields}
    spec = RunSpec(
        run_id="r", model="m", published=PublishedPrefix("m", text, (), calls, (1, 1)), stream=True, **fields
    )
    return can_go_on(spec, spec.messages)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, True),
        ({"params": {"max_tokens": 9, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1}}, True),
        ({"params": {"temperature": 0, "seed": 4}}, True),
        ({"params": {"temperature": 0.5, "seed": 4}}, False),
        ({"params": {"seed": 4}}, False),
        ({"params": {"n": 1, "presence_penalty": 0.0, "tools": [], "logprobs": False}}, True),
        ({"params": {"response_format": {"type": "text"}}}, True),
        ({"params": {"n": 2}}, False),
        ({"params": {"logprobs": True}}, False),
        ({"params": {"tools": [{"type": "function"}]}}, False),
        ({"params": {"response_format": {"type": "json_object"}}}, False),
        ({"params": {"presence_penalty": 0.5}}, False),
        ({"params": {"frequency_penalty": 0.5}}, False),
        ({"params": {"a_field_of_tomorrow": 1}}, False),
        ({"params": {"stop": ["END"]}}, True),
        ({"params": {"stop": ["END"]}, "text": "The E"}, False),
        ({"params": {"stop": ["END"]}, "text": "The END is"}, False),
        ({"extra": {"logit_bias": '{"1": 2}'}}, True),
        ({"extra": {"min_tokens": "5"}}, False),
        ({"extra": {"guided_regex": "a+"}}, False),
        ({"text": ""}, False),
        ({"text": "Once "}, False),
        ({"text": "Once\n"}, False),
        ({"text": "\n Once"}, True),
        ({"text": "<think>So"}, False),
        ({"text": "…und Käse"}, True),
        ({"calls": (3,)}, False),
        ({"messages": [USER, {"role": "assistant", "content": "Well"}]}, False),
        ({"messages": None, "prompt": "Once", "params": {"max_tokens": 9}}, True),
        ({"messages": None, "prompt": "Once"}, False),
        ({"messages": None, "params": {"max_tokens": 9, "prompt_token_ids": [1]}}, False),
        ({"task": "summarization"}, False),
    ],
)
def test_only_runs_go_on_that_depend_on_nothing_but_the_text(fields: dict[str, Any], expected: bool) -> None:
    assert goes_on(**fields) is expected


def test_nothing_goes_on_of_which_nothing_was_told() -> None:
    assert not can_go_on(RunSpec(run_id="r", task="text_generation", model="m", messages=[USER]), [USER])


def test_the_forms() -> None:
    said = {"role": "assistant", "content": "Once"}
    assert behind(CHAT, "Once") == {
        **CHAT,
        "messages": [USER, said],
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    assert behind({"prompt": "Say: ", "max_tokens": 3}, "Once") == {"prompt": "Say: Once", "max_tokens": 3}
    assert counting(CHAT) == {"model": "m", "messages": [USER], "max_tokens": 1, "stream": True}
    body = trial_body("m")
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": BEGUN}]
    assert closed(body) == {**body, "messages": turns, "add_generation_prompt": False}


def test_tokens_are_counted_once() -> None:
    before = delivered("Once", 7, 11)
    assert before == DeliveredText(text="Once", prompt_tokens=7, tokens=4)
    usage = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14, "cached_tokens": 11}
    assert before.usage(usage) == {
        "prompt_tokens": 7,
        "completion_tokens": 7,
        "total_tokens": 14,
        "cached_tokens": 7,
    }
    assert before.usage({}) == {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}


@pytest.mark.parametrize(("most", "left"), [(10, 6), (5, 1), (4, None), (3, None)])
def test_the_longest_answer_is_that_of_the_whole(most: int, left: int | None) -> None:
    rest = DeliveredText(text="Once", prompt_tokens=7, tokens=4).left({"max_tokens": most, "n": 1})
    assert rest == (None if left is None else {"max_tokens": left, "n": 1})


def test_an_answer_without_a_limit_has_none_behind_the_prefix() -> None:
    assert DeliveredText(text="Once", prompt_tokens=7, tokens=4).left({"n": 1}) == {"n": 1}


@pytest.mark.parametrize(("prompt", "longer"), [(None, 9), (7, None), (7, 7), (9, 7)])
def test_counts_without_the_prefix_are_a_refusal(prompt: int | None, longer: int | None) -> None:
    with pytest.raises(InvalidRequest):
        delivered("Once", prompt, longer)


def said(text: str, tokens: int | None, **fields: Any) -> Said:
    return Said(text=text, prompt_tokens=tokens, **fields)


ALONE = said("One, two, three", 20)
OPEN, SHUT = said(" five, six", 27), said("You forgot", 32)


@pytest.mark.parametrize(
    ("alone", "going_on", "closed_turn", "reason"),
    [
        (ALONE, OPEN, SHUT, None),
        (ALONE, said(" 5, 6", 27), SHUT, None),  # what a weak model says is not judged when the counts tell
        (ALONE, OPEN, None, None),
        (ALONE, OPEN, said("five", None), None),
        (ALONE, OPEN, said(" five, six", 27), None),  # it leaves every last turn open
        (ALONE, said("You forgot", 32), SHUT, "closes the prefix"),
        (ALONE, said(" 5, 6", 27), said(" 5, 6", 27), "closes the prefix"),
        (ALONE, said("One, two, three", 27), SHUT, "anew"),
        (ALONE, said("five, six", 27), SHUT, "drops the space"),
        (ALONE, said(" five", 20), SHUT, "leaves the prefix out"),
        (ALONE, said(" five", None), SHUT, "how many tokens"),
        (said("One", None), OPEN, SHUT, "how many tokens"),
        (said("", 20, thinks=True), OPEN, SHUT, "thinks"),
        (said("<think>\nOkay", 20), OPEN, SHUT, "thinks"),
        (ALONE, said("", 27, thinks=True), SHUT, "thinks"),
    ],
)
def test_what_the_trial_tells(alone: Said, going_on: Said, closed_turn: Said | None, reason: str | None) -> None:
    found = unfit(alone, going_on, closed_turn)
    assert (found is None) if reason is None else (found is not None and reason in found)
