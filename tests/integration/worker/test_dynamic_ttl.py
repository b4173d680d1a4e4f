"""`scheduler.dynamic_ttl` over Kafka: a flood expires after the chosen time; named deadlines are left alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import httpx
import pytest

from penstock.schemas.codec import default_codec
from penstock.schemas.records import ResultEvent, StatusEvent
from system import Process, System, eventually
from worker_requests import engine, outcome, send

pytestmark = pytest.mark.slow

FLOOR_S, FACTOR = 3.0, 2.0
RUN_MS = 40
WARM, FLOOD = 24, 400
"""Runs of one slot: the flood takes 16 s at least."""
LONG_MS = 3_600_000


def chosen(system: System) -> dict[str, set[int | None]]:
    """By request, the times to live that its statuses named."""
    found: dict[str, set[int | None]] = {}
    for message in system.read(system.names.status):
        event = default_codec().decode(message.value() or b"", StatusEvent)
        found.setdefault(event.request_id, set()).add(event.ttl_ms)
    return found


def all_ended(system: System, ids: Iterable[str], worker: Process, deadline_s: float = 90) -> dict[str, ResultEvent]:
    wanted = set(ids)
    eventually(lambda: wanted <= system.outcomes().keys(), deadline_s, worker.tail)
    return {one: event for one, event in system.outcomes().items() if one in wanted}


def lived_ms(event: ResultEvent) -> int:
    return event.created_at - event.origin.append_time_ms


@pytest.mark.thorough
def test_a_flood_expires_after_the_chosen_time_and_named_deadlines_hold(make_system: Callable[..., System]) -> None:
    system = make_system(models=[engine(first_delay_ms=RUN_MS, tokens=1, slots=1)])
    settings = {"DYNAMIC_TTL": "true", "TTL_FLOOR_S": str(FLOOR_S), "TTL_FACTOR": str(FACTOR)}
    worker = system.worker(env={f"PENSTOCK_SCHEDULER__{name}": value for name, value in settings.items()}).wait_ready()
    gateway = system.gateway().wait_ready()
    # One after the other, so that hardly any waits; without waits nothing is chosen.
    first = gateway.submit()
    assert outcome(system, first).status == "completed"
    assert gateway.request(first)["ttl_ms"] is None
    for number in range(WARM):
        assert httpx.get(f"{gateway.url}/v1/requests/{gateway.submit()}?wait=30", timeout=60).json()["done"], number

    flood = [f"flood-{number}" for number in range(FLOOD)]
    send(system, *({"request_id": one} for one in flood))
    named = gateway.submit(ttl_ms=LONG_MS), gateway.submit(deadline=time.time() + LONG_MS / 1000)
    unmeasured = gateway.submit(priority=9)
    waiting = gateway.submit()
    eventually(lambda: gateway.request(waiting)["ttl_ms"] is not None, 30, worker.tail)
    assert gateway.request(waiting)["ttl_ms"] >= FLOOR_S * 1000

    ended = all_ended(system, [*flood, waiting, *named, unmeasured], worker)
    ttl_of = chosen(system)
    expired = [one for one in (*flood, waiting) if ended[one].status == "expired"]
    assert {ended[one].status for one in flood} == {"completed", "expired"}
    assert len(expired) > FLOOD / 4
    for one in expired:
        (ttl_ms,) = ttl_of[one]
        assert ttl_ms is not None
        assert FLOOR_S * 1000 <= ttl_ms <= lived_ms(ended[one]) <= ttl_ms + 5_000, (one, ttl_ms, lived_ms(ended[one]))
    told = gateway.request(expired[0])
    assert (told["status"], told["ttl_ms"]) == ("expired", *ttl_of[expired[0]])
    assert told["error"]["code"] == "expired"

    # Those that name a deadline outlive the others of the flood, and nothing is chosen for them.
    for one in named:
        assert (ended[one].status, ttl_of[one]) == ("completed", {None})
    assert ttl_of[unmeasured] == {None}, "so few of its class have waited that nothing is known"
    assert ended[unmeasured].status == "completed"

    # What expired has waited too: the next time to live is longer, not shorter.
    later = gateway.submit()
    assert outcome(system, later).status == "completed"
    (ttl_ms,) = chosen(system)[later]
    assert ttl_ms is not None
    assert ttl_ms > FLOOR_S * 1000 * FACTOR * 0.8
    system.wait_drained()
    assert worker.stop() == 0, worker.tail()
