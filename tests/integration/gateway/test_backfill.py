"""A gateway with an empty disk serves at once, while the history of the log is still to be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import httpx
import pytest

from kit.past import ENDED, Past, all_ids, chat, get, is_whole
from registry_server import Registry
from stream_clients import Callers
from support import wait_until
from system import Process, System

pytestmark = pytest.mark.slow

WORDS = 4


@pytest.fixture
def registry() -> Iterator[Registry]:
    with Registry.running() as made:
        yield made


def start(system: System, registry: Registry, name: str = "g1") -> Process:
    return system.gateway(name, env={"PENSTOCK_SCHEMA_REGISTRY__URL": registry.url})


def is_unknown_yet(answer: httpx.Response) -> bool:
    return answer.status_code == 503 and int(answer.headers["retry-after"]) > 0 and "history until" in answer.text


@pytest.fixture
def system(make_system: Callable[..., System], registry: Registry) -> System:
    """It has a worker, a history, and the gateway `g1`, which cannot read that while the registry is down."""
    system = make_system()
    system.worker().wait_ready()
    past = Past(system)
    past.hold_outcomes()
    past.write_ended()
    registry.up = False
    start(system, registry).wait_ready()
    return system


def test_new_requests_are_served_whole_and_only_unknown_ids_must_wait(system: System, registry: Registry) -> None:
    gateway = system.process("g1")
    probe = get(gateway, "/readyz").json()
    assert (probe["status"], "history until" in probe["reason"]) == ("degraded", True), probe
    answer = chat(gateway)
    assert answer.status_code == 200, answer.text
    callers = Callers([gateway.url], "noop", WORDS, 30)
    for kind in (callers.socket, callers.chat_stream, callers.chat):
        assert kind(0) == "".join(f"word{number} " for number in range(WORDS)), kind.__name__
    made = gateway.submit(stream=True)
    assert [frame for frame in get(gateway, f"/v1/requests/{made}/events").text.split("\n\n") if "word3" in frame]
    assert gateway.request(made, wait=20)["status"] == "completed"
    wait_until(lambda: registry.asked, 30, "the history is held")

    for old in ("old-7", "never"):
        for path in (f"/v1/requests/{old}", f"/v1/requests/{old}/events", f"/v1/admin/requests/{old}"):
            assert is_unknown_yet(get(gateway, path)), path
        assert is_unknown_yet(httpx.post(f"{gateway.url}/v1/requests/{old}/cancel", timeout=30)), old
    body = {"task": "text_generation", "payload": {"prompt": "p"}}
    key = {"Idempotency-Key": "k"}
    assert is_unknown_yet(httpx.post(f"{gateway.url}/v1/requests", json=body, headers=key, timeout=30))
    listed = get(gateway, "/v1/requests")
    assert "x-history-until" in listed.headers
    assert made in {one["request_id"] for one in listed.json()["data"]}
    problems = get(gateway, "/v1/admin/problems").json()
    assert [one["cause"] for one in problems["data"]] == []
    assert "history until" in problems["summary"]
    assert "penstock_queue_depth{" not in get(gateway, "/metrics").text, "what waits is not known: it is not 0"

    registry.up = True
    wait_until(lambda: is_whole(gateway), 60, gateway.tail)
    assert "x-history-until" not in get(gateway, "/v1/requests").headers
    old = gateway.request("old-7")
    assert (old["status"], old["result"]["text"]) == ("completed", "old-7")
    assert get(gateway, "/v1/requests/never").status_code == 404
    assert httpx.post(f"{gateway.url}/v1/requests", json=body, headers=key, timeout=30).status_code == 202
    assert {f"old-{number}" for number in range(ENDED)} <= all_ids(gateway)


def test_a_gateway_that_is_killed_before_it_knows_its_history_begins_anew(system: System, registry: Registry) -> None:
    gateway = system.process("g1")
    made = gateway.submit()
    assert gateway.request(made, wait=20)["status"] == "completed"
    wait_until(lambda: registry.asked, 30, "the history is held")
    gateway.kill9()

    registry.up = True
    again = start(system, registry).wait_ready()
    wait_until(lambda: is_whole(again), 60, again.tail)
    fresh = start(system, registry, "g2").wait_ready()
    wait_until(lambda: is_whole(fresh), 60, fresh.tail)
    assert again.request(made)["status"] == "completed"
    assert all_ids(again) == all_ids(fresh)
    for figure in ("accepted", "ended"):
        counts = [get(one, "/v1/admin/history", params={"range_s": 3600}).json() for one in (again, fresh)]
        assert counts[0][figure] == counts[1][figure], figure
