"""The program that decodes images, in a process of its own: whatever an image does to it happens to nothing else.

    python -m penstock.processors.images.decoder MEMORY_BYTES MAX_PIXELS MAX_SIDE CPU_S

On its standard input come jobs, as `wire` writes them: {format, size, only_look}, then so many bytes of the image. On
its standard output goes an answer for each: {width, height, mode}, then the pixels where it was not only to look; or
{code, message}. It ends when its input does, with the worker, in whatever way that ended.

Only the decoder of the format that the worker has sniffed is opened. Width and height are looked at before any pixel
is decoded. Memory and processor time have limits of the kernel's: an image that passes them ends this process. It is
started without the worker's environment, which holds secrets.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from PIL import ExifTags, Image, ImageChops, ImageCms, ImageFile, ImageOps

from penstock.processors.guarded.limits import limit_cpu, limit_this_process
from penstock.processors.guarded.wire import read_header, write

_LYING = frozenset({5, 6, 7, 8})
"""Orientations of EXIF that are turned by a quarter."""
CODE_INVALID, CODE_TOO_LARGE, CODE_MEMORY = "invalid", "too_large", "memory"


class Refused(Exception):
    """This image is not decoded; `code` is one of CODE_*."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def main(argv: list[str]) -> int:
    memory_bytes, max_pixels, max_side, cpu_s = (int(text) for text in argv)
    prepare(max_pixels)
    limit_this_process(memory_bytes)
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    while job := read_header(jobs):
        data = jobs.read(job["size"])
        limit_cpu(cpu_s)
        pixels = b""
        try:
            if job["only_look"]:
                about = look(data, job["format"], max_pixels, max_side)
            else:
                image = decode(data, job["format"], max_pixels, max_side)
                pixels = image.tobytes()
                about = {"width": image.width, "height": image.height, "mode": image.mode}
        except Refused as error:
            about = {"code": error.code, "message": str(error)}
        except MemoryError:
            about = {"code": CODE_MEMORY}
        write(answers, about, pixels)
        if about.get("code") == CODE_MEMORY:
            return 0  # what is left of it would be in the way of the next image
    return 0


def prepare(max_pixels: int) -> None:
    Image.preinit()
    Image.init()
    Image.MAX_IMAGE_PIXELS = max_pixels
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    warnings.simplefilter("ignore")
    warnings.simplefilter("error", Image.DecompressionBombWarning)


# --- one image


def decode(data: bytes, format_name: str, max_pixels: int, max_side: int) -> Image.Image:
    """The first frame, upright, in sRGB, of mode L, RGB or RGBA, without metadata. Raises Refused, MemoryError."""
    with _opened(data, format_name, max_pixels, max_side) as image:
        image.load()
        if format_name == "PNG":
            correct_colour_key(image, data)
        ImageOps.exif_transpose(image, in_place=True)
        return _plain(image)


def look(data: bytes, format_name: str, max_pixels: int, max_side: int) -> dict[str, Any]:
    """What `decode` would make, without the pixels: {width, height, mode}. Raises Refused, MemoryError.

    What is behind the pixels is not seen: an orientation there, or that the file is cut off.
    """
    with _opened(data, format_name, max_pixels, max_side) as image:
        # By the base class: a PNG's own method decodes all to find what may be at its end.
        orientation = Image.Image.getexif(image).get(ExifTags.Base.Orientation)
        width, height = image.size[::-1] if orientation in _LYING else image.size
        return {"width": width, "height": height, "mode": _plain_mode(image)}


@contextmanager
def _opened(data: bytes, format_name: str, max_pixels: int, max_side: int) -> Generator[Image.Image]:
    """Of a size that is allowed. What goes wrong with it is Refused or MemoryError."""
    try:
        with Image.open(io.BytesIO(data), formats=[format_name]) as image:
            _check_size(image, max_pixels, max_side)
            yield image
    except (Refused, MemoryError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise Refused(CODE_TOO_LARGE, f"has more than {max_pixels} pixels") from None
    except Exception as error:  # whatever Pillow's decoders raise: the image is at fault
        raise Refused(CODE_INVALID, f"is not a whole and valid {format_name} image") from error


def _check_size(image: Image.Image, max_pixels: int, max_side: int) -> None:
    width, height = image.size
    if width < 1 or height < 1:
        raise Refused(CODE_INVALID, "has no pixels")
    if max(width, height) > max_side:
        raise Refused(CODE_TOO_LARGE, f"is {width} x {height} pixels: a side may have {max_side}")
    if width * height > max_pixels:
        raise Refused(CODE_TOO_LARGE, f"is {width} x {height} pixels: it may have {max_pixels} in all")


def _plain(image: Image.Image) -> Image.Image:
    """8 bits a channel, grey or colours, transparency as alpha."""
    profile: bytes | None = image.info.get("icc_profile")
    if _is_deep_grey(image):
        return _of_deep_grey(image)
    if image.mode == "CMYK":
        return _in_srgb(image, profile, "RGB") or image.convert("RGB")
    mode = _plain_mode(image)
    plain = image if image.mode == mode == "RGB" else image.convert(mode)
    if profile and image.mode in ("RGB", "RGBA"):
        plain = _in_srgb(plain, profile, plain.mode) or plain
    return plain


def _is_deep_grey(image: Image.Image) -> bool:
    return image.mode.startswith("I") or image.mode == "F"


def _plain_mode(image: Image.Image) -> str:
    if image.has_transparency_data or image.mode in ("RGBA", "LA", "PA"):
        return "RGBA"
    return "L" if image.mode in ("1", "L") or _is_deep_grey(image) else "RGB"


def _of_deep_grey(image: Image.Image) -> Image.Image:
    """16 bits a pixel as 8, with alpha where one level is transparent."""
    if image.mode == "F":
        raise Refused(CODE_INVALID, "holds floating-point pixels, which are not supported")
    deep = image.convert("I")
    grey = deep.point(lambda value: value * (1 / 256)).convert("L")
    if "transparency" in image.info:
        key: int = image.info["transparency"]
        alpha = deep.point([255 * (level != key) for level in range(1 << 16)], "L")
        grey = Image.merge("LA", (grey, alpha)).convert("RGBA")
    return grey


def _in_srgb(image: Image.Image, profile: bytes | None, mode: str) -> Image.Image | None:
    """The colours of its profile in sRGB; None without a usable profile, which is no reason to refuse an image."""
    if not profile:
        return None
    try:
        source = ImageCms.getOpenProfile(io.BytesIO(profile))
        return ImageCms.profileToProfile(image, source, ImageCms.createProfile("sRGB"), outputMode=mode)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None


_DEPTH, _COLOUR_TYPE = 24, 25
"""Places of bytes in a PNG, whose first chunk is IHDR."""
_GREY, _COLOURS = 0, 2


def correct_colour_key(image: Image.Image, data: bytes) -> None:
    """Make the transparent colour of the loaded `image` hold for its 8 bits, or give it an alpha channel.

    A chunk tRNS holds one colour, in the file's own samples (https://www.w3.org/TR/png-3/#11tRNS). Pillow widens
    samples of 2 and 4 bits to 8 and cuts colours of 16 bits to 8, and leaves that colour as it is: no pixel equals it
    any more. `data`: its file. Grey of 16 bits stays as it is: its samples keep their depth.
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
