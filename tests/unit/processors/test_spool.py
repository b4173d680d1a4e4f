"""Outputs on local disk: a limit, a disk that takes nothing, and files that nobody has to clean up."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from penstock.processors.engines.base import Finished
from penstock.processors.spool import Spool, Spooled
from support import wait_until_async


def output(size: int) -> Finished:
    return Finished(
        run_id="run", output={"images": [{"data": bytes(size)}]}, finish_reason="stop", usage={"prompt_tokens": 3}
    )


async def test_an_output_comes_back_as_it_was(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 1 << 20)
    held = await spool.put(output(1_000))
    assert spool.used_bytes == held.size > 1_000
    assert os.listdir(tmp_path) == [], "the file has no name: a kill leaves nothing"
    for _ in range(2):
        assert await held.read() == output(1_000)
    del held

    def given_back() -> bool:
        gc.collect()
        return spool.used_bytes == 0

    await wait_until_async(given_back, 30)  # the thread that read it lets go of it a moment later


async def test_beyond_its_limit_it_takes_nothing(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 2_500)
    first = await spool.put(output(1_000))
    assert isinstance(first, Spooled)
    assert await spool.put(output(2_000)) is None
    assert spool.used_bytes == first.size
    assert await Spool(tmp_path, 0).put(output(1)) is None


async def test_a_disk_that_takes_nothing_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    spool = Spool(tmp_path / "file", 1 << 20)
    assert await spool.put(output(10)) is None
    assert spool.used_bytes == 0


async def test_a_full_disk_is_no_failure() -> None:
    class OfAFullDisk(Spool):
        def _write(self, data: bytes) -> object:  # type: ignore[override]
            with Path("/dev/full").open("wb") as file:
                file.write(data)
                file.flush()
            return file

    spool = OfAFullDisk(Path("/"), 1 << 20)
    assert await spool.put(output(10)) is None
    assert spool.used_bytes == 0


@given(sizes=st.lists(st.integers(0, 400), max_size=8))
def test_its_count_is_that_of_what_it_holds(sizes: list[int]) -> None:
    async def go() -> None:
        spool = Spool(Path(tempfile.gettempdir()), 1_000)
        held = [one for size in sizes if (one := await spool.put(output(size))) is not None]
        assert spool.used_bytes == sum(one.size for one in held) <= 1_000

    asyncio.run(go())
