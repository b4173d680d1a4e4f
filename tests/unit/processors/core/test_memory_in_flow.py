"""Memory and models in the flow: grants of replicas and runs, drains, evictions, replicas, and what operators want."""

from __future__ import annotations

import pytest

from card_driver import GB, Card, card, gb, spec
from flow_driver import HIGH, LOW, MEDIUM
from penstock.processors.core import effects as ask
from penstock.processors.core.fleet.replica import ReplicaState
from penstock.processors.core.fleet.views import PlacementSettings
from penstock.processors.core.queue.budget import FACT_BYTES
from penstock.processors.core.queue.slack import SlackSettings
from penstock.schemas.errors import EngineFailed, InsufficientCapacity
from penstock.schemas.records import Requirements


@pytest.mark.parametrize("way", ["finish", "fail", "cancel", "death", "revocation", "stop", "timeout"])
def test_a_runs_memory_comes_back_on_every_path(way: str) -> None:
    world = card(80, a=gb(10, run=5))
    world.submit("r", execution_timeout_ms=1000)
    assert world.free_gb == 65
    match way:
        case "finish":
            world.finish("r")
        case "fail":
            world.fail("r", EngineFailed("no"))
        case "cancel":
            world.cancel("r")
        case "death":
            world.slow_loads = []
            world.die("a")
        case "revocation":
            world.flow.assigned({}, 2, fenced=False, now=world.now)
        case "stop":
            world.flow.stop_taking()
            world.flow.hand_back()
        case _:
            world.pass_time(1.5)
    owners = [grant.owner for grant in world.flow.ledger.grants()]
    assert owners == ["a"], "what its replica holds, alone"
    assert world.free_gb == 70


def test_what_an_engine_says_of_a_run_is_booked_while_it_runs() -> None:
    world = Card(80, {"a": gb(10, run=5)}, slots=3, inline=False)
    world.memory = lambda work: {"small": 2, "large": 30, "huge": 50}[work.request_id] * GB
    world.submit("large")
    assert world.free_gb == 80 - 10 - 30
    world.submit("small")
    assert world.free_gb == 80 - 10 - 30 - 5, "what its model says of each run is the least"
    work = world.submit("huge")
    assert "huge" not in world.running
    assert world.flow.waiting_for(work, world.now).reason == "memory"
    world.finish("large")
    assert "huge" in world.running
    world.finish("small")
    world.finish("huge")
    assert world.free_gb == 70


def test_a_run_that_no_device_can_hold_beside_its_model_fails_at_once() -> None:
    world = Card(80, {"a": gb(10)}, inline=False)
    world.memory = lambda work: 71 * GB
    work = world.submit("r")
    assert world.ended == [("r", "failed")]
    assert work.outcome.error.details == {"need": 81 * GB, "capacity": 80 * GB, "unit": "bytes"}
    assert world.free_gb == 70


def test_what_can_never_fit_is_refused_at_once_with_need_and_capacity() -> None:
    world = card(80, a=gb(100), b=gb(10))
    world.submit("first", model="a")
    assert world.status_of("first") == "failed"
    work = world.submit("second", model="a")
    assert isinstance(work.outcome.error, InsufficientCapacity)
    assert work.outcome.error.details == {"need": 100 * GB, "capacity": 80 * GB, "unit": "bytes"}
    hungry = world.submit("hungry", model="b", requirements=Requirements(vram_bytes=90 * GB))
    assert isinstance(hungry.outcome.error, InsufficientCapacity)


@pytest.mark.parametrize("inline", [True, False])
def test_parked_requests_are_not_read_again_to_wait_for_memory(inline: bool) -> None:
    """The first one waits with its bytes. Behind it each turn read one more again, until nothing was parked."""
    total_bytes = 60_000
    world = Card(80, {"a": gb(10, run=30)}, slots=8, intake_bytes=total_bytes, inline=inline)
    for number in range(90):
        world.submit(f"r{number}", klass=(HIGH, MEDIUM, LOW)[number % 3], size=2000)
    world.pass_steps(10)
    assert len(world.running) == 2
    assert world.flow.budget.used_bytes <= total_bytes + 90 * FACT_BYTES
    waiting = [work for work in world.flow.works.values() if work.request_id not in world.running]
    assert sum(work.body is not None for work in waiting) <= 3 * 3 + 1, "of each class those that its share holds"
    for left in range(90, 0, -1):
        world.pass_time(0.1)
        assert len(world.running) == min(2, left)
        world.finish(next(iter(world.running)))
    assert len(world.ended) == 90


@pytest.mark.parametrize("known_by", ["requirements", "preparing"])
def test_bytes_of_requests_that_wait_for_memory_keep_to_their_share(known_by: str) -> None:
    """How much each run takes is known from its record, or when it is prepared. The record need not stay for that."""
    world = Card(80, {"a": gb(10)}, slots=8, intake_bytes=60_000, inline=False)
    if known_by == "preparing":
        world.memory = lambda work: 30 * GB
    requirements = Requirements(vram_bytes=40 * GB) if known_by == "requirements" else None
    for number in range(60):
        world.submit(f"r{number}", size=2000, requirements=requirements)
    share = world.flow.budget.pair_share_bytes
    while world.flow.works:
        world.pass_time(0.1)
        assert world.running
        waiting = [work for work in world.flow.works.values() if work.request_id not in world.running]
        assert sum(work.size_bytes for work in waiting if work.body is not None) <= share + 2000
        world.finish(next(iter(world.running)))
    assert len(world.ended) == 60


def test_room_is_kept_only_for_a_parked_request_that_is_being_read() -> None:
    """One that is not read, since those before it fill the share, must not hold up what can start behind it."""
    world = Card(80, {"a": gb(10)}, slots=2, intake_bytes=60_000, inline=False)
    world.memory = lambda work: (1 if work.request_id == "small" else 60) * GB
    world.submit("runs", HIGH, size=10)
    for number in range(4):
        world.submit(f"large{number}", MEDIUM, size=world.flow.budget.pair_share_bytes)
    world.submit("small", LOW, size=50)
    world.pass_time(0.5)
    assert set(world.running) == {"runs", "small"}


def test_an_idle_model_goes_for_one_that_is_waited_for_and_comes_back_when_it_is() -> None:
    world = card(80, a=gb(50), b=gb(50))
    world.submit("a1", model="a")
    world.finish("a1")
    world.pass_steps(30.0)
    world.submit("b1", model="b")
    world.pass_steps(1.0)
    assert "b1" in world.running
    assert world.unloads == [("a", 0, "idle")]
    assert world.flow.lifecycle.evictions == 1
    world.finish("b1")
    world.pass_steps(60.0)
    assert world.ready("a") == [], "nobody asks for it"


@pytest.mark.parametrize("then", ["what runs ends", "nobody waits any more"])
def test_a_busy_model_is_drained_for_more_urgent_work_and_not_for_equal_at_once(then: str) -> None:
    world = card(80, a=gb(50), b=gb(50))
    for name in ("a1", "a2"):
        world.submit(name, "low", model="a")
    world.pass_steps(2.0)
    world.submit("b0", "low", model="b")
    world.pass_steps(0.5)
    (replica,) = world.flow.lane("a").replicas.values()
    assert replica.state is ReplicaState.READY
    world.submit("b1", "high", model="b")
    world.pass_steps(10.0)
    assert replica.state is ReplicaState.DRAINING
    assert "a1" in world.running, "what runs may end"
    if then == "what runs ends":
        world.finish("a1")
        world.pass_steps(0.5)
        assert world.running.keys() == {"b1"}, "nothing new started"
    else:
        world.cancel("b0")
        world.cancel("b1")
        world.pass_steps(0.5)
        assert replica.state is ReplicaState.READY, "the drain is undone"
        world.finish("a1")
        assert "a2" in world.running


def test_pinned_models_stay() -> None:
    world = Card(80, {"a": gb(50), "b": gb(50)}, specs=[spec("a", pinned=True)])
    assert world.ready("a") == [0], "nobody had to ask"
    work = world.submit("b1", "high", model="b")
    world.pass_steps(60.0)
    assert world.ready("a") == [0]
    waiting = world.flow.waiting_for(work, world.now)
    assert (waiting.reason, waiting.need_bytes, waiting.free_bytes) == ("memory", 50 * GB, 30 * GB)
    world.flow.orders.desire("a", loaded=None, pinned=False)
    world.pass_steps(30.0)
    assert "b1" in world.running


@pytest.mark.parametrize("size", [50, 10])
def test_keep_alive_unloads_what_nobody_uses(size: int) -> None:
    """Also a model that fits twice: it was kept, as if it were to be loaded at the start."""
    world = Card(80, {"a": gb(size)}, specs=[spec("a", keep_alive_s=5.0)])
    world.submit("r")
    world.finish("r")
    world.pass_steps(4.0)
    assert world.ready("a") == [0]
    world.pass_steps(2.0)
    assert world.unloads == [("a", 0, "keep_alive")]
    assert world.flow.ledger.grants() == []


def test_an_operator_loads_unloads_and_pauses() -> None:
    world = card(80, a=gb(10), b=gb(10))
    world.flow.orders.desire("a", loaded=True, pinned=None)
    world.settle()
    assert world.ready("a") == [0]
    world.flow.orders.desire("a", loaded=False, pinned=None)
    world.settle()
    assert world.unloads == [("a", 0, "desired")]
    world.pass_steps(1.0)
    assert world.flow.lane("a").why_not_ready is None, "nobody wants it, so it waits for nothing"
    world.flow.orders.pause("model", "a", paused=True)
    world.flow.orders.pause("class", "low", paused=True)
    model, klass = world.submit("r", model="a"), world.submit("s", "low", model="b")
    world.pass_steps(5.0)
    assert not world.running
    assert [world.flow.waiting_for(work, world.now).reason for work in (model, klass)] == ["paused", "paused"]
    assert world.flow.orders.paused() == ["class/low", "model/a"]
    world.flow.orders.pause("model", "a", paused=False)
    world.flow.orders.pause("class", "low", paused=False)
    world.settle()
    assert sorted(world.running) == ["r", "s"]


def test_a_saturated_model_gets_a_replica_more_where_memory_lies_free() -> None:
    world = Card(80, {"a": gb(30)}, specs=[spec("a", max_replicas=3)])
    for number in range(4):
        world.submit(f"r{number}")
    world.pass_steps(20.0)
    assert world.ready("a") == [0, 1], "a third does not fit"
    assert sorted(world.running) == ["r0", "r1"]
    assert {world.running[name].run.replica for name in world.running} == {0, 1}  # type: ignore[union-attr]


def test_a_conversation_prefers_the_replica_that_has_its_beginning() -> None:
    world = Card(80, {"a": gb(30)}, slots=2, affinity_s=0.5, specs=[spec("a", min_replicas=2, max_replicas=2)])
    world.submit("first", conversation="c")
    world.pass_steps(0.5)
    assert world.ready("a") == [0, 1]
    first = world.running["first"]
    world.finish("first")
    others = [world.submit(f"o{number}") for number in range(2)]
    mine = {work.run.replica for work in others if work is not None and work.run is not None}
    assert mine, "they run"
    for number in range(3):
        world.submit(f"turn{number}", conversation="c")
        world.pass_time(0.05)
        work = world.running[f"turn{number}"]
        assert work.run.replica == first.run.replica
        world.finish(f"turn{number}")


def test_a_model_that_takes_more_than_it_was_granted_is_given_up_for_what_comes_back() -> None:
    """Found by the simulator: with what it was granted alone there was not enough, and a run waited for ever."""
    world = card(100, a=gb(40), b=gb(30))
    world.submit("b1", model="b")
    world.finish("b1")
    world.submit("a1", model="a")
    world.finish("a1")
    # Its grant cannot grow to what it takes, which others have.
    world.flow.ledger.measure(next(one for one in world.flow.ledger.grants() if one.owner == "b"), "sim", 50 * GB)
    assert world.free_gb == 10
    world.submit("large", model="a", requirements=Requirements(vram_bytes=85 * GB))
    for _ in range(30):
        world.pass_steps(1.0)
        world.observe()
    assert world.unloads == [("b", 0, "idle")]
    assert "large" in world.running


def test_placement_is_not_asked_for_each_run_that_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads all models and replicas: while nobody waits for memory the next tick is soon enough."""
    world = card(80, slots=2, a=gb(10, run=2), b=gb(60))
    for number in range(40):
        world.submit(f"r{number}", model="a")
    plans: list[float] = []
    plan = world.flow.placing.plan

    def counted(now: float) -> None:
        plans.append(now)
        plan(now)

    monkeypatch.setattr(world.flow.placing, "plan", counted)
    for _ in range(20):
        world.finish(next(iter(world.running)))
    assert len(plans) <= 1
    world.submit("other", model="b")
    world.pass_time(0.1)
    before = len(plans)
    world.submit("large", model="a", requirements=Requirements(vram_bytes=78 * GB))
    world.finish(next(iter(world.running)))
    world.pass_time(0.1)
    assert len(plans) > before, "somebody waits"


def test_what_could_start_now_goes_where_a_slot_is_free_not_where_fewer_are_prepared() -> None:
    """Found by the simulator: an urgent one stood behind a slot that was kept, and a low one took the free slot."""
    world = Card(80, {"a": gb(30)}, affinity_s=60.0, specs=[spec("a", min_replicas=2, max_replicas=2)])
    lane = world.flow.lane("a")
    world.submit("warm")
    world.pass_steps(0.5)
    assert world.ready("a") == [0, 1]
    world.finish("warm")
    world.hold_answers.add(ask.Prepare)
    for number in range(3):
        lane.remember_prefix(f"c{number}", lane.replicas[1])
        world.submit(f"turn{number}", "high", conversation=f"c{number}")
    world.pass_time(0.3)  # room is kept for a moment only for those whose conversations are being read
    world.submit("turn", "high", conversation="new", settle=False)
    world.submit("urgent", "high", settle=False)
    world.submit("low", "low", settle=False)
    world.settle()
    assert [len(one.ahead) for one in lane.ready] == [1, 3]
    assert list(world.running) == ["urgent"]


def test_an_engine_that_dies_takes_no_more_than_its_own_requests_along() -> None:
    """In mid-batch and in mid-load; the books are right after each."""
    world = card(80, slots=2, a=gb(10, run=2), b=gb(10, run=2))
    world.submit("a1", model="a")
    world.submit("b1", model="b")
    assert world.free_gb == 80 - 20 - 4
    world.slow_loads = []
    world.die("a")
    assert sorted(world.running) == ["b1"]
    assert [grant.owner for grant in world.flow.ledger.grants()].count("b (runs)") == 1
    world.pass_steps(1.0)
    assert world.slow_loads == [("a", 0)]
    world.load_failed(EngineFailed("killed while it loaded"), "a")
    assert world.free_gb == 80 - 10 - 2
    world.pass_steps(3.0)
    assert world.slow_loads[-1] == ("a", 0)
    world.loaded("a", 0)
    world.settle()
    assert sorted(world.running) == ["a1", "b1"]
    assert world.running["a1"].spent <= 2
    assert world.free_gb == 80 - 20 - 4


def test_health_turns_bad_when_work_waits_and_memory_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    world = card(80, a=gb(10))
    world.slow_loads = []
    world.submit("r")
    world.pass_steps(2.0)
    assert world.flow.watch.idle_in_spite_of_work(world.now) == 0.0, "it loads"
    world.flow.lane("a").replicas.clear()  # a fault of ours: the load was forgotten
    world.flow.lane("a").sizing = False
    monkeypatch.setattr(world.flow.placing, "plan", world.flow.dirty.planning)
    world.pass_steps(5.0)
    assert world.flow.watch.idle_in_spite_of_work(world.now) > 3.0


def test_a_model_that_is_not_served_any_more_is_unloaded() -> None:
    world = card(80, a=gb(10), b=gb(10))
    world.submit("a1", model="a")
    world.finish("a1")
    del world.specs["a"]
    world.configure()
    assert world.unloads == [("a", 0, "removed")]
    assert world.flow.ledger.grants() == []


def test_slack_keeps_no_low_request_from_its_end_or_its_news_while_its_model_is_not_loaded() -> None:
    """Found by the simulator (seed 10303): of a model that is not loaded low work was kept back for its urgent work.

    So nobody told it that its model is loading, and when the model could not be loaded it waited for ever.
    """
    world = Card(80, {"large": gb(100), "slow": gb(10)}, slack=SlackSettings(), by_hand=True)
    world.submit("never", "low", model="large")
    world.submit("later", "low", model="slow")
    world.pass_steps(1.0)
    assert world.status_of("never") == "failed"
    assert world.slow_loads == [("slow", 0)]
    said = [(one.subject.request_id, one.status) for one in world.effects(ask.Status)]
    assert ("later", "loading_model") in said


@pytest.mark.parametrize("total_gb", [100, 120], ids=["room for both by two", "room by one"])
def test_a_saturated_model_and_one_that_should_have_two_replicas_do_not_take_turns(total_gb: int) -> None:
    """Found by the simulator (seed 3478): the idle replicas were given up, and loaded again, for ever."""
    world = Card(total_gb, {"a": gb(48), "b": gb(22)}, placement=PlacementSettings(scale_after_s=0.5))
    two = spec("b", min_replicas=2, max_replicas=2)
    world.configure(a=spec("a", max_replicas=2), b=two)
    world.observe()
    world.hold_answers = {ask.Unload}
    world.submit("b0", model="b")
    world.pass_steps(1.0)
    world.finish("b0")
    for number in range(6):
        world.submit(f"a{number}", model="a")
    for _ in range(50):
        world.pass_steps(0.1)
        for effect in world.asked[:1]:
            world.asked.remove(effect)
            world.answer(effect)
            world.settle()
    assert len(world.loads) <= 4
