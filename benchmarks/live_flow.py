"""A real flow with real devices, engines and admission, in this process and without Kafka.

What a worker has behind its topics: serving, lanes, manager, execution. Requests come from `submit`, outcomes are seen
in `ended`. Time is real.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from flow_driver import World
from penstock.processors.core import effects as ask
from penstock.processors.core.flow import Flow
from penstock.processors.execution import Execution
from penstock.processors.lanes import LaneShell
from penstock.processors.metrics import Metrics
from penstock.processors.models.machine import Machine
from penstock.processors.models.serving import Serving
from penstock.processors.outputs import Outputs
from penstock.processors.settings import WorkerSettings
from penstock.processors.spool import Spool
from penstock.schemas.topics import TopicNames

OBSERVE_S = 0.5


class LiveFlow(World):
    """Call `turn` often: `until` does."""

    def __init__(self, machine: Machine, models: list[dict[str, Any]], folder: Path) -> None:
        self.machine = machine
        self.settings = WorkerSettings.model_validate({"models": models, "worker": {"data_dir": folder}})
        self._observed_at = 0.0
        self.most_reserved: dict[str, int] = {}
        super().__init__(*(model["id"] for model in models))

    def make_flow(self, *args: Any) -> Flow:
        settings, _, book = args
        self.now = time.monotonic()
        metrics = Metrics()
        self.lanes = LaneShell(metrics)
        self.serving = Serving(
            self.settings,
            publish=lambda topic, key, record: None,
            names=TopicNames(),
            reports=self.lanes,
            clock_ms=lambda: round(time.time() * 1000),
            clock=time.monotonic,
            machine=self.machine,
        )
        flow = Flow(settings, self.serving, book, devices=self.machine.capacities)
        self.lanes.connect(self.serving, flow, lambda: None)
        self.serving.connect(flow)
        self.execution = Execution(
            flow,
            self.lanes.engine,
            cast("Any", None),  # nobody here has a conversation
            Outputs(self.settings.worker.data_dir / "artifacts"),
            Spool(self.settings.worker.data_dir, 0),
            metrics,
            clock=time.monotonic,
            changed=lambda: None,
            defaults=self.serving.defaults,
        )
        return flow

    def answer(self, effect: Any) -> None:
        match effect:
            case ask.Size():
                self.lanes.size(effect)
            case ask.Load():
                self.loads.append(effect.model)
                self.lanes.load(effect)
            case ask.Unload():
                self.lanes.unload(effect)
            case ask.Prepare():
                self.execution.prepare(effect)
            case ask.Begin():
                self.execution.begin(effect)
            case ask.Start(subject):
                self.started.append(subject.request_id)
                self.execution.start(effect)
            case ask.CancelRun():
                self.execution.cancel(effect.lane, effect.replica, effect.run_id)
            case _:
                super().answer(effect)

    async def turn(self) -> None:
        """One look: devices now and then, what is due, what the flow asks."""
        self.now, self.wall_ms = time.monotonic(), round(time.time() * 1000)
        if self.now - self._observed_at >= OBSERVE_S:
            await self.serving.observe()
            self._observed_at = self.now = time.monotonic()
        self.flow.tick(self.now, self.wall_ms)
        self.flow.check_timeouts(self.now)
        self.settle()
        for device in self.machine.capacities:
            reserved = self.flow.ledger.reserved_bytes(device.device)
            self.most_reserved[device.device] = max(self.most_reserved.get(device.device, 0), reserved)

    async def until(self, condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """Turn until it holds. Raises TimeoutError that says what did not come."""
        give_up = time.monotonic() + timeout_s
        while not (found := condition()):
            if time.monotonic() > give_up:
                raise TimeoutError(f"{what}: not within {timeout_s:g} s")
            await self.turn()
            await asyncio.sleep(0.01)
        return found

    async def close(self) -> None:
        await self.execution.close()
        await self.serving.stop()
