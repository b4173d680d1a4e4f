"""Text: 16 streams × 64 tokens through Penstock against the same continuous-batching manager driven directly.

With `--level engine` the engine is driven without a worker and without Kafka. Both sides always have equal threads.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from backlog import WARM, warm
from common import Row, broker, interleave, save, system

from penstock.producers import AsyncClient, Chunk, KafkaSettings, Result

STREAMS, TOKENS = 16, 64
AIMS = {"tiny": "≥ 0.9", "smollm2": "≥ 0.97"}
NOOP = {"id": "noop", "source": "noop", "engine": "noop", "tasks": ["text_generation"], "options": {"tokens": 1}}
"""Warms Kafka beside the measured model."""
PROMPT = "Tell me a long story about a dog and the sea."


LONG_OBJECT = {"type": "object", "properties": {"story": {"type": "string", "minLength": 4000}}, "required": ["story"]}
"""A schema whose text is cut by its length, so that guided runs make as many tokens as plain ones."""
GUIDED = {"response_format": {"type": "json_schema", "json_schema": {"name": "story", "schema": LONG_OBJECT}}}


async def through_penstock(settings: KafkaSettings, model: str, **wanted: Any) -> dict[str, float]:
    """One round. `wanted`: more fields of the payload."""
    async with AsyncClient(settings) as client:
        firsts: list[float] = []

        async def stream(number: int) -> int:
            messages = [{"role": "user", "content": f"{PROMPT} {number}"}]
            payload = {"messages": messages, "max_tokens": TOKENS, "temperature": 0, **wanted}
            began = time.perf_counter()
            submitted = await client.submit(task="text_generation", payload=payload, model=model, stream=True)
            first, tokens = True, 0
            async for event in client.follow(submitted):
                if isinstance(event, Chunk) and first:
                    firsts.append(1000 * (time.perf_counter() - began))
                    first = False
                elif isinstance(event, Result) and event.event.usage is not None:
                    tokens = event.event.usage.completion_tokens
            return tokens

        began = time.perf_counter()
        tokens = sum(await asyncio.gather(*(stream(n) for n in range(STREAMS))))
        elapsed = time.perf_counter() - began
    return {"rate": tokens / elapsed, "first": statistics.median(firsts), "tokens": tokens}


class EngineAlone:
    """An engine in its process, driven from here as the worker drives it."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self._engine = self._loop.run_until_complete(self._start(folder, options))

    async def _start(self, folder: Path, options: dict[str, Any]) -> Any:
        from penstock.processors.models.catalog import ModelConfig
        from penstock.processors.models.factory import make_engine
        from penstock.processors.models.sizing import size_model

        config = ModelConfig(id="m", source=str(folder), engine="text", options=options)
        engine = make_engine(config, await size_model(config))
        await engine.start()
        return engine

    def measure(self) -> dict[str, float]:
        return self._loop.run_until_complete(self._measure())

    async def _measure(self) -> dict[str, float]:
        from penstock.processors.engines.base import RunSpec

        runs = [_Run() for _ in range(STREAMS)]
        began = time.perf_counter()

        async def begin(number: int, run: _Run) -> None:
            self._number += 1
            spec = RunSpec(
                run_id=f"r{self._number}",
                task="text_generation",
                model="m",
                messages=[{"role": "user", "content": f"{PROMPT} {number}"}],
                params={"max_tokens": TOKENS, "temperature": 0},
                stream=True,
            )
            self._engine.run(spec, await self._engine.prepare(spec), run)

        await asyncio.gather(*(begin(number, run) for number, run in enumerate(runs)))
        tokens = sum(await asyncio.gather(*(run.tokens for run in runs)))
        elapsed = time.perf_counter() - began
        firsts = [1000 * (run.first - began) for run in runs if run.first is not None]
        return {"rate": tokens / elapsed, "first": statistics.median(firsts), "tokens": tokens}

    def close(self) -> None:
        self._loop.run_until_complete(self._engine.stop())
        self._loop.close()


class _Run:
    """The sink of one run."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.tokens: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_delta(self, _: Any) -> None:
        self.first = self.first or time.perf_counter()

    def on_finished(self, finished: Any) -> None:
        self.tokens.set_result(finished.completion_tokens)

    def on_failed(self, failed: Any) -> None:
        self.tokens.set_exception(failed.error)


class Direct:
    """The same manager with the same options in a process of its own, driven by lines on its standard input."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(folder), json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
        )
        self.read()

    def read(self) -> dict[str, float]:
        assert self.process.stdout is not None
        while not (line := self.process.stdout.readline()).startswith(b"{"):
            assert line, "the direct manager ended"
        return json.loads(line)

    def measure(self) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go\n")
        self.process.stdin.flush()
        return self.read()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


def serve(folder: str, options: dict[str, Any]) -> None:
    """The floor: transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(int(options.get("threads", 2)))
    dtype = getattr(torch, str(options.get("dtype", "float32")))
    device = str(options.get("device", "cpu"))
    own = False if device == "cpu" else None  # on a card, what transformers takes by itself
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().to(device)
    model.set_attn_implementation("sdpa")
    config = ContinuousBatchingConfig(
        block_size=options["block_size"],
        num_blocks=options["num_blocks"],
        max_batch_tokens=options["max_batch_tokens"],
        max_requests_per_batch=64,
        per_request_processors=True,
        use_cuda_graph=own,
        use_async_batching=own,
    )
    base = GenerationConfig(
        do_sample=True,
        temperature=0.9,
        top_k=50,
        top_p=0.95,
        max_new_tokens=TOKENS,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    manager = model.init_continuous_batching(generation_config=base, continuous_batching_config=config)
    manager.start()
    print("{}", flush=True)
    for run, _ in enumerate(sys.stdin):
        print(json.dumps(asyncio.run(drive(manager, tokenizer, run))), flush=True)


async def drive(manager: Any, tokenizer: Any, run: int) -> dict[str, float]:
    """One round: all streams at once into the bare manager."""
    finished = asyncio.Event()
    firsts: dict[str, float] = {}
    done: list[Any] = []
    began = time.perf_counter()

    def handle(output: Any) -> None:
        if output.generated_tokens:
            firsts.setdefault(output.request_id, 1000 * (time.perf_counter() - began))
        if output.is_finished():
            done.append(output)
            if len(done) == STREAMS:
                finished.set()

    for number in range(STREAMS):
        name = f"{run}-{number}"
        messages = [{"role": "user", "content": f"{PROMPT} {number}"}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        manager.register_result_handler(name, handle)
        manager.add_request(
            ids,
            request_id=name,
            max_new_tokens=TOKENS,
            streaming=True,
            top_k=1,
            eos_token_id=tokenizer.eos_token_id,
        )
    await asyncio.wait_for(finished.wait(), 300)
    tokens = sum(len(output.generated_tokens) for output in done)
    elapsed = time.perf_counter() - began
    return {"rate": tokens / elapsed, "first": statistics.median(firsts.values()), "tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=None)
    parser.add_argument("--quick", action="store_true", help="one round, little warming: shows only that it works")
    parser.add_argument("--models", nargs="*", default=["tiny", "smollm2"])
    parser.add_argument("--level", choices=["worker", "engine"], default="worker")
    parser.add_argument("--threads", type=int, default=2, help="of either side")
    parser.add_argument("--guided", action="store_true", help="with a JSON schema, against the same model without one")
    arguments = parser.parse_args()
    rounds = arguments.rounds or (1 if arguments.quick else 5)
    from penstock.cli.assets import prepare_model

    folders = {"tiny": "tiny-lm", "smollm2": "smollm2-135m"}
    options = {
        "threads": arguments.threads,
        "dtype": "float32",
        "block_size": 32,
        "num_blocks": 256,
        "max_batch_tokens": 512,
    }
    rows: list[Row] = []
    for name in arguments.models:
        folder = prepare_model(folders[name], lambda line: print(line, file=sys.stderr))
        measure = at_engine_level if arguments.level == "engine" else at_worker_level
        if arguments.guided:
            measure = guided_and_plain
        ours, floors, steals = measure(name, folder, options, rounds, 2_000 if arguments.quick else WARM)
        kind = "guided (floor: plain)" if arguments.guided else arguments.level
        title = f"{name}, {STREAMS} streams × {TOKENS} tokens, {kind}"
        aim = "≥ 0.5" if arguments.guided else AIMS[name]
        rows += [
            Row(f"{title}: tokens", "tokens/s", ours["rate"], floors["rate"], steals, aim),
            Row(f"{title}: first token, median", "ms", ours["first"], floors["first"], steals, "≤ 2× + Kafka's floor"),
        ]
    save("text_guided" if arguments.guided else "text" if arguments.level == "worker" else "text_engine", rows)


Figures = tuple[dict[str, list[float]], dict[str, list[float]], list[float]]


def at_engine_level(_: str, folder: Path, options: dict[str, Any], rounds: int, _warming: int) -> Figures:
    engine, direct = EngineAlone(folder, options), Direct(folder, options)
    try:
        for _warm in range(2):
            engine.measure()
            direct.measure()
        return interleave(rounds, engine.measure, direct.measure)
    finally:
        direct.close()
        engine.close()


def at_worker_level(name: str, folder: Path, options: dict[str, Any], rounds: int, warming: int) -> Figures:
    model = {"id": name, "source": str(folder), "engine": "text", "tasks": ["text_generation"], "options": options}
    with broker() as bootstrap, system(bootstrap, models=[model, NOOP]) as found:
        worker = found.worker().wait_ready(180)
        warm(found, worker, warming, model=NOOP["id"])
        settings = KafkaSettings(bootstrap_servers=bootstrap, topic_prefix=found.prefix)
        direct = Direct(folder, options)
        try:
            asyncio.run(through_penstock(settings, name))
            direct.measure()
            return interleave(rounds, lambda: asyncio.run(through_penstock(settings, name)), direct.measure)
        finally:
            direct.close()


def guided_and_plain(name: str, folder: Path, options: dict[str, Any], rounds: int, warming: int) -> Figures:
    """The same model in the same worker, by turns."""
    model = {"id": name, "source": str(folder), "engine": "text", "tasks": ["text_generation"], "options": options}
    with broker() as bootstrap, system(bootstrap, models=[model, NOOP]) as found:
        worker = found.worker().wait_ready(180)
        warm(found, worker, warming, model=NOOP["id"])
        settings = KafkaSettings(bootstrap_servers=bootstrap, topic_prefix=found.prefix)

        def guided() -> dict[str, float]:
            return asyncio.run(through_penstock(settings, name, **GUIDED))

        def plain() -> dict[str, float]:
            return asyncio.run(through_penstock(settings, name))

        guided()
        plain()
        return interleave(rounds, guided, plain)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main()
