"""Placement rule by rule: where a model is loaded, who is given up for it, and who is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from penstock.processors.core.fleet.ledger import DeviceCapacity, Ledger
from penstock.processors.core.fleet.placement import decide
from penstock.processors.core.fleet.space import PLANS, PLANS_KEPT
from penstock.processors.core.fleet.views import (
    Demand,
    Drain,
    ModelView,
    Need,
    PlacementSettings,
    PlannedLoad,
    PlannedUnload,
    ReplicaView,
    Reserve,
    UseRate,
)
from placement_world import PlacementWorld

GB = 1 << 30
TEN = PlacementSettings(turn_factor=10)
"""A turn of a model that loads in 5 s lasts 50 s."""


def card(number: int = 0, total: int = 80) -> DeviceCapacity:
    return DeviceCapacity(device=f"cuda:{number}", kind="cuda", total_bytes=total * GB)


def host(total: int = 64) -> DeviceCapacity:
    return DeviceCapacity(device="cpu", kind="cpu", total_bytes=total * GB)


def model(name: str, size: int = 50, load_s: float = 5.0, **fields: Any) -> ModelView:
    return ModelView(model=name, needs={"cuda": Need(bytes=size * GB)}, load_seconds=load_s, **fields)


def waits(klass: str = "medium", since: float = 0.0, count: int = 1) -> Demand:
    return Demand(counts={klass: count}, oldest={klass: since}, weight=float(count))


def replica(name: str, ledger: Ledger, size: int = 50, device: str = "cuda:0", **fields: Any) -> ReplicaView:
    number = fields.pop("replica", 0)
    assert ledger.grant(name, {device: size * GB}, 0.0) is not None
    known = {"state": "ready", "ready_at": 0.0, "last_used_at": 1.0, "klass": "medium"} | fields
    return ReplicaView(model=name, replica=number, device=device, bytes={device: size * GB}, **known)


def books(*devices: DeviceCapacity) -> Ledger:
    ledger = Ledger(devices or (card(),))
    for device in devices or (card(),):
        ledger.observe(device.device, 0)
    return ledger


def test_nothing_is_loaded_before_its_device_was_observed() -> None:
    ledger = Ledger([card()])
    wanted = model("a", demand=waits())
    assert decide(1.0, [wanted], [], ledger) == []
    ledger.observe("cuda:0", 0)
    assert [type(one) for one in decide(1.0, [wanted], [], ledger)] == [PlannedLoad]


def test_placed_by_free_memory_then_by_load() -> None:
    ledger = books(card(0), card(1), host())
    held = [replica("x", ledger, 30), replica("y", ledger, 30, "cuda:1", running=1)]
    models = [model("x"), model("y"), model("a", 10, demand=waits())]
    assert [one.device for one in decide(1.0, models, held, ledger) if isinstance(one, PlannedLoad)] == ["cuda:0"]
    ledger.observe("cuda:0", 5 * GB)
    assert [one.device for one in decide(1.0, models, held, ledger) if isinstance(one, PlannedLoad)] == ["cuda:1"]


def test_host_memory_is_part_of_a_load_and_several_devices_are_taken_at_once() -> None:
    ledger = books(card(0), card(1), card(2), host(20))
    ledger.observe("cuda:1", 40 * GB)
    wide = ModelView(
        model="w", needs={"cuda": Need(bytes=60 * GB, host_bytes=16 * GB, devices=2)}, load_seconds=9, demand=waits()
    )
    (load,) = decide(1.0, [wide], [], ledger)
    assert isinstance(load, PlannedLoad)
    assert set(load.devices) == {"cuda:0", "cuda:2"}
    assert dict(load.needs) == {"cuda:0": 60 * GB, "cuda:2": 60 * GB, "cpu": 16 * GB}
    ledger.observe("cpu", 10 * GB)
    assert decide(1.0, [wide], [], ledger) == [], "the host's memory is short now"


def test_a_fixed_device_is_kept_to() -> None:
    ledger = books(card(0), card(1))
    fixed = ModelView(model="f", needs={"cuda:1": Need(bytes=GB)}, load_seconds=1, demand=waits())
    assert [one.device for one in decide(1.0, [fixed], [], ledger) if isinstance(one, PlannedLoad)] == ["cuda:1"]


@pytest.mark.parametrize(
    ("fields", "loads"),
    [
        ({"demand": waits()}, "demand"),
        ({"demand": waits(), "paused": True}, None),
        ({"demand": waits(), "desired_loaded": False}, None),
        ({"demand": waits(), "broken_until": 20.0}, None),
        ({"demand": waits(), "broken_until": 9.0}, "demand"),
        ({"pinned": True}, "pinned"),
        ({"preload": True}, "preload"),
        ({"desired_loaded": True}, "desired"),
        ({"min_replicas": 1}, "replicas"),
        ({}, None),
    ],
)
def test_what_makes_a_model_wanted(fields: dict[str, Any], loads: str | None) -> None:
    decisions = decide(10.0, [model("a", **fields)], [], books())
    assert [one.reason for one in decisions if isinstance(one, PlannedLoad)] == ([] if loads is None else [loads])


def test_the_cheapest_idle_one_goes_and_no_more_than_needed() -> None:
    ledger = books()
    held = [replica("dear", ledger, 30), replica("cheap", ledger, 30)]
    models = [model("dear", 30, load_s=60), model("cheap", 30, load_s=5), model("a", 45, demand=waits())]
    decided = decide(100.0, models, held, ledger)
    assert decided[:1] == [PlannedUnload(model="cheap", replica=0, reason="idle", for_model="a")]
    assert decided[1:] == [Reserve(model="a", device="cuda:0", bytes=45 * GB, until=float("inf"))]


def test_what_is_used_often_stays_and_what_has_priority_too() -> None:
    for change in ({"use_rate": 0.5}, {"priority": 9.0}):
        ledger = books()
        held = [replica("kept", ledger, 30), replica("other", ledger, 30)]
        models = [model("kept", 30, **change), model("other", 30), model("a", 45, demand=waits(since=99))]
        assert [one.model for one in decide(100.0, models, held, ledger) if isinstance(one, PlannedUnload)] == ["other"]


def test_busy_ones_go_for_more_urgent_work_once_they_served_as_long_as_they_took_to_load() -> None:
    ledger = books()
    held = [replica("b", ledger, ready_at=100.0, running=1, klass="low")]
    models = [model("b", demand=waits("low", 90)), model("a", demand=waits("high", 101))]
    assert decide(104.0, models, held, ledger) == []
    assert decide(105.0, models, held, ledger)[0] == Drain(model="b", replica=0, for_model="a", reason="class")
    models = [model("b", demand=waits("high", 90)), model("a", demand=waits("low", 101))]
    assert decide(120.0, models, held, ledger) == [], "not for less urgent work"


def test_busy_ones_of_the_same_class_go_when_their_turn_is_over() -> None:
    ledger = books()
    held = [replica("b", ledger, ready_at=100.0, running=1)]
    late = [model("b", demand=waits(since=200)), model("a", demand=waits(since=101))]
    early = [model("b", demand=waits(since=90)), model("a", demand=waits(since=101))]

    def gone(now: float, models: list[ModelView]) -> bool:
        return any(isinstance(one, Drain) for one in decide(now, models, held, ledger, TEN))

    assert not gone(149, late)
    assert gone(151, late)
    assert not gone(151, early), "what waits for it came first"
    assert gone(251, early), "and yet the other gets its turn"


def test_low_work_that_has_waited_long_gets_a_part_of_the_turns() -> None:
    ledger = books()
    held = [replica("b", ledger, ready_at=100.0, running=1, klass="high")]
    models = [model("b", demand=waits("high", 399)), model("a", demand=waits("low", 101))]
    assert not any(isinstance(one, Drain) for one in decide(400.0, models, held, ledger, TEN))
    assert decide(501.0, models, held, ledger, TEN)[0] == Drain(model="b", replica=0, for_model="a", reason="turn")


def test_who_gave_up_its_room_does_not_take_it_back() -> None:
    ledger = books()
    held = [replica("b", ledger, state="draining", running=1, klass="high", for_model="a")]
    models = [model("b", demand=waits("high", 10)), model("a", demand=waits("low", 400))]
    assert not [one for one in decide(501.0, models, held, ledger) if not isinstance(one, Reserve)]
    gone = [replica("b", books(), state="unloading", for_model="a")]
    empty = books()
    (load,) = [one for one in decide(501.0, models, gone, empty) if isinstance(one, PlannedLoad)]
    assert load.model == "a"


def test_idle_ones_are_kept_a_moment_if_somebody_may_ask() -> None:
    ledger = books()
    held = [replica("b", ledger, last_used_at=100.0)]
    models = [model("b", use_rate=1.0), model("a", demand=waits(since=100))]
    assert not [one for one in decide(102.0, models, held, ledger) if isinstance(one, PlannedUnload)]
    assert [one for one in decide(105.0, models, held, ledger) if isinstance(one, PlannedUnload)]
    high = [model("b", use_rate=1.0), model("a", demand=waits("high", 100))]
    assert [one for one in decide(100.5, high, held, ledger) if isinstance(one, PlannedUnload)]
    seldom = [model("b", use_rate=0.01), model("a", demand=waits(since=100))]
    assert [one for one in decide(100.5, seldom, held, ledger) if isinstance(one, PlannedUnload)]
    low = [model("b", use_rate=0.1), model("a", demand=waits("low", 100))]
    assert not [one for one in decide(119.0, low, held, ledger) if isinstance(one, PlannedUnload)]
    assert [one for one in decide(121.0, low, held, ledger) if isinstance(one, PlannedUnload)]


def test_keep_alive_and_orders() -> None:
    ledger = books()
    held = [replica("a", ledger, last_used_at=100.0)]
    assert decide(159.0, [model("a", keep_alive_s=60)], held, ledger) == []
    assert decide(160.0, [model("a", keep_alive_s=60)], held, ledger) == [
        PlannedUnload(model="a", replica=0, reason="keep_alive")
    ]
    for kept in ({"pinned": True}, {"desired_loaded": True}, {"demand": waits()}, {"min_replicas": 1}):
        assert decide(160.0, [model("a", keep_alive_s=60, **kept)], held, ledger) == []
    ordered = [replace(held[0], end_reason="desired")]
    assert decide(101.0, [model("a")], ordered, ledger) == [PlannedUnload(model="a", replica=0, reason="desired")]
    busy = [replica("b", books(), running=1, end_reason="desired")]
    assert decide(101.0, [model("b")], busy, ledger) == [Drain(model="b", replica=0, for_model=None, reason="desired")]


def test_a_drained_one_is_unloaded() -> None:
    held = [replica("a", books(), state="draining", for_model="b")]
    assert decide(1.0, [model("a")], held, books()) == [
        PlannedUnload(model="a", replica=0, reason="drained", for_model="b")
    ]


def test_a_saturated_model_gets_a_replica_and_gives_it_up_first() -> None:
    ledger = books()
    held = [replica("a", ledger, 30, running=2)]
    busy = model("a", 30, max_replicas=2, saturated_since=90.0, demand=waits())
    (load,) = decide(100.0, [busy], held, ledger)
    assert isinstance(load, PlannedLoad)
    assert (load.replica, load.reason) == (1, "saturated")
    assert decide(94.0, [busy], held, ledger) == []
    held.append(replica("a", ledger, 30, replica=1, running=1, ready_at=100.0))
    other = model("b", 40, demand=waits(since=150))
    assert decide(200.0, [busy, other], held, ledger) == [
        Drain(model="a", replica=1, for_model="b", reason="surplus"),
        Reserve(model="b", device="cuda:0", bytes=40 * GB, until=float("inf")),
    ]


def test_foreign_use_that_grows_makes_what_lies_idle_go() -> None:
    ledger = books()
    held = [replica("a", ledger, 30), replica("b", ledger, 30, running=1)]
    ledger.observe("cuda:0", 30 * GB)
    assert decide(10.0, [model("a", 30), model("b", 30)], held, ledger) == [
        PlannedUnload(model="a", replica=0, reason="over_limit")
    ]


def test_look_ahead_chooses_among_what_came_together() -> None:
    settings = PlacementSettings(lookahead_s=5)
    near = [model("few", load_s=20, demand=waits(since=10, count=1)), model("many", demand=waits(since=14, count=9))]
    far = [model("few", load_s=20, demand=waits(since=10, count=1)), model("many", demand=waits(since=16, count=9))]
    first = [decide(20.0, models, [], books(), settings)[0].model for models in (near, far)]
    assert first == ["many", "few"]


def test_two_models_on_a_card_for_one_take_long_turns() -> None:
    world = PlacementWorld([card()], [model("a"), model("b")], TEN)
    for _ in range(1200):
        world.add("a", run_s=0.5)
        world.add("b", run_s=0.5)
        world.go(0.5)
    assert len(world.evictions) <= 600 / (10 * 5) + 2
    served = {name: sum(one[0] == name for one in world.waited) for name in "ab"}
    assert min(served.values()) >= 0.35 * sum(served.values()), "and both are served"


def test_a_stream_of_urgent_requests_for_one_model_does_not_make_the_other_livelock() -> None:
    world = PlacementWorld([card()], [model("urgent"), model("bulk")], TEN)
    world.add("bulk", "low", run_s=0.5, times=2000)
    for _ in range(60):
        world.add("urgent", "high", run_s=0.2)
        world.go(10)
    assert sum(one[0] == "bulk" for one in world.waited) >= 20, "low work goes on"
    high = sorted(wait for name, _, wait in world.waited if name == "urgent")
    assert high[int(0.9 * len(high))] <= 1, "urgent work finds its model loaded, mostly"
    assert high[-1] <= 4 * 5, "and waits for two loads and a guard at most"
    assert len(world.evictions) <= 10


def test_room_is_kept_only_for_who_still_waits() -> None:
    ledger = books()
    assert ledger.reserve("cuda:0", 50 * GB, "gone", float("inf"), 10.0)
    models = [model("gone"), model("a", demand=waits())]
    drop, load = decide(11.0, models, [], ledger)
    assert drop == Reserve(model="gone", device="cuda:0", bytes=0, until=11.0)
    assert isinstance(drop, Reserve)
    assert isinstance(load, PlannedLoad)
    ledger.reserve(drop.device, drop.bytes, drop.model, drop.until, 11.0)
    assert ledger.grant("a", load.needs, 11.0) is not None


def test_what_is_remembered_of_a_ledger_is_bounded() -> None:
    ledger = books()
    for size in range(3 * PLANS_KEPT):
        wanted = ModelView(model="a", needs={"cuda": Need(bytes=size)}, load_seconds=1, demand=waits())
        assert decide(1.0, [wanted], [], ledger)
    assert 0 < len(PLANS[ledger]) <= PLANS_KEPT


def test_chance_of_use_decays() -> None:
    rate = UseRate(memory_s=100)
    for second in range(1000):
        rate.used(float(second))
    assert rate.rate(1000.0) == pytest.approx(1.0, rel=0.05)
    assert rate.rate(1500.0) < 0.01
    assert model("a", use_rate=0.1).chance_of_use(10) == pytest.approx(0.632, abs=0.001)


def test_a_replica_on_which_nothing_can_run_has_no_turn() -> None:
    """Found by the simulator (seed 10764): it was kept for its whole turn, while no run of either model had memory."""
    ledger = books()
    standing = replica("a", ledger, 40, ready_at=95.0, queued_for_it=1, stands=True)
    other = replica("b", ledger, 35, ready_at=60.0, queued_for_it=1)
    models = [
        model("a", 40, demand=waits(since=80.0)),
        model("b", 35, demand=waits(since=70.0)),
        ModelView(
            model="b (run 1)",
            needs={"cuda": Need(bytes=20 * GB)},
            load_seconds=0.0,
            demand=waits(since=70.0),
            at=("b", 0),
            waits_since=70.0,
        ),
    ]
    ends = [
        one for one in decide(99.0, models, [standing, other], ledger, TEN) if isinstance(one, Drain | PlannedUnload)
    ]
    assert not ends, "it has not been ready for as long as its load took"
    (end,) = [
        one for one in decide(100.0, models, [standing, other], ledger, TEN) if isinstance(one, Drain | PlannedUnload)
    ]
    assert (end.model, end.reason, end.for_model) == ("a", "stands", "b (run 1)")
    served = replace(standing, stands=False, running=1)
    assert not [
        one for one in decide(100.0, models, [served, other], ledger, TEN) if isinstance(one, Drain | PlannedUnload)
    ]
