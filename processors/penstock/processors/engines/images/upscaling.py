"""Upscaling inside the child: operations on images, with a network for `upscale`, computed tile by tile.

The network is Real-ESRGAN's compact one (SRVGGNetCompact): convolutions of 3 × 3 and a shuffle of pixels. An output
pixel sees only so many pixels around it as there are convolutions, so tiles that overlap by that much give exactly what
the whole image would. Memory follows the tile, not the image.

A model's folder holds model.safetensors and config.json with model_type (srvgg), channels, convolutions and scale.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from penstock.processors.engines.backend import Emit
from penstock.processors.engines.base import EngineInfo
from penstock.processors.engines.images.work import ImageWork, Job
from penstock.processors.engines.process.loading import device_name, dtype_name, set_up_torch
from penstock.processors.images.operations import Encoded, Picture, apply, encode
from penstock.processors.images.pictures import opened
from penstock.schemas.errors import InvalidRequest

TILE = 256
MODEL_TYPE = "srvgg"
ALIVE = 8
"""Feature maps of a tile that are held at once, at most: what a convolution reads and makes, and its scratch."""

Box = tuple[int, int, int, int]
"""(left, top, right, bottom), pixels."""


class UpscalingBackend(ImageWork):
    """`tile` (256): the side of a tile, pixels. `channels_last` and half precision follow the device."""

    upscales = True

    def __init__(self, source: str, options: Mapping[str, Any], emit: Emit) -> None:
        super().__init__(source, options, emit)
        self.device = device_name(options)
        self._tile = int(options.get("tile", TILE))
        # The network uses all cores by itself: two images at once would only take memory twice.
        self._network_free = threading.Lock()
        self._network: Any = None
        self._overlap = 0
        self._scale = 0

    def load(self) -> EngineInfo:
        import torch

        set_up_torch(self._options)
        config = read_config(Path(self._source))
        self._overlap, self._scale = int(config["convolutions"]), int(config["scale"])
        network = load_network(Path(self._source), config)
        self._network = network.to(device=self.device, dtype=getattr(torch, dtype_name(self._options)))
        self._network.to(memory_format=torch.channels_last)
        self._enlarge(Image.new("RGB", (8, 8)))
        return super().load()

    def compute(self, run_id: str, job: Job) -> Encoded:
        images = {place: opened(image) for place, image in job.images.items()}
        picture = Picture(image=images["image"], format=job.form, quality=job.quality)
        for step in job.steps:
            self.go_on(run_id)
            picture = apply(picture, step, images, lambda image, factor: self.upscale(run_id, image, factor))
        self.go_on(run_id)
        return encode(picture)

    def upscale(self, run_id: str, image: Image.Image, factor: int) -> Image.Image:
        """`factor` times larger; less than the network's own factor is reached by making its image smaller again."""
        made = Image.new("RGB", (image.width * self._scale, image.height * self._scale))
        colours = image.convert("RGB")  # its alpha is put back below
        for inner, outer in tiles(image.size, self._tile, self._overlap):
            with self._network_free:
                self.go_on(run_id)
                large = self._enlarge(colours.crop(outer))
            left, top = (inner[0] - outer[0]) * self._scale, (inner[1] - outer[1]) * self._scale
            width, height = (inner[2] - inner[0]) * self._scale, (inner[3] - inner[1]) * self._scale
            made.paste(
                large.crop((left, top, left + width, top + height)), (inner[0] * self._scale, inner[1] * self._scale)
            )
        size = image.width * factor, image.height * factor
        if size != made.size:
            made = made.resize(size, Image.Resampling.LANCZOS)
        if image.mode == "RGBA":
            made.putalpha(image.getchannel("A").resize(size, Image.Resampling.LANCZOS))
        return made.convert("L") if image.mode == "L" else made

    def _enlarge(self, image: Image.Image) -> Image.Image:
        import numpy
        import torch

        pixels = torch.from_numpy(numpy.asarray(image).copy()).permute(2, 0, 1).unsqueeze(0)
        with torch.inference_mode():
            batch = pixels.to(self.device).to(next(self._network.parameters()).dtype).div(255)
            made = self._network(batch.to(memory_format=torch.channels_last))
            levels = made[0].float().clamp(0, 1).mul(255).round().to(torch.uint8).permute(1, 2, 0).cpu()
        return Image.fromarray(levels.contiguous().numpy())


def tiles(size: tuple[int, int], tile: int, overlap: int) -> Iterator[tuple[Box, Box]]:
    """Boxes that cover an image once, each with the larger box that must be computed for it."""
    width, height = size
    for top in range(0, height, tile):
        for left in range(0, width, tile):
            right, bottom = min(left + tile, width), min(top + tile, height)
            outer = (
                max(0, left - overlap),
                max(0, top - overlap),
                min(width, right + overlap),
                min(height, bottom + overlap),
            )
            yield (left, top, right, bottom), outer


def read_config(folder: Path) -> dict[str, Any]:
    """Raises InvalidRequest for a folder that holds no such network."""
    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{folder.name} holds no readable config.json") from error
    if config.get("model_type") != MODEL_TYPE:
        raise InvalidRequest(f"{folder.name} is no upscaler: its model_type is not {MODEL_TYPE}")
    return config


def make_network(config: Mapping[str, Any]) -> Any:
    """The network without weights."""
    import torch
    from torch import nn

    channels, convolutions, scale = (int(config[name]) for name in ("channels", "convolutions", "scale"))
    layers: list[Any] = []
    for number in range(convolutions - 1):
        layers += [nn.Conv2d(channels if number else 3, channels, 3, padding=1), nn.PReLU(channels)]
    layers.append(nn.Conv2d(channels, 3 * scale * scale, 3, padding=1))

    class Network(nn.Module):
        """What it adds to the image that is only made larger."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(*layers)

        def forward(self, image: torch.Tensor) -> torch.Tensor:
            added = nn.functional.pixel_shuffle(self.body(image), scale)
            return added + nn.functional.interpolate(image, scale_factor=scale, mode="nearest")

    return Network().eval()


def load_network(folder: Path, config: Mapping[str, Any]) -> Any:
    from safetensors.torch import load_file

    network = make_network(config)
    network.load_state_dict(load_file(folder / "model.safetensors"))
    return network


def tile_bytes(config: Mapping[str, Any], options: Mapping[str, Any], element_bytes: int) -> int:
    """Memory that one tile takes while it is computed."""
    side = int(options.get("tile", TILE)) + 2 * int(config["convolutions"])
    return side * side * int(config["channels"]) * element_bytes * ALIVE
