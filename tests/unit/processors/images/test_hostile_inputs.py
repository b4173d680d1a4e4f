"""Ten thousand hostile images and URLs, a share of them in each run: each is a clear error, and nothing else happens.

PENSTOCK_TEST_LONG=1 runs all.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Awaitable, Iterable
from contextlib import closing
from typing import Any

from hostile_images import Dns, Network, hostile_images, hostile_server, hostile_urls, scan_bomb
from penstock.common.artifacts import ArtifactStore
from penstock.common.urls.rules import UrlRules
from penstock.processors.guarded.process import RENEWED_AFTER
from penstock.processors.images.decoders import DecodeLimits, Decoders
from penstock.processors.images.fetching import ImageFetcher
from penstock.processors.images.inputs import ImageInputs
from penstock.processors.images.processors import ImageJob, ImageProcessors
from penstock.schemas.errors import InvalidRequest, PenstockError, SourceUnavailable, TooLarge

LONG = bool(os.environ.get("PENSTOCK_TEST_LONG"))
IMAGES, URLS = (6_000, 4_000) if LONG else (360, 240)
CLEAR = (InvalidRequest, TooLarge, SourceUnavailable)
PARAM = "payload.image"


async def outcomes(cases: Iterable[tuple[str, Awaitable[Any]]], at_once: int) -> Counter[tuple[str, str]]:
    """(kind, what came of it), counted. Raises AssertionError for anything but a clear error."""
    counted: Counter[tuple[str, str]] = Counter()
    places = asyncio.Semaphore(at_once)

    async def run(kind: str, case: Awaitable[Any]) -> None:
        try:
            found = await case
        except PenstockError as failure:
            error = failure
        else:
            raise AssertionError(f"{kind} gave {found!r}")
        finally:
            places.release()
        assert type(error) in CLEAR, (kind, repr(error))
        assert PARAM in error.message, (kind, error.message)
        assert len(error.message) < 400, (kind, error.message)
        assert (error.param or "").startswith(PARAM), (kind, error.param)
        counted[kind, error.code] += 1

    async with asyncio.TaskGroup() as group:
        for kind, case in cases:
            await places.acquire()
            group.create_task(run(kind, case))
    return counted


async def test_hostile_images() -> None:
    with closing(Decoders(DecodeLimits(max_pixels=4_000_000), processes=2)) as decoders:
        cases = ((kind, decoders.decode(data, param=PARAM)) for kind, data in hostile_images(7, IMAGES))
        counted = await outcomes(cases, at_once=4)
        assert counted.total() == IMAGES
        assert decoders.deaths == 0  # each was refused before the kernel had to end its decoder


async def test_hostile_images_that_are_worked_on() -> None:
    """What a look at the beginning lets pass is opened by the process that works on it."""
    decoders = Decoders(DecodeLimits(max_pixels=4_000_000), processes=2)
    processors = ImageProcessors(max_pixels=4_000_000)
    processors.start(2)
    pids = processors.pool.pids()
    numbers = itertools.count()
    operations = [{"op": "thumbnail", "width": 20, "height": 20}]

    async def work(data: bytes) -> bytes:
        seen = await decoders.look(data, param=PARAM)
        job = ImageJob(images={"image": seen}, operations=operations, form="png", quality=None)
        return (await asyncio.to_thread(processors.process, str(next(numbers)), job)).data

    try:
        counted = await outcomes(((kind, work(data)) for kind, data in hostile_images(8, IMAGES)), at_once=2)
        assert counted.total() == IMAGES
        assert decoders.deaths == 0
        assert processors.pool.pids() == pids or IMAGES > RENEWED_AFTER  # none has ended on an image
    finally:
        processors.pool.close()
        decoders.close()


async def test_hostile_urls(tmp_path: Any) -> None:
    decoders = Decoders(processes=1)
    async with hostile_server() as port:
        network, rules = Network(port), UrlRules(allow_hosts=("*",))

        def inputs(timeout_s: float) -> ImageInputs:
            fetcher = ImageFetcher(
                rules, max_bytes=200_000, timeout_s=timeout_s, max_redirects=3, resolve=Dns(), network=network
            )
            return ImageInputs(lambda: ArtifactStore(tmp_path), decoders, fetcher, max_bytes=200_000)

        patient, hurried = inputs(60), inputs(0.3)
        try:
            cases = (
                (kind, (hurried if kind in ("drip", "silent") else patient).fetch("t", {"url": url}, param=PARAM))
                for kind, url in hostile_urls(11, URLS)
            )
            counted = await outcomes(cases, at_once=16)
        finally:
            decoders.close()
        assert counted.total() == URLS
        assert network.addresses
        assert network.forbidden() == []
        assert {code for kind, code in counted if kind in ("drip", "silent", "unknown name")} <= {"source_unavailable"}
        assert {code for kind, code in counted if "address" in kind or "turns" in kind} == {"invalid"}


async def test_an_image_that_takes_too_long_ends_its_own_decoder_alone() -> None:
    from random import Random

    from hostile_images import picture

    with closing(Decoders(DecodeLimits(cpu_s=1), processes=1)) as decoders:
        results = await asyncio.gather(
            decoders.decode(scan_bomb(), param=PARAM),
            decoders.decode(picture(Random(3)), param=PARAM),
            return_exceptions=True,
        )
        assert isinstance(results[0], InvalidRequest)
        assert "takes too long" in results[0].message
        assert not isinstance(results[1], BaseException)
        assert decoders.deaths == 1
