"""Guarded decoding: what comes out is upright and plain, and what happens to a decoder happens to one image alone."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import signal
import struct
import zlib
from collections.abc import AsyncGenerator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageCms

from hostile_images import chunk, picture, png
from kit.pictures import file_of
from kit.refusals import refused
from penstock.processors.images.decoders import DecodeLimits, Decoders
from penstock.processors.images.pictures import opened
from penstock.schemas.errors import InternalError, InvalidRequest, TooLarge
from support import alive, wait_until_async

PARAM = "payload.image"


@pytest.fixture
async def decoders() -> AsyncGenerator[Decoders]:
    made = Decoders(DecodeLimits(max_pixels=2_000_000, max_side=3_000), processes=2)
    yield made
    made.close()


@pytest.mark.parametrize("format_name", ["PNG", "BMP"])
async def test_pixels_are_those_of_the_image(decoders: Decoders, format_name: str) -> None:
    pixels = random.Random(1).randbytes(40 * 30 * 3)
    found = await decoders.decode(file_of(Image.frombytes("RGB", (40, 30), pixels), format_name), param=PARAM)
    assert (found.width, found.height, found.mode, found.source_format) == (40, 30, "RGB", format_name)
    assert found.pixels == pixels
    assert str(pixels[:20]) not in repr(found)  # logs never show an image


@pytest.mark.parametrize(
    ("mode", "format_name", "expected"),
    [
        ("1", "PNG", "L"), ("L", "JPEG", "L"), ("LA", "PNG", "RGBA"), ("P", "GIF", "RGB"), ("RGBA", "WEBP", "RGBA"),
        ("CMYK", "JPEG", "RGB"), ("I;16", "PNG", "L"),
    ],
)  # fmt: skip
async def test_three_modes_come_out(decoders: Decoders, mode: str, format_name: str, expected: str) -> None:
    data = file_of(Image.new(mode, (8, 4)), format_name)
    assert (await decoders.decode(data, param=PARAM)).mode == expected
    assert (await decoders.look(data, param=PARAM)).mode == expected


@pytest.mark.parametrize(
    ("depth", "colour_type", "row", "key", "expected"),
    [
        (1, 0, b"\x80", (1,), [(255, 255, 255, 0), (0, 0, 0, 255)]),
        (2, 0, b"\xc0", (3,), [(255, 255, 255, 0), (0, 0, 0, 255)]),
        (4, 0, b"\xa0", (10,), [(170, 170, 170, 0), (0, 0, 0, 255)]),
        (8, 0, b"\xc8\x00", (200,), [(200, 200, 200, 0), (0, 0, 0, 255)]),
        (16, 0, b"\xc8\x01\xc8\x00", (0xC801,), [(200, 200, 200, 0), (200, 200, 200, 255)]),
        (8, 2, b"\xc8\x01\x02\0\0\0", (200, 1, 2), [(200, 1, 2, 0), (0, 0, 0, 255)]),
        (16, 2, b"\xc8\x01\0\0\0\0\xc8\0\0\0\0\0", (0xC801, 0, 0), [(200, 0, 0, 0), (200, 0, 0, 255)]),
    ],
)
async def test_the_transparent_colour_of_each_depth(
    decoders: Decoders, depth: int, colour_type: int, row: bytes, key: tuple[int, ...], expected: list[Any]
) -> None:
    """A PNG without alpha whose chunk tRNS names one colour in the file's own samples."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, depth, colour_type, 0, 0, 0))
    transparent = chunk(b"tRNS", struct.pack(f">{len(key)}H", *key))
    body = chunk(b"IDAT", zlib.compress(b"\0" + row)) + chunk(b"IEND", b"")
    data = b"\x89PNG\r\n\x1a\n" + header + transparent + body
    found = await decoders.decode(data, param=PARAM)
    assert list(opened(found).get_flattened_data()) == expected
    assert (await decoders.look(data, param=PARAM)).mode == found.mode == "RGBA"


async def test_sixteen_bits_are_scaled_not_cut(decoders: Decoders) -> None:
    image = Image.new("I;16", (3, 1))
    for at, value in enumerate((0, 0x8000, 0xFFFF)):
        image.putpixel((at, 0), value)
    found = await decoders.decode(file_of(image, "PNG"), param=PARAM)
    assert list(found.pixels) == [0, 128, 255]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format_name", ["PNG", "JPEG", "WEBP"])
async def test_a_look_tells_the_size_that_decoding_gives(
    decoders: Decoders, format_name: str, orientation: int
) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.frombytes("RGB", (40, 30), random.Random(1).randbytes(40 * 30 * 3))
    data = file_of(image, format_name, exif=exif.tobytes())
    seen, found = await decoders.look(data, param=PARAM), await decoders.decode(data, param=PARAM)
    assert (seen.width, seen.height, seen.mode) == (found.width, found.height, found.mode)
    assert (seen.source_format, seen.source_sha256) == (found.source_format, found.source_sha256)
    assert (seen.data, seen.size_bytes, seen.pixel_bytes) == (data, len(data), len(found.pixels))
    assert seen == pickle.loads(pickle.dumps(seen, protocol=5))


async def test_a_look_refuses_what_an_images_beginning_shows(decoders: Decoders) -> None:
    with pytest.raises(TooLarge, match="2000000"):
        await decoders.look(png(2999, 2999, body=b""), param=PARAM)
    with pytest.raises(TooLarge, match="a side may have 3000"):
        await decoders.look(png(3001, 1, body=b""), param=PARAM)
    with pytest.raises(InvalidRequest, match="not a whole and valid PNG"):
        await decoders.look(b"\x89PNG\r\n\x1a\n" + b"x" * 100, param=PARAM)
    assert (await decoders.look(png(300, 200, body=b"nothing"), param=PARAM)).width == 300
    assert decoders.deaths == 0


async def test_orientation_is_applied_and_metadata_dropped(decoders: Decoders) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    exif[0x010F] = "a maker"
    image = Image.new("RGB", (40, 20))
    image.paste((255, 255, 255), (0, 0, 20, 20))
    found = await decoders.decode(file_of(image, "PNG", exif=exif), param=PARAM)
    assert (found.width, found.height) == (20, 40)
    assert found.pixels[:3] == b"\xff\xff\xff"  # what was left is above now
    assert found.pixels[-3:] == b"\0\0\0"


async def test_the_first_frame_counts(decoders: Decoders) -> None:
    frames = [Image.new("RGB", (9, 9), colour) for colour in ("red", "lime", "blue")]
    for format_name in ("GIF", "WEBP", "PNG"):
        options = {"lossless": True} if format_name == "WEBP" else {}
        data = file_of(frames[0], format_name, save_all=True, append_images=frames[1:], **options)
        found = await decoders.decode(data, param=PARAM)
        assert found.pixels[:3] == b"\xff\0\0", format_name


async def test_colours_of_a_profile_come_out_in_srgb(decoders: Decoders) -> None:
    image = Image.new("RGB", (4, 4), (200, 30, 30))
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    plain = await decoders.decode(file_of(image, "PNG", icc_profile=lab), param=PARAM)
    assert max(abs(a - b) for a, b in zip(plain.pixels[:3], (200, 30, 30), strict=True)) <= 1
    broken = await decoders.decode(file_of(image, "PNG", icc_profile=b"no profile at all"), param=PARAM)
    assert tuple(broken.pixels[:3]) == (200, 30, 30)  # a broken profile is no reason to refuse the image


async def test_sides_and_pixels_have_limits(decoders: Decoders) -> None:
    for size, word in (((3_001, 2), "a side may have 3000"), ((1_500, 1_400), "2000000 pixels")):
        with refused(TooLarge, word, param=PARAM):
            await decoders.decode(file_of(Image.new("L", size), "PNG"), param=PARAM)
    assert decoders.deaths == 0


async def test_a_format_that_is_not_accepted_is_named(decoders: Decoders) -> None:
    with pytest.raises(InvalidRequest, match="TIFF image; accepted are PNG, JPEG"):
        await decoders.decode(file_of(Image.new("L", (4, 4)), "TIFF"), param=PARAM)
    with closing(Decoders(DecodeLimits(formats=("TIFF",)))) as tolerant:
        found = await tolerant.decode(file_of(Image.new("L", (4, 4)), "TIFF"), param=PARAM)
        assert found.source_format == "TIFF"


async def test_flipped_bytes_give_an_image_or_a_clear_error(decoders: Decoders) -> None:
    rng = random.Random(5)
    outcomes = {"image": 0, "error": 0}
    for number in range(150):
        data = bytearray(picture(rng, ("PNG", "JPEG", "WEBP", "GIF", "BMP")[number % 5]))
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(12, len(data))] = rng.randrange(256)
        (found,) = await asyncio.gather(decoders.decode(bytes(data), param=PARAM), return_exceptions=True)
        if isinstance(found, BaseException):
            assert isinstance(found, InvalidRequest | TooLarge)
            assert found.param == PARAM
            outcomes["error"] += 1
        else:
            assert found.pixels
            outcomes["image"] += 1
    assert outcomes["image"] > 10
    assert outcomes["error"] > 10


async def test_a_decoder_that_was_killed_while_idle_harms_no_image(decoders: Decoders) -> None:
    data = picture(random.Random(2))
    await decoders.decode(data, param=PARAM)
    (pid,) = decoders.pool.pids()
    os.kill(pid, signal.SIGKILL)
    await wait_until_async(lambda: pid not in decoders.pool.pids(), describe="the killed decoder to be noticed")
    assert (await decoders.decode(data, param=PARAM)).pixels
    assert decoders.deaths == 0


async def test_a_decoder_that_is_killed_at_work_fails_its_image_alone() -> None:
    with closing(Decoders(processes=1)) as decoders:
        await decoders.decode(picture(random.Random(2)), param=PARAM)
        (pid,) = decoders.pool.pids()
        os.kill(pid, signal.SIGSTOP)  # so that it is at work for as long as the test needs
        working = asyncio.create_task(decoders.decode(picture(random.Random(3)), param=PARAM))
        waiting = asyncio.create_task(decoders.decode(picture(random.Random(4)), param=PARAM))
        await wait_until_async(lambda: len(decoders.pool.at_work()) == 1)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(InvalidRequest, match="ended its decoder"):
            await working
        assert (await waiting).pixels
        assert decoders.deaths == 1


async def test_memory_is_limited_by_the_kernel() -> None:
    with closing(Decoders(DecodeLimits(max_pixels=100_000_000, memory_bytes=220 << 20), processes=1)) as decoders:
        big = file_of(Image.new("RGB", (6_000, 6_000)), "PNG", compress_level=1)  # 108 MB of pixels
        with pytest.raises(InvalidRequest, match=r"too much memory|ended its decoder"):
            await decoders.decode(big, param=PARAM)
        assert (await decoders.decode(picture(random.Random(4)), param=PARAM)).pixels


async def test_a_caller_who_leaves_and_a_close_leave_no_process() -> None:
    decoders = Decoders(processes=2)
    await decoders.decode(picture(random.Random(2)), param=PARAM)
    (pid,) = decoders.pool.pids()
    os.kill(pid, signal.SIGSTOP)
    task = asyncio.create_task(decoders.decode(picture(random.Random(3)), param=PARAM))
    await wait_until_async(lambda: len(decoders.pool.at_work()) == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await wait_until_async(lambda: not alive(pid), describe="the cancelled image's decoder to end")
    await decoders.decode(picture(random.Random(2)), param=PARAM)
    (other,) = decoders.pool.pids()
    decoders.close()
    await wait_until_async(lambda: not alive(other), describe="the idle decoder to end")
    with pytest.raises(InternalError, match="stops"):
        await decoders.decode(picture(random.Random(2)), param=PARAM)


async def test_a_decoder_has_nothing_of_the_workers_environment(
    decoders: Decoders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of the worker")
    await decoders.decode(picture(random.Random(2)), param=PARAM)
    (pid,) = decoders.pool.pids()
    environment = Path(f"/proc/{pid}/environ").read_bytes()  # noqa: ASYNC240  (no disk is read)
    names = {entry.partition(b"=")[0] for entry in environment.split(b"\0") if entry}
    assert names == {b"PYTHONPATH"}
