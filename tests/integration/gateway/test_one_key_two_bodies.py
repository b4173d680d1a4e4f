"""One Idempotency-Key with different bodies at two gateways in one instant: one body is accepted, everywhere."""

from __future__ import annotations

import dataclasses
import json
import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest

from kit.examples import ALL
from penstock.schemas.records import Origin
from penstock.schemas.topics import request_key
from support import wait_until
from system import NOOP, Process, System

Json = dict[str, Any]

SYSTEM = {"models": [{**NOOP, "id": "m"}], "processes": ["w1", "g1", "g2"]}
ROUNDS, THINGS_ROUNDS = (40, 8) if ALL else (20, 5)
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


def race(
    gateways: Sequence[Process], sent: Sequence[Json], key: str, path: str = "/v1/requests"
) -> list[httpx.Response]:
    """Each body at another gateway, at once."""
    start = threading.Barrier(len(sent))

    def submit(gateway: Process, body: Json) -> httpx.Response:
        start.wait(30)
        return httpx.post(f"{gateway.url}{path}", json=body, headers={"Idempotency-Key": key}, timeout=60)

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


ITEM = {"type": "message", "role": "user", "content": "x"}
CONVERSATIONS, FORK, PROMPTS = "/v1/conversations", "/v1/conversations/stem/fork", "/v1/completions"
THINGS: dict[str, tuple[str, Json, Json]] = {
    "titles": (CONVERSATIONS, {"title": "left"}, {"title": "right"}),
    "ids": (CONVERSATIONS, {"id": "{}-left"}, {"id": "{}-right"}),
    "items": (CONVERSATIONS, {"items": [ITEM]}, {"items": [ITEM, ITEM]}),
    "forks": (FORK, {"through": 0}, {"through": 1}),
    "forks by id": (FORK, {"through": 0, "id": "{}-left"}, {"through": 0, "id": "{}-right"}),
    "prompts": (PROMPTS, {"model": "m", "prompt": ["a", "b"]}, {"model": "m", "prompt": ["a", "c", "d"]}),
    "batches": ("/v1/batches", {"metadata": {"side": "left"}}, {"metadata": {"side": "right"}}),
}
"""What else is made under a key: a route with two bodies."""


@pytest.fixture(scope="module")
def input_file(system: System) -> str:
    """A file of a batch, and a conversation `stem` with two items."""
    url = system.process("g1").url
    stem = httpx.post(f"{url}/v1/conversations", json={"id": "stem", "items": [ITEM, ITEM]}, timeout=60)
    assert stem.status_code == 200, stem.text
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    line = json.dumps({"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body})
    form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", line.encode())}}
    return httpx.post(f"{url}/v1/files", **form, timeout=60).json()["id"]


@pytest.mark.parametrize("things", THINGS)
def test_one_body_makes_a_thing(system: System, things: str, input_file: str) -> None:
    """With another body at the other gateway; with the same body both answer with the same thing."""
    gateways = [system.process("g1"), system.process("g2")]
    path, *fields = THINGS[things]
    batch = {"input_file_id": input_file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    for number in range(THINGS_ROUNDS):
        name = f"{things.replace(' ', '-')}-{number}-{uuid.uuid4().hex[:6]}"
        sent = [
            {**(batch if things == "batches" else {}), **one, **({"id": one["id"].format(name)} if "id" in one else {})}
            for one in fields
        ]
        answers = race(gateways, sent, name, path)
        codes = [answer.status_code for answer in answers]
        made = [answer for answer in answers if answer.is_success]
        assert (len(made), codes.count(422)) == (1, 1), [answer.text for answer in answers]
        refusal = answers[codes.index(422)].json()["error"]
        assert (refusal["code"], refusal["param"]) == ("idempotency_key_reused", "Idempotency-Key")
        won = answers.index(made[0])
        again = race(gateways, [sent[won]] * 2, name, path)
        assert [one.json().get("id") for one in again] == [made[0].json()["id"]] * 2, [one.text for one in again]
        twice = race(gateways, [sent[0]] * 2, f"{name}-twice", path) if "id" not in sent[0] else again
        assert len({one.json()["id"] for one in twice}) == 1, [one.text for one in twice]
        assert all(one.is_success for one in twice)


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
