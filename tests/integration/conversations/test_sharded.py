"""Conversations that share one topic: as with topics of their own, whatever is killed, deleted, forked or lost."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing

import httpx
from confluent_kafka.admin import AdminClient, NewPartitions

from conversing import Json, fork, items, questions, turn
from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.common.shards.addresses import address_of, split_key
from penstock.common.transport import Transport
from penstock.gateway.service.conversation_sweeps import STRAY_MS
from penstock.producers import Client
from support import wait_until
from system import NOOP, System, eventually

TASKS = ["text_generation", "summarization"]
MODELS = [
    {**NOOP, "id": "talk", "tasks": TASKS, "options": {"echo": True}},
    {**NOOP, "id": "slow", "options": {"echo": True, "first_delay_ms": 3_000}},
    {**NOOP, "id": "stuck", "options": {"echo": True, "first_delay_ms": 600_000}},
]


SYSTEM = {"models": MODELS, "sharded": True}


def ended(client: httpx.Client, asked: Json) -> Json:
    answer = client.get(f"/v1/requests/{asked['request_id']}?wait=50")
    assert answer.json()["done"], answer.text
    return answer.json()


def said(client: httpx.Client, conversation: str) -> list[str]:
    return [one["content"][0]["text"] for one in items(client, conversation) if one["role"] == "user"]


def live_keys(system: System, conversation: str) -> list[bytes]:
    """Keys of its records that no tombstone takes away, as a stock consumer finds them."""
    live: dict[bytes, None] = {}
    for message in system.read(system.names.conversation_log):
        split = split_key(message.key())
        if split is not None and split[0] == conversation:
            live.pop(split[1], None)
            if message.value() is not None:
                live[split[1]] = None
    return list(live)


def run_until(system: System, client: httpx.Client, asked: Json, status: str) -> None:
    def is_there() -> bool:
        return client.get(f"/v1/requests/{asked['request_id']}").json()["status"] == status

    eventually(is_there, 30, lambda: system.logs(10))


def test_turns_go_on_over_kills_and_lost_copies(system: System, client: httpx.Client) -> None:
    for number in range(3):
        assert questions(turn(client, "c", f"q{number}")) == [f"q{one}" for one in range(number + 1)]
        turn(client, f"other-{number}", "something else")
    asked = turn(client, "c", "q3", wait=0, model="slow")
    run_until(system, client, asked, "running")
    system.process("w").kill9()
    system.worker("w1").wait_ready()
    assert questions(ended(client, asked)) == ["q0", "q1", "q2", "q3"]
    assert said(client, "c") == ["q0", "q1", "q2", "q3"]
    system.process("w").kill9()
    (system.folder / "w1" / "conversations").unlink()
    system.worker("w1").wait_ready()
    assert questions(turn(client, "c", "q4")) == ["q0", "q1", "q2", "q3", "q4"]
    before = items(client, "c")
    system.process("g").kill9()
    for name in ("g1", "g2"):  # over its copy, and beside it without one
        system.gateway(name).wait_ready()
        with httpx.Client(base_url=system.process("g").url, timeout=60) as other:
            assert items(other, "c") == before
            found = [one["id"] for one in other.get("/v1/conversations?limit=100").json()["data"]]
            assert {"c", "other-0", "other-1", "other-2"} <= set(found)
    names = [name for name in admin.partition_counts(system.kafka) if name.startswith(f"{system.prefix}conv")]
    assert names == [], "no conversation has a topic of its own"
    with Client(system.kafka) as direct:
        assert [turn.offset for turn in direct.history("c")] == [one["offset"] for one in before]


def test_a_worker_that_cannot_write_its_copy_says_so_and_goes_on_when_it_can(
    system: System, client: httpx.Client
) -> None:
    turn(client, "held", "q0")
    worker = system.process("w")
    with closing(sqlite3.connect(system.folder / worker.name / "conversations", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        asked = turn(client, "held", "q1", wait=0)
        wait_until(lambda: "database is locked" in httpx.get(worker.url + "/readyz").text, 40, worker.tail)
        assert not worker.ready()
        other.execute("ROLLBACK")
    assert questions(ended(client, asked)) == ["q0", "q1"]
    assert worker.ready()


def test_a_deleted_conversation_ends_its_turns_and_begins_anew(system: System, client: httpx.Client) -> None:
    turn(client, "gone", "old")
    stuck = turn(client, "gone", "stuck", wait=0, model="stuck")
    waiting = turn(client, "gone", "waiting", wait=0)
    run_until(system, client, stuck, "running")
    assert client.delete("/v1/conversations/gone").json()["deleted"]
    assert [ended(client, one)["status"] for one in (stuck, waiting)] == ["cancelled", "cancelled"]
    assert client.get("/v1/conversations/gone").status_code == 404
    assert live_keys(system, "gone") == []
    assert questions(turn(client, "gone", "new")) == ["new"]
    assert said(client, "gone") == ["new"]
    system.process("w").kill9()
    assert client.delete("/v1/conversations/gone").status_code == 200
    late = turn(client, "gone", "newer", wait=0)
    system.worker("w1").wait_ready()
    assert questions(ended(client, late)) == ["newer"]
    assert [key.partition(b"/")[0] for key in live_keys(system, "gone")] == [
        b"fork",
        *[late["request_id"].encode()] * 2,
    ]


def test_forks_outlive_their_parent_which_goes_with_the_last(system: System, client: httpx.Client) -> None:
    for number in range(3):
        turn(client, "root", f"q{number}")
    answer = items(client, "root")[3]
    fork(client, "root", answer["offset"], "heir")
    assert questions(turn(client, "heir", "mine")) == ["q0", "q1", "mine"]
    last = items(client, "heir")[-1]
    fork(client, "heir", last["offset"], "grandchild")
    assert client.delete("/v1/conversations/root").status_code == 200
    assert client.get("/v1/conversations/root").status_code == 404
    assert questions(turn(client, "heir", "more")) == ["q0", "q1", "mine", "more"]
    assert said(client, "grandchild") == ["q0", "q1", "mine"]
    assert questions(turn(client, "root", "anew")) == ["anew"]
    assert client.delete("/v1/conversations/root").status_code == 200
    assert said(client, "grandchild") == ["q0", "q1", "mine"]
    assert client.delete("/v1/conversations/heir").status_code == 200
    assert live_keys(system, "root"), "the grandchild inherits from it"
    assert questions(turn(client, "grandchild", "last")) == ["q0", "q1", "mine", "last"]
    assert client.delete("/v1/conversations/grandchild").status_code == 200
    assert [live_keys(system, one) for one in ("root", "heir", "grandchild")] == [[], [], []]


def test_what_is_erased_is_erased_for_all_who_read_it(system: System, client: httpx.Client) -> None:
    done = [turn(client, "leak", text) for text in ("public", "secret", "after")]
    fork(client, "leak", items(client, "leak")[-1]["offset"], "leak-2")
    assert client.delete(f"/v1/requests/{done[1]['request_id']}").status_code == 200
    eventually(lambda: said(client, "leak") == ["public", "after"], 30, lambda: str(said(client, "leak")))
    assert said(client, "leak-2") == ["public", "after"]
    assert questions(turn(client, "leak-2", "next")) == ["public", "after", "next"]
    assert not [key for key in live_keys(system, "leak") if key.startswith(done[1]["request_id"].encode())]


def test_followers_and_the_summarizer_see_what_comes(system: System, client: httpx.Client) -> None:
    made = client.post("/v1/conversations", json={"id": "live", "summarize": {"every_turns": 2, "model": "talk"}})
    assert made.status_code == 200, made.text
    with client.stream("GET", "/v1/conversations/live/events", timeout=40) as events:
        lines = events.iter_lines()
        assert next(line for line in lines if line.startswith("data:"))
        summarizer = system.summarizer()
        summarizer.wait_ready()
        for number in range(4):
            turn(client, "live", f"q{number}")
            turn(client, "beside", "others write to the topic too")
        summarizer.kill9()
        for number in range(4, 8):
            turn(client, "live", f"q{number}")
        shown = [json.loads(line[5:]) for line in _data(lines, 8)]
    assert [one["item"]["role"] for one in shown] == ["user", "assistant"] * 4
    system.summarizer("s2").wait_ready()
    ends = [one["offset"] for one in items(client, "live") if one["role"] == "assistant"]

    wait_until(lambda: covered(client, "live") == [ends[1], ends[3]], 60, lambda: f"{ends}\n{system.logs(10)}")


def covered(client: httpx.Client, conversation: str) -> list[int]:
    """Through which offsets its summaries go."""
    records = client.get(f"/v1/conversations/{conversation}/replay?limit=1000").json()["data"]
    told = [one["message"] for one in records if one["message"]]
    return [one["covers_through"] for one in told if one["direction"] == "summary"]


def test_conversations_at_the_same_offsets_have_summaries_of_their_own(make_system: Callable[..., System]) -> None:
    policy = {"every_turns": 2, "model": "talk"}
    system = make_system(models=MODELS, sharded=True).start_all(["w1", "g1", "s1"])
    partitions = admin.partition_counts(system.kafka)[system.names.conversation_log]
    by_partition: dict[int, str] = {}
    for one in (f"s{number}" for number in range(100)):
        topic = system.names.conversation("default", one)
        by_partition.setdefault(address_of(system.names, topic, partitions).partition, one)
    assert len(by_partition) == partitions > 1
    with httpx.Client(base_url=system.process("g").url, timeout=60) as client:
        for one in by_partition.values():
            client.post("/v1/conversations", json={"id": one, "summarize": policy}).raise_for_status()
            for number in range(6):
                turn(client, one, f"q{number}")
        places = {tuple(item["offset"] for item in items(client, one)) for one in by_partition.values()}
        assert len(places) == 1, "they do not stand at the same offsets"
        for one in by_partition.values():
            wait_until(lambda one=one: covered(client, one), 30, lambda: system.logs(10))
        asked = client.get("/v1/requests?task=summarization&limit=100").json()["data"]
        assert {one["conversation_id"] for one in asked} == set(by_partition.values()), "they share a request"


def test_what_a_killed_worker_left_of_a_deleted_conversation_is_erased(system: System, client: httpx.Client) -> None:
    turn(client, "left", "kept")
    kafka, topic = system.kafka, system.names.conversation_log
    partitions = admin.partition_counts(kafka, [topic])[topic]
    transport = Transport(kafka)
    for conversation in ("left", "deleted"):
        address = address_of(system.names, system.names.conversation("default", conversation), partitions)
        key = address.key(b"r1/in/0")
        transport.send(topic, b"text", key=key, partition=address.partition, timestamp_ms=now_ms() - STRAY_MS)
    assert transport.close(20) == 0
    assert live_keys(system, "deleted") == [b"r1/in/0"]
    sweeping = system.gateway("sweeping", env={"PENSTOCK_GATEWAY__SWEEP_CONVERSATIONS_S": "1"})
    wait_until(lambda: live_keys(system, "deleted") == [], 60, sweeping.tail)
    assert b"r1/in/0" in live_keys(system, "left")
    assert sweeping.stop() == 0, sweeping.tail()


def test_conversations_go_on_where_they_stand_after_partitions_were_added(system: System, client: httpx.Client) -> None:
    ids = [f"spread-{number}" for number in range(12)]
    for one in ids:
        turn(client, one, "before")
    topic = system.names.conversation_log
    admin_client = AdminClient(system.kafka.librdkafka())
    admin_client.create_partitions([NewPartitions(topic, 9)])[topic].result(20)
    for one in ids:
        assert questions(turn(client, one, "beside")) == ["before", "beside"]
    system.process("w").kill9()
    system.process("g").kill9()
    (system.folder / "w1" / "conversations").unlink()
    system.worker("w1").wait_ready()
    system.gateway("g3").wait_ready()
    with httpx.Client(base_url=system.process("g").url, timeout=60) as other, Client(system.kafka) as direct:
        for one in ids:
            assert questions(turn(other, one, "after")) == ["before", "beside", "after"]
            assert said(other, one) == ["before", "beside", "after"]
            assert len(direct.history(one)) == 6


def _data(lines: Iterator[str], count: int) -> list[str]:
    found: list[str] = []
    while len(found) < count:
        line = next(lines)
        if line.startswith("data:") and '"item"' in line:
            found.append(line)
    return found
