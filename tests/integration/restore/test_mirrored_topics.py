"""Topics that MirrorMaker 2 copied into an empty cluster, with other offsets: what holds, what runs again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from conversing import fork, items, turn
from mirror_maker import copy_topics
from penstock.cli.embedded_kafka import EmbeddedKafka
from restoring import penstock, reconcile, restore_findings, shift_offsets, text_so_far
from support import wait_until
from system import NOOP, Process, System, eventually, running
from worker_requests import send

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

WORDS = 40
MODELS = [
    {**NOOP, "options": {"tokens": 4}},
    {**NOOP, "id": "slow", "options": {"tokens": WORDS, "delay_ms": 300, "slots": 4}},
]
KEY = {"Idempotency-Key": "once"}
KEYED = {"task": "text_generation", "model": "noop", "payload": {"prompt": "keyed"}}


@dataclass
class Copy:
    """What the old installation showed, and the new one."""

    done: dict[str, dict[str, Any]]
    keyed: str
    stream: str
    stream_so_far: str
    left: list[str]
    fork: str
    letter: dict[str, Any]
    used: tuple[int, frozenset[str]]
    """The total of usage, and the requests on the log that it counts."""
    new: System
    findings: list[str]
    """Of `penstock doctor`, before the topics were reconciled."""
    reconciled: list[dict[str, Any]]

    @property
    def gateway(self) -> Process:
        return self.new.process("g")


def use(old: System) -> dict[str, Any]:
    """All that an installation holds when its last worker is killed."""
    old.worker("w0").wait_ready().stop()  # so that epochs are above those of a new group
    old.start_all(["w1", "g1"])
    worker, gateway = old.process("w"), old.process("g")
    shift_offsets(old)
    with httpx.Client(base_url=gateway.url, timeout=60) as http:
        ids = [gateway.submit(model="noop") for _ in range(4)]
        ids += [turn(http, "c", f"q{number}", "noop")["request_id"] for number in range(3)]
        keyed = http.post("/v1/requests", json=KEYED, headers=KEY).json()["request_id"]
        assert http.post("/v1/conversations", json={"id": "c", "title": "Talk"}).is_success
        forked = fork(http, "c", items(http, "c")[1]["id"])["id"]
        send(old, {"request_id": "bad", "payload": {"prompt": 7}})
        letters = wait_until(lambda: http.get("/v1/admin/dlq").json()["data"], 30, gateway.tail)
        done = {one: gateway.request(one, wait=30) for one in [*ids, keyed]}
        stream = gateway.submit(model="slow", stream=True)
        left = [stream, turn(http, "c", "q3", "slow", wait=0)["request_id"]]
        for one in left:
            eventually(lambda one=one: gateway.request(one)["status"] == "running", 30, gateway.tail)
        told = text_so_far(gateway, stream)
        worker.kill9()
        left += [gateway.submit(model="noop"), turn(http, "c", "q4", "noop", wait=0)["request_id"]]
        used = usage_of(gateway), frozenset(old.outcomes())
    assert gateway.stop() == 0
    told = {"used": used, "done": done, "keyed": keyed, "stream": stream, "stream_so_far": told, "left": left}
    return {**told, "fork": forked, "letter": letters[0]}


def usage_of(gateway: Process) -> int:
    """Requests that ended, by the totals of usage."""
    found = httpx.get(f"{gateway.url}/v1/usage", params={"group_by": ""}, timeout=30).json()["data"]
    return sum(one["requests"] for one in found)


@pytest.fixture(scope="module")
def copy(kafka: Any, second_kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copy]:
    folder = tmp_path_factory.mktemp("mirrored")
    old = System(kafka.bootstrap_servers, "mirrored-", folder / "old", models=MODELS)
    with running(old):
        facts = use(old)
        copy_topics(old.bootstrap, second_kafka.bootstrap_servers, old.prefix, folder / "mirror")
    new = System(second_kafka.bootstrap_servers, old.prefix, folder / "new", models=MODELS)
    new.folder.mkdir()
    created = penstock(new, "topics", "create", "--alter")
    assert created.returncode == 0, created.stderr
    findings = restore_findings(new)
    reconciled = [reconcile(new, "--dry-run"), reconcile(new), reconcile(new)]
    try:
        new.start_all(["w1", "g1"])
        yield Copy(**facts, new=new, findings=findings, reconciled=reconciled)
    finally:
        new.stop()
        new.reads.close()


def test_what_had_ended_is_shown_and_does_not_run_again(copy: Copy) -> None:
    for request_id, before in copy.done.items():
        assert copy.gateway.request(request_id) == before
    copy.new.wait_drained()
    ends = Counter(event.request_id for event in copy.new.results() if event.is_terminal)
    assert {one: ends[one] for one in copy.done} == dict.fromkeys(copy.done, 1)


def test_what_had_not_ended_runs_once_and_a_stream_goes_on(copy: Copy) -> None:
    ended = {one: copy.gateway.request(one, wait=60) for one in copy.left}
    assert {one["status"] for one in ended.values()} == {"completed"}, ended
    text = ended[copy.stream]["result"]["text"]
    assert text == "".join(f"word{number} " for number in range(WORDS))
    assert text.startswith(copy.stream_so_far)
    ends = Counter(event.request_id for event in copy.new.results() if event.is_terminal)
    assert {one: ends[one] for one in copy.left} == dict.fromkeys(copy.left, 1)
    again = [one for one in copy.new.results() if one.request_id == copy.stream and one.epoch > 5 and one.text]
    assert not (again[0].text or "").startswith("word0"), "the stream began again"


def test_conversations_go_on_in_order_with_their_forks_and_titles(copy: Copy) -> None:
    copy.gateway.request(copy.left[-1], wait=60)
    with httpx.Client(base_url=copy.gateway.url, timeout=60) as http:
        said = [(one["role"], one["content"][0]["text"]) for one in items(http, "c")]
        assert [text for role, text in said if role == "user"] == [f"q{number}" for number in range(5)]
        assert [role for role, _ in said] == ["user", "assistant"] * 5
        assert http.get("/v1/conversations/c").json()["title"] == "Talk"
        assert [one["content"][0]["text"] for one in items(http, copy.fork)] == [text for _, text in said[:2]]
        assert turn(http, copy.fork, "another", "noop")["status"] == "completed"
        assert len(items(http, copy.fork)) == 4


def test_an_idempotency_key_still_names_its_request(copy: Copy) -> None:
    answer = httpx.post(f"{copy.gateway.url}/v1/requests", json=KEYED, headers=KEY, timeout=30)
    assert (answer.json()["request_id"], answer.headers["idempotency-replayed"]) == (copy.keyed, "true")


def test_usage_goes_on_from_the_totals_of_before(copy: Copy) -> None:
    for request_id in copy.left:
        copy.gateway.request(request_id, wait=60)
    before, ended = copy.used
    since = {event.request_id for event in copy.new.results() if event.is_terminal} - ended
    assert since >= {*copy.left}
    wait_until(lambda: usage_of(copy.gateway) == before + len(since), 30, lambda: f"{usage_of(copy.gateway)} {before}")


def test_dead_letters_are_there_once(copy: Copy) -> None:
    letters = httpx.get(f"{copy.gateway.url}/v1/admin/dlq", timeout=30).json()["data"]
    assert [(one["request_id"], one["reason"]) for one in letters] == [("bad", copy.letter["reason"])]


def test_reconcile_says_what_it_does_and_does_it_once(copy: Copy) -> None:
    dry, first, again = copy.reconciled
    assert dry == {name: value for name, value in first.items() if name != "generation"}
    assert first["unfinished"] == len(copy.left)
    assert 2 <= first["appended_again"] <= len(copy.left)
    assert (first["conversation_facts"], first["usage_totals"] > 0, again["usage_totals"]) == (1, True, 0)
    assert first["generation"] > first["highest_epoch"]
    assert (again["unfinished"], again["appended_again"], again["conversation_facts"]) == (len(copy.left), 0, 0)


def test_doctor_names_topics_that_were_not_reconciled(copy: Copy) -> None:
    (finding,) = copy.findings
    assert "restored or mirrored" in finding
    assert restore_findings(copy.new) == []


def test_it_refuses_while_workers_run(copy: Copy) -> None:
    done = penstock(copy.new, "topics", "reconcile")
    assert (done.returncode, "stop all workers" in done.stderr) == (1, True), done.stderr
