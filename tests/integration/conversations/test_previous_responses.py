"""Responses that go on behind earlier ones, by the stock client: two that go on from one are two branches."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from system import NOOP, System

MODELS = [
    {**NOOP, "id": "echo", "options": {"echo": True}},
    {**NOOP, "id": "slow", "options": {"first_delay_ms": 600_000}},
]


SYSTEM = {"models": MODELS, "processes": ["w1", "g1", "g2"]}


def client_of(system: System, name: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=system.process(name).url + "/v1", api_key="unused", max_retries=0, timeout=60)


def told(response: Any) -> list[tuple[str, str]]:
    """What the model was given; it repeats that as its answer."""
    return [(one["role"], one["content"]) for one in json.loads(response.output_text)]


def test_two_that_go_on_from_one_are_branches_at_any_gateway(system: System) -> None:
    one, other = client_of(system, "g1"), client_of(system, "g2")
    first = one.responses.create(model="echo", input="q0", instructions="Be brief.")
    assert told(first) == [("system", "Be brief."), ("user", "q0")]
    left = one.responses.create(model="echo", input="q1", previous_response_id=first.id)
    right = other.responses.create(
        model="echo",
        input=[{"role": "user", "content": "q1, edited"}],
        previous_response_id=first.id,
        instructions="Be long.",
    )
    asked = [("user", "q0"), ("assistant", first.output_text)]
    assert told(left) == [*asked, ("user", "q1")], "instructions are not taken along"
    assert told(right) == [("system", "Be long."), *asked, ("user", "q1, edited")]
    last = other.responses.create(model="echo", input="q2", previous_response_id=left.id)
    assert told(last) == [*asked, ("user", "q1"), ("assistant", left.output_text), ("user", "q2")]
    assert (first.previous_response_id, last.previous_response_id) == (None, left.id)
    assert one.responses.retrieve(last.id).previous_response_id == left.id
    # Each has all that it was made of: the chain may be deleted in front of it.
    one.responses.delete(first.id)
    again = one.responses.create(model="echo", input="q2", previous_response_id=left.id)
    assert told(again) == told(last)


def test_what_nothing_goes_on_from_is_refused(system: System) -> None:
    client = client_of(system, "g1")
    turn = client.responses.create(model="echo", input="q0", conversation="talk")
    unstored = client.responses.create(model="echo", input="q0", store=False)
    waiting = client.responses.create(model="slow", input="q0", background=True)
    refusals: list[tuple[str, dict[str, Any], int]] = [
        ("resp_nowhere", {}, 404),
        ("chatcmpl-1", {}, 404),
        (unstored.id, {}, 404),
        (waiting.id, {}, 409),
        (turn.id, {}, 400),
        (waiting.id, {"conversation": "other"}, 400),
    ]
    for previous, more, status in refusals:
        with pytest.raises(openai.APIStatusError) as refused:
            client.responses.create(model="echo", input="q1", previous_response_id=previous, **more)
        assert (refused.value.status_code, refused.value.param) == (status, "previous_response_id"), previous
    client.responses.cancel(waiting.id)
    with pytest.raises(openai.ConflictError, match="did not complete"):
        client.responses.create(model="echo", input="q1", previous_response_id=waiting.id)
