"""One worker process and Kafka: outcomes, statuses, streams, cancels, expiry, poison, turns, an orderly stop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Producer

from penstock.schemas.codec import default_codec
from penstock.schemas.fold import ResultFold
from penstock.schemas.records import WorkerState
from penstock.schemas.topics import HEADER_ATTEMPT, conversation_key, partition_for
from system import System, eventually
from worker_requests import command, engine, outcome, records, send, statuses, turn

Make = Callable[..., System]


def test_a_request_runs_and_its_offset_is_committed(make_system: Make) -> None:
    system = make_system(models=[engine(tokens=3)])
    worker = system.worker().wait_ready()
    send(system, {"request_id": "r1", "metadata": {"mine": "7"}})
    event = outcome(system, "r1")
    assert event.status == "completed"
    assert event.output_text == "word0 word1 word2 "
    assert event.usage is not None
    assert event.usage.completion_tokens == 3
    assert event.timings is not None
    assert event.metadata == {"mine": "7"}
    assert event.epoch >= 1
    assert event.attempt == 1
    assert event.origin.topic == system.names.request("text_generation", 5)
    eventually(lambda: system.lag() == 0, 10, worker.tail)
    eventually(lambda: statuses(system, "r1") == ["completed"], 10, lambda: str(statuses(system, "r1")))
    states = [default_codec().decode(m.value() or b"", WorkerState) for m in system.read(system.names.worker)]
    assert states[-1].state == "running"
    assert worker.stop() == 0
    states = [default_codec().decode(m.value() or b"", WorkerState) for m in system.read(system.names.worker)]
    assert states[-1].state == "stopped"


def test_every_partition_has_a_committed_start_before_work(make_system: Make) -> None:
    system = make_system()
    system.worker().wait_ready()
    assert len(system.committed()) == 5 * 4


def test_a_stream_is_its_text_in_pieces(make_system: Make) -> None:
    system = make_system(models=[engine(tokens=30, delay_ms=10)])
    system.worker().wait_ready()
    send(system, {"request_id": "r1", "stream": True})
    event = outcome(system, "r1")
    chunks = [e for e in system.results() if e.kind == "chunk"]
    assert "".join(chunk.text or "" for chunk in chunks) == event.output_text
    assert [i for chunk in chunks for i in chunk.token_ids or []] == list(range(30))
    assert chunks[0].text == "word0 ", "the first token goes out at once"
    assert len(chunks) < 25, "later ones are gathered"
    offsets = [chunk.text_offset for chunk in chunks]
    assert offsets == [sum(len(c.text or "") for c in chunks[:n]) for n in range(len(chunks))]
    assert "running" in statuses(system, "r1")


def test_cancel_queued_running_and_before_the_worker(make_system: Make) -> None:
    system = make_system(models=[engine(tokens=2000, delay_ms=20, slots=1)])
    send(system, {"request_id": "early"})
    command(system, "cancel", "early", reason="too early")
    worker = system.worker().wait_ready()
    assert outcome(system, "early").status == "cancelled"
    send(system, {"request_id": "running", "stream": True})
    eventually(lambda: any(e.request_id == "running" for e in system.results()), 20, worker.tail)
    send(system, {"request_id": "queued"})
    eventually(lambda: "queued" in statuses(system, "queued"), 20, worker.tail)
    command(system, "cancel", "queued")
    assert outcome(system, "queued").status == "cancelled"
    command(system, "cancel", "running")
    event = outcome(system, "running")
    assert event.status == "cancelled"
    assert event.error is not None
    assert event.error.code == "cancelled"
    eventually(lambda: system.lag() == 0, 10, worker.tail)


def test_what_cannot_run_says_so(make_system: Make) -> None:
    system = make_system(models=[engine(tokens=2000, delay_ms=20, slots=1)], worker_options={"model_absent_s": 1})
    worker = system.worker().wait_ready()
    send(
        system,
        {"request_id": "model", "model": "no-such-model"},
        {"request_id": "task", "task": "image_generation", "payload": {"prompt": "a cat"}},
        {"request_id": "long", "execution_timeout_ms": 300, "max_attempts": 1},
    )
    assert (outcome(system, "model").error or event_error()).code == "model_not_found"
    assert (outcome(system, "task").error or event_error()).code == "model_not_found", "no model here draws"
    assert (outcome(system, "long").error or event_error()).code == "execution_timeout"
    send(system, {"request_id": "blocks"})  # first: of two that wait the one with the earlier deadline starts
    eventually(lambda: "running" in statuses(system, "blocks"), 20, worker.tail)
    send(system, {"request_id": "late", "ttl_ms": 400})
    assert outcome(system, "late").status == "expired"
    command(system, "cancel", "blocks")
    eventually(lambda: system.lag() == 0, 10, worker.tail)


def event_error() -> Any:
    raise AssertionError("the event has no error")


def test_poison_is_dead_lettered_with_its_bytes(make_system: Make) -> None:
    system = make_system()
    worker = system.worker().wait_ready()
    topic = system.names.request("text_generation", 5)
    producer = Producer({"bootstrap.servers": system.bootstrap})
    poison = [b"\x07garbage", b"{not json", b"\x00\x50\x4e\xff\xff"]
    for value in poison:
        producer.produce(topic, value, key="k", headers=[("a", b"1")], partition=2)
    producer.produce(topic, b'{"request_id": "mine", "task": "text_generation", "payload": {}}', partition=2)
    producer.flush()
    send(system, {"request_id": "good"}, partition=2)
    assert outcome(system, "good").status == "completed"
    assert outcome(system, "mine").status == "dead_lettered"
    eventually(lambda: system.lag() == 0, 10, worker.tail)
    letters = sorted(system.dead_letters(), key=lambda letter: letter.origin.offset)
    assert [letter.original for letter in letters[:3]] == poison
    assert [letter.reason_code for letter in letters[:3]] == ["wrong_magic", "bad_json", "unknown_schema"]
    assert letters[0].original_headers == {"a": b"1"}
    assert letters[0].origin.partition == 2


def test_the_same_request_twice_has_one_outcome(make_system: Make) -> None:
    system = make_system(models=[engine(tokens=20, delay_ms=20)])
    worker = system.worker().wait_ready()
    send(system, {"request_id": "r1"}, {"request_id": "r1"})
    outcome(system, "r1")
    eventually(lambda: system.lag() == 0, 10, worker.tail)
    assert sum(e.is_terminal for e in system.results()) == 1


def test_attempts_begin_at_the_header(make_system: Make) -> None:
    system = make_system()
    system.worker().wait_ready()
    send(system, {"request_id": "r1"}, headers=[(HEADER_ATTEMPT, b"2")])
    assert outcome(system, "r1").attempt == 2


def test_turns_stand_in_a_line_with_their_own_past(make_system: Make) -> None:
    system = make_system(models=[engine(echo=True)])
    system.worker().wait_ready()
    send(system, *(turn(f"r{n}", f"question {n}") for n in range(4)))
    assert outcome(system, "r3").status == "completed"
    kept = records(system)
    assert [key for key, _ in kept] == [
        key for n in range(4) for key in (f"r{n}/in/0/{kept[0][1].epoch}", f"r{n}/out/{kept[0][1].epoch}")
    ]
    contexts = [json.loads(outcome(system, f"r{n}").output_text or "") for n in range(4)]
    for n, context in enumerate(contexts):
        assert [m["content"] for m in context if m["role"] == "user"] == [f"question {k}" for k in range(n + 1)]


def test_a_turn_on_the_wrong_partition_goes_home_first(make_system: Make) -> None:
    system = make_system(models=[engine(echo=True)])
    worker = system.worker().wait_ready()
    home = partition_for(conversation_key("default", "c1").encode(), 4)
    away = (home + 1) % 4
    send(system, turn("r1", "hello"), partition=away)
    event = outcome(system, "r1")
    assert event.status == "completed"
    assert event.origin.partition == away, "its first record is its origin"
    eventually(lambda: system.lag() == 0, 10, worker.tail)
    topic = system.names.request("text_generation", 5)
    assert {(m.partition(), m.offset()) for m in system.read(topic)} == {(away, 0), (home, 0)}
    assert sum(e.is_terminal for e in system.results()) == 1


def test_killed_after_the_answer_was_kept(make_system: Make) -> None:
    system = make_system(models=[engine(echo=True)])
    doomed = system.worker("w1", faults="kill:after_answer_append")
    send(system, turn("r1", "hello", stream=True))
    assert doomed.wait_dead() == -9
    before = records(system)
    assert [message.direction for _, message in before] == ["in", "out"]
    system.worker("w2").wait_ready()
    event = outcome(system, "r1", 60)
    assert event.output_text == before[1][1].content
    assert records(system) == before
    assert not [e for e in system.results() if e.kind == "chunk" and e.epoch == event.epoch], "it ran again"


def test_erase_tombstones_the_turns(make_system: Make) -> None:
    system = make_system(models=[engine(echo=True)])
    worker = system.worker().wait_ready()
    send(system, turn("r1", "secret"), turn("r2", "kept"))
    origin = outcome(system, "r1").origin
    outcome(system, "r2")
    command(system, "erase", "r1", origin=origin, conversation_id="c1")
    topic = system.names.conversation("default", "c1")
    eventually(lambda: sum(m.value() is None for m in system.read(topic)) == 2, 20, worker.tail)
    send(system, turn("r3", "after"))
    context = json.loads(outcome(system, "r3").output_text or "")
    assert "secret" not in [message["content"] for message in context]


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("before_terminal@20", marks=pytest.mark.thorough),
        "before_commit@20",
        pytest.param("mid_stream@40", marks=pytest.mark.thorough),
    ],
)
def test_killed_at_any_moment_nothing_is_lost(make_system: Make, moment: str) -> None:
    system = make_system(models=[engine(tokens=5, delay_ms=15, slots=8)], worker_options={"session_timeout_s": 6})
    ids = [f"r{n}" for n in range(80)]
    send(system, *({"request_id": i, "stream": True, "priority": n % 10} for n, i in enumerate(ids)))
    doomed = system.worker("w1", faults=f"kill:{moment}")
    assert doomed.wait_dead(60) == -9, doomed.tail()
    finished = {(e.origin.topic, e.origin.partition, e.origin.offset) for e in system.results() if e.is_terminal}
    for (topic, partition), end in system.committed().items():
        assert all((topic, partition, offset) in finished for offset in range(end)), "ran ahead of an outcome"
    second = system.worker("w2").wait_ready()
    system.wait_drained(60)
    assert {i: system.outcomes()[i].status for i in ids} == dict.fromkeys(ids, "completed")
    for request_id in ids:
        fold = ResultFold(request_id=request_id, tenant="default")
        for event in system.results():
            if event.request_id == request_id:
                fold.apply(event)
        assert fold.terminal is not None
    assert second.stop() == 0, second.tail()


def test_sigterm_finishes_what_runs_and_hands_back_the_rest(make_system: Make) -> None:
    system = make_system(models=[engine(tokens=20, delay_ms=25, slots=2)])
    worker = system.worker().wait_ready()
    ids = [f"r{n}" for n in range(8)]
    send(system, *({"request_id": i, "stream": True} for i in ids))
    eventually(lambda: any(e.kind == "chunk" for e in system.results()), 20, worker.tail)
    assert worker.stop() == 0, worker.tail()
    first = system.outcomes()
    assert 0 < len(first) < len(ids), "what ran was finished, the rest handed back"
    assert {e.request_id for e in system.results()} == set(first), "nothing is left half told"
    system.worker("w2").wait_ready()
    system.wait_drained(30)
    assert set(system.outcomes()) == set(ids)
    assert sum(e.is_terminal for e in system.results()) == len(ids)


def test_missing_topics_and_a_taken_port_are_named(make_system: Make, tmp_path: Any) -> None:
    system = make_system()
    nowhere = System(system.bootstrap, "nothere-", tmp_path / "x")
    nowhere.folder.mkdir()
    lost = nowhere.worker()
    assert lost.wait_dead() == 1
    assert "penstock topics create" in lost.tail()
    first = system.worker("w1").wait_ready()
    second = system.worker("w2", env={"PENSTOCK_WORKER__HEALTH_PORT": str(first.port)})
    assert second.wait_dead() == 1
    assert "health_port" in second.tail()


@pytest.mark.parametrize("ending", ["cancelled", pytest.param("expired", marks=pytest.mark.thorough)])
def test_an_answer_that_stands_is_the_outcome_whatever_comes_after(make_system: Make, ending: str) -> None:
    """The worker dies with the answer appended; until the next one comes the turn is cancelled, or its time is over."""
    system = make_system(models=[engine(tokens=3)])
    worker = system.worker("w1", faults="kill:after_answer_append@1").wait_ready()
    send(system, turn("t1", "hello", **({"ttl_ms": 4_000} if ending == "expired" else {})))
    assert worker.wait_dead(30) == -9, worker.tail()
    assert "t1" not in system.outcomes()
    if ending == "cancelled":
        command(system, "cancel", "t1")
    else:
        appended = records(system)[0][1].created_at
        eventually(lambda: time.time() * 1000 > appended + 4_500, 10, lambda: "the deadline has not passed")
    system.worker("w2").wait_ready()
    event = outcome(system, "t1")
    assert (event.status, event.output_text) == ("completed", "word0 word1 word2 ")
    assert [key.split("/")[1] for key, _ in records(system)] == ["in", "out"]
    # One that has no answer ends as it should, and makes no conversation.
    command(system, "cancel", "t2")
    send(system, turn("t2", "hello", "c2"))
    assert outcome(system, "t2").status == "cancelled"


def test_poison_of_any_kind_leaves_the_worker_alive(make_system: Make) -> None:
    system = make_system()
    worker = system.worker().wait_ready()
    topic = system.names.request("text_generation", 5)
    producer = Producer({"bootstrap.servers": system.bootstrap})
    bad = [
        (b'{"a":' * 50_000, []),
        (b'{"request_id": "\\ud800", "task": "text_generation", "payload": {"prompt": 5}}', []),
        (b"\x01\x02", [("penstock-attempt", None), ("x", None)]),
        (json.dumps({"request_id": "y" * 900_000, "task": "text_generation"}).encode(), []),
    ]
    for value, headers in bad:
        producer.produce(topic, value, partition=0, headers=headers)
    for header in (("penstock-attempt", None), ("penstock-origin", None), ("penstock-attempt", b"9" * 30)):
        body = {"request_id": f"ok{len(header[1] or '')}{header[0]}", "task": "text_generation"}
        value = json.dumps({**body, "payload": {"prompt": "x"}}).encode()
        producer.produce(topic, value, partition=0, headers=[header])
    assert producer.flush(60) == 0
    eventually(lambda: len(system.outcomes()) == 5 and system.lag() == 0, 40, worker.tail)
    assert worker.alive()
    assert len(system.dead_letters()) == len(bad)
    assert sum(event.status == "completed" for event in system.outcomes().values()) == 3
