"""One Idempotency-Key with different bodies at two gateways in one instant: one body is accepted, everywhere."""

from __future__ import annotations

import dataclasses
import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from penstock.schemas.records import Origin
from penstock.schemas.topics import request_key
from support import wait_until
from system import NOOP, Process, System

Json = dict[str, Any]

SYSTEM = {"models": [{**NOOP, "id": "m"}], "processes": ["w1", "g1", "g2"]}
ROUNDS = 40
VARIANTS: dict[str, Sequence[Json]] = {
    "texts": ({}, {}),
    "conversations": ({"conversation_id": "{}-left"}, {"conversation_id": "{}-right"}),
    "classes": ({"priority": 1}, {"priority": 9}),
}


def bodies(variant: str, name: str) -> list[Json]:
    """Two requests that differ in their text, and in what the variant says."""
    found: list[Json] = []
    for side, fields in zip(("left", "right"), VARIANTS[variant], strict=True):
        payload = {"messages": [{"role": "user", "content": f"{side} of {name}"}]}
        own = {key: value.format(name) if isinstance(value, str) else value for key, value in fields.items()}
        found.append({"task": "text_generation", "payload": payload, "metadata": {"side": side}, **own})
    return found


def race(gateways: Sequence[Process], sent: Sequence[Json], key: str) -> list[httpx.Response]:
    """Each body at another gateway, at once."""
    start = threading.Barrier(len(sent))

    def submit(gateway: Process, body: Json) -> httpx.Response:
        start.wait(30)
        return httpx.post(f"{gateway.url}/v1/requests", json=body, headers={"Idempotency-Key": key}, timeout=60)

    with ThreadPoolExecutor(len(sent)) as pool:
        return list(pool.map(submit, gateways, sent))


def ended(gateway: Process, request_id: str) -> Json:
    answer = httpx.get(f"{gateway.url}/v1/requests/{request_id}?wait=60", timeout=90)
    assert answer.status_code == 200, answer.text
    assert answer.json()["done"], answer.text
    return answer.json()


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_body_is_accepted(system: System, variant: str) -> None:
    gateways = [system.process("g1"), system.process("g2")]
    seen: Counter[tuple[int, ...]] = Counter()
    sides: Counter[str] = Counter()
    for number in range(ROUNDS):
        name = f"{variant}-{number}-{uuid.uuid4().hex[:6]}"
        sent = bodies(variant, name)
        answers = race(gateways, sent, name)
        codes = [answer.status_code for answer in answers]
        seen[tuple(sorted(codes))] += 1
        assert sorted(codes) == [202, 422], [answer.text for answer in answers]
        won = codes.index(202)
        refusal = answers[1 - won].json()["error"]
        assert (refusal["code"], refusal["param"]) == ("idempotency_key_reused", "Idempotency-Key")
        sides[sent[won]["metadata"]["side"]] += 1
        facts = [ended(gateway, answers[won].json()["request_id"]) for gateway in gateways]
        for found in facts:
            assert found["metadata"] == sent[won]["metadata"]
            assert found.get("conversation_id") == sent[won].get("conversation_id")
            assert found["status"] == "completed"
        for gateway in gateways:  # whoever asks again hears the same
            again = [race([gateway], [body], name)[0].status_code for body in sent]
            assert again[won] == 202
            assert again[1 - won] == 422
    assert len(sides) == 2, f"one gateway won each time: {sides}"


def test_gateways_show_the_record_that_ran_of_two_with_one_id(own_place: Any) -> None:
    """Services on Kafka choose ids themselves. The gateways have read them at other times, and one begins again."""
    first = own_place.gateway("first")
    scribe, kinds = own_place.scribe, [{"conversation_id": f"c{n}", "priority": n} for n in (1, 5, 9)]
    jobs = [scribe.request(metadata={"n": f"{number}"}, **kind) for number, kind in enumerate(kinds)]
    shared = jobs[0].id
    for number in (1, 2):
        request = dataclasses.replace(jobs[number].request, request_id=shared)
        topic = scribe.names.request(request.task, request.priority)
        made = scribe.put(topic, request, request_key(request))
        place = Origin(topic=topic, partition=made.partition, offset=made.offset, append_time_ms=made.timestamp_ms)
        jobs[number] = dataclasses.replace(jobs[number], request=request, origin=place)
    first.wait_for(shared, "accepted")
    second = own_place.gateway("second")

    def shown(gateway: Any) -> tuple[Any, ...]:
        found = gateway.get(f"/v1/requests/{shared}").json()
        return found["metadata"], found["conversation_id"], found["priority"], found["status"]

    for gateway in (first, second):
        assert shown(gateway) == ({"n": "0"}, "c1", 1, "accepted"), "the one that was appended first"
    first.stop()
    jobs[1].status("running").chunk("ran", 0)
    again = own_place.gateway("first")
    for gateway in (again, second):
        wait_until(
            lambda shows=partial(shown, gateway): shows()[0] == {"n": "1"}, 20, f"the record that ran: {gateway.url}"
        )
    jobs[0].status("running").end("of the other")
    jobs[1].end("ran on")
    third = own_place.gateway("third")
    for gateway in (again, second, third):
        gateway.wait_for(shared, "completed")
        assert shown(gateway) == ({"n": "1"}, "c5", 5, "completed")
        assert gateway.get(f"/v1/requests/{shared}").json()["result"]["text"] == "ran on"
        assert shared in [one["request_id"] for one in gateway.get("/v1/requests?conversation_id=c5").json()["data"]]
        assert gateway.get("/v1/requests?conversation_id=c1").json()["data"] == []
