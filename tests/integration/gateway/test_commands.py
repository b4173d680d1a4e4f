"""Another priority for one request and for many, cancels by filter: what callers and Kafka see, with a real broker."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from penstock.cli.main import app
from penstock.common.reader import read_to_end
from penstock.gateway.edge.keys import create_key
from penstock.schemas.codec import default_codec
from penstock.schemas.records import ControlCommand
from support import wait_until


def commands(scribe: Any, kind: str = "reprioritize") -> list[ControlCommand]:
    records = read_to_end(scribe.settings, scribe.names.control)
    found = [default_codec().decode(record.value or b"", ControlCommand) for record in records]
    return [one for one in found if one.kind == kind]


def priority_of(gateway: Any, request_id: str) -> int:
    return gateway.get(f"/v1/requests/{request_id}").json()["priority"]


def test_a_request_gets_another_priority(own_place: Any) -> None:
    gateway, scribe = own_place.gateway(), own_place.scribe
    request_id = gateway.submit(priority=9)
    path = f"/v1/requests/{request_id}/reprioritize"
    answer = gateway.http.post(path, json={"priority": 1})
    assert (answer.status_code, answer.json()["priority"], answer.json()["status"]) == (202, 1, "accepted")
    assert gateway.http.post(path, json={"priority": "low"}).json()["priority"] == 8
    assert gateway.http.post(path, json={"priority": "high"}).json()["priority"] == 2
    assert [one.priority for one in commands(scribe)] == [1, 8, 2]
    assert [one["priority"] for one in gateway.get("/v1/requests").json()["data"]] == [2]
    queues = gateway.get("/v1/admin/stats").json()["queues"]
    assert {klass: queue["depth"] for klass, queue in queues.items()} == {"high": 1, "medium": 0, "low": 0}
    gateway.stop()
    second = own_place.gateway()
    assert priority_of(second, request_id) == 2
    fresh = own_place.gateway("another")
    assert priority_of(fresh, request_id) == 2


@pytest.mark.parametrize(
    "body", [{}, {"priority": -1}, {"priority": 1_001}, {"priority": True}, {"priority": "urgent"}, {"priority": {}}]
)
def test_priorities_that_there_are_not(gateway: Any, body: dict[str, Any]) -> None:
    answer = gateway.http.post(f"/v1/requests/{gateway.submit()}/reprioritize", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")


def test_one_that_runs_or_has_ended_stays_as_it_is(own_place: Any) -> None:
    gateway, scribe = own_place.gateway(), own_place.scribe
    job = scribe.request().status("running")
    path = f"/v1/requests/{job.id}/reprioritize"
    gateway.wait_for(job.id, "running")
    runs = gateway.http.post(path, json={"priority": 1})
    assert (runs.status_code, runs.json()["error"]["code"]) == (409, "conflict")
    assert runs.json()["error"]["details"] == {"status": "running"}
    job.status("retrying")
    gateway.wait_for(job.id, "retrying")
    assert gateway.http.post(path, json={"priority": 3}).status_code == 202
    job.end("x")
    gateway.wait_for(job.id, "completed")
    ended = gateway.http.post(path, json={"priority": 1})
    assert ended.status_code == 409
    assert ended.json()["error"]["details"]["status"] == "completed"
    assert [one.priority for one in commands(scribe)] == [3]
    assert gateway.http.post("/v1/requests/unknown/reprioritize", json={"priority": 1}).status_code == 404


def test_a_turn_takes_the_turns_before_it_along(own_place: Any) -> None:
    gateway, scribe = own_place.gateway(), own_place.scribe
    turns = [gateway.submit(priority=9, conversation_id="c") for _ in range(4)]
    other = gateway.submit(priority=9, conversation_id="other")
    assert gateway.http.post(f"/v1/requests/{turns[2]}/reprioritize", json={"priority": 1}).status_code == 202
    assert [one.request_id for one in commands(scribe)] == turns[:3]
    assert gateway.http.post(f"/v1/requests/{turns[0]}/reprioritize", json={"priority": 5}).status_code == 202
    assert [one.request_id for one in commands(scribe)[3:]] == [turns[2], turns[1], turns[0]]
    moved = gateway.http.post("/v1/requests/reprioritize", json={"ids": [turns[3], other], "priority": "high"}).json()
    assert set(moved["request_ids"]) == {*turns, other}
    assert [one.request_id for one in commands(scribe)[6:] if one.request_id != other] == turns


def test_tenants_and_keys(own_place: Any) -> None:
    keys_file = own_place.folder / "keys.json"
    keys = {
        "acme": create_key(keys_file, tenant="acme", max_priority=3),
        "globex": create_key(keys_file, tenant="globex", max_priority=4),
        "reader": create_key(keys_file, tenant="acme", scopes=("submit", "read")),
        "operator": create_key(keys_file, tenant="acme", scopes=("admin",)),
    }
    gateway = own_place.gateway(auth={"keys_file": keys_file}, ready=False)
    wait_until(lambda: httpx.get(gateway.url + "/readyz").status_code == 200, describe="ready")
    acme, globex, reader, operator = ({"authorization": f"Bearer {key}"} for key in keys.values())
    mine, theirs = gateway.submit(headers=acme, priority=9), gateway.submit(headers=globex, priority=9)

    def status(request_id: str, priority: Any, headers: dict[str, str]) -> int:
        path = f"/v1/requests/{request_id}/reprioritize"
        return gateway.http.post(path, json={"priority": priority}, headers=headers).status_code

    assert status(mine, 5, globex) == status(theirs, 5, acme) == 404
    assert status(mine, 1, acme) == status(theirs, 3, globex) == status(theirs, "high", globex) == 403
    assert status(mine, 5, reader) == 403
    assert status(mine, "high", acme) == 202
    assert gateway.get(f"/v1/requests/{mine}", headers=acme).json()["priority"] == 3
    assert status(theirs, 4, globex) == 202

    def many(headers: dict[str, str], **body: Any) -> httpx.Response:
        return gateway.http.post("/v1/requests/cancel", json=body, headers=headers)

    assert many(acme, tenant="globex", older_than_s=0).status_code == 403
    assert many(acme, tenant="*", older_than_s=0).status_code == 403
    assert many(acme, tenant="acme", older_than_s=0, dry_run=True).json()["request_ids"] == [mine]
    assert many(operator, tenant="globex", older_than_s=0, dry_run=True).json()["request_ids"] == [theirs]
    assert set(many(operator, tenant="*", older_than_s=0).json()["request_ids"]) == {mine, theirs}
    assert {one.tenant for one in commands(own_place.scribe, "cancel")} == {"acme", "globex"}


def test_many_are_chosen_by_a_filter(own_place: Any) -> None:
    gateway, scribe = own_place.gateway(), own_place.scribe
    low = [scribe.request(priority=9, model="a").id for _ in range(5)]
    high = [scribe.request(priority=1, model="a").id for _ in range(2)]
    scribe.request(priority=9, model="b").status("running")
    http = gateway.http

    def call(name: str, **body: Any) -> dict[str, Any]:
        answer = http.post(f"/v1/requests/{name}", json=body)
        assert answer.status_code == 202, answer.text
        return answer.json()

    dry = call("reprioritize", model="a", **{"class": "low"}, priority="medium", dry_run=True)
    assert (dry["count"], dry["dry_run"], commands(scribe)) == (5, True, [])
    scribe.request(priority=9, model="c")
    found = call("cancel", model="c", dry_run=True)
    scribe.request(priority=9, model="c")
    assert call("cancel", model="c", dry_run=True)["count"] == 2
    assert call("cancel", model="c", dry_run=True, accepted_before=found["accepted_before"])["count"] == 1
    assert call("reprioritize", model="a", older_than_s=3_600, priority=1)["count"] == 0
    assert call("reprioritize", model="b", priority=1)["count"] == 0, "it runs"
    seen: list[str] = []
    for left in (True, True, False):
        part = call("reprioritize", **{"class": "low"}, model="a", priority="medium", limit=2)
        seen += part["request_ids"]
        assert part["has_more"] is left
    assert sorted(seen) == sorted(low)
    wait_until(lambda: {priority_of(gateway, one) for one in low} == {5}, describe="the last command is read")
    assert call("cancel", task="embedding")["count"] == 0
    assert call("cancel", **{"class": "high"}, model="a")["request_ids"] == high
    seen = []
    for left in (True, True, False):
        part = call("cancel", model="a", limit=2)
        assert part["has_more"] is left
        seen += part["request_ids"]
    assert sorted(seen) == sorted(low)
    for body in (
        {"limit": 1},
        {"dry_run": True},
        {"class": "x"},
        {"ids": [], "model": "a"},
        {"moel": 1},
    ):
        for name in ("cancel", "reprioritize"):
            assert http.post(f"/v1/requests/{name}", json={**body, "priority": 1}).status_code == 400, body


def test_the_command_line_chooses_by_user_session_and_correlation(own_place: Any) -> None:
    gateway, scribe = own_place.gateway(), own_place.scribe
    ours = [scribe.request(priority=9, user_id="u", metadata={"correlation_id": name}).id for name in "kl"]
    in_session = scribe.request(priority=9, user_id="v", session_id="s").id
    scribe.request(priority=9)

    def requests(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["requests", *arguments, "--url", gateway.url])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert requests("cancel", "--user-id", "u", "--dry-run") == "2 requests match; nothing was done\n"
    assert requests("cancel", "--user-id", "u", "--session-id", "s") == "0 requests: cancel requested\n"
    assert requests("reprioritize", "--session-id", "s", "--to", "high") == "1 requests: priority high\n"
    assert requests("cancel", "--correlation-id", "k") == "1 requests: cancel requested\n"
    assert requests("cancel", "--user-id", "u", "--class", "low") == "1 requests: cancel requested\n"
    assert [(one.request_id, one.priority) for one in commands(scribe)] == [(in_session, 2)]
    assert [one.request_id for one in commands(scribe, "cancel")] == ours


def test_an_operator_sees_why_requests_of_any_tenant_wait_and_not_what_is_in_them(own_place: Any) -> None:
    """ "There is no such request", said the gateway to the operator who was asked why a tenant waits."""
    keys_file = own_place.folder / "keys.json"
    keys = [create_key(keys_file, tenant="shop"), create_key(keys_file, tenant="ops", scopes=("admin",))]
    gateway = own_place.gateway(auth={"keys_file": keys_file}, ready=False)
    wait_until(lambda: httpx.get(gateway.url + "/readyz").status_code == 200, describe="ready")
    shop, operator = ({"authorization": f"Bearer {key}"} for key in keys)
    ids = [gateway.submit(headers=shop, metadata={"secret": "s"}, user_id="u", priority=9) for _ in range(3)]

    def asked(path: str, headers: dict[str, str] = operator) -> tuple[int, Any]:
        answer = gateway.http.get(f"/v1/admin/requests{path}", headers=headers)
        return answer.status_code, answer.json()

    status, page = asked("?tenant=shop&limit=2")
    assert (status, [one["request_id"] for one in page["data"]], page["has_more"]) == (200, ids[:0:-1], True)
    rest = asked(f"?tenant=shop&limit=2&after={page['last_id']}")[1]["data"]
    assert [one["request_id"] for one in rest] == ids[:1]
    for one in (*rest, asked(f"/{ids[0]}?tenant=shop")[1], asked(f"/{ids[0]}?tenant=*")[1]):
        assert (one["tenant"], one["request_id"], one["user_id"]) == ("shop", ids[0], "u")
        assert (one["status"], one["waiting_for"]["reason"]) == ("accepted", "no_worker")
        assert not {"result", "metadata", "progress"} & one.keys()
    assert asked("?tenant=shop&status=running")[1]["data"] == asked("")[1]["data"] == []
    assert asked(f"/{ids[0]}")[0] == asked(f"/{ids[0]}?tenant=other")[0] == asked("/unknown?tenant=*")[0] == 404
    cursor = asked("?tenant=shop")[1]["cursor"]
    since = f"?changed_since={cursor.partition('-')[0]}-0&tenant"
    wait_until(lambda: len(asked(f"{since}=shop")[1]["data"]) == 3, describe="they have changed")
    assert {one["tenant"] for one in asked(f"{since}=shop")[1]["data"]} == {"shop"}
    assert asked(f"{since}=ops")[1]["data"] == []
    assert asked("?tenant=shop", shop)[0] == asked(f"/{ids[0]}?tenant=shop", shop)[0] == 403
    assert asked("?tenant=No!")[0] == asked("?tenant=*&after=no-tenant")[0] == 400
    _, of_all = asked("?tenant=*&limit=2")
    assert of_all["last_id"] == f"shop/{ids[-2]}"
    rest = asked(f"?tenant=*&limit=2&after={of_all['last_id']}")[1]["data"]
    assert [one["request_id"] for one in (*of_all["data"], *rest)] == ids[::-1]
    assert "secret" not in str(of_all)

    where = ["--url", gateway.url, "--key", keys[1]]
    done = CliRunner().invoke(app, ["requests", "list", "--tenant", "shop", "--status", "waiting", *where])
    assert done.exit_code == 0, done.output
    assert all(f"{one} " in done.stdout for one in ids)
    assert done.stdout.count("no worker is alive") == 3, done.stdout
    shown = CliRunner().invoke(app, ["requests", "show", ids[0], "--tenant", "shop", "--json", *where])
    assert '"no_worker"' in shown.stdout
    listed = CliRunner().invoke(app, ["models", "list", "--url", gateway.url, "--key", keys[0]])
    assert listed.exit_code == 0, "the scopes of a new key are enough"
