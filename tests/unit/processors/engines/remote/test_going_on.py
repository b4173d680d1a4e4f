"""The remote engine goes on behind delivered text, against a server that takes prefixes, and ones that do not."""

from __future__ import annotations

import asyncio
import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import httpx
import pytest

from kit import engines as kit
from kit.engines import Handler, Sink, sse
from penstock.processors.core.work.published_prefix import PublishedPrefix
from penstock.processors.engines.base import EngineState, Finished, RunSpec, TurnedAway
from penstock.processors.engines.remote import trial
from penstock.processors.engines.remote.engine import RemoteEngine
from penstock.schemas.errors import EngineFailed
from prefix_server import STORY, PrefixServer, tokens_of
from support import wait_until_async

USER = {"role": "user", "content": "Tell me a story."}


def handler_of(server: PrefixServer) -> Handler:
    def handle(request: httpx.Request) -> httpx.Response:
        status, events = server.answer(json.loads(request.content))
        return sse(*events) if status == 200 else httpx.Response(status, json=next(events))

    return handle


def serving(server: PrefixServer, **options: Any) -> AbstractAsyncContextManager[RemoteEngine]:
    return kit.serving(handler_of(server), **{"continue": "prefix", **options})


def asked(published: str | None = None, **fields: Any) -> RunSpec:
    before = None if published is None else PublishedPrefix("m", published, (), (), (1, 1))
    fields = {"messages": [USER], "params": {"max_tokens": 1_000}, **fields}
    return RunSpec(
        run_id="r1", request_id="a", task="text_generation", model="m", stream=True, published=before, **fields
    )


async def run(engine: RemoteEngine, spec: RunSpec) -> tuple[bool, Sink, Any]:
    sink = Sink()
    prepared = await engine.prepare(spec)
    engine.run(spec, prepared, sink)
    return prepared.goes_on, sink, await asyncio.wait_for(sink.done, 10)


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("continues", None),
        ("leaves_open", None),
        ("refuses", "refuses a prefix"),
        ("ignores", "anew"),
        ("closes", "anew"),
        ("counts_nothing", "how many tokens"),
        ("echoes", "anew"),
        ("thinks", "thinks"),
        ("strips", "drops the space"),
    ],
)
async def test_the_server_is_tried_when_the_model_starts(kind: str, note: str | None) -> None:
    server = PrefixServer(kind=kind)
    async with serving(server) as engine:
        found = engine.info().note
        assert (found is None) if note is None else (found is not None and note in found)
        tried = len(server.asked)
        assert tried == (2 if kind == "refuses" else 3)
        goes_on, sink, finished = await run(engine, asked(STORY[:50]))
    assert goes_on is (note is None)
    assert finished.output["text"].endswith(STORY) or kind == "strips"
    assert "".join(sink.texts) == (STORY[50:] if goes_on else finished.output["text"])


async def test_nothing_is_tried_or_sent_otherwise_without_the_option() -> None:
    server = PrefixServer()
    async with serving(server, **{"continue": "none"}) as engine:
        goes_on, sink, _ = await run(engine, asked(STORY[:50]))
        assert (goes_on, engine.info().note, len(server.asked)) == (False, None, 1)
    assert sink.texts == [token for token in tokens_of(STORY) if token]


@pytest.mark.parametrize("form", ["chat", "prompt"])
async def test_a_text_that_was_cut_anywhere_is_the_whole_text(form: str) -> None:
    """What was delivered is all deltas up to the cut; they never end in white space, which templates strip."""
    fields: dict[str, Any] = {} if form == "chat" else {"messages": None, "prompt": "Tell me a story.\n"}
    fields["params"] = {"max_tokens": 200, "stop": ["NEVER"], "temperature": 0}
    server = PrefixServer()
    async with serving(server) as engine:
        _, sink, whole = await run(engine, asked(**fields))
        assert (whole.finish_reason, (whole.usage or {})["completion_tokens"]) == ("length", 200)
        texts = sink.texts
        assert [text for text in texts if text[-1].isspace()] == []
        for cut in range(1, len(texts)):
            published = "".join(texts[:cut])
            before = len(server.asked)
            goes_on, more, rest = await run(engine, asked(published, **fields))
            assert goes_on
            assert (rest.output, rest.finish_reason, rest.usage) == (whole.output, "length", whole.usage)
            assert published + "".join(more.texts) == whole.output["text"]
            assert server.made[before:] == [1, 1, 200 - len(tokens_of(published))]


async def test_nothing_is_asked_for_when_all_was_delivered() -> None:
    server = PrefixServer()
    text = "".join(tokens_of(STORY)[:20])
    async with serving(server) as engine:
        goes_on, sink, finished = await run(engine, asked(text, params={"max_tokens": 20}))
    assert goes_on
    assert (finished.output, finished.finish_reason, sink.texts) == ({"text": text}, "length", [])
    assert (finished.usage or {})["completion_tokens"] == 20
    assert server.made[3:] == [1, 1]


async def test_a_server_that_refuses_a_prefix_later_gets_the_request_anew() -> None:
    server = PrefixServer()
    async with serving(server) as engine:
        server.kind = "refuses"
        goes_on, sink, failed = await run(engine, asked(STORY[:50]))
        assert goes_on
        assert (type(failed.error), failed.retryable_here, sink.texts) == (TurnedAway, True, [])
        goes_on, sink, finished = await run(engine, asked(STORY[:50]))
    assert not goes_on
    assert isinstance(finished, Finished)
    assert "".join(sink.texts) == STORY


async def test_a_server_that_is_away_at_the_start_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "DELAYS_S", (0.01, 0.02))
    server = PrefixServer(away=True)
    async with serving(server) as engine:
        assert engine.state is EngineState.READY
        assert "could not be tried" in (engine.info().note or "")
        assert not (await engine.prepare(asked(STORY[:50]))).goes_on
        await wait_until_async(lambda: len(server.asked) > 3, 10)
        server.away = False
        await wait_until_async(lambda: engine.info().note is None, 10)
        assert (await engine.prepare(asked(STORY[:50]))).goes_on
        tried = len(server.asked)
    assert len(server.asked) == tried


async def test_a_server_that_hangs_does_not_hold_the_load_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "FIRST_TRIAL_S", 0.05)

    async def hang(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with kit.serving(hang, **{"continue": "prefix"}) as engine:
        assert (engine.state, "in time" in (engine.info().note or "")) == (EngineState.READY, True)


async def test_an_engine_that_is_stopped_while_it_tries_the_server_has_not_started() -> None:
    asking = asyncio.Event()

    async def hang(request: httpx.Request) -> httpx.Response:
        asking.set()
        await engine.stop()
        raise httpx.ReadError("closed", request=request)

    async with kit.listening(hang) as resolver:
        engine = RemoteEngine("m", "http://server", {"continue": "prefix"}, resolver=resolver)
        with pytest.raises(EngineFailed, match="stopped while"):
            await engine.start()
    assert asking.is_set()
    assert engine.state is EngineState.STOPPED
    await engine.stop()
