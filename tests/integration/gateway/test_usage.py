"""`GET /v1/usage` on real gateways: each request once, whatever is killed, and beyond the retention of the results."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.gateway.edge.keys import create_key
from penstock.schemas.codec import default_codec
from penstock.schemas.records import UsageTotal
from support import wait_until
from system import Process, System
from worker_requests import engine, send

EACH = 24
"""Requests of each tenant."""
FIGURES = ("requests", "completed", "dead_lettered", "input_tokens", "output_tokens")


class Callers:
    """A key for each of two tenants, and an operator's."""

    def __init__(self, file: Path) -> None:
        tenants = {"acme": "acme", "globex": "globex", "operator": "default"}
        scopes = {"operator": ("admin",)}
        made = {
            name: create_key(file, tenant=tenant, scopes=scopes.get(name, ("submit", "read")))
            for name, tenant in tenants.items()
        }
        self.ids = {name: secret.split("_")[1] for name, secret in made.items()}
        self._headers = {name: {"authorization": f"Bearer {secret}"} for name, secret in made.items()}

    def call(self, name: str, gateway: Process, path: str, **options: Any) -> httpx.Response:
        options["headers"] = {**self._headers[name], **options.get("headers", {})}
        return httpx.request(options.pop("method", "GET"), f"{gateway.url}{path}", timeout=40, **options)

    def submit(self, name: str, gateway: Process, **fields: Any) -> str:
        body = {"task": "text_generation", "payload": {"prompt": "go"}, **fields}
        return (
            self.call(name, gateway, "/v1/requests", method="POST", json=body).raise_for_status().json()["request_id"]
        )

    def ended(self, name: str, gateway: Process, request_id: str) -> dict[str, Any]:
        def done() -> dict[str, Any] | None:
            answer = self.call(name, gateway, f"/v1/requests/{request_id}?wait=20")
            return answer.json() if answer.status_code == 200 and answer.json()["done"] else None

        return wait_until(done, 90, lambda: f"{request_id} has ended: {gateway.tail()}")

    def usage(self, gateway: Process, by: str = "tenant,key") -> dict[tuple[Any, ...], dict[str, Any]]:
        found = self.call("operator", gateway, "/v1/admin/usage", params={"group_by": by}).raise_for_status().json()
        fields = [f"{one}_id" if one == "key" else one for one in by.split(",")]
        return {tuple(one[field] for field in fields): one for one in found["data"]}


@pytest.fixture
def callers(tmp_path: Path) -> Callers:
    return Callers(tmp_path / "keys.json")


@pytest.fixture
def site(make_system: Callable[..., System], callers: Callers, tmp_path: Path) -> System:
    return make_system(
        models=[engine(tokens=10, delay_ms=30)],
        gateway_options={"usage_s": 0.5},
        auth={"keys_file": str(tmp_path / "keys.json")},
    )


def figures(one: dict[str, Any]) -> dict[str, int]:
    return {name: one[name] for name in FIGURES}


def published(system: System) -> Counter[str]:
    """The sum of the newest records of the topic."""
    newest = {
        message.key(): default_codec().decode(message.value() or b"", UsageTotal)
        for message in system.read(system.names.usage)
    }
    return Counter(
        one.tenant
        for total in newest.values()
        for one in [total]
        for share in total.shares
        for _ in range(share.completed + share.dead_lettered)
    )


def test_totals_are_what_clients_saw_whatever_is_killed(site: System, callers: Callers) -> None:
    site.start_all(["g1", "g2", "w1"])
    g1, g2, w1 = (site.process(name) for name in ("g1", "g2", "w1"))
    asked = [
        (name, callers.submit(name, (g1, g2)[n % 2], priority=n % 9))
        for n in range(EACH)
        for name in callers.ids
        if name != "operator"
    ]
    asked.append(("acme", callers.submit("acme", g2, execution_timeout_ms=5, max_attempts=2)))
    first = asked[0]
    callers.ended(first[0], g2, first[1])
    w1.kill9()
    g1.kill9()
    site.worker("w2").wait_ready()
    send(site, {"request_id": "straight", "tenant": "globex"})
    seen = {name: Counter[str]() for name in callers.ids}
    for name, request_id in [*asked, ("globex", "straight")]:
        one = callers.ended(name, g2, request_id)
        used = (one["result"] or {}).get("usage") or {}
        seen[name].update(
            requests=1,
            **{one["status"]: 1},
            input_tokens=used.get("prompt_tokens", 0),
            output_tokens=used.get("completion_tokens", 0),
        )
    again = site.gateway("g1").wait_ready()
    empty = site.gateway("g3").wait_ready()

    def agreed(gateway: Process) -> bool:
        found = callers.usage(gateway, "tenant")
        return all(figures(found[name,]) == {one: seen[name][one] for one in FIGURES} for name in ("acme", "globex"))

    for gateway in (g2, again, empty):
        wait_until(lambda one=gateway: agreed(one), 30, lambda one=gateway: f"{one.name} {callers.usage(one)} {seen}")
    by_key = callers.usage(g2)
    assert by_key["acme", callers.ids["acme"]]["requests"] == EACH + 1
    assert by_key["globex", callers.ids["globex"]]["requests"] == EACH
    assert by_key["globex", None]["requests"] == 1
    assert by_key["acme", callers.ids["acme"]]["device_seconds"] >= EACH * 0.3
    own = callers.call("globex", g2, "/v1/usage", params={"group_by": ""}).json()["data"]
    assert [one["requests"] for one in own] == [EACH + 1]

    # Retention deletes the results: totals stay, also at a gateway that has never seen them, and are added to.
    sent = {"acme": EACH + 1, "globex": EACH + 1}
    wait_until(lambda: published(site) == sent, 30, lambda: f"published: {published(site)}")
    admin = AdminClient({"bootstrap.servers": site.bootstrap})
    ends = site.ends([site.names.result])
    for future in admin.delete_records([TopicPartition(*tp, end) for tp, end in ends.items()]).values():
        future.result(20)
    late = site.gateway("g4").wait_ready()
    assert agreed(late)
    seen["acme"].update(requests=1, completed=1)
    more = callers.ended("acme", late, callers.submit("acme", late))["result"]["usage"]
    seen["acme"].update(input_tokens=more["prompt_tokens"], output_tokens=more["completion_tokens"])
    for gateway in (late, g2, again, empty):
        wait_until(lambda one=gateway: agreed(one), 30, lambda one=gateway: f"{one.name} {callers.usage(one)} {seen}")


def test_pages_a_table_and_what_is_refused(site: System, callers: Callers) -> None:
    site.start_all(["g1", "w1"])
    gateway = site.process("g1")
    for name in ("acme", "globex"):
        callers.ended(name, gateway, callers.submit(name, gateway))
    first = callers.call("operator", gateway, "/v1/admin/usage", params={"group_by": "tenant", "limit": 1}).json()
    assert ([one["tenant"] for one in first["data"]], first["has_more"]) == (["globex"], True)
    rest = {"group_by": "tenant", "after": first["last_id"]}
    second = callers.call("operator", gateway, "/v1/admin/usage", params=rest).json()
    assert ([one["tenant"] for one in second["data"]], second["has_more"]) == (["acme"], False)
    only = callers.call("operator", gateway, "/v1/admin/usage", params={"tenant": "acme", "group_by": "tenant"}).json()
    assert [one["tenant"] for one in only["data"]] == ["acme"]
    table = callers.call("acme", gateway, "/v1/usage", headers={"accept": "text/csv"})
    (row,) = csv.DictReader(io.StringIO(table.text))
    assert (row["model"], row["requests"], row["completed"]) == ("noop", "1", "1")
    assert callers.call("acme", gateway, "/v1/admin/usage").status_code == 403
    for asked, said in (
        ({"group_by": "week"}, "group_by takes day, tenant, model, key, not 'week'"),
        ({"from": "2026-02-31"}, "from is no day of the calendar: 2026-02-31"),
        ({"from": "2026-02-02", "to": "2026-02-01"}, "from must be at or before to, and at most 366 days are shown"),
        ({"after": "x"}, "after is no id of this list"),
    ):
        answer = callers.call("acme", gateway, "/v1/usage", params=asked)
        assert (answer.status_code, json.loads(answer.text)["error"]["message"]) == (400, said)
