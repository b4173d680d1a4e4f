"""The sizes of an image through its operations, before anything is computed: what cannot work is refused here.

Pure: sizes and operations in, sizes out. An operation makes exactly the size that is planned for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.schemas.errors import InvalidRequest, TooLarge, UnsupportedParameter
from penstock.schemas.image_operations import MAX_SIDE, Value, typed

Size = tuple[int, int]
"""(width, height), pixels."""

MAX_PIXELS = 64 * 2**20
"""Of any image on the way: 64 megapixels are 256 MiB with alpha."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One operation: its arguments as values, the size that it makes, and the place of the image that it takes."""

    op: str
    values: Mapping[str, Value]
    size: Size
    overlay: str | None = None


def plan(
    operations: Sequence[Mapping[str, Any]],
    sizes: Mapping[str, Size],
    *,
    upscales: bool,
    max_pixels: int = MAX_PIXELS,
) -> list[Step]:
    """The steps of operations in any form. `sizes` by place: `image`, and `operations[2].image` for a composition.

    Raises InvalidRequest, TooLarge and, for `upscale` where no model `upscales`, UnsupportedParameter; each names the
    operation's number and field.
    """
    size = sizes["image"]
    steps: list[Step] = []
    for number, operation in enumerate(operations):
        place = f"payload.operations[{number}]"
        op, values = str(operation["op"]).lower(), typed(operation, place)
        overlay: str | None = None
        if op == "upscale" and not upscales:
            raise UnsupportedParameter(
                f"{place}.op: upscale needs a model, and the one that serves this request has none", param=f"{place}.op"
            )
        if op == "composite":
            overlay = f"operations[{number}].image"
            if overlay not in sizes:
                raise InvalidRequest(f"{place}.image is not there", param=f"{place}.image")
            _check_overlay(values, size, sizes[overlay], place)
        size = made_size(op, values, size, place)
        if size[0] * size[1] > max_pixels or max(size) > MAX_SIDE:
            raise TooLarge(
                f"{place} would make an image of {size[0]} × {size[1]} pixels; the limits are {MAX_SIDE} a side and"
                f" {max_pixels} in all",
                param=place,
            )
        steps.append(Step(op=op, values=values, size=size, overlay=overlay))
    return steps


def made_size(op: str, values: Mapping[str, Any], size: Size, path: str) -> Size:
    """The size that an operation makes of an image of this size. Raises InvalidRequest for a crop that lies outside."""
    match op:
        case "resize":
            return resized(size, values.get("width"), values.get("height"), values["fit"])
        case "thumbnail":
            if size[0] <= values["width"] and size[1] <= values["height"]:
                return size
            return resized(size, values["width"], values["height"], "contain")
        case "crop":
            _check_crop(values, size, path)
            return values["width"], values["height"]
        case "rotate":
            return rotated(size, values["degrees"]) if values["expand"] else size
        case "upscale":
            factor = int(values["factor"])
            return size[0] * factor, size[1] * factor
        case _:
            return size


def resized(size: Size, width: int | None, height: int | None, fit: str) -> Size:
    """exact and cover: what is asked for, a side that is left out in proportion; contain: the largest that fits in."""
    if width is not None and height is not None and fit != "contain":
        return width, height
    scales = [wanted / own for wanted, own in ((width, size[0]), (height, size[1])) if wanted is not None]
    scale = min(scales)
    found = max(1, round(size[0] * scale)), max(1, round(size[1] * scale))
    return (found[0] if width is None else min(found[0], width)), (
        found[1] if height is None else min(found[1], height)
    )


def covering_box(size: Size, wanted: Size) -> tuple[float, float, float, float]:
    """The largest box in the middle of an image that has the wanted proportions."""
    scale = max(wanted[0] / size[0], wanted[1] / size[1])
    width, height = min(size[0], wanted[0] / scale), min(size[1], wanted[1] / scale)
    left, top = (size[0] - width) / 2, (size[1] - height) / 2
    return left, top, left + width, top + height


def rotated(size: Size, degrees: float) -> Size:
    """The smallest image that holds a rotated one, as Pillow computes it."""
    if degrees % 180 == 0:
        return size
    if degrees % 90 == 0:
        return size[1], size[0]
    angle = -math.radians(-degrees % 360.0)
    cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
    width, height = size
    centre = width / 2.0, height / 2.0
    shift_x = cos * -centre[0] + sin * -centre[1] + centre[0]
    shift_y = -sin * -centre[0] + cos * -centre[1] + centre[1]
    corners = ((0, 0), (width, 0), (width, height), (0, height))
    xs = [cos * x + sin * y + shift_x for x, y in corners]
    ys = [-sin * x + cos * y + shift_y for x, y in corners]
    return math.ceil(max(xs)) - math.floor(min(xs)), math.ceil(max(ys)) - math.floor(min(ys))


def _check_crop(values: Mapping[str, Any], size: Size, path: str) -> None:
    for edge, length, whole, name in (("left", "width", size[0], "wide"), ("top", "height", size[1], "high")):
        if values[edge] >= whole:
            param = f"{path}.{edge}"
            raise InvalidRequest(f"{param} is {values[edge]}, but the image is {whole} pixels {name}", param=param)
        if values[edge] + values[length] > whole:
            param = f"{path}.{length}"
            raise InvalidRequest(
                f"{param} reaches to pixel {values[edge] + values[length]}, but the image is {whole} pixels {name}",
                param=param,
            )


def _check_overlay(values: Mapping[str, Any], size: Size, overlay: Size, path: str) -> None:
    """An image of which nothing would be seen is a mistake."""
    for edge, own, whole in (("left", overlay[0], size[0]), ("top", overlay[1], size[1])):
        if values[edge] >= whole or values[edge] + own <= 0:
            param = f"{path}.{edge}"
            raise InvalidRequest(f"{param} puts the second image wholly outside of the first", param=param)
