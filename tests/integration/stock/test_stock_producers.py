"""Records as stock clients of other languages write them, compressed by each codec, and records that nobody expects.

Each request gets its one outcome, what is no request gets its dead letter, and worker and gateway serve on.
"""

from __future__ import annotations

import json
import random
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka import Producer

from penstock.schemas.codec import default_codec
from penstock.schemas.records import DeadLetter
from penstock.schemas.requests import parse_request
from stock_clients import CLIENTS, StockClient, tool
from support import wait_until
from system import System

SYSTEM: dict[str, Any] = {}
PAIRS = [(client, codec) for client in CLIENTS for codec in client.codecs]
OUTCOME_S = 15.0


def body(request_id: str, **fields: Any) -> dict[str, Any]:
    return {"request_id": request_id, "task": "text_generation", "payload": {"prompt": "Grüße, 世界 " * 20}, **fields}


def foreign(request_id: str) -> dict[str, Any]:
    """A request under the names that other services use, with its id as what correlates it."""
    payload = {"prompt": "Grüße, 世界 " * 20}
    profile = {"modelName": "noop"}
    ids = {"requestId": request_id, "correlationId": request_id, "userId": "u-1"}
    return {**ids, "type": "completion", "modelProfile": profile, "payload": payload}


def write_requests(folder: Path, name: str) -> list[Path]:
    """Six requests in JSON, two under foreign names, and two in Avro; a file is named as its request's id."""
    files: list[Path] = []
    for number in range(6):
        path = folder / f"{name}-json-{number}.json"
        value = foreign(path.stem) if number > 3 else body(path.stem)
        path.write_text(json.dumps(value, ensure_ascii=False))
        files.append(path)
    for number in range(2):
        path = folder / f"{name}-avro-{number}.avro"
        request = parse_request(body(path.stem), now_ms=int(time.time() * 1000))
        path.write_bytes(default_codec().encode(request))
        files.append(path)
    return files


def alive(system: System) -> None:
    for process in system.processes:
        assert process.alive(), f"{process.name} ended with {process.popen.returncode}:\n{process.tail(60)}"


def wait_outcomes(system: System, ids: Sequence[str]) -> None:
    """Each request is completed, and told so once."""

    def arrived() -> bool:
        alive(system)
        return set(ids) <= set(system.outcomes())

    wait_until(arrived, OUTCOME_S, lambda: f"no outcome of {sorted(set(ids) - set(system.outcomes()))}", poll_s=0.1)
    terminal = [event for event in system.results() if event.is_terminal and event.request_id in set(ids)]
    assert sorted(event.request_id for event in terminal) == sorted(ids)
    assert {event.status for event in terminal} == {"completed"}


def topic_of(system: System) -> str:
    return system.names.request("text_generation", 5)


def new_id(name: str) -> str:
    return f"{name}-{uuid.uuid4().hex[:8]}"


def send_json(system: System, request_id: str, **produce: Any) -> None:
    producer = Producer({"bootstrap.servers": system.bootstrap})
    producer.produce(topic_of(system), json.dumps(body(request_id)), **produce)
    assert producer.flush(60) == 0


@pytest.mark.parametrize(("client", "codec"), PAIRS, ids=[f"{client.name}-{codec}" for client, codec in PAIRS])
def test_each_client_with_each_codec(system: System, tmp_path: Path, client: StockClient, codec: str) -> None:
    """JSON and Avro requests of a stock client, with its defaults and with each of its codecs, complete once each."""
    alive(system)
    files = write_requests(tmp_path, f"{client.name}-{codec}")
    client.send(system.bootstrap, topic_of(system), codec, files)
    ids = [path.stem for path in files]
    wait_outcomes(system, ids)
    correlated = {one: event.correlation_id for one, event in system.outcomes().items() if one in ids}
    assert {one: said for one, said in correlated.items() if said} == {one: one for one in ids[4:6]}


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_a_record_of_900_kb(system: System, tmp_path: Path, codec: str) -> None:
    """A record near the limit of size, which compresses badly, arrives by each codec."""
    alive(system)
    path = tmp_path / f"{new_id(f'large-{codec}')}.json"
    text = json.dumps(body(path.stem))
    # White space before the last brace: the request itself stays small, and so does its echo on other topics.
    padding = bytes(random.Random(7).choices(b" \t\r\n", k=900_000 - len(text.encode())))
    path.write_bytes(text[:-1].encode() + padding + b"}")
    next(client for client in CLIENTS if client.name == "kcat").send(system.bootstrap, topic_of(system), codec, [path])
    wait_outcomes(system, [path.stem])


EMPTY: list[tuple[str, bytes | None, bytes | None]] = [
    ("a null value", None, None),
    ("an empty value", None, b""),
    ("an empty key with an empty value", b"", b""),
    ("a tombstone", b"some-request", None),
]


@pytest.mark.parametrize(("key", "value"), [case[1:] for case in EMPTY], ids=[case[0] for case in EMPTY])
def test_a_record_without_a_request(system: System, key: bytes | None, value: bytes | None) -> None:
    """What holds no request gets one dead letter, with no bytes in it; the next record completes."""
    alive(system)
    after = new_id("after-empty")
    delivered: list[Any] = []
    producer = Producer({"bootstrap.servers": system.bootstrap})
    producer.produce(
        topic_of(system), value, key=key, partition=2, on_delivery=lambda error, message: delivered.append(message)
    )
    producer.produce(topic_of(system), json.dumps(body(after)), partition=2)
    assert producer.flush(60) == 0
    wait_outcomes(system, [after])
    place = (2, delivered[0].offset())

    def letters() -> list[DeadLetter]:
        return [one for one in system.dead_letters() if (one.origin.partition, one.origin.offset) == place]

    wait_until(letters, OUTCOME_S, lambda: f"no dead letter of {place}", poll_s=0.1)
    assert [letter.original for letter in letters()] == [b""]


def test_transactions_committed_and_aborted(system: System) -> None:
    """What a transaction committed completes; what it aborted was never sent; its markers do not hold the offset."""
    alive(system)
    kept, given_up, after = ([f"{new_id(name)}" for _ in range(5)] for name in ("kept", "aborted", "plain"))
    producer = Producer({"bootstrap.servers": system.bootstrap, "transactional.id": new_id("tx")})
    producer.init_transactions(30)
    for ids, end in ((given_up, producer.abort_transaction), (kept, producer.commit_transaction)):
        producer.begin_transaction()
        for request_id in ids:
            producer.produce(topic_of(system), json.dumps(body(request_id)), partition=3)
        assert producer.flush(60) == 0
        end(30)
    for request_id in after:
        send_json(system, request_id, partition=3)
    wait_outcomes(system, [*kept, *after])
    system.wait_drained(20)
    assert set(given_up).isdisjoint(system.outcomes()), "aborted requests ran"


def test_a_header_name_that_is_not_utf8(system: System) -> None:
    """`kcat -H $'\\xff=1'`: the request has one outcome, the next record too, and the gateway knows both."""
    alive(system)
    odd, after = new_id("odd"), new_id("after-odd")
    command = [tool("kcat"), "-P", "-b", system.bootstrap, "-t", topic_of(system), "-p", "0", "-H", b"\xff=1"]
    subprocess.run([*command, "-H", b"good=\xff\xfe"], input=json.dumps(body(odd)).encode(), check=True, timeout=30)
    send_json(system, after, partition=0)
    wait_outcomes(system, [after])
    wait_until(lambda: odd in system.outcomes(), OUTCOME_S, "an outcome of the record with the odd header")
    gateway = system.processes[1]
    for request_id in (odd, after):
        answer = httpx.get(f"{gateway.url}/v1/requests/{request_id}", params={"wait": 10}, timeout=15)
        assert answer.status_code == 200, answer.text
        assert answer.json()["done"], answer.text
    assert httpx.get(gateway.url + "/readyz", timeout=5).status_code == 200
    alive(system)


def test_nothing_is_left_behind(system: System) -> None:
    """After all of the above every record is committed."""
    alive(system)
    system.wait_drained(20)
