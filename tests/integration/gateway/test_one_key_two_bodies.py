"""One Idempotency-Key with different bodies at two gateways in one instant: one body is accepted, everywhere."""

from __future__ import annotations

import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

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
