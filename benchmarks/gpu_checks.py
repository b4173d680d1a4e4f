"""The checks of gpu_check.py. Each returns figures, or raises `Failed` with what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from gpu_site import MIB, Run, Site, begin, embed, fork_server_pid
from live_flow import LiveFlow

from penstock.processors.engines.base import EngineState, Finished

Figures = dict[str, Any]
Check = Callable[[Site], Awaitable[Figures]]

RATIO = 0.9
"""The least part of the bare manager's tokens per second."""
LEFT = 0.03
"""So much of what a model held may be left when it is unloaded."""
SLACK_BYTES = 96 * MIB
"""Of a card, that comes and goes without us: a display, a driver's own."""
SLACK_CPU_BYTES = 16 * MIB
"""Of main memory: Python's resource tracker."""


class Failed(Exception):
    """The check ran, and what it saw is wrong."""


def expect(holds: bool, what: str) -> None:
    if not holds:
        raise Failed(what)


async def fork_server(site: Site) -> Figures:
    """Two engines from one fork server answer on the device; neither this process nor the fork server touches it."""
    began = time.perf_counter()
    async with site.engine() as first:
        first_s = time.perf_counter() - began
        began = time.perf_counter()
        async with site.engine() as second:
            second_s = time.perf_counter() - began
            runs = [await begin(engine, "r") for engine in (first, second)]
            for run in runs:
                expect(isinstance(await _end(run), Finished), "an engine did not answer")
            listed = site.reading().by_pid
            parents = {os.getpid(), fork_server_pid()}
            if listed is not None and not site.on_cpu:
                expect(not parents & set(listed), "the worker or its fork server has a context on the card")
                expect({first.pid, second.pid} <= set(listed), "the driver does not list our engines")
            return {"first_s": first_s, "second_s": second_s, "processes_listed": listed is not None}


async def admission(site: Site) -> Figures:
    """A model waits, with figures, while another program really holds the memory; it is loaded when that ends."""
    need = int(0.6 * site.free_bytes())
    async with site.flow(site.entry("a", need)) as flow:
        async with site.others(int(0.55 * site.free_bytes())):
            await flow.turn()
            flow.submit("r", model="a", payload=_payload())
            told = await flow.until(lambda: _waits_for_memory(flow), 30, "a reason for waiting")
            expect(told.need_bytes == need, f"it waits for {told.need_bytes} bytes, not for {need}")
            expect((told.free_bytes or 0) < need, "it waits, and there is room")
            end = time.monotonic() + 3
            await flow.until(lambda: time.monotonic() > end, 10, "")
            expect(not flow.loads, "it was loaded into memory that another program holds")
            foreign = flow.flow.ledger.foreign_bytes(site.device.device)
        await flow.until(lambda: flow.status_of("r") == "completed", 90, "its answer, after the other has ended")
        return {"need_mib": need // MIB, "free_mib": (told.free_bytes or 0) // MIB, "foreign_mib": foreign // MIB}


async def turns(site: Site) -> Figures:
    """Two models, each larger than half of the device, answer by turns; no moment has more granted than it holds."""
    need = int(0.6 * site.free_bytes())
    async with site.flow(site.entry("a", need), site.entry("b", need)) as flow:
        began = time.perf_counter()
        for number in range(4):
            flow.submit(f"r{number}", model="ab"[number % 2], payload=_payload())
            await flow.until(lambda name=f"r{number}": flow.status_of(name), 90, f"request {number}")
            expect(flow.status_of(f"r{number}") == "completed", f"request {number} is {flow.ended[-1]}")
        most, limit = flow.most_reserved[site.device.device], flow.flow.ledger.limit_bytes(site.device.device)
        expect(most <= limit, f"{most} bytes were granted of {limit}")
        expect(len(flow.loads) >= 2, "both were loaded at once")
        seconds = time.perf_counter() - began
        return {"loads": len(flow.loads), "seconds": seconds, "granted_mib": most // MIB, "limit_mib": limit // MIB}


async def unload(site: Site) -> Figures:
    """What a model held is back when it is unloaded."""
    start = site.reading().used_bytes
    async with site.flow(site.entry("a", int(0.5 * site.free_bytes()))) as flow:
        flow.submit("r", model="a", payload=_payload())
        await flow.until(lambda: flow.status_of("r") == "completed", 90, "its answer")
        held = site.reading().used_bytes - start
        expect(held > 0, "a loaded model holds nothing")
        flow.flow.orders.desire("a", False, None)
        await flow.until(lambda: not flow.flow.lane("a").replicas, 30, "its end")
        allowed = start + max(LEFT * held, SLACK_CPU_BYTES if site.on_cpu else SLACK_BYTES)
        await flow.until(lambda: site.reading().used_bytes <= allowed, 20, "the memory that it held")
        left = site.reading().used_bytes - start
        return {"held_mib": held // MIB, "left_mib": left // MIB}


async def out_of_memory(site: Site) -> Figures:
    """A batch that cannot fit into an engine's grant: it ends or is made smaller; engine and neighbour live on."""
    texts = ["the sea and the dog " * 100] * (400 if site.large else 200)
    small = 64 * MIB if site.on_cpu else 900 * MIB + _weights(site)
    async with site.engine() as neighbour, site.engine("embedding", small, max_batch_tokens=1 << 20) as engine:
        run = await begin(neighbour, "beside", 200)
        if site.on_cpu:  # the allocator of main memory is held back as a card's is by its fraction
            process = psutil.Process(engine.pid)
            process.rlimit(resource.RLIMIT_AS, (process.memory_info().vms + 128 * MIB, resource.RLIM_INFINITY))
        ended = await _end_or_death(engine, await embed(engine, "large", texts))
        if site.on_cpu and engine.state is EngineState.READY:
            psutil.Process(engine.pid).rlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        expect(isinstance(await _end(run), Finished), "the engine beside it was harmed")
        if engine.state is EngineState.READY:
            again, how = engine, "finished in smaller batches" if isinstance(ended, Finished) else str(ended)
            expect(isinstance(await _end(await embed(again, "small", ["a dog"])), Finished), "it answers no more")
        else:
            how = "its engine died; a new one answers"
            async with site.engine("embedding", None) as again:
                expect(isinstance(await _end(await embed(again, "small", ["a dog"])), Finished), "a new one fails")
        return {"large": how}


async def batching(site: Site) -> Figures:
    """16 streams × 64 tokens through an engine against the same continuous-batching manager driven directly."""
    options = {
        "device": "cpu" if site.on_cpu else "cuda:0",
        "dtype": "float32" if site.on_cpu else "bfloat16",
        "threads": 1 if site.on_cpu else 2,
        "block_size": 32,
        "num_blocks": 256,
        "max_batch_tokens": 512,
    }
    rounds = await _batching(site, options)
    ours, bare = (median(side) for side in zip(*rounds, strict=True))
    ratio = median(one / other for one, other in rounds)
    expect(site.on_cpu or ratio >= RATIO, f"{ours:.0f} tokens/s against {bare:.0f}: {ratio:.2f} is below {RATIO}")
    return {"tokens_per_s": round(ours), "bare_tokens_per_s": round(bare), "ratio": ratio}


async def _batching(site: Site, options: dict[str, Any]) -> list[tuple[float, float]]:
    """By round, tokens per second of an engine and of the bare manager."""
    seen = {} if site.device.address is None else {"CUDA_VISIBLE_DEVICES": site.device.address}
    sizes = ("1", "1") if site.on_cpu else ("2", "5")
    program = str(Path(__file__).with_name("gpu_batching.py"))
    process = await asyncio.create_subprocess_exec(
        sys.executable, program, str(site.model()), json.dumps(options), *sizes,
        stdout=asyncio.subprocess.PIPE, env={**os.environ, **seen}, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = await process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    expect(process.returncode == 0, f"the measurement ended with exit code {process.returncode}")
    return [tuple(one) for one in json.loads(said.splitlines()[-1])]


CHECKS: Mapping[str, Check] = {
    "fork_server": fork_server,
    "admission": admission,
    "turns": turns,
    "unload": unload,
    "out_of_memory": out_of_memory,
    "batching": batching,
}


def _payload() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Tell me a story about a dog."}], "max_tokens": 8}


def _waits_for_memory(flow: LiveFlow) -> Any:
    told = [flow.flow.waiting_for(work, time.monotonic()) for work in flow.flow.works.values()]
    return next((one for one in told if one.reason == "memory"), None)


def _weights(site: Site) -> int:
    return sum(file.stat().st_size for file in site.model().glob("*.safetensors"))


async def _end(run: Run) -> Any:
    return await asyncio.wait_for(asyncio.shield(run.done), 120)


async def _end_or_death(engine: Any, run: Run) -> Any:
    """Its end, or None when its engine has died under it."""
    died = asyncio.get_running_loop().create_future()
    engine.on_died = lambda code: died.done() or died.set_result(code)
    await asyncio.wait([run.done, died], timeout=120, return_when=asyncio.FIRST_COMPLETED)
    expect(run.done.done() or died.done(), "a batch that is too large neither ended nor failed")
    if not run.done.done():
        return None
    found = run.done.result()
    return found if isinstance(found, Finished) else found.error
