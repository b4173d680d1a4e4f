"""A stream whose engine or worker is killed goes on where it stopped: its reader sees one text, begun once."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamed import Chat, Serving, began, folds, read_frames, serving_tiny
from system import System, eventually
from worker_requests import engine, outcome, send

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 24}},
    "required": ["a"],
}
TOOL = {"type": "function", "function": {"name": "tell", "parameters": SCHEMA}}
TOKENS = 400
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 11},
    "guided": {
        "temperature": 0.9,
        "seed": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    },
    "call": {"temperature": 0.9, "seed": 5, "tools": [TOOL], "tool_choice": "required"},
}
CHATS = {name: {"model": "tiny", "max_tokens": TOKENS, **chat} for name, chat in KINDS.items()}
WORDS = 60
SLOW = engine(tokens=WORDS, delay_ms=60, slots=64)


@pytest.fixture(scope="module")
def serving(kafka: Any, tiny_lm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving_tiny(kafka, tiny_lm, tmp_path_factory.mktemp("streams")) as started:
        yield started


@pytest.mark.slow
def test_chats_go_on_after_a_kill(serving: Serving) -> None:
    """Of their engine; then, when the same are asked again, of their worker."""
    url = serving.gateway.url
    expected = {name: Chat(url, chat).whole() for name, chat in CHATS.items()}
    assert expected["plain"][3]["completion_tokens"] == TOKENS
    for times, victim in enumerate(("engine", "worker"), 1):
        chats = {name: Chat(url, chat) for name, chat in CHATS.items()}
        for chat in chats.values():
            chat.read(3)
        serving.kill(victim)
        assert {name: chat.whole() for name, chat in chats.items()} == expected, victim
        assert len(serving.gone_on()) == times * len(chats), f"they were over before the kill of the {victim}"


@pytest.mark.slow
def test_a_text_goes_on_when_its_gateway_dies_in_the_same_second(serving: Serving) -> None:
    system, port = serving.system, serving.gateway.port
    payload = {"messages": [{"role": "user", "content": "Tell me a story."}], "max_tokens": 400, "temperature": 0}
    send(system, {"request_id": "whole", "payload": payload, "stream": True})
    whole = outcome(system, "whole", 90).output_text
    send(system, {"request_id": "cut", "payload": payload, "stream": True})
    frames, cursor = read_frames(serving.gateway.url, "cut", None, most=4)
    serving.worker.kill9()
    serving.gateway.kill9()
    serving.worker = system.worker("last")
    serving.gateway = system.gateway(port=port).wait_ready()
    more, _ = read_frames(serving.gateway.url, "cut", cursor)
    types = [frame["type"] for frame in [*frames, *more]]
    assert "restarted" not in types
    assert types.count("result") == 1
    assert "".join(frame["text"] for frame in [*frames, *more] if frame["type"] == "chunk") == whole
    assert more[-1]["result"]["text"] == whole


@pytest.mark.parametrize("how", [pytest.param("killed", marks=pytest.mark.thorough), "stopped and woken"])
def test_streams_of_a_worker_that_dies_or_sleeps_go_on_in_another(make_system: Callable[..., System], how: str) -> None:
    """One that was only stopped wakes as a zombie, and writes on: nobody hears it."""
    system = make_system(models=[SLOW])
    first, second = system.worker("w1"), system.worker("w2")
    first.wait_ready()
    second.wait_ready()
    ids = [f"r{number}" for number in range(24)]
    send(
        system, *({"request_id": one, "payload": {"prompt": "go", "max_tokens": WORDS}, "stream": True} for one in ids)
    )
    eventually(lambda: began(system.results()) == set(ids), 60, first.tail)
    if how == "killed":
        first.kill9()
    else:
        os.kill(first.popen.pid, signal.SIGSTOP)
    for one in ids:
        assert outcome(system, one, 120).status == "completed", second.tail()
    if how != "killed":
        os.kill(first.popen.pid, signal.SIGCONT)
        eventually(lambda: first.ready() and system.lag() == 0, 60, first.tail)
        assert first.stop() == 0, first.tail()
    found = folds(system, ids)
    whole = "".join(f"word{number} " for number in range(WORDS))
    assert {fold.text for fold in found.values()} == {whole}
    assert [fold.request_id for fold in found.values() if fold.restarts or fold.gap] == []
    assert any(fold.since != fold.place for fold in found.values()), "the first worker ran none of them"
    assert second.stop() == 0, second.tail()
