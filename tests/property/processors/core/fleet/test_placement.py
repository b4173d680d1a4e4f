"""Placement in a made-up fleet: whatever comes, the ledger holds, turns last, and all that is asked for is served."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from kit.examples import examples
from penstock.processors.core.fleet.ledger import DeviceCapacity
from penstock.processors.core.fleet.views import ModelView, Need
from placement_world import PlacementWorld

DEVICES = (
    DeviceCapacity(device="cuda:0", kind="cuda", total_bytes=84, reserve_bytes=4),
    DeviceCapacity(device="cuda:1", kind="cuda", total_bytes=48),
    DeviceCapacity(device="cpu", kind="cpu", total_bytes=40),
)
MODELS = (
    ModelView(model="large", needs={"cuda": Need(bytes=60, host_bytes=20)}, load_seconds=6),
    ModelView(model="middle", needs={"cuda": Need(bytes=40, host_bytes=10)}, load_seconds=4, max_replicas=2),
    ModelView(model="fixed", needs={"cuda:1": Need(bytes=30)}, load_seconds=2, keep_alive_s=20),
    ModelView(model="small", needs={"cuda": Need(bytes=10), "cpu": Need(bytes=10)}, load_seconds=1, max_replicas=3),
    ModelView(model="pinned", needs={"cuda:0": Need(bytes=12)}, load_seconds=1, pinned=True),
    ModelView(model="wide", needs={"cuda": Need(bytes=36, devices=2)}, load_seconds=5, preload=True),
    ModelView(model="host", needs={"cpu": Need(bytes=25)}, load_seconds=3, min_replicas=1),
)
NAMES = st.sampled_from([one.model for one in MODELS])
CLASSES = st.sampled_from(("high", "medium", "low"))
LONGEST_RUN_S = 8.0
ENOUGH_S = 6000.0
"""An upper bound for serving all that can wait here: with aged shares a low class waits for eight turns of 90 s."""


class PlacementMachine(RuleBasedStateMachine):
    """Requests, foreign use and failures in any order. The world checks the ledger and the turns at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.world = PlacementWorld(DEVICES, MODELS)

    @rule(model=NAMES, klass=CLASSES, run_s=st.floats(0.1, LONGEST_RUN_S), times=st.integers(1, 12))
    def request(self, model: str, klass: str, run_s: float, times: int) -> None:
        self.world.add(model, klass, run_s, times)

    @rule(seconds=st.sampled_from((0.5, 2.0, 10.0, 60.0)))
    def time_passes(self, seconds: float) -> None:
        self.world.go(seconds, step=0.5)

    @rule(model=NAMES, klass=CLASSES, every_s=st.sampled_from((0.5, 3.0)), times=st.integers(5, 30))
    def stream(self, model: str, klass: str, every_s: float, times: int) -> None:
        for _ in range(times):
            self.world.add(model, klass, 0.7)
            self.world.go(every_s, step=0.5)

    @rule(device=st.sampled_from([one.device for one in DEVICES]), used=st.integers(0, 60))
    def foreign_use(self, device: str, used: int) -> None:
        """It comes and goes, beside what the holders of grants use."""
        ours = self.world.ledger.reserved_bytes(device)
        self.world.ledger.observe(device, used + ours, ours)

    @precondition(lambda self: sum(self.world.failures.values()) < 4)
    @rule(model=NAMES, times=st.integers(1, 2))
    def loads_fail(self, model: str, times: int) -> None:
        self.world.failures[model] = times

    def teardown(self) -> None:
        for device in self.world.limits:
            self.world.ledger.observe(device, 0)
        began = self.world.now
        while not self.world.idle():
            self.world.go(5, step=0.5)
            assert self.world.now - began < ENOUGH_S, (
                f"not served: { {m: len(w) for m, w in self.world.waiting.items()} }"
            )
        self.world.go(60, step=0.5)
        evicted = len(self.world.evictions)
        loaded = len(self.world.loads)
        self.world.go(60, step=0.5)
        assert len(self.world.loads) == loaded, "without demand nothing comes"
        assert len(self.world.evictions) == evicted, "and nothing goes"
        assert any(one.model == "pinned" and one.state == "ready" for one in self.world.replicas)


TestPlacement = PlacementMachine.TestCase
TestPlacement.settings = settings(max_examples=examples(25), stateful_step_count=25, deadline=None)
