"""The one decision of what may start, asked on whole flows: of two causes the one that must end first is the reason."""

from __future__ import annotations

from typing import get_args

import pytest

from card_driver import GB, Card, gb, spec
from flow_driver import HIGH, LOW, MEDIUM, World, ready
from penstock.processors.core.queue.slack import SlackSettings
from penstock.processors.core.requests.admission import Reason
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.suspects import set_apart
from penstock.schemas.records import WAITING_REASONS, WaitingFor


def reason(world: World, request_id: str) -> str:
    return waiting(world, request_id).reason


def waiting(world: World, request_id: str) -> WaitingFor:
    work = next(work for work in world.flow.works.values() if work.request_id == request_id)
    return world.flow.waiting_for(work, world.now)


def test_what_was_short_once_is_not_said_any_more() -> None:
    """The reason of a moment ago was repeated until it started: now a slot is missing, whatever the cache holds."""
    world = World()
    world.need = lambda work: 10 if work.request_id == "small" else 60
    world.up(slots=2, tokens=100)
    for name in ("runs", "waits"):
        world.submit(name)
    assert reason(world, "waits") == "memory"
    world.submit("small")
    assert set(world.running) == {"runs", "small"}
    assert reason(world, "waits") == "class"


def test_one_that_must_run_by_itself_waits_for_what_runs_and_not_for_its_cache() -> None:
    """Found by the simulator (seed 8760): it was said to wait for memory, beside an empty replica."""
    world = World()
    world.need = lambda work: 60
    world.up(slots=2, tokens=100)
    world.submit("runs")
    world.submit("suspect")
    suspect = next(work for work in world.flow.works.values() if work.request_id == "suspect")
    suspect.alone = True
    told = waiting(world, "suspect")
    assert (told.reason, told.estimated_start_at) == ("class", None)
    world.finish("runs")
    assert set(world.running) == {"suspect"}


@pytest.mark.parametrize("order", ["model", "class"])
def test_an_order_comes_before_all_other_causes(order: str) -> None:
    world = ready(slots=1, inline=True)
    world.submit("runs", LOW, conversation="c")
    world.submit("turn", LOW, conversation="c")
    assert reason(world, "turn") == "conversation"
    if order == "model":
        world.flow.orders.pause("model", "m", True)
    else:
        world.flow.orders.pause("class", "low", True)
    assert reason(world, "turn") == "paused"
    assert waiting(world, "turn").estimated_start_at is None


def test_low_work_waits_for_slack_only_while_nothing_urgent_waits() -> None:
    world = ready(slots=8, inline=True, slack=SlackSettings(half_life_s=1.0))
    for number in range(9):
        world.submit(f"high{number}", HIGH)
    for number in range(2):
        world.submit(f"low{number}", LOW)
    world.pass_time(30)
    assert reason(world, "low1") == "class", "a more urgent request waits before it"
    for number in range(5):
        world.finish(f"high{number}")
    assert reason(world, "low1") == "slack", "slots are free, and are kept for what is more urgent"


def test_no_start_is_promised_behind_one_of_which_nobody_knows_when_it_starts() -> None:
    """What stood behind a request that waited for memory was told a time."""
    world = World()
    world.need = lambda work: 60
    world.up(slots=2, tokens=100)
    world.submit("measured")
    world.pass_time(2)
    world.finish("measured")
    for number in range(8):
        world.submit(f"r{number}")
    world.pass_time(1)
    assert set(world.running) == {"r0"}
    assert (reason(world, "r1"), waiting(world, "r1").estimated_start_at) == ("memory", None)
    assert (reason(world, "r7"), waiting(world, "r7").estimated_start_at) == ("class", None)


def test_parked_work_behind_a_suspect_is_read_and_keeps_no_slot_unread() -> None:
    """The suspect's bytes fill the share of its class: what is parked behind it was never read, and kept its room."""
    world = ready(slots=2, inline=True, aging_s=1.0, aged_share=2, intake_bytes=1_200)
    world.up(slots=2, replica=1, inline=True)
    for number in range(4):
        world.submit(f"high{number}", HIGH, size=10)
    suspect = world.submit("suspect", LOW, size=150)
    parked = world.submit("parked", LOW, size=150)
    assert parked.stage is Stage.PARKED
    set_apart(suspect)
    world.submit("medium", MEDIUM, size=10)
    world.pass_time(2)
    on_first = [work.request_id for work in world.flow.lane("m").replicas[0].holders]
    on_second = [work.request_id for work in world.flow.lane("m").replicas[1].holders]
    world.finish(on_second[0])
    world.finish(on_first[0])
    assert "suspect" not in world.running, "another request runs on the replica that is kept for it"
    assert {"parked", "medium"} & set(world.running), "the other replica has a slot for somebody"


def test_suspects_do_not_wait_for_a_parked_request_that_cannot_be_read_for_their_bytes() -> None:
    """Found by the simulator (seeds 102 and 382): in the turn of the aged a parked request comes first. The bytes of a
    suspect of its class fill their share, so it was not read, and all suspects waited for it, for ever."""
    world = ready(slots=2, aging_s=1.0, aged_share=2, intake_bytes=1_200)
    world.submit("high", HIGH, size=10)
    world.finish("high")
    world.die()
    world.submit("filler", LOW, size=150)
    parked = world.submit("parked", LOW, size=200)
    world.cancel("filler")
    for suspect in (world.submit("low", LOW, size=151, ttl_ms=60_000), world.submit("medium", MEDIUM, size=10)):
        set_apart(suspect)
    world.pass_time(2)
    world.up(slots=2)
    assert parked.stage is Stage.PARKED
    for name in ("low", "medium", "parked"):
        assert set(world.running) == {name}
        world.finish(name)


def test_aged_low_work_that_lacks_memory_under_slack_hides_nobody() -> None:
    """It came first in its turn and lacked memory; slack kept it from getting any, and others were not looked at."""
    models = {"m": gb(30, 30), "idle": gb(30)}
    world = Card(80, models, slots=2, slack=SlackSettings(), aging_s=1.0, aged_share=2)
    for model in models:
        world.submit(f"first of {model}", model=model)
        world.pass_steps(0.5)
        world.finish(f"first of {model}")
    assert (world.free_gb, world.ready("idle")) == (20, [0])
    world.flow.orders.pause("model", "m", True)
    world.submit("low", LOW, model="m")
    world.pass_steps(2.0)
    world.submit("medium", MEDIUM, model="m")
    world.flow.orders.pause("model", "m", False)
    world.pass_steps(30.0)
    assert world.running, "the idle model was given up for one of them"


def test_suspects_go_to_a_replica_that_has_become_empty() -> None:
    """They waited for what ran on the replica that was kept for them, beside an empty one."""
    world = ready(slots=2, inline=True)
    world.up(slots=2, replica=1, inline=True)
    for number in range(4):
        world.submit(f"r{number}", HIGH)
    suspect = world.submit("suspect")
    set_apart(suspect)
    kept, other = world.flow.lane("m").replicas.values()
    world.finish(next(iter(kept.holders)).request_id)
    world.pass_time(0.1)
    assert (kept.exclusive, other.exclusive) == (suspect.group, None)
    for work in list(other.holders):
        world.finish(work.request_id)
    assert "suspect" in world.running
    assert list(other.holders) == [suspect]
    world.submit("beside")
    assert list(kept.holders)[1:] == [world.running["beside"]], "nobody is kept from the former one any more"


def test_all_reasons_are_those_of_the_records() -> None:
    """A record behind an open transaction no worker has read; what is to start later does not ask for admission."""
    assert set(get_args(Reason)) == set(WAITING_REASONS) - {"transaction", "scheduled"}


def test_a_parked_request_is_read_again_for_a_slot_that_those_before_it_cannot_use() -> None:
    """Found by the simulator (seed 30276): the share of its class was full of what waited for another replica, so it
    was not read again, and the slot that was kept for it stayed empty."""
    world = World(intake_bytes=4_000)
    world.need = lambda work: 80 if work.request_id == "large" else 10
    world.up(slots=1, tokens=100)
    world.submit("busy", size=50)
    world.submit("large", size=250)
    world.pass_time(0.1)
    parked = world.submit("parked", size=250, user_id="u")
    assert parked.stage.value == "parked"
    assert (parked.body, parked.subject.labels.user_id) == (None, "u"), "its statuses echo what its bytes said"
    world.up(slots=1, tokens=50, replica=1)
    world.pass_time(0.1)
    assert set(world.running) == {"busy", "parked"}
    world.finish("busy")
    world.pass_time(0.1)
    assert set(world.running) == {"large", "parked"}


@pytest.mark.parametrize("larger", ["comes free", "dies"])
def test_what_the_cache_of_one_replica_cannot_hold_waits_for_a_larger_one_and_keeps_nobody_waiting(larger: str) -> None:
    """It was refused, because its prompt had been counted where the cache is too small for it."""
    world = World()
    world.need = lambda work: 80 if work.request_id == "large" else 10
    world.up(slots=1, tokens=100)
    world.submit("busy")
    world.up(slots=1, tokens=50, replica=1)
    world.submit("large")
    world.pass_time(0.1)
    if larger == "dies":
        world.die()
        world.pass_time(1.0)
        assert world.status_of("large") == "failed"
        return
    world.pass_time(5.0)
    assert not world.ended
    world.submit("small")
    world.pass_time(0.1)
    assert set(world.running) == {"busy", "small"}
    world.finish("busy")
    world.pass_time(0.1)
    assert set(world.running) == {"large", "small"}


def test_what_waits_for_memory_of_another_replica_takes_nobodys_place() -> None:
    """Found by the simulator (seed 10904): those behind it were not prepared, beside a replica with four free slots."""
    world = Card(100, {"m": gb(30)}, slots=1, inline=False, specs=[spec("m", min_replicas=2, max_replicas=2)])
    suspect = world.submit("suspect")
    world.pass_steps(0.5)
    kept, other = world.flow.lane("m").ready
    assert suspect in kept.holders
    world.memory = lambda work: (1 if work.request_id == "small" else 50) * GB
    world.flow.replicas.busy("m", other.number, 1.0, world.now)
    for number in range(other.look_ahead):
        world.submit(f"large{number}")
    world.pass_steps(0.5)
    assert len(kept.ahead) == other.look_ahead
    set_apart(suspect)
    kept.exclusive = suspect.group
    world.submit("small")
    world.pass_steps(2.0)
    assert set(world.running) == {"suspect", "small"}


def test_no_start_is_promised_while_the_worker_is_kept_for_a_suspect() -> None:
    """A request for an idle model was told the moment of its question, and waited until the suspect had ended."""
    world = World("m", "idle")
    world.up(slots=2, inline=True)
    world.up("idle", slots=2, inline=True)
    for model in ("m", "idle"):
        world.submit(f"measured {model}", model=model)
        world.pass_time(2)
        world.finish(f"measured {model}")
    suspect = world.submit("suspect", LOW, model="m", settle=False)
    suspect.alone = True
    world.settle()
    assert set(world.running) == {"suspect"}
    world.submit("r", model="idle")
    assert (reason(world, "r"), waiting(world, "r").estimated_start_at) == ("class", None)
    world.finish("suspect")
    world.pass_time(0.1)
    assert set(world.running) == {"r"}
