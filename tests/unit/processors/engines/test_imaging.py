"""The imaging backend in this process: outputs, refusals, cancelling; upscaling by tiles is as upscaling whole."""

from __future__ import annotations

import asyncio
import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from penstock.processors.engines.base import Finished, RunFailed, RunSpec
from penstock.processors.engines.imaging import ImagingBackend
from penstock.processors.engines.upscaling import MODEL_TYPE, UpscalingBackend, make_network, tiles
from penstock.processors.images.decoded import DecodedImage
from penstock.schemas.errors import InvalidRequest, PenstockError, TooLarge, UnsupportedParameter
from penstock.schemas.records import OutputSpec


def decoded(image: Image.Image, source_format: str = "PNG") -> DecodedImage:
    return DecodedImage(image.width, image.height, image.mode, image.tobytes(), source_format, "")


def spec(number: int, *operations: dict[str, Any], images: list[Image.Image], **fields: Any) -> RunSpec:
    return RunSpec(
        run_id=f"run-{number}",
        task="image_processing",
        model="images",
        payload={"operations": list(operations)},
        images={"image": decoded(images[0])},
        **fields,
    )


class Bench:
    """A backend, and the outcomes of its runs."""

    def __init__(self, kind: Any = ImagingBackend, source: str = "", **options: Any) -> None:
        self.outcomes: dict[str, Finished | RunFailed] = {}
        self._news = asyncio.Event()
        self.backend = kind(source, {"threads": 2, **options}, self._on_event)
        self.backend.load()

    def _on_event(self, event: tuple[Any, ...]) -> None:
        assert event[1].run_id not in self.outcomes, "a second outcome"
        self.outcomes[event[1].run_id] = event[1]
        self._news.set()

    def begin(self, spec: RunSpec) -> None:
        _, job = self.backend.prepare(spec)
        self.backend.run(spec, job)

    async def image(self, spec: RunSpec) -> Image.Image:
        self.begin(spec)
        return await self.ended(spec.run_id)

    async def ended(self, run_id: str) -> Image.Image:
        async with asyncio.timeout(60):
            while run_id not in self.outcomes:
                self._news.clear()
                await self._news.wait()
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


async def test_many_at_once_are_as_alone() -> None:
    bench = Bench()
    images = [noise(40 + n, 30) for n in range(8)]
    steps = [{"op": "resize", "width": 20, "height": 10}, {"op": "rotate", "degrees": 90}]
    alone = [await bench.image(spec(n, *steps, images=[image])) for n, image in enumerate(images)]
    for n, image in enumerate(images):
        bench.begin(spec(100 + n, *steps, images=[image]))
    together = [await bench.ended(f"run-{100 + n}") for n in range(8)]
    assert [one.tobytes() for one in together] == [one.tobytes() for one in alone]
    assert alone[0].size == (10, 20)
    assert bench.backend.progress() is None


async def test_the_form_of_the_output() -> None:
    bench = Bench()
    flip = {"op": "flip", "axis": "vertical"}
    assert (await bench.image(spec(1, flip, images=[noise(4, 4)]))).format == "PNG"
    jpeg = RunSpec(
        run_id="run-2", task="image_processing", model="m", payload={"operations": [flip]},
        images={"image": decoded(noise(4, 4), "JPEG")},
    )  # fmt: skip
    assert (await bench.image(jpeg)).format == "JPEG"  # as it came
    gif = RunSpec(
        run_id="run-3", task="image_processing", model="m", payload={"operations": [flip]},
        images={"image": decoded(noise(4, 4), "GIF")},
    )  # fmt: skip
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


async def test_a_cancelled_run_ends_before_its_next_operation_and_tells_nothing(monkeypatch: Any) -> None:
    bench = Bench(threads=1)
    begun, go_on = threading.Event(), threading.Event()
    original = Image.Image.resize

    def resize(image: Image.Image, size: tuple[int, int], *more: Any, **named: Any) -> Image.Image:
        begun.set()
        assert go_on.wait(60)
        return original(image, size, *more, **named)

    monkeypatch.setattr(Image.Image, "resize", resize)
    bench.begin(spec(1, *[{"op": "resize", "width": 9, "height": 9}] * 3, images=[noise(40, 30)]))
    bench.begin(spec(2, {"op": "resize", "width": 9, "height": 9}, images=[noise(40, 30)]))
    assert await asyncio.to_thread(begun.wait, 60)
    bench.backend.cancel("run-1")
    go_on.set()
    await bench.ended("run-2")
    assert bench.backend._done == 3  # one resize of the first; resize and encoding of the second
    assert list(bench.outcomes) == ["run-2"]


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
