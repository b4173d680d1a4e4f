"""Dependencies of a gateway: the last result of each probe is reported, and a hanging probe holds up nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.gateway_records import worker
from penstock.common.desired import Desired
from penstock.gateway.service.dependencies import Dependencies, Problem
from penstock.gateway.service.model_states import not_following
from penstock.schemas.records import DesiredState, WorkerState
from support import wait_until_async

LATE, NOW = 20_000, 100_000


class Stage:
    """Probes by name, whose next results a test sets; each waits until it may go on."""

    def __init__(self, *names: str) -> None:
        self.results: dict[str, Problem | Exception | None] = dict.fromkeys(names)
        self.free = {name: asyncio.Event() for name in names}
        self.begun = dict.fromkeys(names, 0)
        self.dependencies = Dependencies(
            {name: self._probe(name) for name in names}, every_s=0.001, retry_s=0.001, answer_s=0.01
        )

    def _probe(self, name: str) -> Callable[[], Awaitable[Problem | None]]:
        async def probe() -> Problem | None:
            self.begun[name] += 1
            await self.free[name].wait()
            if isinstance(result := self.results[name], Exception):
                raise result
            return result

        return probe

    def problem(self, name: str) -> Problem | None:
        (found,) = [one for one in self.dependencies.results() if one.name == name]
        return found.problem


async def test_the_last_result_of_each_dependency_is_reported() -> None:
    stage = Stage("a", "b")
    assert [(one.name, one.checked_at_ms, one.problem) for one in stage.dependencies.results()] == [
        ("a", None, None),
        ("b", None, None),
    ]
    running = asyncio.create_task(stage.dependencies.run())
    stage.free["a"].set()
    stage.results["a"] = Problem("it is away", "host:port refused")
    await wait_until_async(lambda: stage.problem("a") == Problem("it is away", "host:port refused"))
    stage.results["a"] = None
    await wait_until_async(lambda: stage.problem("a") is None)
    stage.results["a"] = RuntimeError("a defect")
    await wait_until_async(lambda: stage.problem("a") == Problem("the probe of a failed", "RuntimeError: a defect"))
    assert all(one.checked_at_ms is not None for one in stage.dependencies.results() if one.name == "a")
    running.cancel()


async def test_a_hanging_probe_is_reported_once_and_holds_up_no_other() -> None:
    stage = Stage("a", "b")
    running = asyncio.create_task(stage.dependencies.run())
    stage.free["b"].set()
    await wait_until_async(lambda: stage.problem("a") is not None and stage.begun["b"] > 20)
    assert stage.begun["a"] == 1
    assert stage.problem("a") == Problem("the probe of a has no answer within 0.01 s")
    stage.free["a"].set()
    await wait_until_async(lambda: stage.problem("a") is None)
    running.cancel()


def order(created_at: int, revision: int) -> Desired:
    state = DesiredState(kind="model", name=f"m{revision}", action="load", created_at=created_at)
    return Desired(state, revision)


def follows(name: str, observed: int | None, *, topic: str | None = "t", started_at: int = 0) -> WorkerState:
    return worker(name, started_at=started_at, updated_at=NOW, observed_revision=observed, observed_topic_id=topic)


OLD, NEW = NOW - LATE - 1, NOW - LATE


@pytest.mark.parametrize(
    ("orders", "workers", "late"),
    [
        ([], [follows("a", None)], []),
        ([order(OLD, 5)], [follows("a", 5), follows("b", 4), follows("c", None), follows("d", 7)], ["b", "c"]),
        ([order(NEW, 5)], [follows("a", 4)], []),
        ([order(OLD, 5), order(NEW, 9)], [follows("a", 5)], []),
        ([order(OLD, 5)], [follows("a", 5, topic="another")], ["a"]),
        ([order(OLD, 5)], [follows("a", 5, topic=None)], []),
        ([order(OLD, 5)], [follows("a", None, started_at=NEW)], []),
    ],
)
def test_workers_that_do_not_follow_orders(orders: list[Desired], workers: list[WorkerState], late: list[str]) -> None:
    assert not_following(workers, orders, "t", NOW, LATE) == late


@given(st.lists(st.tuples(st.integers(0, NOW), st.integers(0, 20))), st.integers(0, 20))
def test_a_worker_follows_if_it_has_observed_all_orders_that_are_not_new(
    orders: list[tuple[int, int]], observed: int
) -> None:
    late = not_following([follows("a", observed)], [order(*one) for one in orders], "t", NOW, LATE)
    assert late == (["a"] if any(NOW - at > LATE and revision > observed for at, revision in orders) else [])
