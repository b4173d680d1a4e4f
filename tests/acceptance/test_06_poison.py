"""Point 6: poison passes by: each bad record is dead-lettered with reason and bytes; the partition moves on."""

from __future__ import annotations

from confluent_kafka import Producer

from system import System, eventually

LONG = b'{"task":"text_generation","payload":{"prompt":"x","stop":["' + b"x" * 600_000 + b'"]}}'
POISON = {
    "bytes": b"\x01\x02\xff not a record",
    "wrong magic": b"\x07\x50\x4e\x00\x00abc",
    "unknown schema id": b"\x00\x50\x4e\xff\xff" + b"abc",
    "truncated": b"\x00\x50\x4e\x00\x00\x02",
    "bad json": b'{"task": "text_generation", "payload": ',
    "json without a task": b'{"payload": {"prompt": "x"}}',
    "over the limits": LONG,
    "empty": b"",
    "foreign schema id": b"\x00\x00\x00\x00\x01zzz",
}


SYSTEM = {"processes": ["w1"]}


def test_each_poison_is_dead_lettered_and_the_next_record_runs(system: System) -> None:
    topic = system.names.request("text_generation", 5)
    producer = Producer({"bootstrap.servers": system.bootstrap, "message.max.bytes": 2_000_000})
    for value in POISON.values():
        producer.produce(topic, value, partition=1)
    producer.produce(
        topic, b'{"request_id": "after-poison", "task": "text_generation", "payload": {"prompt": "ok"}}', partition=1
    )
    assert producer.flush(60) == 0
    eventually(lambda: "after-poison" in system.outcomes(), 60, lambda: system.processes[0].tail())
    system.wait_drained()
    letters = system.dead_letters()
    by_bytes = {letter.original: letter for letter in letters}
    missing = [name for name, value in POISON.items() if value not in by_bytes]
    assert missing == []
    for letter in letters:
        assert letter.reason_code
        assert letter.reason
        assert letter.origin.topic == topic
        assert letter.origin.partition == 1
    assert by_bytes[POISON["unknown schema id"]].reason_code == "unknown_schema"
    assert by_bytes[POISON["wrong magic"]].reason_code == "wrong_magic"
    assert by_bytes[POISON["bad json"]].reason_code == "bad_json"
    assert system.outcomes()["after-poison"].status == "completed"
