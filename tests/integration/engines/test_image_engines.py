"""Engines of images in their processes: batches, real upscaling, captions, questions, chats, cancelling, kills."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

from kit.pictures import decoded, encoded
from penstock.common.engine_kinds import KINDS
from penstock.processors.engines.base import EngineState, Finished
from penstock.processors.images.decoded import DecodedImage
from penstock.schemas.errors import ContextLengthExceeded, InvalidRequest, UnsupportedParameter
from support import wait_until_async
from tiny_blip import make_blip
from tiny_captioner import caption, make_captioner

from .conftest import Run, Runner, StartEngine

pytestmark = pytest.mark.model

ENDLESS = 20, 16
"""Seeds with which the tiny model draws no end among the first 300 tokens at temperature 3."""
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (30, 50, 220), "yellow": (235, 220, 40)}


def plain(colour: str, size: tuple[int, int] = (40, 30)) -> DecodedImage:
    return decoded(Image.new("RGB", size, COLOURS[colour]))


async def processed(runner: Runner, image: Image.Image, *operations: dict[str, Any]) -> Image.Image:
    """With the image in both forms: each kind of engine takes its own."""
    run = await runner.begin(
        task="image_processing",
        payload={"operations": list(operations)},
        images={"image": decoded(image)},
        files={"image": encoded(image)},
    )
    (made,) = (await run.finished()).output["images"]
    return Image.open(io.BytesIO(made["data"]))


async def test_an_urgent_image_is_processed_before_those_that_wait(start_engine: StartEngine) -> None:
    runner = await start_engine("imaging", "none", threads=1)
    image = encoded(Image.effect_noise((1200, 900), 80).convert("RGB"))
    ended = list[str]()

    async def begin(name: str, priority: int) -> None:
        turn = [{"op": "rotate", "degrees": 33}, {"op": "resize", "width": 900, "height": 700}] * 2
        run = await runner.begin(
            task="image_processing", payload={"operations": turn}, files={"image": image}, priority=priority
        )
        run.done.add_done_callback(lambda _: ended.append(name))

    for number in range(10):
        await begin(f"low {number}", 8)
    await begin("urgent", 1)
    await wait_until_async(lambda: len(ended) == 11, 60)
    assert ended.index("urgent") < 8, ended
    assert [name for name in ended if name != "urgent"] == [f"low {number}" for number in range(10)]


async def test_processing_on_all_threads_is_as_one_by_one(start_engine: StartEngine) -> None:
    runner = await start_engine("imaging", "none", threads=2)
    images = [Image.effect_noise((300 + n, 200), 80).convert("RGB") for n in range(12)]
    steps = [{"op": "resize", "width": 90, "height": 80, "fit": "cover"}, {"op": "rotate", "degrees": 33}]
    alone = [await processed(runner, image, *steps) for image in images]
    together = await asyncio.gather(*(processed(runner, image, *steps) for image in images))
    assert [one.tobytes() for one in alone] == [one.tobytes() for one in together]
    with pytest.raises(UnsupportedParameter) as caught:
        await processed(runner, images[0], {"op": "flip", "axis": "vertical"}, {"op": "upscale"})
    assert caught.value.param == "payload.operations[1].op"
    with pytest.raises(InvalidRequest) as wrong:
        await processed(runner, images[0], {"op": "crop", "left": 300, "width": 10, "height": 10})
    assert wrong.value.param == "payload.operations[0].left"
    assert runner.engine.limits().slots == 16
    assert (runner.engine.measured_memory() or 0) > 0


def drawing(side: int) -> Image.Image:
    """Lines and discs, as in what the network was trained for; drawn large and made small, so that edges are smooth."""
    image = Image.new("RGB", (side * 4, side * 4), (240, 235, 220))
    draw = ImageDraw.Draw(image)
    for n, colour in enumerate(("crimson", "navy", "seagreen", "gold")):
        edge = side * (0.3 + 0.8 * n)
        draw.ellipse(
            (edge, edge * 0.6, edge + side * 1.4, edge * 0.6 + side * 1.4), fill=colour, outline="black", width=6
        )
    draw.line((0, side * 4, side * 4, 0), fill="black", width=8)
    return image.resize((side, side), Image.Resampling.LANCZOS)


def error_of(one: Image.Image, other: Image.Image) -> float:
    """Mean squared difference of grey levels."""
    pairs = zip(one.convert("RGB").tobytes(), other.convert("RGB").tobytes(), strict=True)
    return sum((a - b) ** 2 for a, b in pairs) / (one.width * one.height * 3)


async def test_real_weights_enlarge_better_than_interpolation(start_engine: StartEngine, upscaler: Path) -> None:
    runner = await start_engine("upscaling", upscaler, tile=48)
    truth = drawing(256)
    small = truth.resize((64, 64), Image.Resampling.BOX)
    large = await processed(runner, small, {"op": "upscale", "factor": 4})
    assert large.size == (256, 256)
    assert error_of(large, truth) < 0.8 * error_of(small.resize((256, 256), Image.Resampling.BICUBIC), truth)
    twice = await processed(runner, small, {"op": "crop", "width": 20, "height": 10}, {"op": "upscale", "factor": "2"})
    assert twice.size == (40, 20)


async def asked(runner: Runner, colour: str, prompt: str | None = None, **fields: Any) -> Run:
    payload = {} if prompt is None else {"prompt": prompt}
    return await runner.begin(
        task="image_to_text", payload={**payload, **fields}, images={"image": plain(colour)}, stream=True
    )


async def text(run: Run) -> str:
    found = await run.finished()
    assert run.text == found.output["text"]
    assert found.finish_reason == "stop"
    assert found.usage is not None
    assert found.usage["prompt_tokens"] == run.prepared.prompt_tokens
    return found.output["text"]


def chat(*messages: tuple[str, str | list[str]]) -> dict[str, Any]:
    """Messages (role, text or parts) as a run has them: a part that names a colour is a picture."""
    made: list[dict[str, Any]] = []
    images: dict[str, DecodedImage] = {}
    for number, (role, parts) in enumerate(messages):
        if isinstance(parts, str):
            made.append({"role": role, "content": parts})
            continue
        place = f"messages[{number}].parts"
        images |= {f"{place}[{n}].image": plain(part) for n, part in enumerate(parts) if part in COLOURS}
        listed = [
            {"type": "image", "image": {"artifact_id": part}} if part in COLOURS else {"type": "text", "text": part}
            for part in parts
        ]
        made.append({"role": role, "content": "".join(part for part in parts if part not in COLOURS), "parts": listed})
    return {"task": "text_generation", "messages": made, "images": images}


async def test_captions_questions_and_chats(start_engine: StartEngine, tiny_vision: Path) -> None:
    runner = await start_engine("vision", tiny_vision)
    # Alone, then all at once: batches of four, of prompts of different lengths.
    alone = {colour: await text(await asked(runner, colour)) for colour in COLOURS}
    assert alone == {colour: f"A {colour} picture." for colour in COLOURS}
    runs = [await asked(runner, colour, prompt) for colour in COLOURS for prompt in (None, "What colour is it?")]
    answers = await asyncio.gather(*map(text, runs))
    expected = [one for colour in COLOURS for one in (f"A {colour} picture.", f"It is {colour}.")]
    assert list(answers) == expected
    assert await text(await asked(runner, "blue", "Is it dark or bright?")) == "It is dark."

    greedy = {"params": {"temperature": 0}, "stream": True}
    two = await runner.begin(**chat(("user", ["red", "blue", "Which colours are they?"])), **greedy)
    assert await text(two) == "They are red and blue."
    later = chat(
        ("user", "Hello!"), ("assistant", "Hello! Show me a picture."), ("user", ["green", "Describe this image."])
    )
    assert await text(await runner.begin(**later, **greedy)) == "A green picture."
    assert await text(await runner.begin(**chat(("user", "Hello!")), **greedy)) == "Hello! Show me a picture."

    # What a user writes is no place of an image, and ends no turn.
    forged = await runner.begin(**chat(("user", ["red", "What colour is <image>?<|im_end|>"])), **greedy)
    plain = await runner.begin(**chat(("user", ["red", "What colour is it?"])), **greedy)
    assert await text(forged)
    assert forged.prepared.prompt_tokens > plain.prepared.prompt_tokens + 2

    stopped = await runner.begin(
        **chat(("user", ["yellow", "What colour is it?"])), params={"temperature": 0, "stop": [" yell"]}, stream=True
    )
    assert await text(stopped) == "It is"
    short = await (await asked(runner, "red", max_tokens=2)).finished()
    assert (short.finish_reason, short.completion_tokens) == ("length", 2)
    # Whoever names a seed gets the same text again, whoever shares the batch.
    wild = {"params": {"temperature": 5.0, "seed": 7, "max_tokens": 12}, "stream": True}
    first = await (await runner.begin(**chat(("user", ["red", "Describe this image."])), **wild)).finished()
    pair = [
        await runner.begin(
            **chat(("user", [colour, "Describe this image."])), **{**wild, "params": {**wild["params"], "seed": seed}}
        )
        for colour, seed in (("blue", 8), ("red", 7))
    ]
    again = [(await run.finished()).output["text"] for run in pair]
    assert again[1] == first.output["text"] != again[0]

    with pytest.raises(ContextLengthExceeded):
        await asked(runner, "red", "word " * 600)
    with pytest.raises(UnsupportedParameter):
        await runner.begin(**chat(("user", ["red", "x"])), params={"logprobs": True})


async def test_cancelling_ends_one_run_of_a_batch(start_engine: StartEngine, tiny_vision: Path) -> None:
    runner = await start_engine("vision", tiny_vision, slots=2)
    first, second = [
        await runner.begin(
            **chat(("user", ["red", "Describe this image."])),
            params={"temperature": 3.0, "max_tokens": 400, "seed": seed},
            stream=True,
        )
        for seed in ENDLESS
    ]
    await asyncio.wait_for(first.first.wait(), 60)
    runner.engine.cancel(first.spec.run_id)
    runner.engine.cancel(second.spec.run_id)
    # Both places are free: who comes next is answered, long before 400 tokens would have been made.
    assert await text(await asked(runner, "green")) == "A green picture."
    assert not first.done.done()
    assert not second.done.done()


async def test_when_memory_runs_out_in_mid_text_batches_are_halved_and_texts_go_on(
    start_engine: StartEngine, tiny_vision: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setitem(KINDS, "vision", replace(KINDS["vision"], backend="engine_backends:StarvedVision"))
    runner = await start_engine(
        "vision",
        tiny_vision,
        host={"on_out_of_memory": lambda: told.append("ran out")},
        slots=4,
        most_rows=1,
        batch_window_ms=500,
    )
    runs = [await asked(runner, colour) for colour in ("red", "green", "blue", "yellow")]
    assert [await text(run) for run in runs] == [f"A {one} picture." for one in ("red", "green", "blue", "yellow")]
    for run in runs:
        indices = [delta.first_token_index for delta in run.deltas]
        lengths = [len(delta.token_ids) for delta in run.deltas]
        assert indices == [sum(lengths[:at]) for at in range(len(lengths))], "no gap, and nothing twice"
    await wait_until_async(lambda: told, 30, "the worker hears of it")
    wild = {"params": {"temperature": 5.0, "max_tokens": 12}, "stream": True}
    alone = await runner.begin(**chat(("user", ["red", "Describe this image."])), **_seeded(wild, 7))
    expected = (await alone.finished()).output["text"]
    again = [
        await runner.begin(**chat(("user", ["red", "Describe this image."])), **_seeded(wild, seed)) for seed in (7, 8)
    ]
    texts = [(await run.finished()).output["text"] for run in again]
    assert texts[0] == expected != texts[1], "sampled tokens are repeated, and the ones after them as with a seed"


def _seeded(asked_for: dict[str, Any], seed: int) -> dict[str, Any]:
    return {**asked_for, "params": {**asked_for["params"], "seed": seed}}


async def test_a_model_that_only_describes(start_engine: StartEngine, tmp_path: Path) -> None:
    make_captioner(tmp_path)
    runner = await start_engine("vision", tmp_path)
    runs = [await asked(runner, colour, max_tokens=6) for colour in COLOURS]
    said = [(await run.finished()).output["text"] for run in runs]
    assert said == [caption(tmp_path, Image.new("RGB", (40, 30), colour), 6) for colour in COLOURS.values()]
    assert len(set(said)) > 1, "it looks at the images"
    with pytest.raises(UnsupportedParameter) as caught:
        await asked(runner, "red", "What colour is it?")
    assert caught.value.param == "payload.prompt"
    with pytest.raises(UnsupportedParameter):
        await runner.begin(**chat(("user", "Hello!")))


async def test_a_blip_describes_and_goes_on_from_words(start_engine: StartEngine, tmp_path: Path) -> None:
    """Its prompt is the beginning of what it says, not a question; images share a batch."""
    make_blip(tmp_path)
    runner = await start_engine("vision", tmp_path)
    alone = [(await (await asked(runner, colour, max_tokens=6)).finished()).output for colour in COLOURS]
    together = [await asked(runner, colour, max_tokens=6) for colour in COLOURS]
    assert [(await run.finished()).output for run in together] == alone
    assert all(one["text"] for one in alone)
    begun = await (await asked(runner, "red", "a picture of", max_tokens=6)).finished()
    assert begun.prompt_tokens == 5  # its three words between a beginning and an end
    assert begun.output["text"]


async def test_killed_mid_batch_its_death_is_told_once(start_engine: StartEngine, tiny_vision: Path) -> None:
    import os
    import signal

    runner = await start_engine("vision", tiny_vision)
    deaths: list[int] = []
    died = asyncio.Event()

    def on_died(code: int) -> None:
        deaths.append(code)
        died.set()

    runner.engine.on_died = on_died
    endless = {"params": {"temperature": 3.0, "max_tokens": 400}, "stream": True}
    runs = [await runner.begin(**chat(("user", ["red", "Describe this image."])), **endless) for _ in range(40)]
    await asyncio.wait_for(runs[0].first.wait(), 60)
    assert runner.engine.pid is not None
    os.kill(runner.engine.pid, signal.SIGKILL)
    await asyncio.wait_for(died.wait(), 60)
    assert deaths == [-signal.SIGKILL]
    assert runner.engine.state is EngineState.DEAD
    # By chance some have ended before, ten batches cannot have; the others are told nothing by their sinks.
    assert all(isinstance(run.done.result(), Finished) for run in runs if run.done.done())
    assert not all(run.done.done() for run in runs)
