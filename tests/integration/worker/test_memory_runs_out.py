"""Memory runs out in real engines under load, by a limit of the kernel: no request notices it, and batches grow back.

The next life of an engine books more, and nothing waits for ever for that.
"""

from __future__ import annotations

import io
import json
import resource
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain, count, cycle, islice
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image, ImageChops

from penstock.cli.assets import prepare_model
from penstock.common.artifacts import ArtifactStore
from penstock.processors.core.fleet.estimates import AFTER_OOM
from penstock.producers.client import Client
from penstock.schemas.records import ResultEvent
from support import engine_processes, wait_until
from system import Process, System
from tiny_blip import make_blip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MIB = 1 << 20
REQUESTS = 66
COLOURS = ((220, 30, 30), (30, 180, 40), (30, 50, 220), (235, 220, 40), (15, 15, 15), (245, 245, 245))
SUBJECTS = range(len(COLOURS))
"""Requests to one model differ by their subject: a seed, a colour, tokens."""
SIDE, SMALL_SIDE = 256, 64
TEXTS, TOKENS = 6, 200
FOUR = {"painter": 4, "reader": 4, "vectors": 4 * TEXTS * TOKENS}
"""By model, what a batch of four requests counts against its engine's limit: images, prompts, tokens."""
ROOM = {"painter": 33 * MIB, "reader": 40 * MIB, "vectors": 32 * MIB}
"""By model, what its engine may take beyond what it holds. Two requests take 20 to 22 MiB, four take 40 to 45."""
TENSORS_APART = {"MALLOC_MMAP_THRESHOLD_": "131072"}
"""Each tensor is mapped by itself. Otherwise the C library keeps freed memory, whose use the limit does not see."""
DEADLINE_S = 240

Request = dict[str, Any]


def request(model: str, subject: int, pictures: list[str], side: int = SIDE) -> Request:
    if model == "painter":
        drawn = {"prompt": "a dam", "width": side, "height": side, "inference_steps": 2, "seed": subject}
        return {"task": "image_generation", "model": model, "payload": drawn}
    if model == "reader":
        read = {"image": {"artifact_id": pictures[subject]}, "max_tokens": 6}
        return {"task": "image_to_text", "model": model, "payload": read}
    texts = [[10 + subject + text] * TOKENS for text in range(TEXTS)]
    return {"task": "embedding", "model": model, "payload": {"input_token_ids": texts}}


@dataclass
class Engines:
    """A worker with three models, and a client that sends requests to them."""

    worker: Process
    client: Client
    pids: dict[str, int] = field(default_factory=dict[str, int])
    """By model, the process of its engine."""
    _numbers: Iterator[int] = field(default_factory=count)

    def completed(self, requests: list[Request]) -> list[ResultEvent]:
        """Send them together. Each completes, in its first attempt."""
        sent = [self.client.submit(request_id=f"r{next(self._numbers)}", **one) for one in requests]
        events = [self.client.result(one, DEADLINE_S) for one in sent]
        assert {event.attempt for event in events} == {1}, self.worker.tail()
        return events

    def load(self, one: Request) -> None:
        """Have its model loaded, and note which process that is."""
        self.completed([one])
        found = {process.pid for process in engine_processes(self.worker.popen.pid)}
        (self.pids[one["model"]],) = found.difference(self.pids.values())

    def all_live(self) -> bool:
        return {process.pid for process in engine_processes(self.worker.popen.pid)} == set(self.pids.values())

    @contextmanager
    def limited(self) -> Iterator[None]:
        """The kernel gives each engine only its room beyond what it holds."""
        for model, pid in self.pids.items():
            resource.prlimit(pid, resource.RLIMIT_DATA, (data_bytes(pid) + ROOM[model], resource.RLIM_INFINITY))
        yield
        for pid in self.pids.values():
            resource.prlimit(pid, resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    def sizes(self, model: str) -> list[int]:
        """The sizes that batches of the model have had since the first, by the worker's log."""
        mark = f"engine.batches model={model} most="
        return [int(line.partition(mark)[2]) for line in self.worker.log.read_text().splitlines() if mark in line]

    def counted(self, metric: str) -> Counter[str]:
        """By model."""
        found = Counter[str]()
        for line in httpx.get(f"{self.worker.url}/metrics").text.splitlines():
            if line.startswith(f"{metric}{{"):
                found[line.partition('model="')[2].partition('"')[0]] += int(float(line.split()[-1]))
        return found

    def wait_until_memory_ran_out(self, before: Counter[str]) -> None:
        """In each engine, once more than before."""

        def ran_out() -> bool:
            found = self.counted("penstock_engine_out_of_memory_total")
            return all(found[model] > before[model] for model in self.pids)

        wait_until(ran_out, 240, lambda: f"the kernel refused nothing: the room is too large\n{self.worker.tail()}")

    def grow_back(self, small: Request) -> None:
        """Send pairs until batches of the model are what they were at first."""
        model = small["model"]

        def grown() -> bool:
            self.completed([small, small])
            return self.sizes(model)[-1] == FOUR[model]

        wait_until(grown, DEADLINE_S, lambda: f"{self.sizes(model)}\n{self.worker.tail()}")


def data_bytes(pid: int) -> int:
    """What the kernel holds against RLIMIT_DATA."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmData")) * 1024


def keep_picture(folder: Path, colour: tuple[int, int, int]) -> str:
    data = io.BytesIO()
    Image.new("RGB", (60, 40), colour).save(data, "PNG")
    return ArtifactStore(folder).put("default", data.getvalue(), media_type="image/png").artifact_id


def answer(event: ResultEvent, client: Client) -> Any:
    """An image, a text, or the numbers of all vectors."""
    output = event.output or {}
    if event.model == "painter":
        data = client.artifacts.get(output["images"][0]["artifact_id"])
        return Image.open(io.BytesIO(data)).convert("RGB")
    return output["text"] if event.model == "reader" else list(chain.from_iterable(output["embeddings"]))


def is_same(one: Any, other: Any) -> bool:
    """A batch rounds otherwise than one alone."""
    if isinstance(one, Image.Image):
        extremes: Any = ImageChops.difference(one, other).getextrema()
        return max(most for _, most in extremes) <= 1
    if isinstance(one, str):
        return one == other
    return max(abs(a - b) for a, b in zip(one, other, strict=True)) < 1e-4


@pytest.fixture
def make_models(make_system: Callable[..., System], tiny_lm: Path, tmp_path: Path) -> Callable[..., System]:
    """Call it with the names of models for a system that serves these."""
    # Images and prompts wait until there are as many as a batch may hold.
    gathered = {"slots": 4, "batch_window_ms": 200, "threads": 1}

    def entry(name: str) -> dict[str, Any]:
        if name == "painter":
            folder = prepare_model("tiny-image-generation", lambda text: None)
            what = {"engine": "diffusers", "tasks": ["image_generation"], "options": gathered}
        elif name == "reader":
            folder = tmp_path / "reader"
            make_blip(folder, 192)
            what = {"engine": "vision", "tasks": ["image_to_text"], "options": gathered}
        else:
            folder = tiny_lm
            what = {"engine": "embedding", "options": {"max_batch_tokens": FOUR["vectors"], "threads": 1}}
        return {"id": name, "source": str(folder), "preload": False, **what}

    return lambda *names: make_system(models=[entry(name) for name in names])


@contextmanager
def client_of(system: System) -> Iterator[Client]:
    settings = system.kafka
    with Client(settings, artifacts=system.folder / "artifacts") as client:
        yield client


def test_engines_without_memory_for_batches_of_four_complete_all_and_grow_back(
    make_models: Callable[..., System],
) -> None:
    system = make_models(*FOUR)
    pictures = [keep_picture(system.folder / "artifacts", colour) for colour in COLOURS]
    with client_of(system) as client:
        engines = Engines(system.worker(env=TENSORS_APART).wait_ready(), client)
        _halve_and_grow_back(engines, pictures)
    system.wait_drained()
    assert system.dead_letters() == []
    assert engines.worker.stop() == 0, engines.worker.tail()


def _halve_and_grow_back(engines: Engines, pictures: list[str]) -> None:
    client = engines.client
    for model in FOUR:
        engines.load(request(model, 0, pictures))
    expected: dict[tuple[str, int], Any] = {}
    for model in FOUR:
        different = [request(model, subject, pictures) for subject in SUBJECTS]
        for subject in SUBJECTS:
            (event,) = engines.completed([different[subject]])
            expected[model, subject] = answer(event, client)
        assert not any(is_same(expected[model, 0], expected[model, other]) for other in SUBJECTS[1:])
        engines.completed(different)  # four and two: kernels that are compiled for these sizes stay
    assert not engines.counted("penstock_engine_out_of_memory_total")

    subjects = list(islice(zip(cycle(FOUR), chain.from_iterable((n, n, n) for n in cycle(SUBJECTS))), REQUESTS))
    requests = [request(model, subject, pictures) for model, subject in subjects]
    with engines.limited():
        events = engines.completed(requests)
    wrong = [
        (key, event)
        for key, event in zip(subjects, events, strict=True)
        if not is_same(answer(event, client), expected[key])
    ]
    assert not wrong, wrong[:3]
    engines.wait_until_memory_ran_out(before=Counter())
    for model in FOUR:
        assert engines.sizes(model)[0] <= FOUR[model] / 2, engines.sizes(model)

    small = [request(model, 0, pictures, SMALL_SIDE) for model in FOUR]
    small[-1]["payload"] = {"input_token_ids": [[5]]}
    with ThreadPoolExecutor() as pool:
        list(pool.map(engines.grow_back, small))
    ran_out = engines.counted("penstock_engine_out_of_memory_total")
    with engines.limited():
        engines.completed(requests[: 3 * 12])
    engines.wait_until_memory_ran_out(before=ran_out)  # so batches of four were made again
    assert engines.all_live()


def reserved_bytes(system: System) -> int:
    """Of main memory, by the newest state of a worker."""
    return sum(device.reserved_bytes for device in system.worker_states()[-1].devices if device.device == "cpu")


def test_after_out_of_memory_the_next_life_books_more_and_is_loaded_where_there_is_less(
    make_models: Callable[..., System],
) -> None:
    system = make_models("vectors")
    several = [request("vectors", 0, [])] * 8
    with client_of(system) as client:
        engines = Engines(system.worker(env=TENSORS_APART).wait_ready(), client)
        engines.load(several[0])
        with engines.limited():
            engines.completed(several)
        engines.wait_until_memory_ran_out(before=Counter())
        assert engines.worker.stop() == 0, engines.worker.tail()

        (memory,) = system.folder.rglob("memory.json")
        ((_, floor, _),) = json.loads(memory.read_text())["learned"][0]["floors"]
        booked = floor / AFTER_OOM
        # More than was booked at first, less than is booked now: the device is enough for it alone.
        limit = int(booked * (1 + AFTER_OOM) / 2)
        env = {"PENSTOCK_DEVICES": json.dumps([{"kind": "cpu", "limit_bytes": limit, "reserve_bytes": 0}])}
        again = Engines(system.worker(env=env).wait_ready(), client, _numbers=count(100))
        again.completed(several)
        wait_until(
            lambda: booked < reserved_bytes(system) <= limit, 60, lambda: (booked, reserved_bytes(system), limit)
        )
        assert again.worker.stop() == 0, again.worker.tail()
    assert system.dead_letters() == []
