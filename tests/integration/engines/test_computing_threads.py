"""Of an engine's threads one alone computes, with as many OpenMP threads as it was given: see `child._load`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image

from penstock.processors.images.decoded import DecodedImage

from .conftest import StartEngine

pytestmark = pytest.mark.model

MORE = 3


def picture() -> DecodedImage:
    image = Image.effect_noise((900, 700), 80).convert("RGB")
    return DecodedImage(image.width, image.height, image.mode, image.tobytes(), "PNG", "")


RUNS: dict[str, dict[str, Any]] = {
    "text": {"prompt": "word " * 200, "params": {"temperature": 0, "max_tokens": 8}},
    "embedding": {"task": "embedding", "inputs": ["word " * 200] * 16},
    "vision": {"task": "image_to_text", "payload": {}, "images": {"image": picture()}},
}


@pytest.mark.parametrize(
    ("kind", "model", "others"), [("text", "smollm2", 2), ("embedding", "minilm", 1), ("vision", "tiny_vision", 1)]
)
async def test_no_other_thread_keeps_openmp_threads(
    start_engine: StartEngine, request: pytest.FixtureRequest, kind: str, model: str, others: int
) -> None:
    """With more of them than processors libgomp puts threads to sleep at each barrier: two were as slow as one.

    `others`: pools of as many threads that are not OpenMP's, torch's second one (caffe2) and that of grammars.
    """
    folder: Path = request.getfixturevalue(model)
    options = {"cache_tokens": 2048, "slots": 2} if kind == "text" else {}
    counts: list[int] = []
    for threads in (1, 1 + MORE):
        runner = await start_engine(kind, folder, threads=threads, **options)
        await (await runner.begin(**RUNS[kind])).finished(120)
        counts.append(psutil.Process(runner.engine.pid).num_threads())
        await runner.engine.stop()
    assert counts[1] - counts[0] == MORE * (1 + others)


ASIDE = """
import threading

import psutil
import torch

from penstock.processors.engines.process.openmp import without_openmp

torch.set_num_threads(4)
values, over = torch.rand(2_000_000), threading.Event()


def counted(aside):
    before, computed, numbers = psutil.Process().num_threads(), threading.Event(), []

    def work():
        if aside:
            without_openmp()
        numbers.append(torch.get_num_threads())
        values.exp()
        computed.set()
        over.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert computed.wait(60)
    return numbers[0], psutil.Process().num_threads() - before


print(counted(True), counted(False))
over.set()
"""


def test_a_thread_beside_the_computing_one_gets_no_openmp_threads() -> None:
    """It prepares images with torch, which made the same model twice as slow. Threads that come later get theirs."""
    ran = subprocess.run([sys.executable, "-c", ASIDE], capture_output=True, text=True, timeout=120, check=False)
    assert ran.stdout.strip() == "(1, 1) (4, 4)", ran.stderr
