"""An urgent text run of a few tokens beside low ones that come and go on one engine, without a worker and Kafka.

Beside each engine that knows who is urgent the same one is measured with one priority for all.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from typing import Any

from common import Row, interleave, options, save

from penstock.cli.assets import prepare_model
from penstock.processors.engines.base import Engine, RunSpec
from penstock.processors.models.catalog import ModelConfig
from penstock.processors.models.factory import make_engine
from penstock.processors.models.sizing import size_model

SLOTS = 64
URGENT, LOW = 1, 8
TOKENS = {URGENT: 4, LOW: 8}
WORDS = {URGENT: 30, LOW: 60}
SETTLES_S = 5.0


class _Ended:
    """The sink of one run."""

    def __init__(self) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_delta(self, _: Any) -> None:
        pass

    def on_finished(self, _: Any) -> None:
        self.done.set_result(None)

    def on_failed(self, failed: Any) -> None:
        self.done.set_exception(failed.error)


class Driver:
    """Sends runs to one engine."""

    def __init__(self, engine: Engine, *, tells: bool) -> None:
        self._engine = engine
        self._tells = tells
        self._number = 0

    async def run(self, priority: int) -> float:
        """One run of this urgency. Returns its seconds."""
        self._number += 1
        spec = RunSpec(
            run_id=f"r{self._number}",
            task="text_generation",
            model="m",
            messages=[{"role": "user", "content": f"{self._number} " + "word " * WORDS[priority]}],
            params={"max_tokens": TOKENS[priority], "temperature": 0},
            stream=True,
            priority=priority if self._tells else LOW,
        )
        prepared, ended, began = await self._engine.prepare(spec), _Ended(), time.perf_counter()
        self._engine.run(spec, prepared, ended)
        await ended.done
        return time.perf_counter() - began


async def measure(source: str, urgent: int, *, tells: bool) -> dict[str, float]:
    """Seconds of the urgent runs, alone and beside low ones, and low runs each second beside them."""
    config = ModelConfig(id="m", source=source, engine="text", options={"threads": 2, "slots": SLOTS})
    engine = make_engine(config, await size_model(config))
    await engine.start()
    driver, ended = Driver(engine, tells=tells), 0

    async def low() -> None:
        nonlocal ended
        while True:
            await driver.run(LOW)
            ended += 1

    try:
        alone = [await driver.run(URGENT) for _ in range(7)][2:]
        async with asyncio.TaskGroup() as group:
            flood = [group.create_task(low()) for _ in range(SLOTS - 1)]
            await asyncio.sleep(SETTLES_S)
            before, began = ended, time.perf_counter()
            beside = [await driver.run(URGENT) for _ in range(urgent)]
            rate = (ended - before) / (time.perf_counter() - began)
            for task in flood:
                task.cancel()
    finally:
        await engine.stop()
    return {"alone": statistics.median(alone), "beside": statistics.median(beside), "low": rate}


def main() -> None:
    found = options(__doc__, rounds=3)
    urgent = 2 if found.quick else 6
    source = str(prepare_model("smollm2-135m", lambda line: print(line, file=sys.stderr)))
    told, untold, steals = interleave(
        found.rounds,
        lambda: asyncio.run(measure(source, urgent, tells=True)),
        lambda: asyncio.run(measure(source, urgent, tells=False)),
    )
    of = f"{TOKENS[URGENT]} tokens of SmolLM2 beside {SLOTS - 1} low runs"
    rows = [
        Row(f"{of}, over alone", "s", told["beside"], told["alone"], steals, ""),
        Row("the same with one priority for all", "s", untold["beside"], untold["alone"], steals, ""),
        Row("low runs beside urgent ones, over one priority", "runs/s", told["low"], untold["low"], steals, ""),
    ]
    save("urgent", rows)


if __name__ == "__main__":
    main()
