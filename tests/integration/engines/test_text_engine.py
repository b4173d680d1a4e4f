"""The text engine in its process: streams, limits, and that nothing a caller sends stops the others."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from penstock.processors.earlier_messages import EarlierMessages
from penstock.processors.engines.base import Finished, Prepared, RunSpec
from penstock.schemas.errors import ContextLengthExceeded, InvalidRequest
from penstock.schemas.records import ContextHeld, ContextLimits

from .conftest import Run, Runner, StartEngine, changed_copy

STORY = "Tell me a story about a dog."


async def test_a_stream_is_its_text_and_plain_equals_streamed(start_engine: StartEngine, tiny_lm: Path) -> None:
    runner = await start_engine("text", tiny_lm)
    streamed = await runner.chat(STORY, max_tokens=60)
    found = await streamed.finished()
    assert streamed.text == found.output["text"]
    assert len(streamed.deltas) > 10
    tokens = [token for delta in streamed.deltas for token in delta.token_ids]
    assert [delta.first_token_index for delta in streamed.deltas] == [
        sum(len(delta.token_ids) for delta in streamed.deltas[:at]) for at in range(len(streamed.deltas))
    ]
    assert len(tokens) <= found.completion_tokens
    assert "<|im_end|>" not in found.output["text"]
    plain = await runner.begin(
        messages=[{"role": "user", "content": STORY}], params={"temperature": 0, "max_tokens": 60}, stream=False
    )
    again = await plain.finished()
    assert again.output == found.output
    assert not plain.deltas
    assert (
        again.usage
        == found.usage
        == {
            "prompt_tokens": streamed.prepared.prompt_tokens,
            "completion_tokens": found.completion_tokens,
            "total_tokens": streamed.prepared.prompt_tokens + found.completion_tokens,
            "cached_tokens": 0,
        }
    )


async def test_finish_reasons_and_stop_strings(start_engine: StartEngine, tiny_lm: Path) -> None:
    runner = await start_engine("text", tiny_lm)
    cut = await (await runner.chat(STORY, max_tokens=7)).finished()
    assert (cut.finish_reason, cut.completion_tokens) == ("length", 7)
    whole = await (await runner.chat("Hello!", max_tokens=60)).finished()
    assert whole.finish_reason == "stop"
    for stream in (True, False):
        run = await runner.begin(
            messages=[{"role": "user", "content": STORY}],
            params={"temperature": 0, "max_tokens": 60, "stop": ["there was", "never"]},
            stream=stream,
        )
        stopped = await run.finished()
        assert (stopped.output["text"], stopped.finish_reason) == ("Once upon a time ", "stop")
        assert run.text in ("", "Once upon a time ")
    assert runner.engine.limits().slots == 64


async def test_no_request_stops_the_others(start_engine: StartEngine, tiny_lm: Path) -> None:
    """All that is known to kill the batching loop (FACTS), while a victim streams."""
    runner = await start_engine("text", tiny_lm, cache_tokens=2048, ignore_eos=True)
    victim = await runner.chat(STORY, max_tokens=200)
    await asyncio.wait_for(victim.first.wait(), 30)
    refused: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"prompt": "word " * 3000}, ContextLengthExceeded),
        ({"messages": [{"role": "user", "content": "word " * 3000}]}, ContextLengthExceeded),
        ({"prompt": "x", "params": {"max_tokens": 5000}}, ContextLengthExceeded),
        ({"prompt": "x", "params": {"max_tokens": 0}}, InvalidRequest),
        ({"prompt": "x", "params": {"temperature": -1}}, InvalidRequest),
        ({"prompt": "x", "params": {"temperature": float("nan")}}, InvalidRequest),
    ]
    for fields, kind in refused:
        with pytest.raises(kind):
            await runner.engine.prepare(runner.spec(**fields))
    odd: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1e-12},
        {"temperature": 100},
        {"temperature": 1, "top_k": 1_000_000},
        {"temperature": 1, "top_k": 1},
        {"temperature": 1, "top_p": 0},
        {"temperature": 1, "top_p": 1e-30},
        {"temperature": 2, "top_p": 1, "top_k": 0},
        {"temperature": 0, "seed": 3},
    ]
    runs = [await runner.begin(prompt="", params={"max_tokens": 3, **params}) for params in odd]
    for run in runs:
        assert (await run.finished()).completion_tokens == 3
    assert (await victim.finished()).completion_tokens == 200


async def test_random_bytes_stream_as_whole_characters(start_engine: StartEngine, tiny_lm: Path) -> None:
    runner = await start_engine("text", tiny_lm, ignore_eos=True)
    runs = [await runner.begin(prompt="é漢🙂", params={"temperature": 100, "max_tokens": 100}) for _ in range(8)]
    for run in runs:
        found = await run.finished()
        assert run.text == found.output["text"]
        assert found.completion_tokens == 100


async def test_cancel_frees_room_and_tells_nothing(start_engine: StartEngine, tiny_lm: Path) -> None:
    runner = await start_engine("text", tiny_lm, cache_tokens=416, ignore_eos=True)
    long = await runner.chat(STORY, max_tokens=300)
    await asyncio.wait_for(long.first.wait(), 30)
    assert runner.engine.limits().tokens == 416
    runner.engine.cancel(long.spec.run_id)
    told = len(long.deltas)
    # The next needs nearly the whole cache: it only runs if the blocks really came back.
    again = await runner.chat(STORY, max_tokens=300)
    assert (await again.finished()).completion_tokens == 300
    assert len(long.deltas) == told
    assert not long.done.done()


async def test_more_than_the_cache_holds_takes_turns(start_engine: StartEngine, tiny_lm: Path) -> None:
    runner = await start_engine("text", tiny_lm, cache_tokens=320, ignore_eos=True)
    room = Room(320)
    waiting = [runner.spec(prompt=f"Number {n}", params={"max_tokens": 80, "temperature": 0}) for n in range(8)]
    prepared = {spec.run_id: await runner.engine.prepare(spec) for spec in waiting}
    assert sum(found.need_tokens for found in prepared.values()) > 2 * 320
    finished = await asyncio.gather(*(room.run(runner, spec, prepared[spec.run_id]) for spec in waiting))
    assert [one.completion_tokens for one in finished] == [80] * 8
    assert room.least < 80


class Room:
    """Counts an engine's tokens, as admission does: a run begins when its need is free."""

    def __init__(self, tokens: int) -> None:
        self.free = self.least = tokens
        self._changed = asyncio.Condition()

    async def run(self, runner: Runner, spec: RunSpec, prepared: Prepared) -> Finished:
        async with self._changed:
            await self._changed.wait_for(lambda: self.free >= prepared.need_tokens)
            self.free -= prepared.need_tokens
            self.least = min(self.least, self.free)
        finished = await Run(runner.engine, spec, prepared).finished()
        async with self._changed:
            self.free += prepared.need_tokens
            self._changed.notify_all()
        return finished


async def test_the_context_is_cut_by_whole_turns(start_engine: StartEngine, tiny_lm: Path) -> None:
    runner = await start_engine("text", tiny_lm, window=200)
    history = [{"role": "system", "content": "Be kind."}]
    for number in range(20):
        history += [
            {"role": "user", "content": f"Question {number}?"},
            {"role": "assistant", "content": f"Answer {number}."},
        ]
    new = [{"role": "user", "content": "My name is Ada."}]
    cut = await runner.engine.prepare(
        runner.spec(messages=new, history=EarlierMessages(messages=history), params={"max_tokens": 20})
    )
    assert cut.held is not None
    assert 0 < cut.held.dropped_turns == 20 - cut.held.turns < 20
    assert cut.held.dropped_tokens is not None
    assert cut.prompt_tokens <= 180
    one = await runner.engine.prepare(
        runner.spec(
            messages=new,
            history=EarlierMessages(messages=history),
            params={"max_tokens": 20},
            context=ContextLimits(last_turns=1),
        )
    )
    assert one.held is not None
    assert one.held.dropped_tokens is not None
    assert one.held == ContextHeld(turns=1, dropped_turns=19, dropped_tokens=one.held.dropped_tokens)
    assert one.held.dropped_tokens > cut.held.dropped_tokens > 0
    # A prompt that was prepared long ago is prepared again when its run begins.
    run = await runner.begin(
        messages=new, history=EarlierMessages(messages=history), params={"max_tokens": 5, "temperature": 0}
    )
    assert (await run.finished()).prompt_tokens == run.prepared.prompt_tokens


@pytest.mark.parametrize("parsed", [False, True])
async def test_a_users_control_strings_are_text_unless_an_option_parses_them(
    start_engine: StartEngine, tiny_lm: Path, *, parsed: bool
) -> None:
    runner = await start_engine("text", tiny_lm, **({"parse_control_strings": True} if parsed else {}))

    async def tokens(role: str, text: str) -> int:
        spec = runner.spec(messages=[{"role": role, "content": text}])
        return (await runner.engine.prepare(spec)).prompt_tokens

    added = [await tokens(role, "hi<|im_end|>") - await tokens(role, "hi") for role in ("user", "system")]
    assert added[1] == 1
    assert (added[0] == 1) is parsed


OVER_ARGUMENTS = """{% for one in messages %}{{ one.content }}{% for call in one.tool_calls or [] %}
{%- for name, value in call.function.arguments | items %}{{ name + value }}{% endfor %}{% endfor %}{% endfor %}
{{- tools or "" }}"""


ARGUMENTS = [
    ('{"a": "b"}', '{"a": "b"}'),
    *((text, "{}") for text in ('{"city": "Ro', "", "5", "null", "[1]", "{" * 100_000)),
    ('{"a": "\\ud83d"}', '{"a": "�"}'),
]


async def test_calls_that_were_cut_go_into_templates_that_go_over_arguments(
    start_engine: StartEngine, tiny_lm: Path, tmp_path: Path
) -> None:
    """In a body as in what a conversation has kept."""
    runner = await start_engine("text", changed_copy(tiny_lm, tmp_path, "chat_template.jinja", OVER_ARGUMENTS))

    async def tokens(arguments: str, *, kept: bool) -> int:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        said: list[Any] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        asked: list[Any] = [{"role": "tool", "content": "y", "tool_call_id": "c"}]
        past, new = (said, asked) if kept else ([], [*said, *asked])
        return (
            await runner.engine.prepare(runner.spec(messages=new, history=EarlierMessages(messages=past)))
        ).prompt_tokens

    for kept in (False, True):
        for arguments, shown in ARGUMENTS:
            assert await tokens(arguments, kept=kept) == await tokens(shown, kept=kept)
    with pytest.raises(InvalidRequest, match="fails with these messages") as caught:
        await tokens('{"a": 5}', kept=False)
    assert caught.value.param == "payload.messages"


async def test_a_template_that_refuses_is_the_callers_error(
    start_engine: StartEngine, tiny_lm: Path, tmp_path: Path
) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    runner = await start_engine("text", changed_copy(tiny_lm, tmp_path, "chat_template.jinja", template))
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        await runner.engine.prepare(runner.spec(messages=[{"role": "user", "content": "x"}]))
