"""The native routes on a real broker: submit, look up, wait, list, cancel, erase, and who may see what."""

from __future__ import annotations

import threading
import time
import uuid
from contextlib import suppress
from typing import Any

import httpx
import pytest

from penstock.common.reader import read_to_end
from penstock.gateway.edge.keys import create_key
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import DecodeError
from penstock.schemas.records import ControlCommand, ConversationMessage, InferenceRequest
from support import wait_until


def test_accepted_is_on_its_topic(gateway: Any, scribe: Any) -> None:
    body = {"task": "text_generation", "priority": 2, "payload": {"prompt": "hello"}, "metadata": {"a": "b"}}
    answer = gateway.http.post("/v1/requests", json=body)
    assert answer.status_code == 202
    found = answer.json()
    request_id = found["request_id"]
    assert answer.headers["location"] == found["status_url"] == f"/v1/requests/{request_id}"
    assert answer.headers["x-request-id"] == request_id
    assert (found["status"], found["done"]) == ("accepted", False)
    records = read_to_end(scribe.settings, scribe.names.request("text_generation", 2))
    requests = [default_codec().decode(record.value or b"", InferenceRequest) for record in records]
    assert [one.priority for one in requests if one.request_id == request_id] == [2]
    shown = gateway.get(found["status_url"]).json()
    assert (shown["status"], shown["priority"], shown["metadata"]) == ("accepted", 2, {"a": "b"})


@pytest.mark.parametrize("as_json", [False, True])
def test_whoever_put_it_there(gateway: Any, scribe: Any, as_json: bool) -> None:
    if as_json:
        value = b'{"task": "text_generation", "request_id": "kcat-%s", "payload": {"prompt": "p"}}'
        request_id = f"kcat-{uuid.uuid4().hex}"
        value = value.replace(b"kcat-%s", request_id.encode())
        scribe.put(scribe.names.request("text_generation", 5), value, request_id.encode())
    else:
        request_id = scribe.request().id
    found = gateway.get(f"/v1/requests/{request_id}")
    assert found.status_code == 200, "at once: the gateway catches up before a 404"
    assert found.json()["status"] == "accepted"


def test_poison_on_a_topic_is_passed_by(gateway: Any, scribe: Any) -> None:
    topic = scribe.names.request("text_generation", 5)
    for poison in (b"", b"{", b'{"task": 1}', b"\x00\x00\x00\x00\x01x", b"[]", b"\xff" * 50, b'{"task":"\\ud800"}'):
        scribe.put(topic, poison, b"k")
        scribe.put(scribe.names.result, poison, b"k")
        scribe.put(scribe.names.status, poison, b"k")
        scribe.put(scribe.names.control, poison, b"k")
    job = scribe.request().status("queued").end("x")
    assert gateway.get(f"/v1/requests/{job.id}", params={"wait": 10}).json()["result"]["text"] == "x"


def test_text_that_is_no_unicode_does_not_spoil_the_list(gateway: Any, scribe: Any) -> None:
    body = b'{"task": "text_generation", "payload": {"prompt": "p"}, "metadata": {"a": "\\ud800"}}'
    scribe.put(scribe.names.request("text_generation", 5), body, b"k")
    assert gateway.get("/v1/requests", params={"limit": 100}).status_code == 200
    assert gateway.http.post("/v1/requests", content=body).status_code == 400


def test_waiting_for_the_outcome(gateway: Any, scribe: Any) -> None:
    request_id = gateway.submit()
    began = time.monotonic()
    assert gateway.get(f"/v1/requests/{request_id}", params={"wait": 0.3}).json()["done"] is False
    assert 0.25 < time.monotonic() - began < 5
    job = scribe.job(request_id)
    later = threading.Timer(0.2, lambda: job.status("running").end("the answer", finish_reason="stop"))
    later.start()
    found = gateway.get(f"/v1/requests/{request_id}", params={"wait": 20}).json()
    later.join()
    assert (found["status"], found["done"], found["result"]["text"]) == ("completed", True, "the answer")
    assert found["result"]["finish_reason"] == "stop"
    assert gateway.get(f"/v1/requests/{request_id}", params={"wait": 61}).status_code == 400


def test_the_first_outcome_is_the_outcome(gateway: Any, scribe: Any) -> None:
    job = scribe.request().end("first").end("second").end("third", epoch=9).status("running", epoch=10)
    found = gateway.get(f"/v1/requests/{job.id}", params={"wait": 10}).json()
    after = scribe.request().end("later")  # on its partition or not: by then all of the above is read
    gateway.get(f"/v1/requests/{after.id}", params={"wait": 10})
    assert gateway.get(f"/v1/requests/{job.id}").json() == found
    assert (found["result"]["text"], found["status"]) == ("first", "completed")


def test_unknown(gateway: Any) -> None:
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("DELETE", "")):
        answer = gateway.http.request(method, f"/v1/requests/{uuid.uuid4()}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_pages(own_place: Any) -> None:
    gateway = own_place.gateway()
    jobs = [own_place.scribe.request(conversation_id="c" if n % 2 else None) for n in range(7)]
    jobs[3].end("x")
    ids = [job.id for job in jobs]
    gateway.wait_for(ids[-1], "accepted")
    gateway.wait_for(ids[3], "completed")
    seen: list[str] = []
    page: dict[str, Any] = {"has_more": True, "last_id": None}
    while page["has_more"]:
        params = {"limit": 3, "order": "asc"} | ({"after": page["last_id"]} if page["last_id"] else {})
        page = gateway.get("/v1/requests", params=params).json()
        assert page["object"] == "list"
        last, _, end = page["last_id"].partition("@")
        assert (page["first_id"], last) == (page["data"][0]["request_id"], page["data"][-1]["request_id"])
        assert bool(end) is page["has_more"], "oldest first, the first page fixes the end"
        seen += [item["request_id"] for item in page["data"]]
    assert sorted(seen) == sorted(ids)
    newest = gateway.get("/v1/requests", params={"limit": 100}).json()["data"]
    assert [item["request_id"] for item in newest] == seen[::-1]
    done = gateway.get("/v1/requests", params={"status": "completed"}).json()
    assert ([item["request_id"] for item in done["data"]], done["has_more"]) == ([ids[3]], False)
    mine = gateway.get("/v1/requests", params={"conversation_id": "c", "order": "asc"}).json()["data"]
    assert {item["request_id"] for item in mine} == {ids[1], ids[3], ids[5]}
    assert gateway.get("/v1/requests", params={"limit": 0}).status_code == 400


def test_a_list_is_kept_up_to_date_by_its_changes(own_place: Any) -> None:
    gateway, scribe = own_place.gateway(), own_place.scribe
    jobs = [scribe.request(metadata={"secret": "s"}) for _ in range(3)]
    gateway.wait_for(jobs[-1].id, "accepted")
    held = {"cursor": gateway.get("/v1/requests").json()["cursor"]}

    def changed(within: dict[str, Any] = held, **params: Any) -> tuple[list[tuple[str, str]], list[str]]:
        """What has come when something has: what changes within a second of a call comes with a later one."""
        found: list[Any] = []
        left: list[str] = []

        def asked() -> bool:
            answer = gateway.get("/v1/requests", params={"changed_since": within["cursor"], **params}).json()
            assert not answer["reset"]
            found.extend(answer["data"])
            left.extend(answer["left"])
            within["cursor"] = answer["cursor"]
            return not answer["has_more"] and bool(found or left)

        wait_until(asked, describe="a change is told")
        assert not [one for one in found if {"result", "metadata"} & one.keys()]
        return [(one["request_id"], one["status"]) for one in found], left

    jobs[0].status("running")
    gateway.wait_for(jobs[0].id, "running")
    assert changed() == ([(jobs[0].id, "running")], [])
    jobs[0].chunk("x", 0)
    jobs[1].end("y")
    gateway.wait_for(jobs[1].id, "completed")
    before = dict(held)
    assert changed() == ([(jobs[1].id, "completed")], []), "text that is streamed changes no list"
    assert changed(before, status="running") == ([], [jobs[1].id])
    assert gateway.http.delete(f"/v1/requests/{jobs[1].id}").status_code == 200
    assert changed() == ([], [jobs[1].id])
    before = dict(held)
    new = [gateway.submit() for _ in range(3)]
    assert changed(limit=2)[0] == [(one, "accepted") for one in new]
    wanted = {"id_contains": new[1][4:-4], "limit": 100}
    assert changed(before, **wanted) == ([(new[1], "accepted")], [new[0], new[2]])
    assert [one["request_id"] for one in gateway.get("/v1/requests", params=wanted).json()["data"]] == [new[1]]
    assert gateway.get("/v1/requests", params={"older_than_s": 1000}).json()["data"] == []
    assert len(gateway.get("/v1/requests", params={"older_than_s": 0}).json()["data"]) == 5
    ours = {"changed_since": held["cursor"]}
    assert own_place.gateway("g2").get("/v1/requests", params=ours).json()["reset"], "the cursor is of another gateway"
    refused = gateway.get("/v1/requests", params={**ours, "after": new[0]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")
    counted = gateway.http.post("/v1/requests/cancel", json={"id_contains": new[1][4:-4], "dry_run": True}).json()
    assert counted["request_ids"] == [new[1]]


def test_pages_of_a_console_share_an_answer(gateway: Any) -> None:
    fresh = {"cache-control": "max-age=1"}
    first = gateway.get("/v1/requests", headers=fresh)
    request_id = gateway.submit()
    shared = [gateway.get("/v1/requests", headers=fresh), gateway.get("/v1/requests")]
    ids = [{one["request_id"] for one in answer.json()["data"]} for answer in shared]
    assert [request_id in one for one in ids] == [False, True], "who did not ask for an older answer got its own"
    for path in ("stats", "problems", "devices"):
        etag = gateway.get(f"/v1/admin/{path}", headers=fresh).headers["etag"]
        again = gateway.get(f"/v1/admin/{path}", headers={**fresh, "if-none-match": etag})
        assert (again.status_code, again.content) == (304, b"")
    assert first.headers["cache-control"] == "private, no-cache"


def test_what_was_asked_for_can_be_asked_again(gateway: Any, scribe: Any) -> None:
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    body = {"task": "text_generation", "payload": {"prompt": "p" * 300_000, "temperature": 0.5}, "metadata": {"a": "b"}}
    context = {"max_tokens": 500, "summary": "never"}
    turn = {"task": "text_generation", "conversation_id": uuid.uuid4().hex, "context": context}
    turn |= {"payload": {"messages": [{"role": "user", "content": "\U0001f409"}]}, "priority": 2, "stream": True}
    for asked in (body, turn, {"task": "embedding", "payload": {"input": ["a", "b"]}}):
        sent = gateway.http.post("/v1/requests", json=asked, headers={"traceparent": trace})
        assert sent.status_code == 202, sent.text
        first = gateway.get(f"{sent.json()['status_url']}/input").json()
        assert first["traceparent"].split("-")[1] == "ab" * 16
        assert first["request"]["payload"].items() >= asked["payload"].items()
        again = gateway.http.post("/v1/requests", json=first["request"])
        assert again.status_code == 202, again.text
        second = gateway.get(f"{again.json()['status_url']}/input").json()
        assert second["request"] == first["request"]
    foreign = scribe.request(tenant="other")
    assert gateway.get(f"/v1/requests/{foreign.id}/input").status_code == 404


def commands(scribe: Any, kind: str) -> list[str]:
    records = read_to_end(scribe.settings, scribe.names.control)
    found: list[ControlCommand] = []
    for record in records:
        with suppress(DecodeError):  # another test's poison
            found.append(default_codec().decode(record.value or b"", ControlCommand))
    return [one.request_id for one in found if one.kind == kind]


def test_cancel(gateway: Any, scribe: Any) -> None:
    request_id = gateway.submit()
    answer = gateway.http.post(f"/v1/requests/{request_id}/cancel")
    assert (answer.status_code, answer.json()["done"]) == (202, False)
    assert commands(scribe, "cancel").count(request_id) == 1
    scribe.job(request_id).end("", status="cancelled")
    gateway.wait_for(request_id, "cancelled")
    again = gateway.http.post(f"/v1/requests/{request_id}/cancel")
    assert (again.status_code, again.json()["status"]) == (200, "cancelled")
    assert commands(scribe, "cancel").count(request_id) == 1


def test_cancel_many(own_place: Any) -> None:
    gateway, scribe = own_place.gateway(), own_place.scribe
    jobs = [scribe.request(conversation_id="c" if n < 3 else "d") for n in range(6)]
    jobs[0].end("x")
    gateway.wait_for(jobs[0].id, "completed")

    def cancel(**body: Any) -> httpx.Response:
        return gateway.http.post("/v1/requests/cancel", json=body)

    first = cancel(ids=[jobs[0].id, jobs[1].id, jobs[1].id, "unknown"])
    assert (first.status_code, first.json()["count"], first.json()["request_ids"]) == (202, 1, [jobs[1].id])
    assert cancel(conversation_id="c").json()["count"] == 2
    assert cancel(conversation_id="d", status="accepted").json()["count"] == 3
    assert cancel(status="running").json()["count"] == 0
    assert set(commands(scribe, "cancel")) == {job.id for job in jobs[1:]}
    old = cancel(ids=[jobs[2].id], tenant="default", accepted_before="2020-01-01T00:00:00Z", dry_run=True)
    assert old.json()["count"] == 0
    wrong = [{}, {"ids": "x"}, {"ids": [1]}, {"status": 1}, {"other": 1}, {"ids": [], "status": "queued"}]
    for body in (*wrong, {"ids": ["x"], "tenant": "*"}):
        assert cancel(**body).status_code == 400, body


def test_erase_is_told_to_every_gateway(place: Any, gateway: Any, scribe: Any) -> None:
    second = place.gateway("second")
    running = scribe.request()
    gateway.wait_for(running.id, "accepted")
    early = gateway.http.delete(f"/v1/requests/{running.id}")
    assert (early.status_code, early.json()["error"]["code"]) == (409, "conflict")
    running.end("secret")
    gateway.wait_for(running.id, "completed")
    assert gateway.http.delete(f"/v1/requests/{running.id}").json()["deleted"] is True

    def gone(at: Any) -> bool:
        answer = at.get(f"/v1/requests/{running.id}")
        return (answer.status_code, answer.json()["error"]["code"]) == (410, "gone") if answer.is_error else False

    assert gone(gateway), "at once where it was asked"
    wait_until(lambda: gone(second), describe="410 at the other gateway")
    for method, path in (("GET", "/events"), ("POST", "/cancel"), ("DELETE", "")):
        assert gateway.http.request(method, f"/v1/requests/{running.id}{path}").status_code == 410
    assert "secret" not in gateway.get("/v1/requests", params={"limit": 100}).text
    running.end("secret again").status("running", epoch=5)
    scribe.put(scribe.names.request("text_generation", 5), running.request, running.id.encode())
    follower = scribe.request()
    gateway.wait_for(follower.id, "accepted")
    assert gone(gateway)
    second.stop()
    reborn = place.gateway("second")
    assert gone(reborn)


def test_an_erase_that_is_read_before_the_outcome(own_place: Any) -> None:
    """The topics have no order among each other: this gateway is told to erase what it has not seen end."""
    gateway, scribe = own_place.gateway(), own_place.scribe
    before, unknown = scribe.request(), scribe.job(str(uuid.uuid4()))
    gateway.wait_for(before.id, "accepted")
    scribe.control("erase", before)
    scribe.control("erase", unknown)
    for job in (before, unknown):
        path = f"/v1/requests/{job.id}"
        wait_until(lambda path=path: gateway.get(path).status_code == 410, describe="gone")
        job.end("secret")
        later = scribe.request().end("later")
        gateway.get(f"/v1/requests/{later.id}", params={"wait": 10})
        assert gateway.get(path).status_code == 410
    gateway.stop()
    assert b"secret" not in (own_place.folder / "g1.sqlite").read_bytes()


def test_idempotency(place: Any, gateway: Any, scribe: Any) -> None:
    key = {"Idempotency-Key": uuid.uuid4().hex}
    body: dict[str, Any] = {"task": "text_generation", "payload": {"prompt": "once"}}
    answers = [gateway.http.post("/v1/requests", json=body, headers=key) for _ in range(3)]
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json()["request_id"] for answer in answers}) == 1
    assert [answer.headers.get("idempotency-replayed") for answer in answers] == [None, "true", "true"]
    other = gateway.http.post("/v1/requests", json={**body, "payload": {"prompt": "twice"}}, headers=key)
    assert (other.status_code, other.json()["error"]["code"]) == (422, "idempotency_key_reused")
    request_id = answers[0].json()["request_id"]
    scribe.job(request_id).end("x")
    gateway.wait_for(request_id, "completed")
    gateway.http.delete(f"/v1/requests/{request_id}")
    assert gateway.http.post("/v1/requests", json=body, headers=key).status_code == 410
    assert gateway.http.post("/v1/requests", json=body, headers={"Idempotency-Key": "x" * 300}).status_code == 400


def test_a_key_that_is_used_twice_at_once(gateway: Any, scribe: Any) -> None:
    key = {"Idempotency-Key": uuid.uuid4().hex}
    ids: list[str] = []
    threads = [threading.Thread(target=lambda: ids.append(gateway.submit(key))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ids) == 8
    assert len(set(ids)) == 1
    records = read_to_end(scribe.settings, scribe.names.request("text_generation", 5))
    assert sum(ids[0].encode() in (record.key or b"") for record in records) == 1


def test_pools(own_place: Any) -> None:
    from support import create_topics

    gateway = own_place.gateway()
    body = {"task": "text_generation", "pool": "big", "payload": {"prompt": "p"}}
    unknown = gateway.http.post("/v1/requests", json=body)
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "pool")
    create_topics(own_place.bootstrap, own_place.prefix, partitions=2, pool="big")
    create_topics(own_place.bootstrap, own_place.prefix, partitions=2, pool="new")
    job = own_place.scribe.request(pool="new")
    # Topics are discovered every 10 s too.
    wait_until(lambda: gateway.get(f"/v1/requests/{job.id}").status_code == 200, 5, "it is not found", promised=True)
    assert gateway.get(f"/v1/requests/{job.id}").json()["pool"] == "new"
    accepted = gateway.http.post("/v1/requests", json=body)
    assert accepted.status_code == 202


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"request_id": "mine"}, "request_id"),
        ({"tenant": "other"}, "tenant"),
        ({"task": "painting"}, "task"),
        ({"task": "image_generation", "payload": {"prompt": "p", "width": -1}}, "payload.width"),
        ({"task": "text_generation", "payload": {"prompt": "p", "max_tokens": -1}}, "payload.max_tokens"),
    ],
)
def test_refused(gateway: Any, body: dict[str, Any], param: str) -> None:
    answer = gateway.http.post("/v1/requests", json={"task": "text_generation", "payload": {"prompt": "p"}, **body})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


DEEP_EXTRA = b'{"task": "text_generation", "payload": {"prompt": "p"}, "extra": {"a": %s}}'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nonsense",
        b"[]",
        b"[" * 100_000,
        b"\xff\xfe",
        DEEP_EXTRA % (b"[" * 500 + b"]" * 500),
        DEEP_EXTRA % (b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    ],
)
def test_bodies_that_are_no_request(gateway: Any, body: bytes) -> None:
    answer = gateway.http.post("/v1/requests", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid")


def test_tenants_and_priorities(own_place: Any) -> None:
    keys_file = own_place.folder / "keys.json"
    keys = {
        "acme": create_key(keys_file, tenant="acme"),
        "globex": create_key(keys_file, tenant="globex", max_priority=4),
    }
    gateway = own_place.gateway(auth={"keys_file": keys_file}, ready=False)
    wait_until(lambda: httpx.get(gateway.url + "/readyz").status_code == 200, describe="ready")
    acme, globex = ({"authorization": f"Bearer {key}"} for key in keys.values())
    mine = gateway.submit(headers=acme, conversation_id="c", metadata={"who": "acme"})
    for method, path in (("GET", ""), ("GET", "/events"), ("POST", "/cancel"), ("DELETE", "")):
        assert gateway.http.request(method, f"/v1/requests/{mine}{path}", headers=globex).status_code == 404
    many = gateway.http.post("/v1/requests/cancel", json={"ids": [mine]}, headers=globex)
    assert many.json()["count"] == 0
    named = gateway.http.post("/v1/requests/cancel", json={"ids": [mine], "tenant": "acme"}, headers=globex)
    assert named.status_code == 403
    by_filter = gateway.http.post("/v1/requests/cancel", json={"conversation_id": "c"}, headers=globex)
    assert by_filter.json()["count"] == 0
    assert gateway.get("/v1/requests", headers=globex).json()["data"] == []
    assert gateway.get(f"/v1/requests/{mine}", headers=acme).json()["metadata"] == {"who": "acme"}
    body = {"task": "text_generation", "payload": {"prompt": "p"}}
    urgent = gateway.http.post("/v1/requests", json={**body, "priority": 3}, headers=globex)
    assert (urgent.status_code, urgent.json()["error"]["param"]) == (403, "priority")
    assert gateway.http.post("/v1/requests", json={**body, "priority": 4}, headers=globex).status_code == 202
    same_key = {"Idempotency-Key": "k"}
    ids = {gateway.submit(headers={**who, **same_key}) for who in (acme, globex)}
    assert len(ids) == 2


def test_stats(gateway: Any, scribe: Any) -> None:
    scribe.request(priority=0).end("x")
    waiting = scribe.request(priority=1)
    gateway.wait_for(waiting.id, "accepted")
    found = gateway.get("/v1/admin/stats").json()
    assert found["queues"]["high"]["depth"] >= 1
    assert found["inflight"] >= 1
    assert found["rates"]["accepted_per_s"] > 0
    assert found["outcomes"]["completed"] >= 1


def test_no_more_than_may_be_on_their_way(own_place: Any) -> None:
    gateway = own_place.gateway(max_live=100)
    for _ in range(100):
        own_place.scribe.request(priority=9)
    wait_until(lambda: gateway.get("/v1/admin/stats").json()["inflight"] >= 100, describe="the gateway holds them")
    gateway.submit(priority=0)  # a backlog of the low class, from Kafka directly, keeps no urgent chat out
    body = {"task": "text_generation", "payload": {"prompt": "p"}, "priority": 9}
    refused = gateway.http.post("/v1/requests", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
    assert refused.headers["retry-after"]


def test_of_an_erased_message_the_replay_shows_its_place_alone(gateway: Any, scribe: Any) -> None:
    """The log holds its text until it is compacted, and `replay` showed it as long."""
    assert gateway.http.post("/v1/conversations", json={"id": "erasing"}).status_code == 200
    topic = scribe.names.conversation("default", "erasing")
    for number, content in enumerate(("hush", "public")):
        message = ConversationMessage(
            tenant="default",
            conversation_id="erasing",
            request_id=f"r{number}",
            role="user",
            direction="in",
            content=content,
            created_at=1,
        )
        scribe.put(topic, message, f"m{number}".encode())
    scribe.put(topic, None, b"m0")
    path = "/v1/conversations/erasing/replay"
    whole = gateway.get(path).json()["data"]
    told = [(one["offset"], one["key"], one["message"] and one["message"]["content"]) for one in whole]
    assert told == [(0, "m0", None), (1, "m1", "public"), (2, "m0", None)]
    page = gateway.get(path, params={"limit": 1}).json()
    assert ([one["message"] for one in page["data"]], page["has_more"], page["next_offset"]) == ([None], True, 1)
    assert gateway.get("/v1/conversations/erasing").json()["created_at"] is not None
