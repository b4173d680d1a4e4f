"""Workers, gateways and the processes beside them: what each reports, who has died, and who lacks what."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from kit.console import HOSTILE, PHONE, TELLS_S, Opener, gone, told, violations, wider_than
from kit.hub import serving_hub
from kit.records import gateway_state, worker
from penstock.common.transport import Transport
from penstock.schemas.codec import default_codec
from penstock.schemas.records import Record
from penstock.schemas.topics import GATEWAY_KEY
from support import create_topics, wait_until
from system import NOOP, Process, System

LATE_S = 7.0
"""A turn of a test takes longer than 3 s where ten processes share a core."""
SETTLES_S = 10.0
"""What a process lacks for a moment is no problem."""
OFF_MS = 60_000
QUEUE = "orders-of-test-workers"
SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
SYSTEM = {
    "models": [NOOP],
    "gateway_options": {"worker_late_s": LATE_S},
    "worker_options": {"state_interval_s": 0.5},
    "webhook_options": {"secret": SECRET},
    "queues": [{"topic": QUEUE, "tenant": "team", "result_topic": f"{QUEUE}-results"}],
    "processes": ["w1", "g1", "h1", "s1"],
}
Problem = dict[str, Any]


@pytest.fixture
def put(system: System) -> Iterator[Callable[..., None]]:
    """Writes to the worker topic, by a clock of its own."""
    transport = Transport(system.kafka)

    def write(key: str, value: Record | None, off_ms: int = 0) -> None:
        encoded = None if value is None else default_codec().encode(value)
        at_ms = round(time.time() * 1000) + off_ms
        transport.send(system.names.worker, encoded, key=key.encode(), timestamp_ms=at_ms)
        assert transport.flush(10) == 0

    yield write
    transport.close()


def listed(gateway: Process) -> dict[str, dict[str, Any]]:
    found = httpx.get(f"{gateway.url}/v1/admin/gateways", timeout=10).json()
    assert (found["object"], found["has_more"]) == ("list", False)
    return {one["id"]: one for one in found["data"]}


def problems(gateway: Process) -> dict[tuple[str, str | None], Problem]:
    found = httpx.get(f"{gateway.url}/v1/admin/problems", timeout=10).json()["data"]
    return {(one["problem"], one["subject"]): one for one in found}


def of(gateway: Process, process: Process) -> dict[str, Any] | None:
    """What a process reports. It is known by its pid: a killed one keeps its place."""
    return next((one for one in listed(gateway).values() if one["pid"] == process.popen.pid), None)


def reported(gateway: Process, process: Process) -> dict[str, Any]:
    wait_until(lambda: of(gateway, process) is not None, TELLS_S, lambda: f"{process.name}: {listed(gateway)}")
    found = of(gateway, process)
    assert found is not None
    return found


def has_problem(gateway: Process, problem: str, subject: str, within_s: float = TELLS_S) -> Problem:
    key = problem, subject
    wait_until(lambda: key in problems(gateway), within_s, lambda: f"{key}: {problems(gateway)}")
    return problems(gateway)[key]


def is_well(gateway: Process, within_s: float = TELLS_S) -> None:
    wait_until(lambda: not problems(gateway), within_s, lambda: str(problems(gateway)))


def row(page: Any, text: str) -> str:
    return page.get_by_role("row").filter(has_text=text).inner_text()


def make_queues(system: System) -> None:
    """The topics of the bridge, if they are not there."""
    admin = AdminClient({"bootstrap.servers": system.bootstrap})
    missing = {QUEUE, f"{QUEUE}-results"} - admin.list_topics(timeout=20).topics.keys()
    topics = [NewTopic(topic, num_partitions=1) for topic in missing]
    for made in admin.create_topics(topics).values() if topics else ():
        made.result(20)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_each_process_is_there_with_what_it_is_and_can_be_read_by_everybody(
    system: System, gateway: Process, open_page: Opener, scheme: str
) -> None:
    request_id = gateway.submit()
    assert gateway.request(request_id, wait=30)["status"] == "completed"
    page = open_page(gateway, color_scheme=scheme)
    told(page, "1 gateway · 1/1 worker · 1 summarizer · 1 webhook sender")
    page.get_by_role("link", name="1 gateway · 1/1 worker").click()
    for process in (gateway, system.process("h"), system.process("s")):
        report = reported(gateway, process)
        assert report["url"] == process.url
        told(page, report["id"])
        shown = row(page, report["id"])
        assert "ready" in shown
        assert f"pid {process.popen.pid}" in shown
    state = system.worker_states()[-1]
    shown = row(page, state.worker_id)
    assert all(one in shown for one in ("running", "noop ready", "common pool", f"pid {system.process('w').popen.pid}"))
    partitions = page.get_by_role("row").filter(has_text=state.worker_id).locator("summary")
    partitions.focus()
    page.keyboard.press("Enter")
    told(page, f"{state.assigned[0]} committed")
    assert len(state.committed) == len(state.lag) == len(state.assigned)
    assert sum(state.committed) > 0
    assert violations(page) == []
    assert wider_than(page, PHONE) == []
    assert violations(page) == []


def test_a_bridge_that_waits_for_its_topic_is_told_until_the_topic_is_there(
    system: System, gateway: Process, open_page: Opener
) -> None:
    page, bridge = open_page(gateway), system.bridge()
    subject = reported(gateway, bridge)["id"]
    problem = has_problem(gateway, "bridge_unwell", subject, SETTLES_S + TELLS_S)
    assert QUEUE in problem["cause"]
    assert problem["affects"] == "no bridge reads the queues"
    assert problem["action"]["command"] == "penstock logs bridge"
    told(page, "bridge_unwell")
    page.get_by_role("link", name="see them").click()
    told(page, f"missing topics: {QUEUE}")
    make_queues(system)
    bridge.wait_ready()
    is_well(gateway)
    gone(page, f"missing topics: {QUEUE}")
    assert "ready" in row(page, subject)
    assert bridge.stop() == 0, bridge.tail()


@pytest.mark.parametrize("kind", ["gateway", "bridge"])
def test_a_process_that_was_killed_is_told_and_the_system_is_well_when_it_is_back(
    system: System, gateway: Process, open_page: Opener, kind: str
) -> None:
    make_queues(system)
    page = open_page(gateway)
    victim = (system.gateway("x2") if kind == "gateway" else system.bridge()).wait_ready()
    subject, pid = reported(gateway, victim)["id"], victim.popen.pid
    count = {"gateway": "2 gateways", "bridge": "1 bridge"}[kind]
    told(page, count)
    is_well(gateway)
    victim.kill9()
    killed = time.monotonic()
    problem = has_problem(gateway, f"{kind}_silent", subject)
    assert time.monotonic() - killed < TELLS_S
    assert f"pid {pid} on" in problem["cause"]
    assert problem["action"]["command"] == f"penstock {kind}"
    told(page, f"{kind}_silent")
    told(page, {"gateway": "1/2 gateways", "bridge": "0/1 bridge"}[kind])
    page.goto(f"{gateway.url}/#/workers")
    wait_until(lambda: "silent" in row(page, subject), TELLS_S, lambda: row(page, subject))
    again = {"gateway": system.gateway, "bridge": system.bridge}[kind](victim.name, port=victim.port).wait_ready()
    is_well(gateway)
    assert listed(gateway)[subject]["pid"] == again.popen.pid != pid
    assert again.stop() == 0, again.tail()
    wait_until(lambda: subject not in listed(gateway), TELLS_S, "one that stops in order leaves at once")
    is_well(gateway)


def test_clocks_that_differ_by_a_minute_make_nobody_silent_and_keep_nobody_alive(
    gateway: Process, open_page: Opener, put: Callable[..., None]
) -> None:
    page = open_page(gateway, "#/workers")
    names = {"ahead": OFF_MS, "behind": -OFF_MS}

    def report() -> None:
        for name, off_ms in names.items():
            at_ms = round(time.time() * 1000) + off_ms
            put(name, worker(name, started_at=at_ms, updated_at=at_ms, pool="clocks"), off_ms)
            gateway_id = f"webhooks-{name}-1"
            put(f"{GATEWAY_KEY}{gateway_id}", gateway_state(gateway_id, started_at=at_ms, reported_at=at_ms), off_ms)

    give_up = time.monotonic() + LATE_S + 2
    while time.monotonic() < give_up:
        report()
        time.sleep(0.3)
        assert problems(gateway) == {}
    assert [listed(gateway)[f"webhooks-{name}-1"]["alive"] for name in names] == [True, True]
    for name in names:
        has_problem(gateway, "worker_silent", name, LATE_S + TELLS_S)
        told(page, "as last reported")
        has_problem(gateway, "webhooks_silent", f"webhooks-{name}-1")
        put(name, None)
        put(f"{GATEWAY_KEY}webhooks-{name}-1", None)
    is_well(gateway)


def test_a_model_that_is_added_shows_how_far_its_download_is(
    system: System, gateway: Process, open_page: Opener, tmp_path: Path
) -> None:
    pytest.importorskip("huggingface_hub")
    create_topics(system.bootstrap, system.prefix, pool="hub")
    with serving_hub(str(tmp_path)) as (hub, env):
        hub.pause_s = 1.0
        loader = system.worker("w2", env={**env, "PENSTOCK_WORKER__POOL": "hub"}).wait_ready()
        page = open_page(gateway, "#/models")
        entry = {"id": "fetched", "source": "owner/name", "revision": "v1", "engine": "text", "pool": "hub"}
        httpx.post(f"{gateway.url}/v1/admin/models", json=entry).raise_for_status()
        shown = page.get_by_role("row").filter(has_text="fetched").get_by_role("progressbar").first
        shown.wait_for(timeout=20_000)
        wait_until(lambda: 0 < float(shown.get_attribute("value")) < 1, 10, lambda: page.inner_text("main"))
        assert "%" in row(page, "fetched")
        httpx.delete(f"{gateway.url}/v1/admin/models/fetched?pool=hub").raise_for_status()
        assert loader.stop() == 0, loader.tail()
    is_well(gateway, TELLS_S + SETTLES_S)


def test_one_that_was_told_to_stop_shows_what_it_waits_for(
    gateway: Process, open_page: Opener, put: Callable[..., None]
) -> None:
    page = open_page(gateway, "#/workers")
    put("leaves", worker("leaves", state="stopping", running=2, updated_at=round(time.time() * 1000), pool="drains"))
    draining = gateway_state("gateway-h-9", status="draining", http_requests=3, reported_at=round(time.time() * 1000))
    put(f"{GATEWAY_KEY}gateway-h-9", draining)
    told(page, "2 requests to end or hand back")
    assert "stopping" in row(page, "leaves")
    shown = row(page, "gateway-h-9")
    assert all(one in shown for one in ("draining", "lets its clients end", "3 HTTP requests")), shown
    assert not [one for one in problems(gateway) if one[1] in ("leaves", "gateway-h-9")], "a stop in order"
    put("leaves", None)
    put(f"{GATEWAY_KEY}gateway-h-9", None)
    gone(page, "gateway-h-9")


def test_whatever_a_report_holds_is_shown_as_text(
    gateway: Process, open_page: Opener, put: Callable[..., None]
) -> None:
    page = open_page(gateway, "#/workers")
    told(page, "common pool")
    now_ms = round(time.time() * 1000)
    texts = {"reason": HOSTILE, "host": HOSTILE, "version": HOSTILE}
    put(HOSTILE, worker(HOSTILE, updated_at=now_ms, pool=HOSTILE, paused=[HOSTILE], assigned=[HOSTILE], **texts))
    put(f"{GATEWAY_KEY}{HOSTILE}", gateway_state(HOSTILE, kind=HOSTILE, status=HOSTILE, lag={HOSTILE: 7}, **texts))
    told(page, "7 records behind")
    assert page.inner_text("main").count(HOSTILE) >= 8
    assert page.title() == "Workers and gateways – Penstock"
    assert violations(page) == []
    assert wider_than(page, PHONE) == []
    put(HOSTILE, None)
    put(f"{GATEWAY_KEY}{HOSTILE}", None)
    gone(page, "7 records behind")
    is_well(gateway)
