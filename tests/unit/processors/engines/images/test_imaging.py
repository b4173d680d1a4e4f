"""The backends of image processing: outputs, refusals, cancelling; upscaling by tiles is as upscaling whole."""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from kit.pictures import decoded, encoded
from kit.refusals import refused
from penstock.processors.engines.base import Finished, RunFailed, RunSpec
from penstock.processors.engines.images.imaging import ImagingBackend
from penstock.processors.engines.images.upscaling import MODEL_TYPE, UpscalingBackend, make_network, tiles
from penstock.schemas.errors import EngineFailed, InvalidRequest, PenstockError, TooLarge, UnsupportedParameter
from penstock.schemas.records import OutputSpec
from support import alive, wait_until_async


def spec(number: int, *operations: dict[str, Any], images: list[Image.Image], **fields: Any) -> RunSpec:
    """With the image as both kinds of backends take it."""
    return RunSpec(
        run_id=f"run-{number}",
        task="image_processing",
        model="images",
        payload={"operations": list(operations)},
        **{"images": {"image": decoded(images[0])}, "files": {"image": encoded(images[0])}, **fields},
    )


benches: list[Bench] = []


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    yield
    while benches:
        if isinstance(backend := benches.pop().backend, ImagingBackend):
            backend.processors.pool.close()


class Bench:
    """A backend, and the outcomes of its runs."""

    def __init__(self, kind: Any = ImagingBackend, source: str = "", **options: Any) -> None:
        self.outcomes: dict[str, Finished | RunFailed] = {}
        self.backend = kind(source, {"threads": 2, **options}, self._on_event)
        self.backend.load()
        benches.append(self)

    def _on_event(self, event: tuple[Any, ...]) -> None:
        assert event[1].run_id not in self.outcomes, "a second outcome"
        self.outcomes[event[1].run_id] = event[1]

    def begin(self, spec: RunSpec) -> None:
        _, job = self.backend.prepare(spec)
        self.backend.run(spec, job)

    async def image(self, spec: RunSpec) -> Image.Image:
        self.begin(spec)
        return await self.ended(spec.run_id)

    async def ended(self, run_id: str) -> Image.Image:
        await wait_until_async(lambda: run_id in self.outcomes, 60)
        outcome = self.outcomes[run_id]
        assert isinstance(outcome, Finished), outcome
        (made,) = outcome.output["images"]
        found = Image.open(io.BytesIO(made["data"]))
        found.load()
        assert (made["width"], made["height"]) == found.size
        assert made["media_type"] == Image.MIME[found.format or ""]
        return found


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    return Image.effect_noise((width, height), 80).convert(mode)


async def test_the_form_of_the_output() -> None:
    bench = Bench()
    flip = {"op": "flip", "axis": "vertical"}
    assert (await bench.image(spec(1, flip, images=[noise(4, 4)]))).format == "PNG"
    jpeg = spec(2, flip, images=[noise(4, 4)], files={"image": encoded(noise(4, 4), "JPEG")})
    assert (await bench.image(jpeg)).format == "JPEG"  # as it came
    gif = spec(3, flip, images=[noise(4, 4)], files={"image": encoded(noise(4, 4), "GIF")})
    assert (await bench.image(gif)).format == "PNG"
    webp = spec(4, flip, images=[noise(4, 4)], output=OutputSpec(format="webp", quality=5))
    assert (await bench.image(webp)).format == "WEBP"
    convert = {"op": "convert", "arguments": {"format": "jpeg", "quality": "5"}}
    assert (await bench.image(spec(5, convert, images=[noise(4, 4, "RGBA")]))).format == "JPEG"


@pytest.mark.parametrize(
    ("operation", "kind", "param"),
    [
        ({"op": "crop", "width": 41, "height": 2}, InvalidRequest, "payload.operations[1].width"),
        ({"op": "upscale"}, UnsupportedParameter, "payload.operations[1].op"),
        ({"op": "resize", "width": 9000, "height": 9000}, TooLarge, "payload.operations[1]"),
        ({"op": "composite", "image": {"url": "x"}}, InvalidRequest, "payload.operations[1].image"),
    ],
)
async def test_refused_before_it_runs(operation: dict[str, Any], kind: type[PenstockError], param: str) -> None:
    bench = Bench()
    with pytest.raises(kind) as caught:
        bench.backend.prepare(spec(1, {"op": "strip_metadata"}, operation, images=[noise(40, 30)]))
    assert type(caught.value) is kind
    assert caught.value.param == param


async def test_an_image_beyond_the_engines_limit_is_refused_before_it_runs() -> None:
    bench = Bench(max_pixels=1000)
    with refused(TooLarge, param="payload.image"):
        bench.backend.prepare(spec(1, {"op": "crop", "width": 2, "height": 2}, images=[noise(40, 30)]))


async def test_a_cancelled_run_gives_its_place_to_the_next_and_tells_nothing() -> None:
    bench = Bench(threads=1)
    await bench.image(spec(1, {"op": "flip", "axis": "vertical"}, images=[noise(4, 4)]))
    (pid,) = bench.backend.processors.pool.pids()
    os.kill(pid, signal.SIGSTOP)  # so that it is at work for as long as the test needs
    resize = {"op": "resize", "width": 9, "height": 9}
    bench.begin(spec(2, resize, images=[noise(40, 30)]))
    bench.begin(spec(3, resize, images=[noise(40, 30)]))
    bench.begin(spec(4, resize, images=[noise(40, 30)]))
    await wait_until_async(lambda: bench.backend.processors.pool.at_work() == {"run-2"})
    bench.backend.cancel("run-2")
    bench.backend.cancel("run-3")  # waits for the thread
    assert (await bench.ended("run-4")).size == (9, 9)
    assert set(bench.outcomes) == {"run-1", "run-4"}
    await wait_until_async(lambda: not alive(pid), describe="the process of the cancelled run to end")


async def test_what_only_decoding_shows_fails_its_run_alone_and_is_not_tried_again() -> None:
    bench = Bench(threads=1)
    cut_off = replace(encoded(noise(300, 300)), data=bytes(encoded(noise(300, 300)).data)[:20_000])
    flip = {"op": "flip", "axis": "vertical"}
    bench.begin(spec(1, flip, images=[noise(4, 4)], files={"image": cut_off}))
    assert (await bench.image(spec(2, flip, images=[noise(4, 4)]))).size == (4, 4)
    failed = bench.outcomes["run-1"]
    assert isinstance(failed, RunFailed)
    assert isinstance(failed.error, InvalidRequest)
    assert (failed.error.param, failed.retryable_here) == ("payload.image", False)


async def test_a_process_that_is_killed_at_work_fails_its_run_which_may_be_tried_again() -> None:
    bench = Bench(threads=1)
    files = {"image": encoded(noise(3000, 3000), "BMP")}
    turns = [{"op": "rotate", "degrees": 33, "expand": False}] * 16
    bench.begin(spec(1, *turns, images=[noise(4, 4)], files=files))
    (pid,) = bench.backend.processors.pool.pids()
    process = psutil.Process(pid)
    # Starting and decoding take a quarter of a second of the processor, the turns many seconds.
    await wait_until_async(lambda: process.cpu_times().user > 1, 60, lambda: str(process.cpu_times()))
    os.kill(pid, signal.SIGKILL)
    assert (await bench.image(spec(2, {"op": "flip", "axis": "vertical"}, images=[noise(4, 4)]))).size == (4, 4)
    failed = bench.outcomes["run-1"]
    assert isinstance(failed, RunFailed)
    assert isinstance(failed.error, EngineFailed)
    assert failed.retryable_here


# -- upscaling


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small network with random weights: its picture depends on every pixel that it sees."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("upscaler")
    config = {"model_type": MODEL_TYPE, "channels": 8, "convolutions": 4, "scale": 4}
    torch.manual_seed(1)
    save_file(make_network(config).state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_tiles_cover_all_once() -> None:
    seen = Image.new("L", (70, 45))
    for inner, outer in tiles(seen.size, 32, 4):
        assert outer[0] <= inner[0]
        assert outer[3] >= inner[3]
        assert (outer[2] - outer[0]) <= 40
        assert (outer[3] - outer[1]) <= 40
        assert seen.crop(inner).getextrema() == (0, 0)
        seen.paste(1, inner)
    assert seen.getextrema() == (1, 1)


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA"])
async def test_tiles_are_as_the_whole(network: Path, mode: str) -> None:
    image = noise(50, 37, mode)
    upscale = {"op": "upscale", "factor": 4}
    whole = await Bench(UpscalingBackend, str(network), tile=64).image(spec(1, upscale, images=[image]))
    tiled = await Bench(UpscalingBackend, str(network), tile=16).image(spec(1, upscale, images=[image]))
    assert whole.size == tiled.size == (200, 148)
    assert whole.mode == tiled.mode == mode
    difference = max(abs(a - b) for a, b in zip(whole.tobytes(), tiled.tobytes(), strict=True))
    assert difference <= 1
    halved = await Bench(UpscalingBackend, str(network)).image(spec(1, {"op": "upscale", "factor": 2}, images=[image]))
    assert halved.size == (100, 74)


async def test_upscaling_among_other_operations_and_cancelled_between_tiles(network: Path) -> None:
    bench = Bench(UpscalingBackend, str(network), tile=16, threads=1)
    steps = [
        {"op": "crop", "width": 20, "height": 20},
        {"op": "upscale"},
        {"op": "thumbnail", "width": 40, "height": 40},
    ]
    assert (await bench.image(spec(1, *steps, images=[noise(50, 37)]))).size == (40, 40)
    # It asks between tiles: cancelled at the third of a hundred, nothing of the rest is computed.
    enlarge, sizes = bench.backend._enlarge, []

    def third_is_cancelled(image: Image.Image) -> Image.Image:
        sizes.append(image.size)
        if len(sizes) == 3:
            bench.backend.cancel("run-2")
        return enlarge(image)

    bench.backend._enlarge = third_is_cancelled
    bench.begin(spec(2, {"op": "upscale"}, images=[noise(160, 160)]))
    bench.begin(spec(3, {"op": "upscale"}, images=[noise(4, 4)]))
    await bench.ended("run-3")
    assert sorted(sizes)[0] == (4, 4)
    await bench.image(spec(4, {"op": "upscale"}, images=[noise(4, 4)]))
    assert set(bench.outcomes) == {"run-1", "run-3", "run-4"}
    assert len(sizes) == 5


async def test_a_folder_that_is_no_upscaler(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(InvalidRequest, match="no upscaler"):
        Bench(UpscalingBackend, str(tmp_path))
