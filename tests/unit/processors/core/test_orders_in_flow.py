"""What operators order meets what waits: unloaded, removed, replaced and paused models, paused classes, suspects."""

from __future__ import annotations

import pytest

from card_driver import Card, card, gb, spec
from flow_driver import HIGH, LOW, MEDIUM, World
from penstock.processors.core import effects as ask
from penstock.processors.core.queue.slack import SlackSettings
from penstock.schemas.errors import EngineFailed
from penstock.schemas.records import STATUS_RANKS

# -- unload


def test_a_model_that_was_ordered_to_be_unloaded_before_a_restart_is_loaded_when_somebody_asks() -> None:
    world = Card(80, {"a": gb(10)}, seen=False)
    world.flow.orders.desire("a", False, None, 7)  # as a worker replays its topic at its start
    world.configure()
    world.observe()
    world.submit("r")
    world.pass_steps(1.0)
    assert world.running.keys() == {"r"}


def test_an_order_to_unload_ends_the_replicas_of_before_it_and_none_after_it() -> None:
    world = card(80, a=gb(10))
    world.submit("r1")
    world.flow.orders.desire("a", False, None, 1)
    world.pass_steps(0.5)
    assert world.unloads == []
    world.finish("r1")
    world.pass_steps(0.5)
    assert world.unloads == [("a", 0, "desired")]
    world.submit("r2")
    world.pass_steps(0.5)
    assert world.running.keys() == {"r2"}
    world.flow.orders.desire("a", False, True, 1)  # another order about it: pinned, and still not to be loaded by order
    world.pass_steps(0.5)
    assert len(world.unloads) == 1
    world.finish("r2")
    world.flow.orders.desire("a", False, None, 3)  # ordered once more
    world.pass_steps(0.5)
    assert len(world.unloads) == 2


# -- remove


@pytest.mark.parametrize("paused", ["no", "model", "class"])
@pytest.mark.parametrize("loaded", [True, False])
def test_what_waits_for_a_model_that_is_removed_is_told_at_once(paused: str, loaded: bool) -> None:
    world = Card(80, {"a": gb(10), "b": gb(10)}, by_hand=not loaded)
    world.submit("runs", model="a")
    if paused != "no":
        world.flow.orders.pause(paused, "a" if paused == "model" else MEDIUM, True)
    for number in range(300):
        world.submit(f"r{number}", model="a", settle=False)
    world.submit("turn", model="a", conversation="c")
    world.submit("behind", model="b", conversation="c")
    world.specs.pop("a")
    world.configure()
    world.pass_steps(0.5)
    failed = {name for name, status in world.ended if status == "failed"}
    assert {f"r{number}" for number in range(300)} | {"turn"} <= failed
    error = next(work for work in world.ended_works if work.request_id == "r0").outcome.error
    assert error.code == "model_not_found"
    if loaded:
        world.finish("runs")
    world.flow.orders.pause("class", MEDIUM, False)
    world.pass_steps(1.0)
    if loaded:
        assert "behind" in world.running


# -- replace


def test_a_model_that_is_replaced_gets_an_engine_of_the_new_kind() -> None:
    world = card(80, a=gb(10))
    world.submit("r1")
    world.configure(a=spec("a", options="other"))
    world.pass_steps(0.5)
    world.submit("r2")
    world.pass_steps(0.5)
    assert world.loads == ["a", "a"]
    assert world.running.keys() == {"r1", "r2"}, "what runs ends where it runs; what comes gets the new engine"
    world.finish("r1")
    world.pass_steps(0.5)
    assert world.unloads == [("a", 0, "replaced")]
    world.configure(a=spec("a", options="other", priority=2.0))
    world.pass_steps(0.5)
    assert world.loads == ["a", "a"], "what needs no other engine changes none"


def test_a_model_that_failed_is_tried_at_once_when_its_entry_changes_or_it_is_ordered_to_load() -> None:
    world = Card(80, {"a": gb(10)}, by_hand=True)
    world.submit("r")
    for change in (lambda: world.configure(a=spec("a", options="other")), lambda: order_load(world)):
        for _ in range(2):
            world.flow.replicas.load_failed("a", 0, EngineFailed("no"), world.now)
        world.settle()
        lane = world.flow.lane("a")
        assert lane.failures
        assert lane.not_before > world.now
        change()
        world.pass_steps(0.2)
        assert lane.failures == 0
        assert lane.loading


def order_load(world: Card) -> None:
    world.flow.orders.desire("a", True, None, 0)


# -- suspects


def two_models(slots_of_other: int = 1) -> World:
    """Two workers died while the request `s` ran."""
    world = World("m", "other")
    world.died_of = {"s": 2}
    world.up("m")
    world.up("other", slots=slots_of_other)
    return world


@pytest.mark.parametrize("devices", [("simulated",), ()])
@pytest.mark.parametrize(("loaded", "pinned"), [(True, None), (None, True)])
def test_a_paused_model_is_loaded_by_order_and_by_nothing_else(
    devices: tuple[str, ...], loaded: bool | None, pinned: bool | None
) -> None:
    world = card(80, a=gb(10))
    world.configure(a=spec("a", devices=devices))
    world.submit("r1")
    world.finish("r1")
    world.flow.orders.pause("model", "a", True)
    world.configure(a=spec("a", devices=devices, options="another"))
    world.submit("r2")
    world.pass_steps(5.0)
    assert world.flow.lane("a").state == "absent"
    world.flow.orders.desire("a", loaded, pinned)
    world.pass_steps(1.0)
    assert world.flow.lane("a").state == "ready"
    assert not world.running
    world.flow.orders.pause("model", "a", False)
    world.pass_steps(0.5)
    assert world.running.keys() == {"r2"}


@pytest.mark.parametrize("cause", ["a paused model", "a busy server"])
def test_a_suspect_that_cannot_start_keeps_nobody_waiting(cause: str) -> None:
    world = two_models()
    world.submit("runs", model="other")
    world.submit("s", LOW, model="m")
    if cause == "a paused model":
        world.flow.orders.pause("model", "m", True)
    else:
        world.flow.replicas.busy("m", 0, 600.0, world.now)
    world.finish("runs")
    world.submit("r", HIGH, model="other")
    assert world.running.keys() == {"r"}


def test_a_suspect_without_a_slot_of_its_model_keeps_nobody_waiting() -> None:
    world = two_models(2)
    world.submit("k", HIGH, model="m")
    world.submit("s", model="m")
    world.pass_time(1.0)
    world.submit("r", model="other")
    assert world.running.keys() == {"k", "r"}
    world.finish("k")
    world.submit("later", model="other")
    assert world.running.keys() == {"r"}, "now it could start, and the others wait for it"
    world.finish("r")
    world.pass_time(0.5)
    assert world.running.keys() == {"s"}


def test_a_suspect_waits_for_others_for_a_minute_and_then_they_go_on() -> None:
    world = two_models(2)
    world.submit("long", model="other")
    world.submit("s", model="m")
    world.submit("r", model="other")
    world.pass_time(1.0)
    assert world.running.keys() == {"long"}, "it is next, and must run alone"
    world.pass_time(30.0)
    assert world.running.keys() == {"long"}
    world.pass_time(30.0)
    world.pass_time(1.0)
    assert world.running.keys() == {"long", "r"}
    world.finish("long")
    world.finish("r")
    world.pass_time(61.0)
    assert world.running.keys() == {"s"}


# -- classes


def test_a_paused_class_does_not_count_as_urgent_work_that_waits() -> None:
    world = World("m", slack=SlackSettings())
    world.up("m", slots=4)
    world.flow.orders.pause("class", HIGH, True)
    world.submit("urgent", HIGH)
    world.submit("r", LOW)
    world.pass_time(1.0)
    assert world.running.keys() == {"r"}


def test_a_turn_behind_another_one_is_promised_no_start() -> None:
    world = World("m", "other")
    world.up("m")
    world.up("other")
    world.submit("warm", model="other")
    world.pass_time(1.0)
    world.finish("warm")
    world.flow.orders.pause("model", "m", True)
    world.submit("first", model="m", conversation="c")
    work = world.submit("second", model="other", conversation="c")
    waiting = world.flow.waiting_for(work, world.now)
    assert waiting.reason == "conversation"
    assert waiting.estimated_start_at is None


def test_a_turn_behind_another_one_says_no_longer_that_it_is_paused_once_it_is_resumed() -> None:
    """Only those that may start hear of changes: it said so for as long as the turn before it ran."""
    world = World("m")
    world.up("m", slots=4)
    world.flow.orders.pause("model", "m", True)
    world.submit("first", conversation="c")
    world.submit("second", conversation="c")
    pass_seconds(world, 2)
    assert said(world, "first") == "paused"
    world.flow.orders.pause("model", "m", False)
    pass_seconds(world, 2)
    assert world.running.keys() == {"first"}
    assert said(world, "second") == "conversation"
    world.flow.orders.pause("model", "m", True)
    world.finish("first")
    pass_seconds(world, 2)
    assert said(world, "second") == "paused"


@pytest.mark.parametrize(("kind", "name"), [("class", "low"), ("model", "m")])
def test_a_status_names_what_is_paused(kind: str, name: str) -> None:
    world = World("m")
    world.up("m")
    world.flow.orders.pause(kind, name, True)
    world.submit("r", LOW)
    pass_seconds(world, 2)
    assert newest_status(world, "r").detail == f"the {kind} {name} is paused"


def pass_seconds(world: World, seconds: int) -> None:
    """As a worker lets time pass: each second it tells those near the front how they stand."""
    for _ in range(seconds):
        world.pass_time(1.0)
        world.flow.publish_positions(64)
        world.settle()


def said(world: World, request_id: str) -> str | None:
    """The reason to wait that the newest status of a request states."""
    waiting = newest_status(world, request_id).waiting
    return None if waiting is None else waiting.reason


def newest_status(world: World, request_id: str) -> ask.Status:
    return [one for one in world.effects(ask.Status) if one.subject.request_id == request_id][-1]


def test_a_status_does_not_name_a_load_that_has_ended() -> None:
    """It stayed "loading_model" until the request started, though its model was ready and paused."""
    world = Card(80, {"a": gb(10)}, status_linger_s=0.05, by_hand=True)
    world.submit("r")
    pass_seconds(world, 2)
    assert said_as(world, "r") == ("loading_model", "model_loading")
    world.flow.orders.pause("model", "a", True)
    world.loaded("a", 0)
    pass_seconds(world, 2)
    assert said_as(world, "r") == ("queued", "paused")
    told = len(world.seen)
    pass_seconds(world, 5)
    assert len(world.seen) == told, "it is not said again and again"
    assert STATUS_RANKS["queued"] >= STATUS_RANKS["loading_model"], "else readers keep the former one"


def said_as(world: World, request_id: str) -> tuple[str, str | None]:
    """The newest status of a request, with its reason to wait."""
    return newest_status(world, request_id).status, said(world, request_id)


def test_a_turn_that_another_class_passes_says_that_it_waits_for_that_turn() -> None:
    """It may start, until the other one does: it kept saying that its model was loaded while the other one ran."""
    world = World("m", "other")
    world.up("other")
    world.submit("low", LOW, model="m", conversation="c")
    pass_seconds(world, 2)
    assert said(world, "low") == "model_loading"
    world.submit("high", HIGH, model="other", conversation="c")
    pass_seconds(world, 2)
    assert world.running.keys() == {"high"}
    assert said(world, "low") == "conversation"
    world.finish("high")
    pass_seconds(world, 2)
    assert said(world, "low") == "model_loading"


@pytest.mark.parametrize("way", ["its engine died", "it failed"])
def test_a_request_that_runs_again_says_what_it_waits_for(way: str) -> None:
    """It stated `retrying`, and no reason, until its model was resumed."""
    world = World("m", status_linger_s=0.05)
    world.up("m")
    world.submit("r", stream=True)
    pass_seconds(world, 1)
    assert said_as(world, "r") == ("running", None)
    world.flow.orders.pause("model", "m", True)
    world.fail("r", EngineFailed("no")) if way == "it failed" else world.die("m")
    assert said_as(world, "r") == ("retrying", None)
    pass_seconds(world, 30)
    assert said_as(world, "r") == ("queued", "paused")


def test_who_hears_of_a_download_hears_what_it_waits_for_too() -> None:
    """The news of the download came without a reason, and the reason was not said again."""
    world = World("m", status_linger_s=0.05)
    world.submit("r")
    pass_seconds(world, 2)
    assert said_as(world, "r") == ("loading_model", "model_loading")
    world.flow.placing.loading_progressed("m", 0.42, world.now)
    world.settle()
    assert said_as(world, "r") == ("loading_model", "model_loading")
