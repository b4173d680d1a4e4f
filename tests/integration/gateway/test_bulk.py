"""Many native requests in one call."""

from __future__ import annotations

import json
from typing import Any

import httpx

PAYLOAD = {"task": "text_generation", "payload": {"prompt": "p"}}
NDJSON = {"content-type": "application/x-ndjson"}


def send(gateway: Any, lines: list[Any], **headers: str) -> httpx.Response:
    text = "\n".join(one if isinstance(one, str) else json.dumps(one) for one in lines)
    return gateway.http.post("/v1/requests/bulk", content=text.encode(), headers={**NDJSON, **headers})


def answers(response: httpx.Response) -> list[dict[str, Any]]:
    assert (response.status_code, response.headers["content-type"]) == (200, NDJSON["content-type"])
    return [json.loads(line) for line in response.text.splitlines()]


def test_each_line_is_a_request(gateway: Any) -> None:
    lines = [{**PAYLOAD, "metadata": {"n": f"{n}"}} for n in range(500)]
    found = answers(send(gateway, lines))
    assert [one["index"] for one in found] == list(range(500))
    assert len({one["request_id"] for one in found}) == 500
    for number in (0, 499):
        shown = gateway.get(f"/v1/requests/{found[number]['request_id']}").json()
        assert (shown["status"], shown["metadata"]) == ("accepted", {"n": f"{number}"})


def test_wrong_lines_fail_alone(gateway: Any) -> None:
    wrong = [PAYLOAD, "no json", "[]", {**PAYLOAD, "task": "none"}, {**PAYLOAD, "request_id": "x"}, "", PAYLOAD]
    found = answers(send(gateway, [*wrong, "x" * 2_100_000]))
    assert [one["index"] for one in found] == list(range(7)), "blank lines do not count"
    codes = [one.get("error", {}).get("code") for one in found]
    assert codes == [None, "invalid", "invalid", "invalid", "unsupported_parameter", None, "too_large"]


def test_a_repeat_finds_the_same_requests(gateway: Any) -> None:
    lines = [PAYLOAD, {**PAYLOAD, "idempotency_key": "bulk-own"}, PAYLOAD]
    first = answers(send(gateway, lines, **{"Idempotency-Key": "bulk"}))
    assert answers(send(gateway, lines, **{"Idempotency-Key": "bulk"})) == first
    single = gateway.http.post("/v1/requests", json=PAYLOAD, headers={"Idempotency-Key": "bulk-own"})
    assert single.json()["request_id"] == first[1]["request_id"]
    changed = answers(send(gateway, [{**PAYLOAD, "priority": 1}], **{"Idempotency-Key": "bulk"}))
    assert changed[0]["error"]["code"] == "idempotency_key_reused"


def test_what_is_no_bulk(gateway: Any) -> None:
    assert gateway.http.post("/v1/requests/bulk", json=PAYLOAD).status_code == 400
    assert send(gateway, ["", " "]).status_code == 400
    too_many = answers(send(gateway, ["{}"] * 50_010))
    assert (len(too_many), too_many[-1]["index"], too_many[-1]["error"]["code"]) == (50_001, 50_000, "too_large")
