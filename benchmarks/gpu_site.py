"""What the checks of gpu_check.py work on: a device, its probe, models made in code, programs that take its memory."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import common  # noqa: F401  (it puts tests/ on the path)
from live_flow import LiveFlow

from penstock.processors.engines.base import Delta, Finished, Prepared, RunFailed, RunSpec
from penstock.processors.hardware.nvml import NvmlProbe
from penstock.processors.hardware.probe import DeviceFacts, Probe, Reading
from penstock.processors.hardware.processes import own_bytes, trees
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.factory import make_engine
from penstock.processors.models.machine import Machine
from penstock.processors.models.sizing import size_model

MIB = 1 << 20
CPU_BYTES = 3 << 30
"""What the form on a CPU takes for the whole of main memory: what other programs have of it does not count there."""
RESERVE = 0.05
EATER = """
import sys
size = int(sys.argv[2])
if sys.argv[1] == "cpu":
    held = bytearray(b"1") * size
else:
    import torch
    held = torch.ones(size, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
print("held", flush=True)
sys.stdin.read()
"""


class OwnProcesses:
    """Main memory as if only this program's processes were there."""

    def devices(self) -> list[DeviceFacts]:
        return [DeviceFacts(device="cpu", kind="cpu", total_bytes=CPU_BYTES, title="main memory, of our processes")]

    def read(self, pids: Set[int]) -> Mapping[str, Reading]:
        # Pages that the fork server shares with its engines are its own again when these have ended.
        found = {
            pid: own_bytes(pid) or 0 for pid in trees([os.getpid()])[os.getpid()] - {os.getpid(), fork_server_pid()}
        }
        return {"cpu": Reading(used_bytes=sum(found.values()), by_pid=found)}


@dataclass(kw_only=True, slots=True)
class Site:
    """One device, and a folder for what the checks write. `large`: weights of some hundred megabytes."""

    device: DeviceFacts
    probe: Probe
    folder: Path
    large: bool

    @property
    def on_cpu(self) -> bool:
        return self.device.kind == "cpu"

    def machine(self) -> Machine:
        reserve = int(self.device.total_bytes * RESERVE)
        return Machine(cpu_reserve_bytes=reserve, gpu_reserve_bytes=reserve, probes=[self.probe])

    def reading(self) -> Reading:
        """Raises RuntimeError when the device cannot be measured."""
        found = self.probe.read(frozenset())[self.device.device]
        if not isinstance(found, Reading):
            raise RuntimeError(f"{self.device.device} cannot be measured: {found.reason}")
        return found

    def model(self) -> Path:
        """The folder of a language model with random weights, made once."""
        folder = self.folder / "model"
        if not folder.exists():
            _make_model(folder, large=self.large)
        return folder

    def entry(self, name: str, vram_bytes: int) -> dict[str, Any]:
        """A `[[models]]` entry."""
        options = {"threads": 2, "cache_tokens": 2048, "slots": 16, "max_batch_tokens": 512}
        return {
            "id": name,
            "source": str(self.model()),
            "engine": "text",
            "device": self.device.device,
            "vram_bytes": vram_bytes,
            "preload": False,
            "options": options,
        }

    def free_bytes(self) -> int:
        """What the ledger could grant now."""
        return int(self.device.total_bytes * (1 - RESERVE)) - self.reading().used_bytes

    @asynccontextmanager
    async def flow(self, *models: dict[str, Any]) -> AsyncIterator[LiveFlow]:
        flow = LiveFlow(self.machine(), list(models), self.folder)
        try:
            yield flow
        finally:
            await flow.close()

    @asynccontextmanager
    async def engine(self, kind: str = "text", granted_bytes: int | None = None, **options: Any) -> AsyncIterator[Any]:
        """An engine that is ready, as a worker would have started it."""
        config = ModelConfig(
            id="m",
            source=str(self.model()),
            engine=kind,
            options={"threads": 2, "device": self.device.device, **options},
        )
        size = await size_model(config)
        granted = size.need_bytes if granted_bytes is None else granted_bytes
        engine = make_engine(config, size, (self.device.device,), granted, facts=self.machine().facts)
        try:
            await engine.start()
            yield engine
        finally:
            await engine.stop()

    @asynccontextmanager
    async def others(self, size_bytes: int) -> AsyncIterator[None]:
        """A program that is no engine of ours takes so much of the device, really."""
        env = dict(os.environ)
        if self.device.address is not None:
            env |= {"CUDA_VISIBLE_DEVICES": self.device.address}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", EATER, self.device.kind, str(size_bytes),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=env,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            said = await asyncio.wait_for(process.stdout.readline(), 90)
            if said.strip() != b"held":
                raise RuntimeError(f"the program that should take {size_bytes / MIB:.0f} MiB of the device failed")
            yield
        finally:
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
            await process.wait()


def fork_server_pid() -> int | None:
    """The pid of this process's fork server, once there is one."""
    return getattr(forkserver, "_forkserver")._forkserver_pid  # noqa: B009


def find(device: str | None, folder: Path) -> Site | None:
    """The site on a device (`cpu`, `cuda:1`, …); by default the card with the most free memory. None: there is none."""
    if device == "cpu":
        probe = OwnProcesses()
        return Site(device=probe.devices()[0], probe=probe, folder=folder, large=False)
    nvml = NvmlProbe()
    cards = [one for one in nvml.devices() if device in (None, one.device)]
    if not cards:
        return None
    used = {name: one.used_bytes for name, one in nvml.read(frozenset()).items() if isinstance(one, Reading)}
    best = max(cards, key=lambda one: one.total_bytes - used.get(one.device, one.total_bytes))
    return Site(device=best, probe=nvml, folder=folder, large=True)


def _make_model(folder: Path, *, large: bool) -> None:
    """Random weights; the tokenizer of the tiny model that the tests train."""
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    from penstock.cli.makers.tiny_lm import Dialogues, make_tokenizer

    tokenizer = make_tokenizer(Dialogues(0))
    ends: dict[str, Any] = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    hidden, layers = (1024, 16) if large else (128, 2)
    config: Any = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        **ends,
    )
    model: Any = LlamaForCausalLM(config).to("cpu")
    model.generation_config = GenerationConfig(**ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class Run:
    """A run on an engine, and its end."""

    def __init__(self, engine: Any, spec: RunSpec, prepared: Prepared) -> None:
        self.done: asyncio.Future[Finished | RunFailed] = asyncio.get_running_loop().create_future()
        self.tokens = 0
        engine.run(spec, prepared, self)

    def on_delta(self, delta: Delta) -> None:
        self.tokens += len(delta.token_ids)

    def on_finished(self, finished: Finished) -> None:
        self.done.set_result(finished)

    def on_failed(self, failed: RunFailed) -> None:
        self.done.set_result(failed)


async def begin(engine: Any, run_id: str, max_tokens: int = 8) -> Run:
    """A chat that runs."""
    spec = RunSpec(
        run_id=run_id,
        task="text_generation",
        model="m",
        messages=[{"role": "user", "content": "Tell me a story about a dog."}],
        params={"max_tokens": max_tokens, "temperature": 0},
        stream=True,
    )
    return Run(engine, spec, await engine.prepare(spec))


async def embed(engine: Any, run_id: str, texts: list[str]) -> Run:
    spec = RunSpec(run_id=run_id, task="embedding", model="m", inputs=texts, params={})
    return Run(engine, spec, await engine.prepare(spec))
