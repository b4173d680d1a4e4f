"""The diffusion engine in its process, with tiny pipelines made in code."""

from __future__ import annotations

import asyncio
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from penstock.cli.makers import tiny_diffusion
from penstock.common.engine_kinds import KINDS
from penstock.processors.engines.base import Finished, Preview, StepProgress
from penstock.processors.images.decoded import DecodedImage
from penstock.schemas.errors import InvalidRequest, UnsupportedParameter
from penstock.schemas.records import OutputSpec
from support import wait_until_async

from .conftest import Run, Runner, StartEngine

LOADED_S = 240
PICTURE = DecodedImage(70, 66, "RGB", bytes(range(66)) * 210, "PNG", "0" * 64)
MASK = DecodedImage(70, 66, "L", b"\xff" * 70 * 33 + b"\0" * 70 * 33, "PNG", "0" * 64)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("diffusion") / "generation"
    tiny_diffusion.make("generation", folder)
    return folder


class Watched(Run):
    """A run that keeps its steps and previews too."""

    def __init__(self, runner: Runner, *args: Any) -> None:
        self.steps: list[StepProgress] = []
        self.previews: list[Preview] = []
        super().__init__(runner.engine, *args)

    def on_progress(self, progress: StepProgress) -> None:
        self.steps.append(progress)
        self.first.set()

    def on_preview(self, preview: Preview) -> None:
        self.previews.append(preview)


async def begin(runner: Runner, *, task: str = "image_generation", **payload: Any) -> Watched:
    images = {name: image for name, image in (("image", PICTURE), ("mask", MASK)) if name in payload}
    output = payload.pop("output", None)
    payload = {"prompt": "a dam", "inference_steps": 4, **payload}
    spec = runner.spec(task=task, payload=payload, images=images, output=output)
    return Watched(runner, spec, await runner.engine.prepare(spec))


def image_of(finished: Finished, number: int = 0) -> Any:
    return Image.open(io.BytesIO(finished.output["images"][number]["data"]))


def greatest_difference(left: Any, right: Any) -> int:
    return max(abs(a - b) for a, b in zip(left.tobytes(), right.tobytes(), strict=True))


async def test_images_alone_and_in_a_batch_with_progress_and_cancel(pipeline: Path, start_engine: StartEngine) -> None:
    runner = await start_engine("diffusers", pipeline, load_timeout_s=LOADED_S, silent_s=240, batch_window_ms=200)
    alone = await begin(runner, seed=7, previews=2)
    one = await alone.finished(LOADED_S)
    (made,) = one.output["images"]
    assert (made["media_type"], made["width"], made["height"], made["seed"]) == ("image/png", 64, 64, 7)
    assert [(step.step, step.steps) for step in alone.steps] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert [(shown.step, Image.open(io.BytesIO(shown.image)).format) for shown in alone.previews] == [(2, "JPEG")]
    assert image_of(one).text["prompt"] == "a dam"

    batch = [await begin(runner, seed=seed, prompt=prompt) for seed, prompt in ((3, "x"), (7, "a dam"), (9, "y"))]
    results = [await run.finished(LOADED_S) for run in batch]
    assert greatest_difference(image_of(one), image_of(results[1])) <= 1
    assert greatest_difference(image_of(results[0]), image_of(results[2])) > 1, "seeds and prompts make a difference"

    kept, gone = await begin(runner, seed=7, inference_steps=40), await begin(runner, seed=8, inference_steps=40)
    await asyncio.wait_for(kept.first.wait(), LOADED_S)
    runner.engine.cancel(gone.spec.run_id)
    told = len(gone.steps)
    shared = await kept.finished(LOADED_S)
    assert len(gone.steps) == told, "nothing more is told of a cancelled run"
    assert not gone.done.done()
    again = await (await begin(runner, seed=7, inference_steps=40)).finished(LOADED_S)
    assert greatest_difference(image_of(shared), image_of(again)) <= 1, "who stays is not changed by who leaves"


async def test_when_memory_runs_out_in_mid_image_batches_and_requests_are_parted(
    pipeline: Path, start_engine: StartEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = await start_engine("diffusers", pipeline, load_timeout_s=LOADED_S, silent_s=240)
    expected = [image_of(await (await begin(runner, seed=seed)).finished(LOADED_S)) for seed in range(3, 10)]
    await runner.engine.stop()
    told: list[str] = []
    monkeypatch.setitem(KINDS, "diffusers", replace(KINDS["diffusers"], backend="engine_backends:StarvedDiffusion"))
    starved = await start_engine(
        "diffusers",
        pipeline,
        host={"on_out_of_memory": lambda: told.append("ran out")},
        load_timeout_s=LOADED_S,
        silent_s=240,
        batch_window_ms=500,
        most_rows=1,
    )
    runs = [await begin(starved, seed=seed) for seed in (3, 4, 5)]
    four = await begin(starved, seed=6, n=4)
    made = [image_of(await run.finished(LOADED_S)) for run in runs]
    of_four = await four.finished(LOADED_S)
    assert [one["seed"] for one in of_four.output["images"]] == [6, 7, 8, 9]
    made += [image_of(of_four, number) for number in range(4)]
    assert all(greatest_difference(one, known) <= 1 for one, known in zip(made, expected, strict=True))
    await wait_until_async(lambda: told, 30, "the worker hears of it")


async def test_editing_output_forms_and_refusals_by_name(pipeline: Path, start_engine: StartEngine) -> None:
    runner = await start_engine("diffusers", pipeline, load_timeout_s=LOADED_S, silent_s=240)
    edited = await begin(
        runner,
        task="image_editing",
        image={"artifact_id": "a"},
        strength=0.5,
        seed=-3,
        sampler="euler",
        n=2,
        output=OutputSpec(format="jpeg", quality=50),
    )
    finished = await edited.finished(LOADED_S)
    assert [image["seed"] for image in finished.output["images"]] == [-3, -2]
    picture = image_of(finished)
    assert (picture.format, picture.size) == ("JPEG", (64, 64)), "of 70 × 66, rounded down"
    assert json.loads(picture.getexif()[0x010E])["strength"] == 0.5
    inpainted = await begin(runner, task="image_editing", image={"url": "u"}, mask={"url": "m"}, seed=1)
    assert image_of(await inpainted.finished(LOADED_S)).size == (64, 64)
    bare = await (await begin(runner, seed=1, output=OutputSpec(format="webp", facts=False))).finished(LOADED_S)
    assert dict(image_of(bare).getexif()) == {}
    for payload, kind, text in (
        ({"sampler": "magic"}, UnsupportedParameter, "payload.sampler: this model knows ddim"),
        ({"width": 65}, InvalidRequest, "the nearest is 64"),
        ({"width": 8192, "height": 8192}, InvalidRequest, "more than"),
        ({"strength": 0.5}, UnsupportedParameter, "payload.strength"),
    ):
        with pytest.raises(kind, match=text):
            await begin(runner, **payload)
