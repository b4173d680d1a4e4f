"""A list of prompts whose worker is killed while some of them run: one answer for each prompt, in their order."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from penstock.schemas.codec import default_codec
from penstock.schemas.records import StatusEvent
from system import System, eventually
from worker_requests import engine

Json = dict[str, Any]
SLOTS = 2
ECHO = engine(echo=True, delay_ms=60, slots=SLOTS)
"""Answers with the prompt, 16 characters every 60 ms."""
PROMPTS = [f"{number} " + "word " * words for number, words in enumerate((12, 180, 170, 190, 160, 10))]
"""The first is over at once, and the last waits for a slot until two of the long ones are over, after 6 s."""


def ask(gateway: str, *, stream: bool) -> list[tuple[int, str, str]]:
    """The index, text and finish reason of each answer. Of a stream, as its reader puts them together."""
    body: Json = {"model": "noop", "prompt": PROMPTS, "max_tokens": 1000, "stream": stream}
    with httpx.stream("POST", f"{gateway}/v1/completions", json=body, timeout=120) as answer:
        assert answer.status_code == 200, answer.read()
        if not stream:
            choices = json.loads(answer.read())["choices"]
            return [(choice["index"], choice["text"], choice["finish_reason"]) for choice in choices]
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    texts, reasons = defaultdict[int, str](str), defaultdict[int, str](str)
    for choice in choices:
        texts[choice["index"]] += choice["text"]
        reasons[choice["index"]] += choice["finish_reason"] or ""
    return [(index, texts[index], reasons[index]) for index in sorted(texts)]


def by_state(system: System) -> tuple[set[str], set[str]]:
    """The requests that have ended, and those that began and have not, as the topics say."""
    events = [default_codec().decode(one.value() or b"", StatusEvent) for one in system.read(system.names.status)]
    ended = set(system.outcomes())
    return ended, {event.request_id for event in events if event.status == "running"} - ended


def has_text(system: System) -> bool:
    """Whether a request that runs has written some of its text: before that nothing of it goes on."""
    return bool({event.request_id for event in system.results() if event.text} & by_state(system)[1])


@pytest.mark.slow
@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.thorough), True], ids=["plain", "streamed"])
def test_each_prompt_has_one_answer_in_its_place(make_system: Callable[..., System], stream: bool) -> None:
    system = make_system(models=[ECHO])
    first, gateway = system.worker("w1").wait_ready(), system.gateway().wait_ready()
    with ThreadPoolExecutor(1) as thread:
        asked = thread.submit(ask, gateway.url, stream=stream)
        eventually(lambda: all(by_state(system)) and (not stream or has_text(system)), 60, first.tail)
        first.kill9()
        ended, ran = by_state(system)
        listed = httpx.get(f"{gateway.url}/v1/requests?limit=100").json()["data"]
        assert len(listed) == len(PROMPTS)
        assert ended, "one must be over"
        assert ran, "one must run"
        assert len(ended | ran) < len(PROMPTS), "one must wait"
        second = system.worker("w2")
        answers = asked.result(120)
    assert answers == [(index, prompt, "stop") for index, prompt in enumerate(PROMPTS)]
    outcomes = system.outcomes()
    assert {one: outcomes[one].status for one in outcomes} == {one["request_id"]: "completed" for one in listed}
    assert {outcomes[one].worker_id for one in ended}.isdisjoint(outcomes[one].worker_id for one in ran)
    assert any(outcomes[one].since is not None for one in ran) is stream, "a stream goes on, the rest begins anew"
    system.wait_drained()
    assert second.stop() == 0, second.tail()
