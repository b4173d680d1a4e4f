"""What a real worker and a real gateway put on the topics is as the AsyncAPI document of that gateway says."""

from __future__ import annotations

import io
import json
import re
import time
from collections.abc import Iterator
from typing import Any

import fastavro
import httpx
import pytest
from confluent_kafka import Message, Producer
from jsonschema import Draft7Validator

from support import wait_until
from system import System

Json = dict[str, Any]
ELSEWHERE = {"conversationLog"}
"""Channels of the layout of conversations that this installation has not."""
JSON_ALONE = {"requestLow", "requestImage"}
"""Channels on which nothing here sends Avro."""
OWN_HEADERS = {"penstock-key-id", "penstock-origin", "penstock-names", "penstock-content"}
"""Of requests, that Penstock's own processes set for one another."""
SEVERAL = 8
"""So many dead letters are more than there are partitions."""
BROKEN = b"\x00 no record"
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def document(url: str) -> Json:
    answer = httpx.get(f"{url}/asyncapi.json", timeout=60)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    return answer.json()


def test_every_record_on_the_topics_is_a_message_of_its_channel(system: System, url: str, document: Json) -> None:
    for process in (system.bridge(), system.webhooks()):
        process.wait_ready()
    make_records(system, url)
    topics = system.reads.topics()
    for name, channel in document["channels"].items():
        if name in {"socket", *ELSEWHERE}:
            continue
        pattern = re.compile(re.sub(r"\\\{\w+\\\}", "[^.]+", re.escape(channel["address"])))
        found = [one for topic in topics if pattern.fullmatch(topic) for one in system.read(topic)]
        messages = {kind: document["components"]["messages"][kind] for kind in channel["messages"]}
        seen = {kind_of(document, messages, one) for one in found if one.value() not in (None, BROKEN)}
        wanted = {"requestJson"} if name in JSON_ALONE or name.endswith("penstock") else messages.keys()
        assert seen >= wanted, f"{channel['address']} has only {seen}"


def make_records(system: System, url: str) -> None:
    """At least one of each message on each topic."""
    turn = {"messages": [{"role": "user", "content": "hi"}]}
    text = {"task": "text_generation", "payload": turn}
    names = system.names
    called = {"callback_url": "https://example.com/hook", "callback_statuses": True}
    drawn = {"task": "image_generation", "payload": {"prompt": "x"}}
    send(system, names.request("text_generation", 5), json.dumps({**text, "tenant": "shop", **called}))
    send(system, names.request("text_generation", 8), json.dumps({**text, "tenant": "shop", "conversation_id": "c"}))
    send(system, names.request("text_generation", 1), json.dumps({**text, "priority": 1, "request_id": "urgent"}))
    send(
        system,
        names.request("image_generation", 5),
        json.dumps(drawn),
    )
    send(system, names.request("embedding", 5), json.dumps({"task": "embedding", "payload": {"input": "x"}}))
    for number, value in enumerate((turn, {"input": "x", "stream": True}, json.dumps({**turn, "model": "noop"}))):
        send(
            system,
            f"{system.prefix}llm-d",
            json.dumps({"id": f"m{number}", "deadline": "4000000000", "payload": value}),
        )
    for fields in (text, {**text, "pool": "nowhere"}):
        send(system, f"{system.prefix}penstock", json.dumps(fields))
    for _ in range(SEVERAL):
        send(system, names.request("text_generation", 5), BROKEN)
    with httpx.Client(base_url=url, headers={"traceparent": TRACE}, timeout=60) as client:

        def post(path: str, body: Any = None) -> Json:
            answer = client.post(path, json=body)
            assert answer.status_code in (200, 202), answer.text
            return answer.json()

        for fields in (
            {**text, "priority": 1, "stream": True, "conversation_id": "c"},
            text,
            {"task": "embedding", "model": "far", "payload": {"input": "hi"}},
        ):
            request = post("/v1/requests", fields)
            ended = client.get(request["status_url"], params={"wait": 30}).json()
            assert ended["status"] == "completed", ended
        later = post("/v1/requests", {**text, "start_after": int(time.time()) + 3_600})
        post(f"/v1/requests/{later['request_id']}/cancel")
        post("/v1/admin/models/noop/pin")

        def letters() -> list[str]:
            return [one["id"] for one in client.get("/v1/admin/dlq", params={"limit": SEVERAL}).json()["data"]]

        wait_until(lambda: len(letters()) == SEVERAL, 30, lambda: str(letters()))
        # Not the first of its partition: records in front of all that is left are deleted.
        purged = next(one for one in letters() if not one.endswith("/0"))
        assert post("/v1/admin/dlq/purge", {"ids": [purged]})["purged"] == 1
    answers = lambda: system.read(f"{system.prefix}answers")  # noqa: E731
    wait_until(lambda: len(answers()) == 5, 60, lambda: f"{len(answers())} answers of 5")
    logs = [
        names.delivery,
        names.control,
        names.audit,
        names.conversation("shop", "c"),
        names.conversation("default", "c"),
    ]
    present = lambda: {topic: len(system.read(topic)) for topic in logs if topic in system.reads.topics()}  # noqa: E731
    wait_until(lambda: len(present()) == len(logs) and all(present().values()), 60, lambda: str(present()))


def send(system: System, topic: str, value: str | bytes) -> None:
    producer = Producer({"bootstrap.servers": system.bootstrap, "partitioner": "murmur2_random"})
    producer.produce(topic, value, headers={"traceparent": TRACE})
    assert producer.flush(30) == 0


def kind_of(document: Json, messages: Json, record: Message) -> str:
    """The one message of the channel that this record is, with its key and headers."""
    refused: list[str] = []
    for kind, message in messages.items():
        problem = misfit(document, message, record)
        if problem is None:
            return kind
        refused.append(f"{kind}: {problem}")
    raise AssertionError(f"{record.topic()} at {record.offset()}: {refused}")


def misfit(document: Json, message: Json, record: Message) -> str | None:
    """Why the record is not this message; None if it is."""
    value = record.value() or b""
    payload = message["payload"]
    if "schemaFormat" in payload:
        if value[:1] != b"\0":
            return "no Avro"
        body = io.BytesIO(value[5:])
        try:
            found: Any = fastavro.schemaless_reader(body, payload["schema"], None)
        except (ValueError, EOFError, IndexError, UnicodeDecodeError) as error:
            return repr(error)
        if body.read(1) or not fastavro.validate(found, payload["schema"], raise_errors=False):
            return "not this record"
    elif value[:1] != b"{":
        return "no JSON"
    else:
        problem = next(errors_of(document, payload, json.loads(value)), None)
        if problem is not None:
            return problem
    headers = {name: bytes(content).decode() for name, content in record.headers() or []}
    unknown = headers.keys() - message["headers"]["properties"].keys() - OWN_HEADERS
    key = record.key()
    key_schema = message["bindings"]["kafka"]["key"]
    problems = [
        *(f"header {name} is not there" for name in unknown),
        *errors_of(document, message["headers"], headers),
        *errors_of(document, key_schema, None if key is None else bytes(key).decode()),
    ]
    return None if not problems else str(problems)


def errors_of(document: Json, schema: Json, value: Any) -> Iterator[str]:
    for error in Draft7Validator({**schema, "components": document["components"]}).iter_errors(value):
        yield f"{error.json_path}: {error.message[:300]}"
