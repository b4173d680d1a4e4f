"""The operations of image_processing over Pillow images: pictures in, pictures out, nothing else touched."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from PIL import Image, ImageOps

from penstock.processors.images.pictures import flattened
from penstock.processors.images.planning import Step, covering_box
from penstock.schemas.image_operations import FORMATS

DEFAULT_QUALITY = 90
"""Of JPEG and WebP."""

Upscale = Callable[[Image.Image, int], Image.Image]
"""An image, and how many times larger it shall be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """An image in sRGB. `format`: a name of FORMATS. `quality` None: the default.

    No metadata: what an image came with stayed with its decoder, once its orientation and profile were applied.
    """

    image: Image.Image
    format: str = "png"
    quality: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """An image as bytes. Width and height in pixels."""

    data: bytes
    media_type: str
    width: int
    height: int


def apply(picture: Picture, step: Step, images: Mapping[str, Image.Image], upscale: Upscale | None = None) -> Picture:
    """One planned operation. `images` by place, as `planning.plan` knows them: what compositions take is there."""
    values: Mapping[str, Any] = step.values
    image = picture.image
    match step.op:
        case "convert":
            return replace(picture, format=values["format"], quality=values.get("quality"))
        case "strip_metadata":
            return picture  # it never has any, see docs/decisions/0034
        case "resize" if values["fit"] == "cover":
            made = image.resize(step.size, Image.Resampling.LANCZOS, box=covering_box(image.size, step.size))
        case "resize" | "thumbnail":
            made = image if image.size == step.size else image.resize(step.size, Image.Resampling.LANCZOS)
        case "crop":
            left, top = values["left"], values["top"]
            made = image.crop((left, top, left + values["width"], top + values["height"]))
        case "rotate":
            made = _rotate(image, values["degrees"], expand=values["expand"])
        case "flip":
            made = ImageOps.mirror(image) if values["axis"] == "horizontal" else ImageOps.flip(image)
        case "composite":
            assert step.overlay is not None
            made = _composite(image, images[step.overlay], values["left"], values["top"], values["opacity"])
        case "upscale":
            assert upscale is not None
            made = upscale(image, int(values["factor"]))
        case other:
            raise ValueError(f"{other} is no operation")
    return replace(picture, image=made)


def _rotate(image: Image.Image, degrees: float, *, expand: bool) -> Image.Image:
    """Clockwise. Right angles are exact; else the corners are transparent (white where a format has no alpha)."""
    turn = degrees % 360
    if turn == 0:
        return image
    exact = {
        90: Image.Transpose.ROTATE_270,
        180: Image.Transpose.ROTATE_180,
        270: Image.Transpose.ROTATE_90,
    }.get(int(turn) if turn == int(turn) else -1)
    if exact is not None and (expand or turn == 180 or image.width == image.height):
        return image.transpose(exact)
    return image.convert("RGBA").rotate(-degrees, Image.Resampling.BICUBIC, expand=expand, fillcolor=(0, 0, 0, 0))


def _composite(image: Image.Image, overlay: Image.Image, left: int, top: int, opacity: float) -> Image.Image:
    """The overlay put onto the image; what reaches over its edges is cut off."""
    overlay = overlay.convert("RGBA")
    if opacity < 1:
        alpha = overlay.getchannel("A").point([round(level * opacity) for level in range(256)])
        overlay.putalpha(alpha)
    layer = Image.new("RGBA", image.size)
    layer.paste(overlay, (left, top))
    made = Image.alpha_composite(image.convert("RGBA"), layer)
    return made if image.mode == "RGBA" else made.convert("RGB")


def encode(picture: Picture) -> Encoded:
    """The picture as bytes of its format, without metadata. No alpha in JPEG: on white."""
    image, name = picture.image, picture.format
    options: dict[str, Any] = {}
    if name != "png":
        options["quality"] = DEFAULT_QUALITY if picture.quality is None else picture.quality
    if name == "jpeg":
        image = flattened(image)
    buffer = io.BytesIO()
    image.save(buffer, name, **options)
    return Encoded(data=buffer.getvalue(), media_type=FORMATS[name], width=image.width, height=image.height)
