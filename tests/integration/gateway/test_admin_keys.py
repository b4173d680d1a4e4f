"""Keys and limits of tenants that operators change while two gateways run, and the record of what they did."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from penstock.cli.embedded_kafka import EmbeddedKafka
from penstock.cli.main import app as cli
from penstock.cli.paths import free_port
from penstock.common import admin
from penstock.common.reader import read_to_end
from penstock.gateway.edge.keys import create_key
from penstock.schemas.codec import default_codec
from penstock.schemas.records import KeyState
from support import create_topics, wait_until

from .conftest import Place

Headers = dict[str, str]


def bearer(secret: str) -> Headers:
    return {"authorization": f"Bearer {secret}"}


@pytest.fixture(scope="module")
def operator(place: Any) -> Headers:
    return bearer(create_key(place.folder / "keys.json", tenant="ops", scopes=["admin"], name="first"))


@pytest.fixture(scope="module")
def gateways(place: Any, operator: Headers) -> list[Any]:
    options = {"auth": {"keys_file": place.folder / "keys.json", "ticket_key": "shared"}, "probe_s": 0.2}
    return [place.gateway(name, limits={"outstanding": 7}, **options) for name in ("one", "two")]


def made(gateway: Any, operator: Headers, **fields: Any) -> tuple[str, Headers]:
    """(id, headers) of a new key."""
    answer = gateway.http.post("/v1/admin/keys", json=fields, headers=operator)
    assert answer.status_code == 201, answer.text
    return answer.json()["id"], bearer(answer.json()["secret"])


def status(gateway: Any, headers: Headers) -> int:
    return int(gateway.get("/v1/stats", headers=headers).status_code)


def soon(gateway: Any, headers: Headers, wanted: int) -> None:
    """The promise is a second; a busy machine has more."""
    wait_until(lambda: status(gateway, headers) == wanted, 10, lambda: f"{status(gateway, headers)}, not {wanted}")


def test_a_key_is_made_changed_rotated_and_revoked_at_all_gateways(gateways: list[Any], operator: Headers) -> None:
    one, two = gateways
    key_id, headers = made(one, operator, tenant="acme", name="shop", limits={"models": ["tiny"]})
    assert status(one, headers) == 200, "in force where it was made, at once"
    soon(two, headers, 200)

    shown = two.get(f"/v1/admin/keys/{key_id}", headers=operator).json()
    assert {
        "tenant": "acme",
        "name": "shop",
        "source": "topic",
        "limits": {"models": ["tiny"]},
    }.items() <= shown.items()
    assert not {"secret", "sha256"} & shown.keys()
    listed = two.get("/v1/admin/keys", headers=operator).json()["data"]
    assert {("first", "file"), ("shop", "topic")} <= {(key["name"], key["source"]) for key in listed}

    changed = one.http.post(f"/v1/admin/keys/{key_id}", json={"scopes": ["submit"]}, headers=operator).json()
    assert (changed["scopes"], changed["limits"]) == (["submit"], {"models": ["tiny"]})
    soon(two, headers, 403)
    one.http.post(f"/v1/admin/keys/{key_id}", json={"scopes": ["read"]}, headers=operator)
    soon(two, headers, 200)

    path = f"/v1/admin/keys/{key_id}/rotate"
    second = bearer(two.http.post(path, json={"grace_s": 600}, headers=operator).json()["secret"])
    soon(one, second, 200)
    assert [status(gateway, headers) for gateway in gateways] == [200, 200], "the old secret has its grace"
    third = bearer(two.http.post(path, json={"grace_s": 0}, headers=operator).json()["secret"])
    soon(one, third, 200)
    for former in (headers, second):
        soon(one, former, 401)

    assert one.http.delete(f"/v1/admin/keys/{key_id}", headers=operator).json()["deleted"] is True
    assert status(one, third) == 401
    soon(two, third, 401)
    assert two.http.delete(f"/v1/admin/keys/{key_id}", headers=operator).json()["deleted"] is True, "a repeat"


@pytest.mark.parametrize("change", ["revoke", "rotate"])
def test_sockets_end_with_the_secret_that_opened_them(gateways: list[Any], operator: Headers, change: str) -> None:
    one, two = gateways
    key_id, headers = made(one, operator, tenant="acme")
    soon(two, headers, 200)
    with connect(two.ws, additional_headers=headers) as socket:
        if change == "revoke":
            one.http.delete(f"/v1/admin/keys/{key_id}", headers=operator)
        else:
            one.http.post(f"/v1/admin/keys/{key_id}/rotate", json={"grace_s": 0}, headers=operator)
        with pytest.raises(ConnectionClosed) as closed:
            socket.recv(10)
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 4401


def test_a_key_expires(gateways: list[Any], operator: Headers) -> None:
    key_id, headers = made(gateways[0], operator, expires_at="2999-01-01T00:00:00Z")
    assert status(gateways[0], headers) == 200
    path = f"/v1/admin/keys/{key_id}"
    assert gateways[0].http.post(path, json={"expires_at": "1000"}, headers=operator).status_code == 200
    assert status(gateways[0], headers) == 401
    assert gateways[0].get(path, headers=operator).json()["expires_at"] == "1970-01-01T00:16:40.000Z"
    refused = gateways[0].http.post(f"{path}/rotate", headers=operator)
    assert (refused.status_code, "has expired" in refused.text) == (409, True)
    assert gateways[0].http.post(path, json={"name": "former"}, headers=operator).status_code == 200
    assert status(gateways[0], headers) == 401, "only a new end lets it work again"
    assert gateways[0].http.post(path, json={"expires_at": None}, headers=operator).status_code == 200
    assert status(gateways[0], headers) == 200


REFUSED: list[tuple[str, str, Any, int, str]] = [
    ("POST", "keys", {"scopes": []}, 400, "invalid"),
    ("POST", "keys", {"tenant": "No"}, 400, "invalid"),
    ("POST", "keys", {"limits": {"speed": 1}}, 400, "invalid"),
    ("POST", "keys", {"secret": "mine"}, 400, "unsupported_parameter"),
    ("POST", "keys", {"expires_at": "tomorrow"}, 400, "invalid"),
    ("POST", "keys", {"expires_at": "1000"}, 400, "invalid"),
    ("POST", "keys/none", {"rate": 1}, 404, "not_found"),
    ("POST", "keys/none/rotate", {"grace_s": -1}, 400, "invalid"),
    ("GET", "keys/none", None, 404, "not_found"),
    ("GET", "keys?after=none", None, 400, "invalid"),
    ("POST", "limits/acme", {"speed": 1}, 400, "invalid"),
    ("POST", "limits/acme", [], 400, "invalid"),
    ("POST", "limits/No", {}, 400, "invalid"),
    ("DELETE", "limits/nobody", None, 404, "not_found"),
    ("GET", "audit?after=x", None, 400, "invalid"),
]


@pytest.mark.parametrize(("method", "path", "body", "code", "error"), REFUSED)
def test_what_is_refused(
    gateways: list[Any], operator: Headers, method: str, path: str, body: Any, code: int, error: str
) -> None:
    options = {} if body is None else {"json": body}
    answer = gateways[0].http.request(method, f"/v1/admin/{path}", headers=operator, **options)
    assert (answer.status_code, answer.json()["error"]["code"]) == (code, error), answer.text


def test_tickets_and_other_keys_make_no_keys_and_the_last_operator_stays(
    gateways: list[Any], operator: Headers, place: Any
) -> None:
    gateway = gateways[0]
    _, plain = made(gateway, operator, tenant="acme")
    assert gateway.http.post("/v1/admin/keys", json={}, headers=plain).status_code == 403
    session = bearer(gateway.http.post("/v1/tickets", json={"use": "session"}, headers=operator).json()["ticket"])
    assert gateway.get("/v1/admin/keys", headers=session).status_code == 200
    assert gateway.http.post("/v1/admin/keys", json={}, headers=session).status_code == 403

    file = place.folder / "keys.json"
    first = json.loads(file.read_text())["keys"][0]["id"]
    refused = gateway.http.delete(f"/v1/admin/keys/{first}", headers=operator)
    assert (refused.status_code, "keys file" in refused.text) == (409, True)

    kept = file.read_text()
    second_id, second = made(gateway, operator, scopes=["admin"])
    path = f"/v1/admin/keys/{second_id}"
    file.write_text(kept.replace('"admin"', '"read"'))
    try:
        wait_until(lambda: gateway.get("/v1/admin/keys", headers=operator).status_code == 403)
        for method, options in (
            ("DELETE", {}),
            ("POST", {"json": {"scopes": ["read"]}}),
            ("POST", {"json": {"expires_at": "2999-01-01T00:00:00Z"}}),
        ):
            answer = gateway.http.request(method, path, headers=second, **options)
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict")
    finally:
        file.write_text(kept)
    wait_until(lambda: gateway.http.delete(path, headers=operator).status_code == 200)


def test_a_revocation_holds_against_a_gateway_that_had_not_read_of_it(
    gateways: list[Any], operator: Headers, place: Any
) -> None:
    """Its change is written behind the revocation, and compaction keeps it as the last record of the key."""
    key_id, headers = made(gateways[0], operator)
    names = place.kafka.names
    (late,) = [
        message
        for message in read_to_end(place.kafka, names.key)
        if message.key == f"key/{key_id}".encode() and message.value is not None
    ]
    gateways[0].http.delete(f"/v1/admin/keys/{key_id}", headers=operator)
    place.scribe.put(names.key, late.value, late.key)
    _, marker = made(gateways[0], operator)  # behind it
    fresh = place.gateway("fresh", auth={"keys_file": place.folder / "keys.json"})
    for gateway in (*gateways, fresh):
        soon(gateway, marker, 200)
        assert status(gateway, headers) == 401
    fresh.stop()


def test_a_record_that_cannot_be_read_stops_no_gateway(gateways: list[Any], operator: Headers, place: Any) -> None:
    key_id, headers = made(gateways[0], operator)
    for entry in ("null", "[1]", "x"):
        state = KeyState(kind="tenant", id="odd", updated_at=1, entry=entry)
        place.scribe.put(place.kafka.names.key, default_codec().encode(state), b"tenant/odd")
    place.scribe.put(place.kafka.names.key, b"no record", b"tenant/odd")
    gateways[0].http.delete(f"/v1/admin/keys/{key_id}", headers=operator)
    _, marker = made(gateways[0], operator)
    fresh = place.gateway("after", auth={"keys_file": place.folder / "keys.json"})
    for gateway in (*gateways, fresh):
        soon(gateway, marker, 200)
        assert status(gateway, headers) == 401
    fresh.stop()


def test_an_operators_key_with_limits_gives_no_more_than_it_has(gateways: list[Any], operator: Headers) -> None:
    rights = {"scopes": ["admin"], "expires_at": "2999-01-01T00:00:00Z", "limits": {"outstanding": 5}}
    own, narrow = made(gateways[0], operator, **rights)
    wide, _ = made(gateways[0], operator, scopes=["admin"])
    soon(gateways[1], narrow, 200)
    for path, body, wider in (
        ("keys", {"scopes": ["admin"]}, ["expires_at", "outstanding"]),
        (f"keys/{own}", {"expires_at": None}, ["expires_at"]),
        (f"keys/{own}", {"limits": {}}, ["outstanding"]),
        (f"keys/{wide}/rotate", {}, ["expires_at", "outstanding"]),
    ):
        answer = gateways[1].http.post(f"/v1/admin/{path}", json=body, headers=narrow)
        assert (answer.status_code, answer.json()["error"]["details"]["wider"]) == (403, wider), answer.text
    answer = gateways[1].http.post("/v1/admin/keys", json=rights, headers=narrow).json()
    assert (answer["made_by"], answer["limits"]) == (own, {"outstanding": 5})
    for key_id in (wide, own, answer["id"]):
        assert gateways[0].http.delete(f"/v1/admin/keys/{key_id}", headers=operator).status_code == 200


def test_limits_of_a_tenant_change_while_gateways_run(gateways: list[Any], operator: Headers) -> None:
    one, two = gateways
    _, headers = made(one, operator, tenant="busy")
    soon(two, headers, 200)

    def outstanding(gateway: Any) -> Any:
        return gateway.get("/v1/stats", headers=headers).json()["limits"].get("outstanding")

    assert [outstanding(gateway) for gateway in gateways] == [7, 7]
    ordered = one.http.post("/v1/admin/limits/busy", json={"outstanding": 1, "streams": None}, headers=operator).json()
    assert ordered["ordered"] == {"outstanding": 1, "streams": None}
    assert (ordered["configured"]["outstanding"], ordered["in_force"]["outstanding"]) == (7, 1)
    assert "streams" in ordered["configured"]
    assert "streams" not in ordered["in_force"]
    wait_until(lambda: outstanding(two) == 1, 10)
    two.submit(headers)
    full = two.http.post("/v1/requests", json={"task": "text_generation", "payload": {"prompt": "p"}}, headers=headers)
    assert full.json()["error"]["details"]["limit"] == "outstanding"
    assert [one["tenant"] for one in two.get("/v1/admin/limits", headers=operator).json()["data"]] == ["busy"]
    assert one.http.post("/v1/admin/limits/ops", json={"calls_per_s": 0.001}, headers=operator).status_code == 200
    for _ in range(3):
        assert one.get("/v1/admin/limits", headers=operator).status_code == 200, "an operator can undo it"
    assert one.http.delete("/v1/admin/limits/ops", headers=operator).status_code == 200
    assert one.http.delete("/v1/admin/limits/busy", headers=operator).json()["ordered"] is None
    wait_until(lambda: outstanding(two) == 7, 10)
    two.submit(headers)
    lifted = one.http.post("/v1/admin/limits/busy", json={"outstanding": None}, headers=operator).json()
    assert "outstanding" not in lifted["in_force"]
    wait_until(lambda: outstanding(two) is None, 10)
    for _ in range(8):  # with the two before, more than are configured
        two.submit(headers)


def actions(gateway: Any, operator: Headers, **query: Any) -> list[dict[str, Any]]:
    answer = gateway.get("/v1/admin/audit", headers=operator, params={"limit": 100, **query})
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def test_actions_are_recorded_with_their_outcome_and_without_secrets(gateways: list[Any], operator: Headers) -> None:
    one, two = gateways
    answer = one.http.post("/v1/admin/keys", json={"tenant": "acme", "name": "recorded"}, headers=operator)
    key_id, secret = answer.json()["id"], answer.json()["secret"]
    model = {"id": "m", "source": "x", "engine": "noop", "options": {"api_key": "hidden"}}
    one.http.post("/v1/admin/models", json=model, headers=operator)
    one.http.delete(f"/v1/admin/keys/{key_id}", headers=operator)
    one.http.post("/v1/admin/keys", content=rb'{"x": "\ud800", "y": NaN}', headers=operator)

    def newest() -> list[dict[str, Any]]:
        return actions(two, operator)[:4]

    def ended() -> bool:
        return all(event["status"] is not None for event in newest())

    wait_until(ended, 10, lambda: str(newest()))
    odd, deleted, added, created = newest()
    assert odd["parameters"] == {"body": {"x": "\ufffd", "y": "nan"}}
    operator_id = operator["authorization"].split("_")[1]
    assert created["action"] == "POST /v1/admin/keys"
    assert created["parameters"] == {"body": {"tenant": "acme", "name": "recorded"}}
    assert (created["key_id"], created["key_name"], created["tenant"]) == (operator_id, "first", "ops")
    assert (created["address"], created["status"], created["user"]) == ("127.0.0.1", 201, None)
    assert (deleted["action"], deleted["target"]) == ("DELETE /v1/admin/keys/{key_id}", f"/v1/admin/keys/{key_id}")
    assert added["parameters"]["body"]["options"] == {"api_key": "***"}
    log = b"".join(message.value or b"" for message in read_to_end(place_of(two), place_of(two).names.audit))
    assert secret.split("_", 2)[2].encode() not in log
    assert b"hidden" not in log


def place_of(gateway: Any) -> Any:
    return gateway.app.state.context.settings.kafka_settings()


def test_the_record_is_read_in_pages_and_filtered(gateways: list[Any], operator: Headers) -> None:
    gateway = gateways[0]
    for number in range(5):
        gateway.http.post(f"/v1/admin/limits/paged{number}", json={"outstanding": number}, headers=operator)
    found: list[str] = []
    after = None
    while True:
        query = {"action": "POST /v1/admin/limits", "limit": 2, **({} if after is None else {"after": after})}
        page = gateway.get("/v1/admin/audit", headers=operator, params=query).json()
        found += [event["target"].rsplit("/", 1)[1] for event in page["data"]]
        if not page["has_more"]:
            break
        after = page["last_id"]
    assert found[:5] == [f"paged{number}" for number in reversed(range(5))]
    assert len([one for one in found if one.startswith("paged")]) == 5
    assert actions(gateway, operator, key_id="nobody") == []
    assert actions(gateway, operator, since="2999-01-01T00:00:00Z") == []


def test_an_action_that_cannot_be_recorded_is_not_done(gateways: list[Any], operator: Headers, place: Any) -> None:
    """The topic refuses the record: it is larger than what it takes."""
    names = place.kafka.names
    before = len(read_to_end(place.kafka, names.key))
    from confluent_kafka.admin import AdminClient, AlterConfigOpType, ConfigEntry, ConfigResource

    client = AdminClient(place.kafka.librdkafka())

    def limit(value: str) -> None:
        entry = ConfigEntry("max.message.bytes", value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ConfigResource.Type.TOPIC, names.audit, incremental_configs=[entry])
        for future in client.incremental_alter_configs([resource]).values():
            future.result(10)

    limit("10")
    try:

        def refused() -> bool:
            return gateways[0].http.post("/v1/admin/keys", json={}, headers=operator).status_code == 503

        wait_until(refused, 20)
        after = len(read_to_end(place.kafka, names.key))
        answer = gateways[0].http.post("/v1/admin/keys", json={}, headers=operator)
        assert answer.status_code == 503, answer.text
        assert len(read_to_end(place.kafka, names.key)) == after >= before
    finally:
        limit("1048588")


def test_without_its_topics_a_gateway_serves_the_keys_of_the_file_and_says_what_is_missing(own_place: Any) -> None:
    """A cluster of an older release."""
    names, kafka = own_place.kafka.names, own_place.kafka
    for topic in (names.key, names.audit):
        admin.delete_topic(kafka, topic)
    file = own_place.folder / "keys.json"
    operator = bearer(create_key(file, scopes=["admin"]))
    gateway = own_place.gateway(auth={"keys_file": file}, probe_s=0.2)
    assert status(gateway, operator) == 200
    assert status(gateway, bearer("pk_unknown_x")) == 401
    answer = gateway.http.post("/v1/admin/keys", json={}, headers=operator)
    assert (answer.status_code, "penstock topics create" in answer.text) == (503, True), answer.text
    assert gateway.get("/v1/admin/audit", headers=operator).status_code == 503
    assert gateway.http.post("/v1/admin/classes/low/pause", headers=operator).status_code == 202, "as before"

    def problems() -> set[str]:
        found = gateway.get("/v1/admin/problems", headers=operator).json()["data"]
        return {one["problem"] for one in found}

    wait_until(lambda: problems() >= {"key_topic_unusable", "audit_unusable"}, 20, lambda: str(problems()))
    create_topics(own_place.bootstrap, own_place.prefix, partitions=2)
    wait_until(lambda: not problems() & {"key_topic_unusable", "audit_unusable"}, 20, lambda: str(problems()))

    def makes() -> bool:  # the producer looks for the topic again within a second or so
        return gateway.http.post("/v1/admin/keys", json={}, headers=operator).status_code == 201

    wait_until(makes, 20)


def test_a_gateway_without_keys_makes_none(own_place: Any) -> None:
    gateway = own_place.gateway()
    assert gateway.get("/v1/admin/keys").json()["data"] == []
    answer = gateway.http.post("/v1/admin/keys", json={})
    assert (answer.status_code, "auth.keys_file" in answer.text) == (409, True)
    assert gateway.http.post("/v1/admin/limits/default", json={"outstanding": 0}).status_code == 200
    body = {"task": "text_generation", "payload": {"prompt": "p"}}
    assert gateway.http.post("/v1/requests", json=body).status_code == 429


def test_keys_made_by_several_operators_at_once_are_all_kept(gateways: list[Any], operator: Headers) -> None:
    with ThreadPoolExecutor(8) as pool:
        making = [pool.submit(made, gateways[number % 2], operator, name=f"n{number}") for number in range(16)]
        keys = [one.result() for one in making]
    for gateway in gateways:
        for _, headers in keys:
            soon(gateway, headers, 200)


@pytest.mark.slow
def test_without_a_broker_known_keys_stay_in_force_and_a_new_gateway_refuses_none_for_good(tmp_path: Path) -> None:
    kafka = EmbeddedKafka(tmp_path / "kafka", free_port())
    kafka.start()
    place = Place(kafka, tmp_path)
    file = tmp_path / "keys.json"
    operator = bearer(create_key(file, scopes=["admin"]))
    options: dict[str, Any] = {"auth": {"keys_file": file}}
    try:
        gateway = place.gateway("old", **options)
        _, headers = made(gateway, operator)
        kafka.kill()
        assert status(gateway, headers) == 200
        assert status(gateway, bearer("pk_unknown_x")) == 401
        refused = gateway.http.post("/v1/admin/keys", json={}, headers=operator)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "broker_unavailable"), refused.text
        fresh = place.gateway("fresh", ready=False, **options)
        waits = fresh.get("/v1/stats", headers=headers)
        assert (waits.status_code, "retry-after" in waits.headers) == (503, True), waits.text
        kafka.start()
        seen: list[int] = []

        def serves() -> bool:
            seen.append(status(fresh, headers))
            return seen[-1] == 200

        wait_until(serves, 90, lambda: str(seen[-10:]))
        assert set(seen) <= {200, 429, 503}, "nobody is refused for good while the keys are not read"
        wait_until(lambda: gateway.http.post("/v1/admin/keys", json={}, headers=operator).status_code == 201, 60)
    finally:
        place.close()
        kafka.kill()


def test_commands_change_keys_at_a_gateway_and_in_a_file(
    gateways: list[Any], operator: Headers, place: Any, tmp_path: Path
) -> None:
    runner, gateway = CliRunner(), gateways[0]
    secret = operator["authorization"].removeprefix("Bearer ")

    def run(where: list[str], *arguments: str) -> str:
        done = runner.invoke(cli, ["keys", *arguments, *where])
        assert done.exit_code == 0, done.output
        return done.stdout.strip()

    for where in (["--url", gateway.url, "--key", secret], ["--file", str(tmp_path / "keys.json")]):
        first = run(where, "create", "--tenant", "cli", "--limit", "outstanding=3", "--expires", "2999-01-01T00:00:00Z")
        key_id = first.split("_")[1]
        second = run(where, "rotate", key_id, "--grace-s", "0")
        assert second.startswith(f"pk_{key_id}_")
        assert second != first
        assert run(where, "limit", key_id, "models=a,b") == f"{key_id} models=a,b"
        listed = [json.loads(line) for line in run(where, "list", "--json").splitlines()]
        (key,) = [one for one in listed if one["id"] == key_id]
        assert (key["limits"], key["expires_at"]) == ({"models": ["a", "b"]}, "2999-01-01T00:00:00.000Z")
        if "--url" in where:
            assert [status(gateway, bearer(one)) for one in (first, second)] == [401, 200]
            assert "outstanding=9" in run(where, "limit", "--tenant", "cli", "outstanding=9", "streams=")
            assert "outstanding=7" in run(where, "limit", "--tenant", "cli")
        assert run(where, "revoke", key_id) == f"{key_id} revoked"
    both = runner.invoke(cli, ["keys", "list", "--url", gateway.url, "--file", "keys.json"])
    assert (both.exit_code, "keep one of them" in both.output) == (2, True)

    cluster = ["--bootstrap-servers", place.bootstrap, "--topic-prefix", place.prefix]
    made = runner.invoke(cli, ["topics", "create", "--partitions", "2", *cluster])
    assert made.exit_code == 0, made.output
    shown = runner.invoke(cli, ["audit", "--url", gateway.url, "--key", secret, "--json", "--action", "topics create"])
    event = json.loads(shown.stdout.splitlines()[0])
    assert (event["action"], event["status"]) == ("penstock topics create", 0)
    assert event["parameters"] == {"partitions": 2}
    assert event["user"]
    assert event["address"]
