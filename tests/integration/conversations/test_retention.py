"""Conversations that nobody has touched are gone everywhere, by two real gateways and a worker; what is open stays."""

from __future__ import annotations

import base64
import json
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from aged_conversations import make_older
from conversing import questions
from penstock.cli.main import app
from penstock.common import admin
from penstock.common.configuration import KafkaSection
from penstock.common.transport import Transport
from penstock.gateway.conversations.tails import TopicEnd
from penstock.gateway.conversations.topics import OwnTopics
from penstock.gateway.edge.keys import create_key
from penstock.gateway.settings import GatewaySettings
from system import NOOP, Process, System, eventually, running

DAY_S, OLD_S = 86_400, 31 * 86_400
MODELS = [
    {**NOOP, "id": "echo", "options": {"echo": True}},
    {**NOOP, "id": "sum", "tasks": ["text_generation", "summarization"], "options": {"echo": True}},
]
PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
Json = dict[str, Any]


class Keys:
    """A key of each tenant, and one for operators."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.acme, self.ever = create_key(path, tenant="acme"), create_key(path, tenant="ever")
        self.admin = create_key(path, tenant="ops", scopes=["admin"])


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(tmp_path_factory.mktemp("keys") / "keys.json")


@pytest.fixture(scope="module")
def system(kafka: Any, keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    made = System(
        kafka.bootstrap_servers,
        f"kept{uuid.uuid4().hex[:6]}-",
        tmp_path_factory.mktemp("kept"),
        models=MODELS,
        auth={"keys_file": str(keys.path)},
        gateway_options={
            "limits": {"conversation_retention_s": "30d", "tenants": {"ever": {"conversation_retention_s": 0}}},
            "sweep_conversations_s": 0,
            "expired_per_minute": 60_000,
        },
    )
    with running(made) as started:
        started.worker().wait_ready()
        started.gateway("g1").wait_ready()
        started.gateway("g2").wait_ready()
        yield started


def gateway_of(system: System, name: str = "g1") -> Process:
    return [one for one in system.processes if one.name == name][-1]


def caller(process: Process, key: str) -> httpx.Client:
    return httpx.Client(base_url=process.url, timeout=60, headers={"authorization": f"Bearer {key}"})


@pytest.fixture
def acme(system: System, keys: Keys) -> Iterator[httpx.Client]:
    with caller(gateway_of(system), keys.acme) as client:
        yield client


@pytest.fixture
def operators(system: System, keys: Keys) -> Iterator[list[httpx.Client]]:
    """At each gateway."""
    with caller(gateway_of(system), keys.admin) as first, caller(gateway_of(system, "g2"), keys.admin) as second:
        yield [first, second]


def ask(client: httpx.Client, conversation: str, text: str, wait: int = 30, **fields: Any) -> Json:
    body = {
        "task": "text_generation",
        "model": "echo",
        "conversation_id": conversation,
        "payload": {"messages": [{"role": "user", "content": text}]},
        **fields,
    }
    answer = client.post(f"/v1/requests?wait={wait}", json=body)
    assert answer.status_code in (200, 202), answer.text
    return answer.json()


def due(operator: httpx.Client, **query: Any) -> dict[str, Json]:
    answer = operator.post("/v1/admin/conversations/sweep", params={"dry_run": "true", **query})
    assert answer.status_code == 200, answer.text
    return {one["conversation_id"]: one for one in answer.json()["data"]}


def sweep(operator: httpx.Client) -> None:
    for _ in range(5):
        answer = operator.post("/v1/admin/conversations/sweep")
        if answer.status_code != 503:  # as of a broker that has just made topics anew
            break
    assert answer.status_code == 200, answer.text


def is_there(system: System, conversation: str, tenant: str = "acme") -> bool:
    kafka = system.kafka
    return admin.topic_id(kafka, system.names.conversation(tenant, conversation)) is not None


def wait_gone(system: System, *conversations: str) -> None:
    def all_gone() -> bool:
        return not any(is_there(system, one) for one in conversations)

    eventually(all_gone, 60, lambda: system.logs(20))


def swept(operator: httpx.Client, result: str) -> float:
    lines = operator.get("/metrics").text.splitlines()
    name = f'penstock_conversations_swept_total{{result="{result}"}} '
    return float(next(line.removeprefix(name) for line in lines if line.startswith(name)))


def test_it_goes_everywhere_with_all_that_belongs_to_it(
    system: System, keys: Keys, acme: httpx.Client, operators: list[httpx.Client]
) -> None:
    secret = f"secret {uuid.uuid4().hex}"
    ask(acme, "old", secret)
    title = {"title": secret, "metadata": {"k": secret}}
    assert acme.post("/v1/conversations/old", json=title).status_code == 200
    uploaded = acme.post("/v1/artifacts", content=PNG, headers={"content-type": "image/png"}).json()
    shown = {"type": "input_image", "file_id": uploaded["artifact_id"]}
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": secret}, shown]}
    assert acme.post("/v1/conversations/old/items", json={"items": [item]}).status_code == 200
    summary = acme.post("/v1/conversations/old/summarize?wait=30", json={"model": "sum"}).json()
    assert secret in summary["result"]["text"]
    artifact = f"/v1/artifacts/{uploaded['artifact_id']}"
    assert acme.delete(artifact).status_code == 409, "the conversation holds it"
    ask(acme, "young", "q")
    with caller(gateway_of(system), keys.ever) as ever:
        ask(ever, "forever", "q")
        assert ever.get("/v1/conversations/forever").json()["expires_at"] is None
    make_older(system, "ever", ["forever"], OLD_S)
    make_older(system, "acme", ["old"], OLD_S)
    make_older(system, "acme", ["young"], 29 * DAY_S)

    first, second = operators
    told = acme.get("/v1/conversations/old").json()
    assert told["expires_at"] - told["last_active_at"] == pytest.approx(30 * DAY_S, abs=2)
    assert time.time() - told["expires_at"] == pytest.approx(DAY_S, abs=120)
    listed = {one["id"]: one for one in acme.get("/v1/conversations").json()["data"]}
    assert listed["old"]["expires_at"] == told["expires_at"]
    assert listed["young"]["expires_at"] > time.time()
    for operator in (first, second):
        assert due(operator).keys() == {"old"}
        assert list(due(operator, within_s=2 * DAY_S)) == ["old", "young"]
    words = ["conversations", "sweep", "--url", gateway_of(system).url, "--key", keys.admin, "--json"]
    looked = CliRunner().invoke(app, [*words, "--dry-run", "--within", "2d"])
    assert [one["conversation_id"] for one in json.loads(looked.stdout)["data"]] == ["old", "young"]
    assert is_there(system, "old"), "a dry run deletes nothing"
    assert acme.post("/v1/admin/conversations/sweep").status_code == 403
    refused = first.post("/v1/admin/conversations/sweep", params={"within_s": 60})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "within_s")

    done = CliRunner().invoke(app, words)
    assert [one["conversation_id"] for one in json.loads(done.stdout)["data"]] == ["old"]
    wait_gone(system, "old")
    eventually(lambda: swept(first, "expired") == 1, 30, gateway_of(system).tail)
    for path in ("", "/items", "/replay", "/export"):
        assert acme.get(f"/v1/conversations/old{path}").status_code == 404, path
    assert acme.delete(artifact).status_code == 200, "nothing holds it any more"
    facts: dict[bytes | None, bytes | None] = {}
    for one in system.read(system.names.conversation_facts):
        facts[one.key()] = one.value()
    assert not [value for value in facts.values() if value and secret.encode() in value]
    assert acme.post("/v1/conversations", json={"id": "old"}).json()["title"] is None
    assert questions(ask(acme, "old", "anew")) == ["anew"]
    assert is_there(system, "young")
    assert is_there(system, "forever", "ever")


def test_a_fork_keeps_what_it_inherited_and_the_parent_goes_with_it(
    system: System, acme: httpx.Client, operators: list[httpx.Client]
) -> None:
    ask(acme, "root", "q0")
    made = acme.post("/v1/conversations/root/fork", json={"through": 1, "id": "branch"})
    assert made.status_code == 201, made.text
    ask(acme, "branch", "q1")
    make_older(system, "acme", ["root", "branch"], OLD_S)
    assert questions(ask(acme, "branch", "q2")) == ["q0", "q1", "q2"]
    assert due(operators[0]).keys() == {"root"}, "what is said in a fork does not renew its parent"
    sweep(operators[0])
    eventually(lambda: acme.get("/v1/conversations/root").status_code == 404, 60, gateway_of(system).tail)
    assert is_there(system, "root"), "its fork needs it"
    assert not due(operators[1])
    sweep(operators[1])
    assert questions(ask(acme, "branch", "q3")) == ["q0", "q1", "q2", "q3"]
    make_older(system, "acme", ["root", "branch"], OLD_S)
    sweep(operators[1])
    wait_gone(system, "root", "branch")


def test_a_fork_that_expires_does_not_renew_its_parent(
    system: System, acme: httpx.Client, operators: list[httpx.Client]
) -> None:
    ask(acme, "trunk", "q0")
    assert acme.post("/v1/conversations/trunk/fork", json={"through": 1, "id": "twig"}).status_code == 201
    make_older(system, "acme", ["trunk", "twig"], 29 * DAY_S)
    before = acme.get("/v1/conversations/trunk").json()
    assert acme.delete("/v1/conversations/twig").status_code == 200
    assert acme.get("/v1/conversations/trunk").json() == before
    assert list(due(operators[0], within_s=2 * DAY_S)).count("trunk") == 1
    assert acme.delete("/v1/conversations/trunk").status_code == 200


def test_an_open_request_keeps_it_until_it_has_ended(
    system: System, acme: httpx.Client, operators: list[httpx.Client]
) -> None:
    first = operators[0]
    ask(acme, "waits", "q0")
    make_older(system, "acme", ["waits"], OLD_S)
    assert first.post("/v1/admin/classes/low/pause").status_code in (200, 202)
    waiting = ask(acme, "waits", "q1", wait=0, priority=9)["request_id"]
    assert due(first)["waits"]["open_request"]
    stayed = swept(first, "stayed")
    sweep(first)
    eventually(lambda: swept(first, "stayed") == stayed + 1, 30, gateway_of(system).tail)
    assert acme.get("/v1/conversations/waits").status_code == 200
    assert first.post("/v1/admin/classes/low/resume").status_code in (200, 202)
    ended = acme.get(f"/v1/requests/{waiting}?wait=30").json()
    assert questions(ended) == ["q0", "q1"], "its history is whole"
    assert not due(first), "it was touched"
    make_older(system, "acme", ["waits"], OLD_S)
    sweep(first)
    wait_gone(system, "waits")


def test_an_empty_one_and_one_with_a_title_alone_go_too(
    system: System, acme: httpx.Client, operators: list[httpx.Client]
) -> None:
    assert acme.post("/v1/conversations", json={"id": "empty"}).json()["expires_at"] is None
    sweep(operators[0])
    # From the first look on its age is known.
    eventually(
        lambda: acme.get("/v1/conversations/empty").json()["expires_at"] is not None, 30, gateway_of(system).tail
    )
    assert not due(operators[0])
    titled = acme.post("/v1/conversations", json={"id": "titled", "title": "T"}).json()
    assert titled["expires_at"] == pytest.approx(time.time() + 30 * DAY_S, abs=60)
    make_older(system, "acme", ["empty", "titled"], OLD_S)
    eventually(lambda: due(operators[0]).keys() == {"empty", "titled"}, 30, gateway_of(system).tail)
    sweep(operators[0])
    wait_gone(system, "empty", "titled")


def test_turns_that_come_while_two_gateways_sweep_are_not_lost(
    system: System, acme: httpx.Client, operators: list[httpx.Client]
) -> None:
    """Each has its old history or none, and what it said stands afterwards."""
    names = [f"moment{number}" for number in range(24)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(partial(ask, acme, text="old"), names))
    make_older(system, "acme", names, OLD_S)
    go = threading.Event()

    def turn(number: int) -> Json:
        go.wait(30)
        time.sleep(number * 0.1)
        return ask(acme, names[number], f"new {number}")

    with ThreadPoolExecutor(len(names)) as pool:
        turns = [pool.submit(turn, number) for number in range(len(names))]
        go.set()
        for operator in operators:
            sweep(operator)
        ended = [one.result() for one in turns]
    lost = [one for one in ended if one["status"] != "completed"]
    assert not [one for one in lost if "conversation was deleted" not in str(one)], lost
    eventually(lambda: not due(operators[0]) and not due(operators[1]), 30, lambda: system.logs(20))
    for number, one in enumerate(ended):
        if one["status"] == "completed":
            said = questions(one)
            assert said in (["old", f"new {number}"], [f"new {number}"])
            answer = acme.get(f"/v1/conversations/{names[number]}/items?order=asc")
            if answer.status_code == 404 and said == [f"new {number}"]:
                lost.append(one)
                continue
            assert answer.status_code == 200, f"{answer.text}\n{one}\n{system.logs(20)}"
            items = answer.json()["data"]
            assert [item["content"][0]["text"] for item in items if item["role"] == "user"] == said
    assert len(lost) <= 2, "only who begins it anew in the moment in which its topic goes"


def test_a_gateway_that_is_killed_in_a_sweep_leaves_the_rest_to_the_other(
    system: System, acme: httpx.Client, operators: list[httpx.Client]
) -> None:
    names = [f"many{number}" for number in range(20)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(partial(ask, acme, text="old"), names))
    make_older(system, "acme", names, OLD_S)
    sweep(operators[1])
    eventually(lambda: sum(is_there(system, one) for one in names) < 18, 60, gateway_of(system, "g2").tail)
    gateway_of(system, "g2").kill9()
    left = [one for one in names if is_there(system, one)]
    expired = swept(operators[0], "expired")
    sweep(operators[0])
    wait_gone(system, *names)
    eventually(lambda: swept(operators[0], "expired") >= expired + len(left) - 1, 30, gateway_of(system).tail)
    system.gateway("g2").wait_ready()


@pytest.mark.thorough
@pytest.mark.slow
def test_a_sweep_that_loses_its_broker_says_so_and_a_later_one_goes_on(
    system: System, kafka: Any, acme: httpx.Client, operators: list[httpx.Client]
) -> None:
    if getattr(kafka, "process", None) is None:
        pytest.skip("this test kills the broker, and PENSTOCK_TEST_KAFKA names one that is not ours")
    names, first = [f"away{number}" for number in range(20)], operators[0]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(partial(ask, acme, text="old"), names))
    make_older(system, "acme", names, OLD_S)
    failed = swept(first, "failed")
    sweep(first)
    eventually(lambda: sum(is_there(system, one) for one in names) < 18, 60, gateway_of(system).tail)
    kafka.kill()
    try:
        eventually(lambda: swept(first, "failed") > failed, 60, gateway_of(system).tail)
    finally:
        kafka.start()
    assert "not_swept error=broker_unavailable" in gateway_of(system).log.read_text()
    gateway_of(system).wait_ready()

    def asked_again_all_are_gone() -> bool:
        return first.post("/v1/admin/conversations/sweep").status_code == 200 and not any(
            is_there(system, one) for one in names
        )

    eventually(asked_again_all_are_gone, 120, gateway_of(system).tail)


def test_a_topic_is_removed_only_where_it_ends_as_it_was_seen(system: System) -> None:
    """Another gateway may have removed it, and a turn begun it anew, since it was looked at."""
    kafka = system.kafka
    topics = OwnTopics(
        GatewaySettings(kafka=KafkaSection(bootstrap_servers=system.bootstrap, topic_prefix=system.prefix))
    )
    topic = kafka.names.conversation("acme", "seen")
    topics.create(topic)
    eventually(lambda: admin.topic_id(kafka, topic) is not None, 30, lambda: topic)
    seen = TopicEnd(admin.topic_id(kafka, topic) or "", 0)
    assert topics.remove(topic, TopicEnd("another", 0)), "that one is gone"
    transport = Transport(kafka)
    transport.send(topic, b"x", key=b"k", partition=0)
    assert transport.close(30) == 0
    assert not topics.remove(topic, seen)
    assert is_there(system, "seen")
    assert topics.remove(topic, TopicEnd(seen.topic_id, 1))
    assert not is_there(system, "seen")
