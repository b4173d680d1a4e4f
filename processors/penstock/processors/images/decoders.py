"""The processes that decode images: one image at a time each, started when first needed, replaced when they end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Collection
from dataclasses import dataclass
from typing import BinaryIO, cast

from penstock.processors.engines.threads import in_daemon_thread
from penstock.processors.images.decoded import CHANNELS, DecodedImage
from penstock.processors.images.wire import read_header, write
from penstock.schemas.errors import InternalError, InvalidRequest, PenstockError, TooLarge
from penstock.schemas.image_formats import sniff

logger = logging.getLogger(__name__)

_PROGRAM = "penstock.processors.images.decoder"
_SIGXCPU = 24
_BASE_BYTES = 512 << 20
"""Address space of a decoder without an image."""
_BYTES_OF_PIXEL = 24
"""What decoding may hold for each pixel: coefficients of a progressive JPEG, the frame, that turned and converted."""
_WALL_FACTOR = 4
"""On a busy machine a decoder gets its processor time late: so many times that long it may take by the clock."""
_RENEWED_AFTER = 500
"""Images after which a decoder is replaced: a leak in a library ends with it."""
_START_S = 60.0
_PIPE_BYTES = 1 << 20
"""As much as the kernel gives to everybody."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeLimits:
    """What one image may have and take. `formats` are names of `penstock.schemas.image_formats.MEDIA_TYPES`."""

    formats: Collection[str] = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
    max_pixels: int = 50_000_000
    max_side: int = 16_384
    cpu_s: int = 10
    memory_bytes: int | None = None
    """Address space of a decoder; None: what the largest image needs."""

    @property
    def address_space(self) -> int:
        return self.memory_bytes or _BASE_BYTES + _BYTES_OF_PIXEL * self.max_pixels


class Decoders:
    """At most `processes` images are decoded at a time; the others wait. Used on one event loop."""

    def __init__(self, limits: DecodeLimits | None = None, *, processes: int = 2) -> None:
        self.limits = limits or DecodeLimits()
        self._free = asyncio.Semaphore(processes)
        self._idle: list[_Decoder] = []
        self._all: set[_Decoder] = set()
        self._closed = False
        self.deaths = 0
        """Decoders that ended while they had an image."""

    async def decode(self, data: bytes, *, param: str) -> DecodedImage:
        """The image. `param` is the field that an error names.

        Raises InvalidRequest for what is no whole image of an accepted format, TooLarge, and InternalError when no
        decoder can be started.
        """
        format_name = self._format_of(data, param)
        async with self._free:
            decoder = self._take()
            try:
                image = await in_daemon_thread(decoder.decode, data, format_name)
            except _Failed as error:
                self.deaths += error.code in ("late", "died")
                raise error.told(param, format_name) from None
            finally:
                # A caller who is cancelled leaves a decoder at work: it is ended.
                self._put_back(decoder)
        return image

    def pids(self) -> set[int]:
        """The processes that run now."""
        return {pid for decoder in self._all if (pid := decoder.pid) is not None}

    @property
    def busy(self) -> int:
        """How many decode now."""
        return len(self._all) - len(self._idle)

    def close(self) -> None:
        """End them all."""
        self._closed = True
        for decoder in self._all:
            decoder.end()
        self._all.clear()
        self._idle.clear()

    def _format_of(self, data: bytes, param: str) -> str:
        accepted = ", ".join(self.limits.formats)
        format_name = sniff(data)
        if format_name is None:
            raise InvalidRequest(f"{param} is not an image of an accepted format ({accepted})", param=param)
        if format_name not in self.limits.formats:
            raise InvalidRequest(f"{param} is a {format_name} image; accepted are {accepted}", param=param)
        return format_name

    def _take(self) -> _Decoder:
        if self._closed:
            raise InternalError("the worker stops: no image is decoded any more")
        while self._idle:
            decoder = self._idle.pop()
            if decoder.alive:
                break
            self._end(decoder)  # somebody ended it while it waited: no image is at fault
        else:
            decoder = _Decoder(self.limits)
        decoder.reusable = False
        self._all.add(decoder)
        return decoder

    def _put_back(self, decoder: _Decoder) -> None:
        if decoder.reusable and not self._closed:
            self._idle.append(decoder)
        else:
            self._end(decoder)

    def _end(self, decoder: _Decoder) -> None:
        decoder.end()
        self._all.discard(decoder)


class _Failed(Exception):
    """Why there is no image: `code` is one of the decoder's, or says how its process ended."""

    def __init__(self, code: str, message: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message

    def told(self, param: str, format_name: str) -> PenstockError:
        match self.code:
            case "too_large":
                return TooLarge(f"{param} {self.message}", param=param)
            case "invalid":
                return InvalidRequest(f"{param} {self.message}", param=param)
            case "memory":
                return InvalidRequest(f"{param}: decoding this {format_name} image takes too much memory", param=param)
            case "late":
                return InvalidRequest(f"{param}: decoding this {format_name} image takes too long", param=param)
            case "not_started":
                return InternalError(f"no image decoder could be started: {self.message}")
            case _:
                return InvalidRequest(f"{param}: decoding this {format_name} image ended its decoder", param=param)


class _Decoder:
    """One process. Its methods block; `end` may be called from any thread."""

    def __init__(self, limits: DecodeLimits) -> None:
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._served = 0
        self._ended = False
        self._lock = threading.Lock()
        self.reusable = False
        """Whether it waits for the next image."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self.alive else None

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def decode(self, data: bytes, format_name: str) -> DecodedImage:
        """Raises _Failed."""
        process = self._started()
        late = threading.Event()

        def kill() -> None:
            late.set()
            process.kill()

        # The kernel counts its processor time; this ends one that neither works nor answers.
        timer = threading.Timer(_START_S + _WALL_FACTOR * self._limits.cpu_s, kill)
        timer.daemon = True
        timer.start()
        self._served += 1
        try:
            image = _answer(process, data, format_name, self._limits)
        except _Failed as error:  # the image's fault: the decoder goes on
            self.reusable = error.code != "memory" and self._served < _RENEWED_AFTER
            raise
        except (OSError, ValueError, KeyError, EOFError) as error:
            process.kill()
            code = process.wait()
            logger.warning("images.decoder_ended pid=%d exit_code=%d", process.pid, code)
            raise _Failed("late" if late.is_set() or code == -_SIGXCPU else "died") from error
        finally:
            timer.cancel()
        self.reusable = self._served < _RENEWED_AFTER
        return image

    def end(self) -> None:
        with self._lock:
            self._ended = True
            process = self._process
        if process is not None:
            process.kill()
            threading.Thread(target=_reap, args=(process,), name="image-decoder-end", daemon=True).start()

    def _started(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._ended:
                raise _Failed("not_started", "the worker stops")
            if self._process is None:
                limits = self._limits
                if importlib.util.find_spec("PIL") is None:
                    raise _Failed("not_started", "Pillow is missing; penstock[worker] installs it")
                numbers = (limits.address_space, limits.max_pixels, limits.max_side, limits.cpu_s)
                try:
                    self._process = subprocess.Popen(
                        [sys.executable, "-P", "-m", _PROGRAM, *map(str, numbers)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,  # libraries write there what they find in an image
                        env={
                            "PYTHONPATH": os.pathsep.join(filter(None, sys.path))
                        },  # no secrets where images are opened
                        cwd="/",
                    )
                except OSError as error:
                    raise _Failed("not_started", type(error).__name__) from error
                _widen(self._process)
            return self._process


def _widen(process: subprocess.Popen[bytes]) -> None:
    """Pixels go through this pipe, 64 KiB at a time if nothing is said: each time one side waits for the other."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(cast("BinaryIO", process.stdout), fcntl.F_SETPIPE_SZ, _PIPE_BYTES)


def _reap(process: subprocess.Popen[bytes]) -> None:
    with process:
        pass


def _answer(process: subprocess.Popen[bytes], data: bytes, format_name: str, limits: DecodeLimits) -> DecodedImage:
    """Raises _Failed as the decoder says; OSError, ValueError, EOFError when it does not speak as it should."""
    jobs, answers = cast("BinaryIO", process.stdin), cast("BinaryIO", process.stdout)
    write(jobs, {"format": format_name, "size": len(data)}, data)
    about = read_header(answers)
    if about is None:
        raise EOFError("the decoder has ended")
    if "code" in about:
        raise _Failed(str(about["code"]), str(about.get("message", "")))
    width, height, mode = about["width"], about["height"], about["mode"]
    if not (type(width) is int and type(height) is int and 0 < width * height <= limits.max_pixels):
        raise ValueError("the decoder made no image")
    return DecodedImage(
        width=width,
        height=height,
        mode=mode,
        pixels=answers.read(width * height * CHANNELS[mode]),
        source_format=format_name,
        source_sha256=hashlib.sha256(data).hexdigest(),
    )
