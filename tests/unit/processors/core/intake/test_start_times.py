"""Requests whose callers name a time to start, in the flow: they wait outside of the queue, as facts alone."""

from __future__ import annotations

from typing import Any

import pytest

from flow_driver import MEDIUM, World, ready
from penstock.processors.core import effects as ask
from penstock.processors.core.fleet.residents import ModelSpec
from penstock.processors.core.work.states import Stage
from penstock.processors.core.work.work import Work
from penstock.schemas.errors import InvalidRequest, ModelNotFound, Overloaded, PenstockError
from penstock.schemas.records import Origin, WorkerState


def submit_later(world: World, request_id: str, seconds: float, **fields: Any) -> Work:
    return world.submit(request_id, start_after_ms=world.wall_ms + round(seconds * 1000), **fields)


def pass_seconds(world: World, seconds: int) -> None:
    """The worker reports each second, as it does."""
    for _ in range(seconds):
        world.pass_time(1)
        world.flow.peers.reported(
            [WorkerState(worker_id="here", state="running", started_at=0, updated_at=world.wall_ms)]
        )


def error_of(world: World, request_id: str) -> PenstockError | None:
    (error,) = [e.error for e in world.effects(ask.Terminal) if e.subject.request_id == request_id]
    return error


def test_it_starts_at_its_time_and_says_until_then_what_it_waits_for() -> None:
    world = ready(inline=True)
    work = submit_later(world, "r", 10)
    assert (work.stage, work.body) == (Stage.SCHEDULED, None)
    assert world.flow.next_due() is not None, "its status is due"
    world.pass_time(0.1)
    waiting = world.flow.waiting_for(work, world.now)
    assert (waiting.reason, waiting.estimated_start_at) == ("scheduled", work.start_after_ms)
    statuses = world.effects(ask.Status)
    assert [(s.status, s.waiting and s.waiting.reason) for s in statuses] == [("queued", "scheduled")]
    world.pass_time(9.8)
    assert not world.started
    assert world.flow.next_due() == pytest.approx(world.now + 0.1)
    world.pass_time(0.1)
    assert world.started == ["r"]
    world.finish("r")
    assert world.ended == [("r", "completed")]
    assert world.committed() == 1


def test_a_time_that_has_passed_changes_nothing() -> None:
    world = ready(inline=True)
    submit_later(world, "r", -5)
    assert world.started == ["r"]


def test_it_takes_its_place_as_if_it_came_at_its_time() -> None:
    world = ready(inline=True, aging_s=20.0)
    submit_later(world, "later", 60, ttl_ms=3_660_000)
    world.submit("runs")
    world.pass_time(59)
    world.submit("before")
    world.pass_time(1)
    world.submit("behind")
    for request_id in ("runs", "before", "later"):
        world.finish(request_id)
    assert world.started == ["runs", "before", "later", "behind"]
    timings = world.ended_works[-1].timings(world.now)
    assert timings.queued_ms == 0, "it waited from its time on"


def test_its_conversation_does_not_wait_for_it() -> None:
    world = ready(inline=True)
    submit_later(world, "later", 10, conversation="c")
    world.submit("now", conversation="c")
    assert world.started == ["now"]
    world.pass_time(10)
    assert world.started == ["now"], "one turn at a time"
    world.finish("now")
    assert world.started == ["now", "later"]


@pytest.mark.parametrize("way", ["cancelled", "deleted", "expired", "expired within a millisecond"])
def test_it_ends_before_its_time(way: str) -> None:
    world = ready(inline=True)
    submit_later(world, "r", 10, conversation="c", ttl_ms=3_000)
    match way:
        case "cancelled":
            world.cancel("r")
        case "deleted":
            world.delete_conversation("c")
        case "expired":
            world.pass_time(2.9)
            assert not world.ended
            world.pass_time(0.2)
            world.pass_time(0.1)
        case _:  # by as much the clocks may differ
            world.pass_time(2.9996)
    assert world.ended == [("r", "expired" if way.startswith("expired") else "cancelled")]
    assert (world.started, world.committed()) == ([], 1)
    assert (world.flow.budget.facts, world.flow.budget.bodies_bytes) == (0, 0)
    assert not world.flow.registry.scheduled.partitions()


def test_another_priority_holds_from_its_time_on() -> None:
    world = ready(inline=True)
    submit_later(world, "later", 10, klass="low")
    world.submit("runs")
    world.submit("waits")
    world.reprioritize("later", 0)
    world.pass_time(10)
    world.finish("runs")
    assert world.started == ["runs", "later"]


@pytest.mark.parametrize("way", ["the worker stops", "the partition goes elsewhere"])
def test_another_worker_takes_it(way: str) -> None:
    world = ready(inline=True)
    work = submit_later(world, "r", 10)
    if way == "the worker stops":
        world.flow.stop_taking()
    else:
        world.assigned(2, ())
    assert work.stage is Stage.DROPPED
    world.pass_time(20)
    assert (world.started, world.ended, world.committed()) == ([], [], 0)
    assert not world.flow.registry.scheduled.partitions()


def test_a_load_that_is_hopeless_now_does_not_end_it() -> None:
    world = World()
    work = submit_later(world, "later", 60)
    world.submit("now")
    world.load_failed(InvalidRequest("never"))
    assert dict(world.ended) == {"now": "failed"}
    assert work.stage is Stage.SCHEDULED
    world.pass_time(30)
    world.up(inline=True)
    world.pass_time(30)
    assert world.started == ["later"]


def test_its_model_may_be_removed_and_come_back_before_its_time() -> None:
    world = ready(inline=True)
    work = submit_later(world, "later", 60, model="m")
    world.flow.orders.configure({"other": ModelSpec(model="other")}, world.now)
    world.models.names = ("other",)
    world.pass_time(30)
    assert work.stage is Stage.SCHEDULED
    world.pass_time(30)
    assert world.flow.waiting_for(work, world.now).reason == "no_worker"
    world.flow.orders.configure({"m": ModelSpec(model="m")}, world.now)
    world.models.names = ("m",)
    world.pass_time(0.6)
    world.up(slots=1, replica=1, inline=True)
    assert world.started == ["later"]


def test_its_model_that_is_gone_for_good_is_told_after_its_time() -> None:
    world = ready(inline=True, model_absent_s=5.0)
    submit_later(world, "later", 60, model="m")
    world.flow.orders.configure({"other": ModelSpec(model="other")}, world.now)
    world.models.names = ("other",)
    pass_seconds(world, 64)
    assert not world.ended, "it waits for a worker from its time on"
    pass_seconds(world, 4)
    assert world.ended == [("later", "failed")]
    assert isinstance(error_of(world, "later"), ModelNotFound)


def test_it_is_written_again_before_it_holds_back_its_partition() -> None:
    """Republished to the end of its partition, it starts at its time all the same, once."""
    world = ready(inline=True, commit_span=32)
    work = submit_later(world, "later", 100, ttl_ms=200_000)
    world.hold_answers.add(ask.Republish)
    fill(world)
    (again,) = world.held(ask.Republish)
    assert (again.subject.request_id, again.partition, again.origin) == ("later", 0, work.first_place)
    assert again.subject.body is not None
    assert world.committed() == 0, "not before the copy is durable"
    copy = world.submit(
        "later",
        start_after_ms=work.start_after_ms,
        ttl_ms=200_000,
        origin=Origin(topic=MEDIUM, partition=0, offset=0, append_time_ms=work.first_place.append_time_ms),
    )
    assert copy.stage is Stage.SCHEDULED
    world.release(ask.Republish)
    assert world.committed() == 17
    world.pass_time(100)
    assert world.started.count("later") == 1
    world.finish("later")
    assert world.committed() == 18
    assert world.flow.budget.facts == 0


def test_one_that_is_written_again_may_still_be_cancelled() -> None:
    world = ready(inline=True, commit_span=32)
    world.hold_answers.add(ask.Fetch)
    submit_later(world, "later", 100)
    fill(world)
    world.cancel("later")
    world.release(ask.Fetch)
    assert world.status_of("later") == "cancelled"
    assert not world.effects(ask.Republish)


def test_a_tenant_holds_a_share_of_a_partition_and_all_of_them_twice_as_much() -> None:
    world = ready(inline=True, commit_span=32)
    for number in range(2):
        submit_later(world, f"a{number}", 10, tenant="a")
    submit_later(world, "a", 10, tenant="a")
    for tenant in "bcd":
        submit_later(world, tenant, 10, tenant=tenant)
    assert world.ended == [("a", "failed"), ("d", "failed")]
    assert isinstance(error_of(world, "a"), Overloaded)
    assert isinstance(error_of(world, "d"), Overloaded)
    world.cancel("a0", "a")
    submit_later(world, "more", 10, tenant="a")
    assert "more" not in dict(world.ended)


def fill(world: World) -> None:
    """So much comes behind what waits that it is written again."""
    for number in range(16):
        world.submit(f"r{number}")
        world.finish(f"r{number}")
    world.pass_time(0.01)


def test_nobody_takes_the_place_of_one_that_is_written_again() -> None:
    world = ready(inline=True, commit_span=32)
    later = [submit_later(world, one, 100, tenant=one[0]) for one in ("a1", "a2", "b1", "b2")]
    world.hold_answers.add(ask.Republish)
    fill(world)
    submit_later(world, "c", 100, tenant="c")
    assert world.status_of("c") == "failed"
    for work in later:
        copy = world.submit(
            work.request_id,
            tenant=work.tenant,
            start_after_ms=work.start_after_ms,
            ttl_ms=200_000,
            origin=work.first_place,
        )
        assert copy.stage is Stage.SCHEDULED
    world.release(ask.Republish)
    assert [one for one, _ in world.ended if one in ("a1", "a2", "b1", "b2")] == []
    world.cancel("a1", "a")
    submit_later(world, "a3", 100, tenant="a")
    assert world.status_of("a3") is None


def test_another_priority_does_not_strand_one_that_is_written_again() -> None:
    world = ready(inline=True, commit_span=32, intake_bytes=200_000)
    work = submit_later(world, "later", 100, size=9_000)
    world.hold_answers.add(ask.Fetch)
    fill(world)
    for number in range(10):
        world.submit(f"low{number}", klass="low", size=9_000)
    assert work.stage is Stage.FETCHING
    world.reprioritize("later", 9)
    assert work.stage is Stage.FETCHING
    world.release(ask.Fetch)
    assert [one.subject.request_id for one in world.effects(ask.Republish)] == ["later"]


def test_what_was_delivered_again_at_a_lower_offset_is_written_again_too() -> None:
    scheduled = ready(inline=True, commit_span=64).flow.registry.scheduled
    works = [
        Work(key=("t", 0, offset), request_id="r", tenant="t", task="x", arrived_at=0.0, seq=offset, attempt=1,
             max_attempts=None, epoch=1, first_place=Origin(topic="t", partition=0, offset=offset, append_time_ms=0))
        for offset in (5, 3, 4, 9)
    ]  # fmt: skip
    for work in works:
        scheduled.add(work)
    assert list(scheduled.of_partition(("t", 0))) == [3, 4, 5, 9]
    for work in works:
        scheduled.remove(work)
    assert (len(scheduled), scheduled.places(("t", 0)), scheduled.places_of(("t", 0), "t")) == (0, 0, 0)


def test_many_that_are_due_at_once_do_not_come_in_one_tick() -> None:
    world = ready(inline=True)
    for number in range(600):
        submit_later(world, f"r{number}", 10)
    world.pass_time(10)
    waiting = [work for work in world.flow.works.values() if work.stage is Stage.SCHEDULED]
    assert len(waiting) == 600 - 256
    world.pass_time(0.01)
    world.pass_time(0.01)
    assert not world.flow.registry.scheduled.partitions()
