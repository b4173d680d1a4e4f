"""Guarded processing: what happens to a process happens to one request alone; sizes are those that decoding finds."""

from __future__ import annotations

import io
import json
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hostile_images import chunk, picture, png, scan_bomb
from kit.refusals import refused
from penstock.processors.guarded.process import JobStopped
from penstock.processors.images.encoded import EncodedImage
from penstock.processors.images.processors import ImageJob, ImageProcessors
from penstock.schemas.errors import EngineFailed, InvalidRequest, TooLarge
from penstock.schemas.image_formats import sniff
from support import alive, wait_until


@pytest.fixture
def processors() -> Iterator[ImageProcessors]:
    made = ImageProcessors(max_pixels=4_000_000, work_cpu_s=5)
    yield made
    made.pool.close()


def image_of(data: bytes, size: tuple[int, int] = (1, 1), *, cpu_s: int = 10) -> EncodedImage:
    return EncodedImage(*size, "RGB", data, sniff(data) or "PNG", "", cpu_s)


def job(data: bytes, *operations: dict[str, Any], form: str = "png", **more: bytes) -> ImageJob:
    images = {"image": image_of(data), **{place: image_of(one) for place, one in more.items()}}
    return ImageJob(images=images, operations=operations, form=form, quality=None)


FLIP = {"op": "flip", "axis": "horizontal"}


def test_a_file_comes_in_and_a_file_goes_out(processors: ImageProcessors) -> None:
    data = picture(random.Random(1), size=(60, 40))
    made = processors.process("a", job(data, FLIP, {"op": "crop", "width": 10, "height": 20}, form="webp"))
    with Image.open(io.BytesIO(made.data)) as image:
        assert (image.format, image.size) == ("WEBP", (10, 20))
    assert (made.media_type, made.width, made.height) == ("image/webp", 10, 20)


def test_an_image_that_is_of_another_size_than_it_seemed_is_planned_anew(processors: ImageProcessors) -> None:
    """A PNG may tell at its very end that it lies on its side, which a look at its beginning does not find."""
    exif = Image.Exif()
    exif[0x0112] = 6
    lying = png(30, 20)
    lying = lying[:-12] + chunk(b"eXIf", exif.tobytes().removeprefix(b"Exif\0\0")) + lying[-12:]
    made = processors.process("a", job(lying, {"op": "crop", "width": 20, "height": 30}))
    assert (made.width, made.height) == (20, 30)
    with refused(InvalidRequest, param="payload.operations[1].width"):
        processors.process("b", job(lying, FLIP, {"op": "crop", "width": 30, "height": 20}))
    with refused(TooLarge, param="payload.operations[0]"):
        processors.process("c", job(lying, {"op": "resize", "width": 4000, "height": 4000}))


def test_each_of_several_images_is_named(processors: ImageProcessors) -> None:
    good, bad = picture(random.Random(1)), picture(random.Random(2))[:-40]
    overlay = {"op": "composite", "image": {"artifact_id": "x"}}
    with refused(InvalidRequest, "not a whole and valid PNG", param="payload.operations[0].image"):
        processors.process("a", job(good, overlay, **{"operations[0].image": bad}))
    assert processors.process("b", job(good, overlay, **{"operations[0].image": good})).data
    with pytest.raises(TooLarge, match="4000000 pixels"):
        processors.process("c", job(png(3000, 3000, body=b"")))


def test_a_request_that_is_given_up_ends_its_process_alone(processors: ImageProcessors) -> None:
    processors.start(1)
    (pid,) = processors.pool.pids()
    os.kill(pid, signal.SIGSTOP)
    outcome: list[object] = []

    def work() -> None:
        try:
            outcome.append(processors.process("a", job(picture(random.Random(1)), FLIP)))
        except JobStopped as error:
            outcome.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: processors.pool.at_work() == {"a"})
    processors.pool.stop("a")
    thread.join(30)
    assert isinstance(outcome[0], JobStopped)
    wait_until(lambda: not alive(pid), describe="its process to end")
    assert processors.process("b", job(picture(random.Random(2)), FLIP)).data
    processors.pool.stop("b")  # it has ended
    assert processors.process("c", job(picture(random.Random(2)), FLIP)).data
    assert len(processors.pool.pids()) == 1, "the same process again"


def test_operations_that_take_too_long_end_their_process(processors: ImageProcessors) -> None:
    slow = ImageProcessors(max_pixels=64_000_000, work_cpu_s=0)
    try:
        turns = [{"op": "rotate", "degrees": 33, "expand": False}] * 30
        with refused(InvalidRequest, "take too long", param="payload.operations"):
            slow.process("a", job(picture(random.Random(1), "BMP", (2000, 2000)), *turns))
    finally:
        slow.pool.close()


def test_an_image_that_takes_too_long_is_told_from_operations_that_do(processors: ImageProcessors) -> None:
    one = ImageJob(images={"image": image_of(scan_bomb(), cpu_s=1)}, operations=[FLIP], form="png", quality=None)
    with refused(InvalidRequest, "decoding this JPEG image takes too long", param="payload.image"):
        processors.process("a", one)


OPENED = {"opened": True}


@pytest.mark.parametrize(
    "answers",
    [
        [(OPENED, "")],
        [({"opened": 1}, "")],
        [(OPENED, ""), ({"width": 9, "height": 9, "size": 17}, "<script></script>")],
        [(OPENED, ""), ({"width": 9, "height": 9, "size": 10**12}, "")],
        [(OPENED, ""), ({"width": 9000, "height": 9000, "size": 6}, "GIF89a")],
        [(OPENED, ""), ({"width": True, "height": 9, "size": 6}, "GIF89a")],
        [(OPENED, ""), ({"width": -9, "height": -9, "size": 6}, "GIF89a")],
        [(OPENED, ""), ({"size": -1}, "")],
        [({"code": "invalid", "message": "\ud800" * 9999, "place": [1], "param": {"x": 1}}, "")],
        [({"code": ["invalid"], "message": 5, "place": "image", "param": 5}, "")],
        [([1], "")],
    ],
)
def test_a_process_is_believed_no_more_than_its_image(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: list[tuple[Any, str]]
) -> None:
    """One that an image has taken over might answer anything."""
    said = b"".join(
        len(header).to_bytes(4, "big") + header + body.encode()
        for header, body in ((json.dumps(header).encode(), body) for header, body in answers)
    )
    (tmp_path / "liar.py").write_text(
        f"import sys\nsys.stdin.buffer.read(10)\nsys.stdout.buffer.write({said!r})\nsys.stdout.flush()\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("penstock.processors.images.processors._PROGRAM", "liar")
    processors = ImageProcessors(max_pixels=4_000_000)
    with pytest.raises((EngineFailed, InvalidRequest)) as caught:
        processors.process("a", job(picture(random.Random(1)), FLIP))
    assert len(caught.value.message.encode()) < 2_000
    assert caught.value.param is None or caught.value.param.encode()
    wait_until(lambda: processors.pool.pids() == set(), describe="the liar to end")


def test_without_a_process_there_is_a_clear_failure(
    processors: ImageProcessors, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(EngineFailed, match="could be started"):
        processors.process("a", job(picture(random.Random(1)), FLIP))
    with pytest.raises(EngineFailed, match="could be started"):
        processors.start(1)
