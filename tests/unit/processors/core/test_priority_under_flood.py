"""Priority under flood in virtual time: high work beside low work by the thousand, with slack and without."""

from __future__ import annotations

import random

from flow_driver import HIGH, LOW, World
from penstock.processors.core.queue.slack import SlackSettings

SLOTS, RUN_S, STEP_S = 8, 0.02, 0.001


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


class Flood:
    """A flow in virtual time: an engine of 8 slots of about 20 ms, low work by the thousand, high work as it comes."""

    def __init__(
        self, high_per_s: float, *, low: int, slack: bool, spread: float = 0.05, seconds: float = 10.0
    ) -> None:
        self.chance, self.seconds, self.spread = random.Random(1), seconds, spread
        self.world = World(slack=SlackSettings() if slack else None, aging_s=600.0)
        self.world.up(slots=SLOTS, inline=True)
        self.ends: list[tuple[float, str]] = []
        self.came: dict[str, float] = {}
        self.took: list[float] = []
        self.low_ended = 0
        for number in range(low):
            self.world.submit(f"low{number}", LOW, settle=False)
        self.high_per_s = high_per_s

    def run(self) -> Flood:
        world, begun, number = self.world, 0, 0
        next_high, started = world.now + 1.0, world.now
        while world.now < started + self.seconds:
            if self.high_per_s and world.now >= next_high:
                self.came[f"high{number}"] = world.now
                world.submit(f"high{number}", HIGH)
                number += 1
                next_high += self.chance.expovariate(self.high_per_s)
            world.pass_time(STEP_S)
            for name in world.started[begun:]:
                self.ends.append((world.now + RUN_S * self.chance.uniform(1 - self.spread, 1 + self.spread), name))
            begun = len(world.started)
            for end, name in [one for one in self.ends if one[0] <= world.now]:
                self.ends.remove((end, name))
                world.finish(name)
                if name in self.came and world.now > started + self.seconds / 2:  # what came before is the warm-up
                    self.took.append(world.now - self.came[name])
                self.low_ended += name.startswith("low")
            world.seen.clear()
        return self


def test_high_work_beside_a_flood_is_nearly_as_fast_as_alone() -> None:
    alone = Flood(40, low=0, slack=True).run()
    beside = Flood(40, low=4_200, slack=True).run()
    strict = Flood(40, low=4_200, slack=False).run()
    base = percentile(alone.took, 0.95)
    assert percentile(beside.took, 0.95) / base <= 1.1
    assert percentile(strict.took, 0.95) / base <= 1.3
    assert beside.low_ended > 0.6 * strict.low_ended


def test_runs_of_equal_length_do_not_end_together() -> None:
    """Paced or not, all slots are busy with low work; but one becomes free every 2.5 ms, not eight every 20."""
    alone = Flood(40, low=0, slack=False, spread=0.0, seconds=4.0).run()
    strict = Flood(40, low=2_000, slack=False, spread=0.0, seconds=4.0).run()
    assert percentile(strict.took, 0.95) / percentile(alone.took, 0.95) <= 1.3
    assert strict.low_ended > 0.8 * 4.0 * SLOTS / (RUN_S + 2 * STEP_S)


def test_low_work_goes_on_at_95_percent() -> None:
    assert Flood(380, low=500, slack=True).run().low_ended > 20
