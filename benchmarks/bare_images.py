"""The floors of `images.py`: bare diffusers, Pillow and transformers in a process of its own, a line in, a line out.

python benchmarks/bare_images.py KIND SOURCE, then {"threads": 2, …} and "go" for each round as lines on its input
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Round = Callable[[], int]
"""Does one round's work; gives how many requests it stands for."""


def generation(source: str, options: dict[str, Any]) -> Round:
    """Batches of equal size through the pipeline; the images stay Pillow's."""
    import torch
    from diffusers import DiffusionPipeline

    torch.set_num_threads(options["threads"])
    pipeline: Any = DiffusionPipeline.from_pretrained(source)
    pipeline.set_progress_bar_config(disable=True)
    size = options["batch"]

    def run() -> int:
        for first in range(0, options["count"], size):
            with torch.inference_mode():
                pipeline(
                    prompt=[f"{options['prompt']} {first + row}" for row in range(size)],
                    generator=[torch.Generator("cpu").manual_seed(first + row) for row in range(size)],
                    **options["parameters"],
                )
        return options["count"]

    return run


def processing(source: str, options: dict[str, Any]) -> Round:
    """As many threads as Penstock's engine has; from the bytes of a file to the bytes of a file."""
    from PIL import Image

    files = [path.read_bytes() for path in sorted(Path(source).iterdir())]
    pool = ThreadPoolExecutor(options["threads"])

    def one(number: int) -> int:
        with Image.open(io.BytesIO(files[number % len(files)])) as image:
            made = image.convert("RGB").resize(tuple(options["size"]), Image.Resampling.LANCZOS)
        file = io.BytesIO()
        made.save(file, "jpeg", quality=options["quality"])
        return len(file.getvalue())

    def run() -> int:
        assert all(pool.map(one, range(options["count"])))
        return options["count"]

    return run


def captions(source: str, options: dict[str, Any]) -> Round:
    """Batches of equal size through `generate`; images are read and texts written, as a caption needs."""
    import torch
    from PIL import Image
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

    torch.set_num_threads(options["threads"])
    tokenizer = AutoTokenizer.from_pretrained(source)
    processor = AutoImageProcessor.from_pretrained(source)
    model: Any = AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32).eval()
    files = [path.read_bytes() for path in sorted(Path(options["images"]).iterdir())]
    own = model.generation_config
    config = GenerationConfig(
        max_new_tokens=options["tokens"],
        do_sample=False,
        eos_token_id=own.eos_token_id,
        pad_token_id=own.pad_token_id,
        decoder_start_token_id=own.decoder_start_token_id,
    )
    size = options["batch"]

    def run() -> int:
        for first in range(0, options["count"], size):
            images = [Image.open(io.BytesIO(files[n % len(files)])).convert("RGB") for n in range(first, first + size)]
            with torch.inference_mode():
                made = model.generate(**processor(images=images, return_tensors="pt"), generation_config=config)
            tokenizer.batch_decode(made, skip_special_tokens=True)
        return options["count"]

    return run


def embeddings(source: str, options: dict[str, Any]) -> Round:
    """Batches of as many padded tokens as Penstock's, texts of like length together."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    torch.set_num_threads(options["threads"])
    tokenizer = AutoTokenizer.from_pretrained(source)
    model: Any = AutoModel.from_pretrained(source, dtype=torch.float32).eval()

    def run() -> int:
        ids = sorted(tokenizer(options["texts"])["input_ids"], key=len)
        while ids:
            longest, batch = 0, list[list[int]]()
            while ids and max(longest, len(ids[0])) * (len(batch) + 1) <= options["batch_tokens"]:
                longest = max(longest, len(ids[0]))
                batch.append(ids.pop(0))
            padded = tokenizer.pad({"input_ids": batch}, return_tensors="pt")
            with torch.inference_mode():
                hidden = model(**padded).last_hidden_state
                mask = padded["attention_mask"].unsqueeze(-1).float()
                torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1).tolist()
        return len(options["texts"]) // options["inputs"]

    return run


KINDS = {"generation": generation, "processing": processing, "captions": captions, "embeddings": embeddings}


def main() -> None:
    kind, source = sys.argv[1:3]
    run = KINDS[kind](source, json.loads(sys.stdin.readline()))
    print("{}", flush=True)
    for _ in sys.stdin:
        began, spent = time.perf_counter(), sum(os.times()[:2])
        count = run()
        rate, cpu_ms = count / (time.perf_counter() - began), 1000 * (sum(os.times()[:2]) - spent) / count
        print(json.dumps({"rate": rate, "cpu_ms": cpu_ms}), flush=True)


if __name__ == "__main__":
    main()
