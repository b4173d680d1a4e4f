"""Cost of traces: processor time of a no-op chat in the gateway and the worker, with traces off and on, by turns.

The collector is a small server in this process that throws away what it gets. `--rounds N`, `--quick`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import ExitStack

import psutil
from common import Figures, broker, options, rotate, system
from overhead import NOOP, post_at_rate

from kit.collector import collecting
from system import System

ENV = {"PENSTOCK_TELEMETRY__TRACES": "true"}


def measured(found: System, rate: float, seconds: float) -> Figures:
    """CPU in microseconds a chat, by process."""
    processes = {one.command: psutil.Process(one.popen.pid) for one in found.processes}

    def spent() -> dict[str, float]:
        return {name: sum(one.cpu_times()[:2]) for name, one in processes.items()}

    before = spent()
    count = len(asyncio.run(post_at_rate(found.process("g").url, rate, seconds)))
    asyncio.run(asyncio.sleep(1.5))  # batches of spans are sent each second
    after = spent()
    each = {name: 1e6 * (after[name] - before[name]) / count for name in processes}
    return {**each, "both": sum(each.values())}


def main() -> None:
    asked = options(__doc__, rounds=8)
    rate, seconds = (50, 3) if asked.quick else (100, 8)
    with ExitStack() as stack:
        bootstrap = stack.enter_context(broker())
        collector = stack.enter_context(collecting())
        collector.take = lambda call: (200, b"")  # type: ignore[method-assign]
        os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "1000"
        sides: dict[str, System] = {}
        for side in ("off", "on"):
            made = sides[side] = stack.enter_context(system(bootstrap, models=[NOOP]))
            if side == "on":
                os.environ |= ENV | {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url}
            made.start_all(["w1", "g1"])
            measured(made, rate, seconds)  # warms it
        results, steals = rotate(
            asked.rounds, {name: (lambda one=one: measured(one, rate, seconds)) for name, one in sides.items()}
        )
    print(f"load {os.getloadavg()[0]:.1f}, steal {max(steals):.2f}", file=sys.stderr)
    for figure in results["off"]:
        off, on = results["off"][figure], results["on"][figure]
        ratios = sorted(b / a for a, b in zip(off, on, strict=True))
        middle = len(ratios) // 2
        print(
            f"{figure}: off {sorted(off)[middle]:.0f} us, on {sorted(on)[middle]:.0f} us, "
            f"ratio {ratios[middle]:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
        )


if __name__ == "__main__":
    main()
