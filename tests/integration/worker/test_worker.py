"""One worker process and Kafka: outcomes, statuses, streams, expiry, poison, turns, an orderly stop."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from confluent_kafka import Producer

from penstock.schemas.topics import HEADER_ATTEMPT, conversation_key, partition_for
from system import System, eventually
from worker_requests import command, engine, outcome, records, send, statuses, turn

Make = Callable[..., System]

SYSTEM = {
    "models": [
        engine(tokens=3),
        {**engine(tokens=30, delay_ms=10), "id": "pieces"},
        {**engine(tokens=2000, delay_ms=20, slots=1), "id": "slow"},
        {**engine(echo=True), "id": "echo"},
    ],
    "worker_options": {"model_absent_s": 1},
    "processes": ["w1"],
}


def wait_committed(system: System) -> None:
    eventually(lambda: system.lag() == 0, 10, system.process("w").tail)


def states(system: System) -> list[str]:
    """What its workers said of themselves."""
    return [one.state for one in system.worker_states()]


def ended_with(system: System, request_id: str) -> str:
    error = outcome(system, request_id).error
    assert error is not None, f"{request_id} has no error"
    return error.code


def terminals(system: System, request_id: str) -> int:
    return sum(event.is_terminal and event.request_id == request_id for event in system.results())


def test_a_request_runs_and_its_offset_is_committed(system: System) -> None:
    assert len(system.committed()) == 5 * 4, "every partition has a committed start"
    send(system, {"request_id": "r1", "model": "noop", "metadata": {"mine": "7"}})
    event = outcome(system, "r1")
    assert (event.status, event.output_text, event.attempt) == ("completed", "word0 word1 word2 ", 1)
    assert event.usage.completion_tokens == 3
    assert event.timings is not None
    assert event.metadata == {"mine": "7"}
    assert event.epoch >= 1
    assert event.origin.topic == system.names.request("text_generation", 5)
    wait_committed(system)
    eventually(lambda: statuses(system, "r1") == ["completed"], 10, lambda: str(statuses(system, "r1")))
    assert states(system)[-1] == "running"


def test_a_stream_is_its_text_in_pieces(system: System) -> None:
    send(system, {"request_id": "stream", "model": "pieces", "stream": True})
    event = outcome(system, "stream")
    chunks = [e for e in system.results() if e.kind == "chunk" and e.request_id == "stream"]
    assert "".join(chunk.text or "" for chunk in chunks) == event.output_text
    assert [i for chunk in chunks for i in chunk.token_ids or []] == list(range(30))
    assert chunks[0].text == "word0 ", "the first token goes out at once"
    assert len(chunks) < 25, "later ones are gathered"
    offsets = [chunk.text_offset for chunk in chunks]
    assert offsets == [sum(len(c.text or "") for c in chunks[:n]) for n in range(len(chunks))]
    assert "running" in statuses(system, "stream")


def test_what_cannot_run_says_so(system: System) -> None:
    send(
        system,
        {"request_id": "model", "model": "no-such-model"},
        {"request_id": "task", "task": "image_generation", "payload": {"prompt": "a cat"}},
        {"request_id": "long", "model": "slow", "execution_timeout_ms": 300, "max_attempts": 1},
    )
    assert ended_with(system, "model") == "model_not_found"
    assert ended_with(system, "task") == "model_not_found", "no model here draws"
    assert ended_with(system, "long") == "execution_timeout"
    # First: of two that wait the one with the earlier deadline starts.
    send(system, {"request_id": "blocks", "model": "slow"})
    eventually(lambda: "running" in statuses(system, "blocks"), 20, system.process("w").tail)
    send(system, {"request_id": "late", "model": "slow", "ttl_ms": 400})
    assert outcome(system, "late").status == "expired"
    command(system, "cancel", "blocks")
    wait_committed(system)


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_a_compressed_record_runs_and_so_does_the_next(system: System, codec: str) -> None:
    producer = Producer({"bootstrap.servers": system.bootstrap, "compression.type": codec})
    body = {"request_id": f"packed-{codec}", "task": "text_generation", "payload": {"prompt": "hello " * 200}}
    producer.produce(system.names.request("text_generation", 5), json.dumps(body), partition=0)
    assert producer.flush(60) == 0
    send(system, {"request_id": f"next-{codec}"}, partition=0)
    for request_id in (f"packed-{codec}", f"next-{codec}"):
        assert outcome(system, request_id, 15).status == "completed"
    assert system.process("w1").alive()


def test_poison_is_dead_lettered_with_its_bytes(system: System) -> None:
    topic = system.names.request("text_generation", 5)
    producer = Producer({"bootstrap.servers": system.bootstrap})
    poison = {b"\x07garbage": "wrong_magic", b"{not json": "bad_json", b"\x00\x50\x4e\xff\xff": "unknown_schema"}
    for value in poison:
        producer.produce(topic, value, key="k", headers=[("a", b"1")], partition=2)
    producer.produce(topic, b'{"request_id": "mine", "task": "text_generation", "payload": {}}', partition=2)
    producer.flush()
    send(system, {"request_id": "good"}, partition=2)
    assert outcome(system, "good").status == "completed"
    assert outcome(system, "mine").status == "dead_lettered"
    wait_committed(system)
    letters = {letter.original: letter for letter in system.dead_letters()}
    assert {value: letters[value].reason_code for value in poison} == poison
    for value in poison:
        assert letters[value].original_headers == {"a": b"1"}
        assert letters[value].origin.partition == 2


Headers = Sequence[tuple[str, bytes | None]]
POISON: list[tuple[bytes, Headers]] = [
    (b'{"a":' * 50_000, []),
    (b'{"request_id": "\\ud800", "task": "text_generation", "payload": {"prompt": 5}}', []),
    (b"\x01\x02", [("penstock-attempt", None), ("x", None)]),
    (json.dumps({"request_id": "y" * 900_000, "task": "text_generation"}).encode(), []),
]


def test_poison_of_any_kind_leaves_the_worker_alive(system: System) -> None:
    topic = system.names.request("text_generation", 5)
    producer = Producer({"bootstrap.servers": system.bootstrap})
    outcomes, letters = len(system.outcomes()), len(system.dead_letters())
    for value, headers in POISON:
        producer.produce(topic, value, partition=0, headers=list(headers))
    odd: dict[str, tuple[str, bytes | None]] = {
        "odd-1": ("penstock-attempt", None),
        "odd-2": ("penstock-origin", None),
        "odd-3": ("penstock-attempt", b"9" * 30),
    }
    for request_id, header in odd.items():
        body = {"request_id": request_id, "task": "text_generation", "payload": {"prompt": "x"}}
        producer.produce(topic, json.dumps(body).encode(), partition=0, headers=[header])
    assert producer.flush(60) == 0
    worker = system.process("w")
    eventually(lambda: len(system.outcomes()) == outcomes + 5 and system.lag() == 0, 40, worker.tail)
    assert worker.alive()
    assert len(system.dead_letters()) == letters + len(POISON)
    assert {system.outcomes()[request_id].status for request_id in odd} == {"completed"}


def test_the_same_request_twice_has_one_outcome(system: System) -> None:
    twice = {"request_id": "twice", "model": "pieces"}
    send(system, twice, twice)
    outcome(system, "twice")
    wait_committed(system)
    assert terminals(system, "twice") == 1


def test_attempts_begin_at_the_header(system: System) -> None:
    send(system, {"request_id": "second"}, headers=[(HEADER_ATTEMPT, b"2")])
    assert outcome(system, "second").attempt == 2


def test_turns_stand_in_a_line_with_their_own_past(system: System) -> None:
    send(system, *(turn(f"t{n}", f"question {n}", "line", model="echo") for n in range(4)))
    assert outcome(system, "t3").status == "completed"
    kept = records(system, "line")
    assert [key for key, _ in kept] == [
        key for n in range(4) for key in (f"t{n}/in/0/{kept[0][1].epoch}", f"t{n}/out/{kept[0][1].epoch}")
    ]
    contexts = [json.loads(outcome(system, f"t{n}").output_text or "") for n in range(4)]
    for n, context in enumerate(contexts):
        assert [m["content"] for m in context if m["role"] == "user"] == [f"question {k}" for k in range(n + 1)]


def test_a_turn_on_the_wrong_partition_goes_home_first(system: System) -> None:
    home = partition_for(conversation_key("default", "far").encode(), 4)
    away = (home + 1) % 4
    send(system, turn("lost", "hello", "far", model="echo"), partition=away)
    event = outcome(system, "lost")
    assert event.status == "completed"
    assert event.origin.partition == away, "its first record is its origin"
    wait_committed(system)
    read = system.read(system.names.request("text_generation", 5))
    places = [m.partition() for m in read if m.key() in (b"far", conversation_key("default", "far").encode())]
    assert sorted(place or 0 for place in places) == sorted((away, home))
    assert terminals(system, "lost") == 1


def test_erase_tombstones_the_turns(system: System) -> None:
    send(system, turn("e1", "secret", "erased", model="echo"), turn("e2", "kept", "erased", model="echo"))
    origin = outcome(system, "e1").origin
    outcome(system, "e2")
    command(system, "erase", "e1", origin=origin, conversation_id="erased")
    topic = system.names.conversation("default", "erased")
    eventually(lambda: sum(m.value() is None for m in system.read(topic)) == 2, 20, system.process("w").tail)
    send(system, turn("e3", "after", "erased", model="echo"))
    context = json.loads(outcome(system, "e3").output_text or "")
    assert "secret" not in [message["content"] for message in context]


def test_missing_topics_and_a_taken_port_are_named(system: System, tmp_path: Path) -> None:
    nowhere = System(system.bootstrap, "nothere-", tmp_path / "x")
    nowhere.folder.mkdir()
    lost = nowhere.worker()
    assert lost.wait_dead() == 1
    assert "penstock topics create" in lost.tail()
    second = system.worker("second", env={"PENSTOCK_WORKER__HEALTH_PORT": str(system.process("w1").port)})
    assert second.wait_dead() == 1
    assert "health_port" in second.tail()


def test_sigterm_finishes_what_runs_and_hands_back_the_rest(make_system: Make) -> None:
    system = make_system(models=[engine(tokens=20, delay_ms=25, slots=2)])
    worker = system.worker().wait_ready()
    ids = [f"r{n}" for n in range(8)]
    send(system, *({"request_id": i, "stream": True} for i in ids))
    eventually(lambda: any(e.kind == "chunk" for e in system.results()), 20, worker.tail)
    assert worker.stop() == 0, worker.tail()
    assert states(system)[-1] == "stopped"
    first = system.outcomes()
    assert 0 < len(first) < len(ids), "what ran was finished, the rest handed back"
    assert {e.request_id for e in system.results()} == set(first), "nothing is left half told"
    system.worker("w2").wait_ready()
    system.wait_drained(30)
    assert set(system.outcomes()) == set(ids)
    assert sum(e.is_terminal for e in system.results()) == len(ids)


def test_an_answer_that_stands_is_the_outcome_whatever_comes_after(make_system: Make) -> None:
    """The worker dies with the answer appended; until the next one comes the turn is cancelled."""
    system = make_system(models=[engine(tokens=3)])
    worker = system.worker("w1", faults="kill:after_answer_append@1").wait_ready()
    send(system, turn("t1", "hello"))
    assert worker.wait_dead(30) == -9, worker.tail()
    assert "t1" not in system.outcomes()
    command(system, "cancel", "t1")
    system.worker("w2").wait_ready()
    event = outcome(system, "t1")
    assert (event.status, event.output_text) == ("completed", "word0 word1 word2 ")
    assert [key.split("/")[1] for key, _ in records(system)] == ["in", "out"]
    # One that has no answer ends as it should, and makes no conversation.
    command(system, "cancel", "t2")
    send(system, turn("t2", "hello", "c2"))
    assert outcome(system, "t2").status == "cancelled"
