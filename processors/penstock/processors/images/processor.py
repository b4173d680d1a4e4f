"""The program that opens images and works on them, in a process of its own: files in, a file out, no pixels between.

    python -m penstock.processors.images.processor MEMORY_BYTES MAX_PIXELS

On its standard input come jobs, as `wire` writes them: {images: [{place, format, size, cpu_s}], operations, work_cpu_s,
form, quality}, then the images' bytes. On its standard output goes {opened: true} when all are decoded, and then
{width, height, size} and so many bytes of a file; or, in place of either, {code, message}, with the `place`
of the image or the `param` that is at fault. It is limited as `decoder` is, and ends as that does.
"""

from __future__ import annotations

import sys
from typing import Any, BinaryIO

from PIL import Image

from penstock.processors.guarded.limits import limit_cpu, limit_this_process
from penstock.processors.guarded.wire import read_header, write
from penstock.processors.images.decoder import (
    CODE_MEMORY,
    Refused,
    decode,
    prepare,
)
from penstock.processors.images.operations import Encoded, Picture, apply, encode
from penstock.processors.images.planning import plan
from penstock.schemas.errors import PenstockError

MAX_SIDE = 2**31 - 1
"""Of what comes: who looked at it before has compared it with the setting."""
CODE_WORK_MEMORY = "work_memory"

Answer = dict[str, Any]


def main(argv: list[str]) -> int:
    memory_bytes, max_pixels = (int(text) for text in argv)
    prepare(max_pixels)
    limit_this_process(memory_bytes)
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    while job := read_header(jobs):
        files = [jobs.read(one["size"]) for one in job["images"]]
        code = serve(job, files, max_pixels, answers)
        if code in (CODE_MEMORY, CODE_WORK_MEMORY):
            return 0  # what is left of it would be in the way of the next image
    return 0


def serve(job: Answer, files: list[bytes], max_pixels: int, answers: BinaryIO) -> str | None:
    """One job; the code where it came to nothing."""
    images: dict[str, Image.Image] = {}
    for about, data in zip(job["images"], files, strict=True):
        limit_cpu(about["cpu_s"])
        try:
            images[about["place"]] = decode(data, about["format"], max_pixels, MAX_SIDE)
        except Refused as error:
            return _refuse(answers, error.code, str(error), place=about["place"])
        except MemoryError:
            return _refuse(answers, CODE_MEMORY, "", place=about["place"])
    write(answers, {"opened": True})
    limit_cpu(job["work_cpu_s"])
    try:
        made = work(images, job, max_pixels)
    except PenstockError as error:
        return _refuse(answers, error.code, error.message, param=error.param)
    except MemoryError:
        return _refuse(answers, CODE_WORK_MEMORY, "")
    about = {"width": made.width, "height": made.height, "size": len(made.data)}
    write(answers, about, made.data)
    return None


def work(images: dict[str, Image.Image], job: Answer, max_pixels: int) -> Encoded:
    """Planned again: an image may be of another size than its beginning said. Raises PenstockError, MemoryError."""
    sizes = {place: image.size for place, image in images.items()}
    picture = Picture(image=images["image"], format=job["form"], quality=job["quality"])
    for step in plan(job["operations"], sizes, upscales=False, max_pixels=max_pixels):
        picture = apply(picture, step, images)
    return encode(picture)


def _refuse(answers: BinaryIO, code: str, message: str, **more: str | None) -> str:
    write(answers, {"code": code, "message": message, **more})
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
