"""Streams of remote models: one text after a kill if the server takes prefixes, begun anew if it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from prefix_server import STORY, TEMPLATE_TOKENS, Json, PrefixServer, tokens_of
from streamed import Chat, began, folds, read_frames
from system import System, eventually
from worker_requests import command, outcome, send

QUESTION = "Tell me a story."
CHAT: Json = {"messages": [{"role": "user", "content": QUESTION}]}
TOKENS = len(tokens_of(STORY))
PROMPT_TOKENS = 2 * TEMPLATE_TOKENS + len(tokens_of(QUESTION))


def far(server: PrefixServer) -> Json:
    options = {"continue": "prefix"}
    return {
        "id": "far",
        "source": server.url,
        "engine": "remote",
        "tasks": ["text_generation"],
        "aliases": ["default"],
        "options": options,
    }


def runs(server: PrefixServer) -> list[tuple[str, int, Json]]:
    """(prefix, tokens made, body) of what was asked for text: not of the trial, nor to count a prompt."""
    found: list[tuple[str, int, Json]] = []
    for body, made in zip(list(server.asked), list(server.made), strict=True):
        if body.get("max_tokens") == 1 or "Count" in str(body):
            continue
        if "prompt" in body:
            prefix = body["prompt"].partition("\n")[2]
        else:
            last = body["messages"][-1]
            prefix = last["content"] if last["role"] == "assistant" else ""
        found.append((prefix, made, body))
    return found


@pytest.mark.slow
def test_streams_go_on_after_their_worker_is_killed(make_system: Callable[..., System]) -> None:
    """Nothing that was delivered is made again, but for what cannot go on exactly: that says `restarted`."""
    with PrefixServer(delay_s=0.005, holds_at=150).listening() as server:
        system = make_system(models=[far(server)])
        worker, gateway = system.worker(), system.gateway().wait_ready()
        worker.wait_ready()
        whole, limited = Chat(gateway.url, {"model": "far"}), Chat(gateway.url, {"model": "far", "max_tokens": 300})
        prompt = {"prompt": QUESTION + "\n", "max_tokens": 1_000}
        send(
            system,
            {"request_id": "native", "payload": CHAT, "stream": True},
            {"request_id": "prompt", "payload": prompt, "stream": True},
            {"request_id": "anew", "payload": {**CHAT, "presence_penalty": 0.5}, "stream": True},
        )
        frames, cursor = read_frames(gateway.url, "native", None, most=4)
        whole.read(5)
        limited.read(5)
        eventually(lambda: began(system.results()) >= {"native", "prompt", "anew"}, 30, worker.tail)
        worker.kill9()
        server.may_end.set()
        worker = system.worker("w2").wait_ready()
        usage = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": TOKENS}
        assert whole.whole() == (STORY, "", "stop", usage)
        text = "".join(tokens_of(STORY)[:300])
        assert limited.whole() == (text, "", "length", {**usage, "completion_tokens": 300})
        more, _ = read_frames(gateway.url, "native", cursor)
        seen = [*frames, *more]
        assert "".join(frame["text"] for frame in seen if frame["type"] == "chunk") == STORY
        assert [frame["type"] for frame in seen if frame["type"] in ("restarted", "result")] == ["result"]
        for one in ("prompt", "anew"):
            assert outcome(system, one).output_text == STORY
        found = folds(system, ("native", "prompt", "anew"))
        assert {one: fold.restarts for one, fold in found.items()} == {"native": 0, "prompt": 0, "anew": 1}
        asked = runs(server)
        assert [body.get("presence_penalty") for prefix, _, body in asked if not prefix][5:] == [0.5]
        going_on = [(prefix, made, body) for prefix, made, body in asked if prefix]
        assert len(going_on) == 4
        for prefix, made, body in going_on:
            assert STORY.startswith(prefix)
            assert made == (300 if body.get("max_tokens", 1_000) < 300 else TOKENS) - len(tokens_of(prefix))
        assert worker.stop() == 0, worker.tail()


def test_a_stream_goes_on_when_its_server_breaks_off(make_system: Callable[..., System]) -> None:
    with PrefixServer(delay_s=0.001, breaks=3).listening() as server:
        system = make_system(models=[far(server)])
        worker = system.worker().wait_ready()
        send(system, {"request_id": "r", "payload": CHAT, "stream": True})
        assert outcome(system, "r", 60).output_text == STORY
        fold = folds(system, ["r"])["r"]
        assert (fold.text, fold.restarts) == (STORY, 0)
        made_behind = [(len(tokens_of(prefix)), made) for prefix, made, _ in runs(server)]
        assert [made for _, made in made_behind[:3]] == [100, 100, 100]
        places = [place for place, _ in made_behind]
        assert places == sorted(set(places)), "it began again at a place where it was before"
        assert len(places) == 4
        assert made_behind[-1] == (places[-1], TOKENS - places[-1])
        assert worker.stop() == 0, worker.tail()


def test_a_server_that_refuses_prefixes_begins_anew_and_operators_see_why(make_system: Callable[..., System]) -> None:
    with PrefixServer(kind="refuses", delay_s=0.005, holds_at=150).listening() as server:
        system = make_system(models=[far(server)])
        worker, gateway = system.worker(), system.gateway().wait_ready()
        worker.wait_ready()

        def reason() -> str:
            listed = httpx.get(gateway.url + "/v1/models", timeout=10).json()["data"]
            return str(next(one["reason"] for one in listed if one["id"] == "far"))

        eventually(lambda: "refuses a prefix" in reason(), 30, reason)
        send(system, {"request_id": "r", "payload": CHAT, "stream": True})
        frames, cursor = read_frames(gateway.url, "r", None, most=4)
        worker.kill9()
        server.may_end.set()
        worker = system.worker("w2").wait_ready()
        more, _ = read_frames(gateway.url, "r", cursor)
        types = [frame["type"] for frame in [*frames, *more]]
        assert types.count("restarted") == 1
        assert more[-1]["result"]["text"] == STORY
        assert not any(prefix for prefix, _, _ in runs(server))
        assert worker.tail(10_000).count("remote.prefix_unfit model=far") == 1
        assert worker.stop() == 0, worker.tail()


@pytest.mark.thorough
def test_one_that_is_cancelled_while_its_prefix_is_counted_ends_and_others_go_on(
    make_system: Callable[..., System],
) -> None:
    with PrefixServer(delay_s=0.005, holds_at=150).listening() as server:
        system = make_system(models=[far(server)])
        worker = system.worker().wait_ready()
        ids = {"cancelled", "late", "goes-on"}
        send(system, *({"request_id": one, "payload": CHAT, "stream": True} for one in ids))
        eventually(lambda: began(system.results()) >= ids, 30, worker.tail)
        server.may_count.clear()
        worker.kill9()
        worker = system.worker("w2").wait_ready()

        def counts() -> int:
            return sum(body.get("max_tokens") == 1 for body in list(server.asked))

        eventually(lambda: counts() == 3, 60, worker.tail)
        command(system, "cancel", "cancelled")
        assert outcome(system, "cancelled").status == "cancelled"
        server.may_count.set()
        found: dict[str, Any] = {one: outcome(system, one, 60).output_text for one in ("late", "goes-on")}
        assert set(found.values()) == {STORY}
        assert [fold.restarts for fold in folds(system, ids).values()] == [0, 0, 0]
        assert len([prefix for prefix, _, _ in runs(server) if prefix]) == 2
        assert worker.stop() == 0, worker.tail()


@pytest.mark.slow
@pytest.mark.model
def test_a_text_of_llama_cpp_s_server_goes_on(make_system: Callable[..., System], llama_cpp: Json) -> None:
    """It dies with its worker. The next one's is tried anew."""
    managed = {**llama_cpp, "id": "llama", "options": {**llama_cpp["options"], "continue": "prefix"}}
    system = make_system(models=[managed])
    worker, gateway = system.worker(), system.gateway().wait_ready()
    worker.wait_ready()
    chat = Chat(gateway.url, {"model": "llama", "temperature": 0, "max_tokens": 150})
    chat.read(4)
    worker.kill9()
    before = len(chat.chunks)
    worker = system.worker("w2").wait_ready()
    _, _, reason, usage = chat.whole()
    assert reason in ("length", "stop")
    assert (usage["completion_tokens"] == 150) == (reason == "length")
    assert len(chat.chunks) > before
    (event,) = system.outcomes().values()
    assert event.since is not None
    assert "remote.prefix_works model=llama" in worker.tail(10_000)
    assert worker.stop() == 0, worker.tail()
