"""What a flow says of those who wait: reasons, places, estimates, times to live; and low work that waits for slack."""

from __future__ import annotations

from card_driver import Card, gb
from flow_driver import HIGH, LOW, MEDIUM, World, ready
from penstock.processors.core import effects as ask
from penstock.processors.core.queue.lifetimes import LifetimeSettings


def waitings(world: World, request_id: str) -> list[tuple[str, int | None]]:
    """(reason, position) of each status in order."""
    return [
        (effect.waiting.reason, effect.waiting.position)
        for effect in world.effects(ask.Status)
        if effect.subject.request_id == request_id and effect.waiting is not None
    ]


def test_statuses_say_what_is_waited_for() -> None:
    world = World()
    world.submit("loads", MEDIUM)
    world.pass_time(1)
    assert waitings(world, "loads") == [("model_loading", 0)]
    world.up(slots=1, inline=True)
    world.submit("second", MEDIUM)
    world.submit("other", MEDIUM, tenant="acme")
    world.submit("turn", MEDIUM, conversation="c")
    world.submit("next turn", MEDIUM, conversation="c")
    world.submit("low", LOW)
    world.pass_time(1)
    assert waitings(world, "second") == [("class", 0)]
    assert waitings(world, "other") == [("tenant_share", 1)]
    assert waitings(world, "next turn") == [("conversation", 3)]
    assert waitings(world, "low") == [("class", 4)]


def test_who_is_near_the_front_hears_only_what_is_new() -> None:
    world = ready(slots=1, inline=True)
    for number in range(4):
        world.submit(f"r{number}", MEDIUM)
    world.pass_time(1)
    world.flow.publish_positions(2)
    world.settle()
    said = len(waitings(world, "r1")), len(waitings(world, "r3"))
    for _ in range(5):
        world.pass_time(1)
        world.flow.publish_positions(2)
        world.settle()
    assert (len(waitings(world, "r1")), len(waitings(world, "r3"))) == said, "nothing has changed"
    world.finish("r0")
    world.flow.publish_positions(2)
    world.settle()
    assert waitings(world, "r2")[-1] == ("class", 0)
    assert len(waitings(world, "r3")) == said[1] + 1, "it has come near the front"


def test_an_estimate_that_has_passed_is_taken_back() -> None:
    """It lay in the past for as long as an engine hung."""
    world = ready(slots=1, inline=True)
    world.submit("first", MEDIUM)
    world.pass_time(4)
    world.finish("first")
    world.submit("hangs", MEDIUM)
    world.submit("waits", MEDIUM)
    world.pass_time(1)

    def told() -> list[int | None]:
        return [
            effect.waiting.estimated_start_at
            for effect in world.effects(ask.Status)
            if effect.subject.request_id == "waits" and effect.waiting is not None
        ]

    assert told()[-1] is not None
    for _ in range(10):
        world.pass_time(1)
        world.flow.publish_positions(2)
        world.settle()
    assert told()[-1] is None
    assert told().count(None) == 1, "it is said once"


def test_an_estimate_is_what_was_measured() -> None:
    errors: list[tuple[str, float]] = []
    world = World()
    world.flow.forecast._observe_error = lambda kind, error: errors.append((kind, error))
    world.up(slots=1, inline=True)
    world.submit("first", MEDIUM)
    world.pass_time(4)
    world.finish("first")
    for name in ("a", "b", "c"):
        world.submit(name, MEDIUM)
    world.pass_time(1)
    status = next(e for e in reversed(world.seen) if isinstance(e, ask.Status) and e.subject.request_id == "b")
    assert status.waiting.estimated_start_at is not None
    assert 2_000 <= status.waiting.estimated_start_at - world.wall_ms <= 4_000
    world.pass_time(3)
    world.finish("a")
    assert [kind for kind, _ in errors] == ["run", "start"]


def test_a_time_to_live_is_chosen_from_the_waits_of_its_class() -> None:
    world = ready(slots=1, inline=True, lifetimes=LifetimeSettings(floor_s=30.0, factor=2.0))
    for number in range(25):
        world.submit(f"r{number}", MEDIUM, ttl_ms=None)
        world.finish(f"r{number}")
    world.submit("busy", MEDIUM)
    waiting = world.submit("waits", MEDIUM, ttl_ms=None)
    named = world.submit("named", MEDIUM, ttl_ms=3_600_000)
    assert (waiting.ttl_ms, named.ttl_ms) == (30_000, None)
    world.pass_time(29)
    assert world.status_of("waits") is None
    world.pass_time(2)
    assert world.status_of("waits") == "expired"
    assert world.status_of("named") is None
    for number in range(10):
        world.submit(f"late{number}", MEDIUM, ttl_ms=None)
    world.pass_time(31)
    longer = world.submit("longer", MEDIUM, ttl_ms=None)
    assert longer.ttl_ms is not None
    assert longer.ttl_ms > 50_000, "the wait of what expired counts"


def test_the_status_and_the_reason_of_a_wait_say_the_same() -> None:
    """It is said after a moment: by then it may wait for memory, and not for a load any more."""
    world = Card(80, {"a": gb(50), "b": gb(50)}, status_linger_s=0.05, by_hand=True)
    world.observe(foreign_gb=40)
    world.submit("r", model="a")
    world.pass_steps(1.0)
    world.observe(foreign_gb=0)
    world.pass_steps(0.3)
    assert world.slow_loads == [("a", 0)]
    world.loaded("a", 0)
    world.settle()
    world.submit("other", model="b")
    world.submit("behind", model="a")
    world.pass_steps(1.0)
    world.flow.replicas.down("a", 0, world.now)
    world.pass_steps(1.0)
    said = [
        (one.status, one.waiting.reason)
        for one in world.effects(ask.Status)
        if one.waiting is not None and one.status != "queued"
    ]
    assert set(said) == {("waiting_for_memory", "memory"), ("loading_model", "model_loading")}
    assert len(said) < 12, "it is not said again and again"


def test_a_turn_that_another_class_of_its_conversation_overtakes_says_so() -> None:
    """It stands near no front, so it is looked at for what it said before."""
    world = ready(slots=1, inline=True)
    world.submit("runs")
    low = world.submit("low", LOW, conversation="c")
    world.pass_time(1)
    assert waitings(world, "low") == [("class", 0)]
    world.submit("high", HIGH, conversation="c")
    world.finish("runs")
    assert list(world.running) == ["high"]
    for _ in range(3):
        world.flow.publish_positions(1)
        world.settle()
    assert [reason for reason, _ in waitings(world, "low")] == ["class", "conversation"]
    world.finish("high")
    assert list(world.running) == ["low"]
    said = len(waitings(world, "low"))
    world.pass_time(1)
    world.flow.publish_positions(9)
    world.settle()
    assert (len(waitings(world, "low")), low.published_status) == (said, "running")


def test_the_flow_is_due_when_a_status_has_lasted() -> None:
    world = World(status_linger_s=0.5)
    assert world.flow.next_due() is None
    world.submit("r")
    assert world.flow.next_due() == world.now + 0.5
    world.pass_time(0.25)
    assert not world.effects(ask.Status)
    assert world.flow.next_due() == world.now + 0.25
    world.pass_time(0.25)
    assert len(world.effects(ask.Status)) == 1
    assert world.flow.next_due() is None
