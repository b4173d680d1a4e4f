"""A gateway with an empty disk begins from the snapshot that another one has written into the store of artifacts."""

from __future__ import annotations

import gzip
import socket
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from kit.past import ENDED, POOL, Past, all_ids, chat, get
from support import wait_until
from system import Process, System

pytestmark = pytest.mark.slow

WRITES = {"PENSTOCK_GATEWAY__VIEW_SNAPSHOT_S": "1"}
READS = {"PENSTOCK_GATEWAY__VIEW_SNAPSHOT_S": "3600"}
MESSAGES = [{"role": "user", "content": "p"}]
MARK = "a-name-that-nobody-else-has"


def snapshots(system: System) -> list[Path]:
    return [*(system.folder / "artifacts").glob(".views/*/*.gz")]


def has_mark(system: System) -> bool:
    return any(MARK.encode() in gzip.decompress(one.read_bytes()) for one in snapshots(system))


def wait_for_the_next(system: System) -> None:
    """One that was begun after this call."""
    for _ in range(2):
        written = snapshots(system)[0].stat().st_mtime_ns
        make(system.process("g1"))
        wait_until(lambda written=written: snapshots(system)[0].stat().st_mtime_ns > written, 20, "a snapshot")


def is_whole(gateway: Process) -> bool:
    """Also if requests wait without a worker."""
    answer = get(gateway, "/v1/requests")
    return answer.status_code == 200 and "x-history-until" not in answer.headers


def begin(system: System, name: str) -> Process:
    """A gateway with an empty disk, once it knows the history."""
    made = system.gateway(name, env=READS).wait_ready()
    wait_until(lambda: is_whole(made), 60, made.tail)
    return made


def read(gateway: Process) -> float:
    return sum(gateway.metric("penstock_view_records_total", fate=fate) for fate in ("decoded", "passed_over"))


def same(path: str, *gateways: Process) -> bool:
    """Whether all say the same. The history ends at the time of the call, and ages are those of then."""
    told = [get(one, path) for one in gateways]
    assert {one.status_code for one in told} == {200}, told[0].text
    bodies = [{**one.json(), "until": None, "cursor": None} for one in told]
    return all(one == bodies[0] for one in bodies)


def depths(gateway: Process) -> list[str]:
    return [one for one in get(gateway, "/metrics").text.splitlines() if one.startswith("penstock_queue_depth{")]


def make(gateway: Process, **fields: object) -> str:
    body = {"task": "text_generation", "payload": {"messages": MESSAGES}, **fields}
    answer = httpx.post(f"{gateway.url}/v1/requests", json=body, timeout=30)
    assert answer.status_code == 202, answer.text
    return answer.json()["request_id"]


@pytest.fixture
def system(make_system: Callable[..., System]) -> System:
    """It has a worker, a history, and the gateway `g1`, which has written a snapshot in which a request is marked."""
    system = make_system()
    Past(system).write_ended()
    system.worker().wait_ready()
    first = system.gateway("g1", env=WRITES).wait_ready()
    wait_until(lambda: is_whole(first), 60, first.tail)
    made = make(first, metadata={"mark": MARK}, conversation_id="talk")
    assert first.request(made, wait=20)["status"] == "completed"
    wait_until(lambda: has_mark(system), 20, first.tail)
    return system


def test_it_knows_what_the_others_know_and_has_not_read_their_log(system: System) -> None:
    first = system.process("g1")
    second = system.gateway("g2", env=READS).wait_ready()
    waits = [make(first, pool=POOL) for _ in range(3)]
    wait_for_the_next(system)
    third = system.gateway("g3", env=READS).wait_ready()
    assert chat(third).status_code == 200
    for one in (second, third):
        wait_until(lambda one=one: is_whole(one), 60, one.tail)
        assert "snapshot.used" in one.log.read_text(), one.tail()
        assert read(one) < ENDED, "of two records for each request"
    assert get(third, f"/v1/requests/{waits[0]}").json()["status"] == "accepted"
    old = third.request("old-7")
    assert (old["status"], old["result"]["text"]) == ("completed", "old-7")
    assert get(third, "/v1/requests/never").status_code == 404
    ids = all_ids(first)
    assert len(ids) > ENDED
    for path in (
        "/v1/admin/history?range_s=3600",
        "/v1/conversations/talk/items",
        "/v1/requests?conversation_id=talk&limit=1",
    ):
        wait_until(lambda path=path: same(path, first, second, third), 20, path)
    assert depths(first) == depths(second) == depths(third) != []
    assert all_ids(third) == ids


def test_a_request_of_the_past_that_waits_ends_afterwards(system: System) -> None:
    first = system.process("g1")
    waits = make(first, pool=POOL)
    wait_until(lambda: waits in all_ids(first), 20, first.tail)
    wait_for_the_next(system)
    second = begin(system, "g2")
    assert second.request(waits)["status"] in ("accepted", "queued")
    system.worker("w2", env={"PENSTOCK_WORKER__POOL": POOL}).wait_ready()
    assert second.request(waits, wait=30)["status"] == "completed"
    assert second.request(waits) == first.request(waits)


def test_what_is_erased_leaves_the_store_with_the_next_snapshot(system: System) -> None:
    first = system.process("g1")
    (marked,) = [one["request_id"] for one in get(first, "/v1/requests?conversation_id=talk").json()["data"]]
    assert httpx.delete(f"{first.url}/v1/requests/{marked}", timeout=30).status_code < 300
    wait_until(lambda: not has_mark(system), 20, first.tail)
    second = begin(system, "g2")
    assert get(second, f"/v1/requests/{marked}").status_code == 410


def test_a_gateway_that_is_killed_while_it_imports_begins_anew(system: System) -> None:
    ids = all_ids(system.process("g1"))
    second = system.gateway("g2", env=READS)
    imported = system.folder / "g2.sqlite.imported"
    wait_until(imported.exists, 60, second.tail, poll_s=0.001)
    second.kill9()
    again = begin(system, "g2")
    assert ids <= all_ids(again)
    again.stop()
    assert ids <= all_ids(begin(system, "g2"))


def test_without_a_snapshot_that_can_be_read_the_log_is_read(system: System) -> None:
    first = system.process("g1")
    ids = all_ids(first)
    first.stop()
    (snapshot,) = snapshots(system)
    content = snapshot.read_bytes()
    half = content[: len(content) // 2]
    for name, harmed in (("g2", half), ("g3", half + bytes(len(half))), ("g4", None)):
        snapshot.unlink()
        if harmed is not None:
            snapshot.write_bytes(harmed)
        made = begin(system, name)
        event = "snapshot.absent" if harmed is None else "snapshot.not_used"
        assert made.log.read_text().count(event) == 1
        assert ids <= all_ids(made)
        assert not [*system.folder.glob(f"{name}.sqlite.imported*")]
        made.stop()


def test_a_store_that_never_answers_is_given_up(system: System) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        endpoint = f'{{"aws_endpoint": "http://127.0.0.1:{silent.getsockname()[1]}", "allow_http": "true"}}'
        store = {
            "PENSTOCK_GATEWAY__ARTIFACTS_DIR": "s3://bucket/x",
            "PENSTOCK_ARTIFACTS__OPTIONS": endpoint,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "here",
        }
        second = system.gateway("g2", env={**READS, **store})
        wait_until(second.alive, 10, second.tail)
        wait_until(lambda: "old-7" in known(second), 90, second.tail)
        assert "the store of artifacts does not answer" in second.log.read_text()


def known(gateway: Process) -> str:
    try:
        return get(gateway, "/v1/requests/old-7").text if gateway.alive() else ""
    except httpx.HTTPError:
        return ""
