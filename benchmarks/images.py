"""Images and embeddings through Penstock, from topic to result topic, against the bare libraries with equal threads.

`--parts generation processing captions embeddings` chooses among them. On a machine that does other work compare the
processor's time: the clock's tells nothing there.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from backlog import Outcomes, encoded_requests, produce
from common import Figures, Row, broker, interleave, markdown, save, system

from penstock.common.artifacts import ArtifactStore
from system import Process, System

BATCH = 4
SIDES = (1600, 1200), (800, 600)
"""Of an image that is processed, and of what comes out."""
QUALITY = 85
PICTURES = 8
DIFFUSION = {"width": 256, "height": 256, "num_inference_steps": 10, "guidance_scale": 7.5}
CAPTION_TOKENS = 32
WORDS = ("the", "gate", "water", "turbine", "river", "stone", "light", "north", "when", "falls")


@dataclass(frozen=True, kw_only=True)
class Part:
    """One comparison: `requests` (payloads) of a task for a model, beside a floor that does the same work."""

    title: str
    unit: str
    aim: str
    model: dict[str, Any]
    floor: str
    floor_options: dict[str, Any]
    requests: Callable[[System], list[Any]]
    many: int
    """Embeddings in a request, else 1."""


class Bare:
    """The floor in its own process."""

    def __init__(self, kind: str, source: str, options: dict[str, Any]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("bare_images.py")), kind, source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        self._say(options)
        self._read()

    def _say(self, what: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what).encode() + b"\n")
        self._process.stdin.flush()

    def _read(self) -> Figures:
        assert self._process.stdout is not None
        while not (line := self._process.stdout.readline()).startswith(b"{"):
            assert line, "the bare program ended"
        return json.loads(line)

    def measure(self) -> Figures:
        self._say("go")
        return self._read()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def cpu_of_tree(pid: int) -> float:
    """Seconds of the processor that a process and all below it have taken; of those that have ended too."""
    root = psutil.Process(pid)
    seconds = 0.0
    for process in [root, *root.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds


def through_penstock(found: System, worker: Process, part: Part, requests: list[Any]) -> Figures:
    """All requests of a round at once; the clock runs from before the first to the last outcome's record."""
    (task,) = part.model["tasks"]
    topic = found.names.request(task, 5)
    records = encoded_requests(len(requests), requests, task=task, model=part.model["id"])
    outcomes = Outcomes(found.bootstrap, found.names.result)
    spent, began = cpu_of_tree(worker.popen.pid), time.time()
    produce(found.bootstrap, topic, records, len(found.ends([topic])))
    times = outcomes.times_ms((key for key, _ in records), 400)
    outcomes.close()
    cpu_ms = 1000 * (cpu_of_tree(worker.popen.pid) - spent) / len(requests)
    return {"rate": len(requests) / (max(times) / 1000 - began), "cpu_ms": cpu_ms}


def measured(part: Part, rounds: int) -> list[Row]:
    with broker() as bootstrap, system(bootstrap, models=[part.model]) as found:
        worker = found.worker().wait_ready(240)
        requests = part.requests(found)
        floor = Bare(part.floor, part.model["source"], part.floor_options)
        try:
            for _ in range(2):
                through_penstock(found, worker, part, requests)
                floor.measure()
            completed(found)
            ours, bare, steals = interleave(
                rounds, lambda: through_penstock(found, worker, part, requests), floor.measure
            )
        finally:
            floor.close()
    rate = [[part.many * value for value in figures["rate"]] for figures in (ours, bare)]
    cpu = [[value / part.many for value in figures["cpu_ms"]] for figures in (ours, bare)]
    return [
        Row(part.title, part.unit, rate[0], rate[1], steals, part.aim),
        Row(f"{part.title}: processor", "ms for one", cpu[0], cpu[1], steals, "reported"),
    ]


def completed(found: System) -> None:
    """What fails fast would seem fast."""
    failed = [event.error for event in found.outcomes().values() if event.status != "completed"]
    assert not failed, failed[:3]


# --- the parts


def generation(folder: Path, threads: int, quick: bool) -> Part:
    count = BATCH if quick else 3 * BATCH
    source = made_model("diffusion", folder)
    payload = {
        "width": DIFFUSION["width"],
        "height": DIFFUSION["height"],
        "inference_steps": DIFFUSION["num_inference_steps"],
        "guidance_scale": DIFFUSION["guidance_scale"],
    }
    prompt = "a gate in the river"
    return Part(
        title=f"images 256 × 256, 10 steps, batches of {BATCH} (floor: bare diffusers)",
        unit="images/s",
        aim="≥ 0.95",
        model=entry("image_generation", "diffusers", source, threads, slots=BATCH),
        floor="generation",
        floor_options={"threads": threads, "batch": BATCH, "count": count, "prompt": prompt, "parameters": DIFFUSION},
        requests=lambda _: [{**payload, "prompt": f"{prompt} {n}", "seed": n} for n in range(count)],
        many=1,
    )


def processing(folder: Path, threads: int, quick: bool) -> Part:
    count = 20 if quick else 200
    (width, height), (less, lower) = SIDES
    pictures = made_pictures(folder / "large", width, height)
    operations = [{"op": "resize", "width": less, "height": lower, "fit": "exact"}]
    operations.append({"op": "convert", "format": "jpeg", "quality": QUALITY})

    def requests(found: System) -> list[Any]:
        kept = keep(found, pictures)
        return [{"image": kept[n % PICTURES], "operations": operations} for n in range(count)]

    return Part(
        title=f"JPEG {width} × {height} to {less} × {lower} (floor: bare Pillow)",
        unit="images/s",
        aim="≥ 0.8",
        model=entry("image_processing", "imaging", pictures, threads),
        floor="processing",
        floor_options={"threads": threads, "count": count, "size": [less, lower], "quality": QUALITY},
        requests=requests,
        many=1,
    )


def captions(folder: Path, threads: int, quick: bool) -> Part:
    count = BATCH if quick else 12 * BATCH
    source = made_model("captioner", folder)
    pictures = made_pictures(folder / "small", 320, 240)

    def requests(found: System) -> list[Any]:
        kept = keep(found, pictures)
        return [{"image": kept[n % PICTURES], "max_tokens": CAPTION_TOKENS} for n in range(count)]

    return Part(
        title=f"captions of {CAPTION_TOKENS} tokens, batches of {BATCH} (floor: bare generate)",
        unit="captions/s",
        aim="≥ 0.95",
        model=entry("image_to_text", "vision", source, threads, slots=BATCH),
        floor="captions",
        floor_options={
            "threads": threads,
            "batch": BATCH,
            "count": count,
            "tokens": CAPTION_TOKENS,
            "images": str(pictures),
        },
        requests=requests,
        many=1,
    )


def embeddings(folder: Path, threads: int, quick: bool) -> Part:
    from penstock.cli.assets import prepare_model
    from penstock.processors.engines.process.loading import padded_tokens

    inputs, count = 8, 8 if quick else 64
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=chance.randint(10, 90))) for _ in range(inputs * count)]
    source = prepare_model("all-minilm-l6-v2", lambda line: print(line, file=sys.stderr))
    return Part(
        title=f"MiniLM, {inputs} texts a request (floor: bare model)",
        unit="texts/s",
        aim="≥ 0.95",
        model=entry("embedding", "embedding", source, threads),
        floor="embeddings",
        floor_options={"threads": threads, "texts": texts, "inputs": inputs, "batch_tokens": padded_tokens({})},
        requests=lambda _: [{"input": texts[inputs * n : inputs * (n + 1)]} for n in range(count)],
        many=inputs,
    )


PARTS = {"generation": generation, "processing": processing, "captions": captions, "embeddings": embeddings}


def entry(task: str, engine: str, source: Path, threads: int, **options: Any) -> dict[str, Any]:
    return {
        "id": engine,
        "source": str(source),
        "engine": engine,
        "tasks": [task],
        "options": {"threads": threads, **options},
    }


def made_model(kind: str, folder: Path) -> Path:
    """In a process of its own: this one need not hold torch."""
    made = folder / kind
    subprocess.run([sys.executable, str(Path(__file__).with_name("image_models.py")), kind, str(made)], check=True)
    return made


def made_pictures(folder: Path, width: int, height: int) -> Path:
    """Files of JPEG that compress like photographs: smooth shapes and some noise."""
    from PIL import Image

    folder.mkdir()
    for number in range(PICTURES):
        coarse = Image.frombytes("RGB", (32, 24), random.Random(number).randbytes(32 * 24 * 3))
        image = coarse.resize((width, height), Image.Resampling.BICUBIC)
        noise = Image.effect_noise((width, height), 12).convert("RGB")
        Image.blend(image, noise, 0.15).save(folder / f"{number}.jpeg", quality=90)
    return folder


def keep(found: System, pictures: Path) -> list[dict[str, str]]:
    """The pictures as artifacts, as requests refer to them."""
    store = ArtifactStore(found.folder / "artifacts")
    files = [path.read_bytes() for path in sorted(pictures.iterdir())]
    return [{"artifact_id": store.put("default", data, media_type="image/jpeg").artifact_id} for data in files]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--quick", action="store_true", help="one short round: shows only that it works")
    parser.add_argument("--parts", nargs="*", choices=sorted(PARTS), default=list(PARTS))
    parser.add_argument("--threads", type=int, default=2, help="of either side")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        for name in arguments.parts:
            rows += (part := measured(PARTS[name](Path(folder), arguments.threads, arguments.quick), rounds))
            print(markdown(part), file=sys.stderr, flush=True)
    save("images", rows)


if __name__ == "__main__":
    main()
