"""What the child does when the batching loop dies under its runs, seen from inside: here the loop can be killed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from penstock.processors.engines.base import RunFailed, RunSpec
from penstock.processors.engines.text import TextBackend


async def test_a_dead_batching_loop_fails_its_runs_and_is_started_anew(tiny_lm: Path) -> None:
    events: list[tuple[Any, ...]] = []
    backend = TextBackend(str(tiny_lm), {"threads": 1, "cache_tokens": 1024, "ignore_eos": True}, events.append)
    await asyncio.to_thread(backend.load)

    def begin(run_id: str, tokens: int) -> None:
        params = {"temperature": 0, "max_tokens": tokens}
        spec = RunSpec(run_id=run_id, task="text_generation", model="m", prompt="Once", params=params, stream=True)
        backend.run(spec, backend.prepare(spec)[1])

    async def until(kind: str, count: int) -> list[Any]:
        async with asyncio.timeout(60):
            while len(found := [event[1] for event in events if event[0] == kind]) < count:
                backend.check()
                await asyncio.sleep(0.01)
        return found

    manager: Any = backend._manager
    try:
        begin("victim-1", 500)
        begin("victim-2", 300)
        await until("delta", 2)
        manager.add_request([10**6], request_id="poison", max_new_tokens=2, eos_token_id=[-1])
        failed: list[RunFailed] = await until("failed", 2)
        assert {run.run_id for run in failed} == {"victim-1", "victim-2"}
        assert all(run.retryable_here and run.error.code == "engine_failed" for run in failed)
        begin("after", 4)
        finished = await until("finished", 1)
        assert (finished[0].run_id, finished[0].completion_tokens) == ("after", 4)
        assert backend._manager is not manager
        # Nothing that a run leaves behind stays: neither handlers, nor results that nobody reads.
        router: Any = backend._manager.output_router
        assert not router.result_handlers
        assert router.output_queue.empty()
    finally:
        backend._manager.stop(block=True, timeout=10, hard_stop=True)
