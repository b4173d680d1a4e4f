"""The transparent colour of a PNG without an alpha channel, where Pillow compares it with samples of another depth.

A chunk tRNS holds one colour, in the file's own samples (https://www.w3.org/TR/png-3/#11tRNS). Pillow widens samples of
2 and 4 bits to 8 and cuts colours of 16 bits to 8, and leaves the colour as it is: no pixel equals it any more.
"""

from __future__ import annotations

import io

from PIL import Image, ImageChops

_DEPTH, _COLOUR_TYPE = 24, 25
"""Places of bytes in a PNG, whose first chunk is IHDR."""
_GREY, _COLOURS = 0, 2


def correct_colour_key(image: Image.Image, data: bytes) -> None:
    """Make the transparent colour of the loaded `image` hold for its 8 bits, or give it an alpha channel.

    `data`: its file. Grey of 16 bits stays as it is: its samples keep their depth.
    """
    key = image.info.get("transparency")
    depth, colour_type = data[_DEPTH], data[_COLOUR_TYPE]
    if key is None:
        return
    if colour_type == _GREY and depth in (2, 4):
        image.info["transparency"] = key * (255 // (2**depth - 1))
    elif colour_type == _COLOURS and depth == 16:
        high, low = [level >> 8 for level in key], [level & 255 for level in key]
        del image.info["transparency"]
        image.putalpha(ImageChops.lighter(_differs(image, high), _differs(_low_bytes(data), low)))


def _low_bytes(data: bytes) -> Image.Image:
    """The less significant bytes of its samples: the file decoded as if its samples had the other byte order."""
    with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
        image.tile = [tile._replace(args="RGB;16L") for tile in image.tile]
        image.load()
        return image.copy()


def _differs(image: Image.Image, colour: list[int]) -> Image.Image:
    """255 where a pixel is another colour, else 0."""
    bands = zip(image.split(), colour, strict=True)
    one, two, three = (band.point([255 * (level != wanted) for level in range(256)]) for band, wanted in bands)
    return ImageChops.lighter(ImageChops.lighter(one, two), three)
