"""Images as files: PNG, JPEG or WebP, with the facts of how they were made in their metadata."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from typing import Any

from penstock.processors.images.decoded import DecodedImage
from penstock.processors.images.pictures import flattened, in_colours, opened
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.image_operations import FORMATS
from penstock.schemas.records import OutputSpec

QUALITY = 90
SENT_QUALITY = 95
"""Of images on their way to a server."""
_DESCRIPTION, _SOFTWARE = 0x010E, 0x0131
"""EXIF tags."""
_EXIF_BYTES = 65_000
"""The longest description. A JPEG's EXIF block may have 65,533 bytes."""
_WEBP_SIDE = 16_383


def check_size(width: int, height: int, output: OutputSpec | None) -> None:
    """Raises InvalidRequest for a size that files of this format cannot have."""
    if output is not None and output.format == "webp" and max(width, height) > _WEBP_SIDE:
        raise InvalidRequest(
            f"output.format: a WebP file has at most {_WEBP_SIDE} pixels a side; the image has {width} × {height}",
            param="output.format",
        )


def encode(image: Any, output: OutputSpec | None, facts: Mapping[str, Any]) -> tuple[bytes, str]:
    """(the file's bytes, its media type) of a Pillow image, in the form that was asked for.

    Facts are in a PNG as a text under each name, in others as a JSON object in EXIF's ImageDescription, which leaves
    out the longest ones if they do not fit. Raises InvalidRequest for a size that the format cannot have.
    """
    check_size(image.width, image.height, output)
    output = output or OutputSpec()
    format = output.format or "png"
    written = {} if output.facts is False else {name: value for name, value in facts.items() if value is not None}
    form: dict[str, Any] = {} if format == "png" else {"quality": output.quality or QUALITY}
    if written and format == "png":
        from PIL.PngImagePlugin import PngInfo

        info = PngInfo()
        for name, value in {"Software": "Penstock", **written}.items():
            info.add_itxt(name, str(value))
        form["pnginfo"] = info
    elif written:
        exif = image.getexif()
        exif[_DESCRIPTION] = _fitting(written)
        exif[_SOFTWARE] = "Penstock"
        form["exif"] = exif.tobytes()
    if format == "jpeg":
        image = in_colours(image)
    file = io.BytesIO()
    image.save(file, format=format, **form)
    return file.getvalue(), FORMATS[format]


def _fitting(facts: Mapping[str, Any]) -> str:
    """The facts as JSON (ASCII), without the longest ones if it is too long for EXIF."""
    kept = dict(facts)
    while len(text := json.dumps(kept)) > _EXIF_BYTES:
        del kept[max(kept, key=lambda name: len(json.dumps(kept[name])))]
    return text


def as_sent(image: DecodedImage, *, lossless: bool = False) -> tuple[bytes, str]:
    """(a file for a server, its media type): a JPEG of what came as one, unless it must be lossless; else a PNG.

    It has no alpha channel, as local models see it: a server that drops alpha would show hidden colours.
    """
    lossy = image.source_format == "JPEG" and not lossless
    form = OutputSpec(format="jpeg", quality=SENT_QUALITY) if lossy else OutputSpec(format="png")
    return encode(flattened(opened(image)), form, {})
