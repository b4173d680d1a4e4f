"""Dead letters from a real failure to a real redrive: over HTTP and by command, across kills, tenants and keys."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from confluent_kafka import Producer

from breakable_server import Breakable, remote, serving
from penstock.gateway.edge.keys import create_key, revoke_key
from system import NOOP, Process, System, eventually, running
from worker_requests import send

Make = Callable[..., System]


def failing(prompt: str, **fields: Any) -> dict[str, Any]:
    """A request that gets its letter after one attempt."""
    return {"request_id": prompt, "payload": {"prompt": prompt}, "max_attempts": 1, **fields}


def client(gateway: Process, key: str | None = None) -> httpx.Client:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=gateway.url, headers=headers, timeout=60)


def letters(http: httpx.Client, **query: Any) -> list[dict[str, Any]]:
    answer = http.get("/v1/admin/dlq", params={"limit": 100, **query})
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def redrive(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/admin/dlq/redrive", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


PENSTOCK = [sys.executable, "-m", "penstock.cli.main"]
ENV = {name: value for name, value in os.environ.items() if name != "PENSTOCK_CONFIG"}


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PENSTOCK, "dlq", *arguments], capture_output=True, text=True, timeout=120, env=ENV)


def dead(http: httpx.Client, count: int) -> list[dict[str, Any]]:
    eventually(lambda: len(letters(http)) >= count, 60, lambda: f"{len(letters(http))} of {count} letters")
    return letters(http)


@pytest.fixture(scope="module")
def server() -> Iterator[Breakable]:
    with serving(500) as found:
        yield found


@pytest.fixture
def broken(server: Breakable) -> Breakable:
    """The server of the remote model: it fails until a test says otherwise."""
    server.status = 500
    server.asked.clear()
    return server


@pytest.fixture(scope="module")
def site(kafka: Any, server: Breakable, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder, prefix = tmp_path_factory.mktemp("letters"), f"l{uuid.uuid4().hex[:6]}-"
    with running(System(kafka.bootstrap_servers, prefix, folder, models=[remote(server.server_port)])) as system:
        yield system.start_all(["w1", "g1"])


@pytest.fixture
def system(site: System) -> Iterator[System]:
    """A system without letters, which most tests share."""
    yield site
    assert command("purge", "--all", "--yes", "--url", site.process("g").url).returncode == 0


def started(make_system: Make, server: Breakable, **options: Any) -> tuple[System, Process]:
    system = make_system(models=[remote(server.server_port)], **options)
    system.worker().wait_ready()
    return system, system.gateway().wait_ready()


def test_a_letter_is_listed_shown_and_run_again_once(gateway: Process, broken: Breakable) -> None:
    with client(gateway) as http:
        asked = {"task": "text_generation", "payload": {"prompt": "p"}, "max_attempts": 2, "priority": 2}
        former = http.post("/v1/requests", json=asked).json()["request_id"]
        ended = http.get(f"/v1/requests/{former}", params={"wait": 30}).json()
        assert ended["status"] == "dead_lettered"
        assert [one["attempt"] for one in ended["history"]] == [1, 2]
        (listed,) = dead(http, 1)
        assert (listed["request_id"], listed["reason"], listed["model"]) == (former, "engine_failed", "noop")
        assert listed["history"] == ended["history"]
        assert "original" not in listed
        shown = http.get(f"/v1/admin/dlq/{listed['id']}").json()
        assert "ce_id" in shown["headers"]
        assert (shown["request"]["payload"], shown["request"]["priority"]) == ({"prompt": "p"}, 2)
        assert shown["error_chain"]

        tried = redrive(http, ids=[listed["id"]], dry_run=True)
        assert (tried["redriven"], letters(http)[0]["redriven_as"]) == (1, None)
        broken.status = 200
        done = redrive(http, filter={"reason": "engine_failed", "tenant": "default"})
        assert done["request_ids"] == tried["request_ids"]
        (again,) = done["request_ids"]
        new = http.get(f"/v1/requests/{again}", params={"wait": 30}).json()
        assert (new["status"], new["redriven_from"], new["priority"]) == ("completed", former, 2)
        assert [one["error"] is None for one in new["history"]] == [False, False, True]
        assert letters(http)[0]["redriven_as"] == again

        assert redrive(http, ids=[listed["id"]])["skipped"][0]["code"] == "conflict"
        assert redrive(http, filter={})["redriven"] == 0
        assert broken.asked["p"] == 3
        (third,) = redrive(http, ids=[listed["id"]], again=True)["request_ids"]
        assert third != again
        assert http.get(f"/v1/requests/{third}", params={"wait": 30}).json()["status"] == "completed"


def test_the_command_does_all_of_it(system: System, gateway: Process, broken: Breakable) -> None:
    send(system, *(failing(f"p{number}") for number in range(3)))
    producer = Producer({"bootstrap.servers": system.bootstrap})
    producer.produce(system.names.request("text_generation", 5), b"\xff no record")
    assert producer.flush(60) == 0
    with client(gateway) as http:
        dead(http, 4)
    where = ["--url", gateway.url]
    listed = [json.loads(line) for line in command("list", "--json", *where).stdout.splitlines()]
    (unreadable,) = [one for one in listed if not one["redrivable"]]
    assert json.loads(command("show", unreadable["id"], "--json", *where).stdout)["request"] is None
    raw = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", "dlq", "show", unreadable["id"], "--raw", *where],
        capture_output=True, timeout=120, check=True,
    )  # fmt: skip
    assert raw.stdout == b"\xff no record"
    refused = command("redrive", unreadable["id"], *where)
    assert (refused.returncode, "no valid request" in refused.stderr) == (1, True)
    assert command("redrive", *where).returncode == 2
    tried = command("redrive", "--all", "--dry-run", *where)
    assert "3 would be redriven, 1 skipped" in tried.stderr
    broken.status = 200
    done = command("redrive", "--reason", "engine_failed", "--rate", "50", *where)
    assert done.returncode == 0, done.stderr
    with client(gateway) as http:
        for request_id in done.stdout.split():
            ended = http.get(f"/v1/requests/{request_id}", params={"wait": 30}).json()
            assert (ended["status"], ended["redriven_from"][0]) == ("completed", "p")
        assert http.get("/metrics").text.count('penstock_dlq_letters{reason="engine_failed"}') == 1
        assert command("purge", unreadable["id"], "--yes", *where).stdout == "1 purged\n"
        assert unreadable["id"] not in [one["id"] for one in letters(http)]
        assert http.get(f"/v1/admin/dlq/{unreadable['id']}").status_code == 404
        assert command("purge", "--all", "--yes", *where).stdout == "3 purged\n"
        assert letters(http) == []
    assert not any(b"no record" in (message.value() or b"") for message in system.read(system.names.dlq))


def test_a_redrive_of_letters_that_fail_again_ends(system: System, gateway: Process, broken: Breakable) -> None:
    """It followed the letters that it made: 30 letters at two a second were 1,113 requests after ten minutes."""
    send(system, *(failing(f"again{number}") for number in range(30)))
    with client(gateway) as http:
        first = {one["id"] for one in dead(http, 30)}
        begin = ["dlq", "redrive", "--since", "2026-01-31T10:00:00Z", "--rate", "2.5", "--url", gateway.url]
        running = subprocess.Popen([*PENSTOCK, *begin], stdout=-1, stderr=-1, text=True, env=ENV)
        dead(http, 32)  # its first call is under way, and what it runs fails again
        running.send_signal(signal.SIGINT)
        printed, said = running.communicate(timeout=120)
        assert running.returncode == 130, said
        told, words = said.splitlines()[-1].split(" were redriven: continue with: ")
        ids = printed.split()
        assert told == f"penstock: {len(ids)}"
        again = shlex.split(words)
        assert {*begin, "--after"} < set(again)
        rest = subprocess.run([*PENSTOCK, *again[1:]], capture_output=True, text=True, timeout=120, env=ENV)
        assert rest.returncode == 0, rest.stderr
        assert f"{30 - len(ids)} redriven, 0 skipped" in rest.stderr
        dead(http, 60)
        assert {one["id"] for one in letters(http) if one["redriven_as"]} == first


@pytest.mark.thorough
def test_a_redrive_of_many_that_is_killed_goes_on_without_running_any_twice(
    make_system: Make, broken: Breakable
) -> None:
    count = 150
    system, gateway = started(make_system, broken)
    prompts = [f"p{number}" for number in range(count)]
    send(system, *(failing(prompt) for prompt in prompts))
    with client(gateway) as http:
        eventually(lambda: len(system.dead_letters()) == count, 90, gateway.tail)
        broken.status = 200
        failed: list[Exception] = []

        def ask() -> None:
            try:
                redrive(http, filter={})
            except httpx.HTTPError as error:
                failed.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        eventually(lambda: sum(broken.asked.values()) >= count + 20, 60, gateway.tail)
        pid = gateway.popen.pid
        gateway.kill9()
        asking.join(60)
    assert not Path(f"/proc/{pid}").exists()
    assert failed, "it had ended before the kill"
    system.gateway(port=gateway.port).wait_ready()
    with client(gateway) as http:
        while redrive(http, filter={})["has_more"]:
            pass
        eventually(lambda: all(broken.asked[prompt] >= 2 for prompt in prompts), 60, lambda: str(broken.asked))
        system.wait_drained()
        assert redrive(http, filter={})["redriven"] == 0
    assert set(broken.asked.values()) == {2}
    ends = system.outcomes().values()
    assert [one.status for one in ends].count("completed") == count


@pytest.mark.thorough
def test_payloads_are_shown_to_keys_of_their_tenant_alone(make_system: Make, broken: Breakable, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    operator = create_key(keys, tenant="ops", scopes=["admin"])
    reader = create_key(keys, tenant="acme", scopes=["read"])
    own = create_key(keys, tenant="acme", scopes=["read", "admin"])
    system, gateway = started(make_system, broken, auth={"keys_file": str(keys)})
    send(system, failing("a secret", request_id="r", tenant="acme"))
    with client(gateway, reader) as http:
        assert http.get("/v1/admin/dlq").status_code == 403
        assert http.post("/v1/admin/dlq/redrive", json={"filter": {}}).status_code == 403
    with client(gateway, operator) as http:
        (letter,) = dead(http, 1)
        shown = http.get(f"/v1/admin/dlq/{letter['id']}").json()
        assert shown["original_omitted"]
        assert "secret" not in json.dumps(shown)
        with client(gateway, own) as owner:
            assert "secret" in owner.get(f"/v1/admin/dlq/{letter['id']}").json()["original"]
        broken.status = 200
        (again,) = redrive(http, ids=[letter["id"]])["request_ids"]
        assert http.get(f"/v1/requests/{again}").status_code == 404
    with client(gateway, reader) as http:
        ended = http.get(f"/v1/requests/{again}", params={"wait": 30}).json()
        assert (ended["status"], ended["redriven_from"]) == ("completed", "r")


def test_a_redrive_whose_key_is_revoked_ends_with_that_and_another_key_continues_it(
    make_system: Make, broken: Breakable, tmp_path: Path
) -> None:
    """The letters that were left were listed as skipped, and the command ended well."""
    keys = tmp_path / "keys.json"
    leaving, staying = (create_key(keys, tenant="ops", scopes=["admin"]) for _ in range(2))
    system, gateway = started(make_system, broken, auth={"keys_file": str(keys)})
    send(system, *(failing(f"p{number}", tenant="acme") for number in range(6)))
    with client(gateway, staying) as http:
        dead(http, 6)
        broken.status = 200
        begin = ["dlq", "redrive", "--all", "--rate", "1", "--url", gateway.url]
        env = {**ENV, "PENSTOCK_API_KEY": leaving}
        running = subprocess.Popen([*PENSTOCK, *begin], stdout=-1, stderr=-1, text=True, env=env)
        eventually(lambda: any(one["redriven_as"] for one in letters(http)), 60, gateway.tail)
        assert revoke_key(keys, leaving.split("_")[1])
        printed, said = running.communicate(timeout=120)
        done = printed.split()
        assert (running.returncode, "unauthenticated" in said, "skipped:" in said) == (1, True, False), said
        told, words = said.splitlines()[-1].split(" were redriven: continue with: ")
        assert told.endswith(f"; {len(done)}")
        assert 0 < len(done) < 6
        rest = command(*shlex.split(words)[2:], "--key", staying)
        assert (rest.returncode, len(rest.stdout.split())) == (0, 6 - len(done)), rest.stderr
        assert {one["redriven_as"] for one in letters(http)} == {*done, *rest.stdout.split()}


def test_a_request_that_is_erased_takes_its_letter_along(system: System, gateway: Process, broken: Breakable) -> None:
    send(system, failing("erase-me"))
    send(system, failing("keep"))
    with client(gateway) as http:
        dead(http, 2)
        eventually(lambda: http.get("/v1/requests/erase-me").json().get("done", False), 30, gateway.tail)
        assert http.delete("/v1/requests/erase-me").status_code == 200
        assert [one["request_id"] for one in letters(http)] == ["keep"]
    gateway.kill9()
    system.gateway("g2", port=gateway.port).wait_ready()
    with client(gateway) as http:
        assert [one["request_id"] for one in letters(http)] == ["keep"]


def test_the_attempts_of_a_killed_worker_are_in_the_history(make_system: Make) -> None:
    system = make_system(models=[{**NOOP, "options": {"tokens": 400, "delay_ms": 20}}])
    worker, gateway = system.worker().wait_ready(), system.gateway().wait_ready()
    with client(gateway) as http:
        asked = {"task": "text_generation", "payload": {"prompt": "p"}, "stream": True}
        request_id = http.post("/v1/requests", json=asked).json()["request_id"]

        def runs() -> bool:
            return http.get(f"/v1/requests/{request_id}").json()["status"] == "running"

        eventually(runs, 30, worker.tail)
        worker.kill9()
        system.worker().wait_ready()
        eventually(lambda: http.get(f"/v1/requests/{request_id}").json()["done"], 90, lambda: system.logs(30))
        ended = http.get(f"/v1/requests/{request_id}").json()
    assert ended["status"] == "completed"
    died, ran = ended["history"]
    assert (died["error"]["code"], died["ended_at"]) == ("engine_failed", None)
    assert died["started_at"] < ran["started_at"]
    assert died["worker_id"] != ran["worker_id"]
    assert ran["error"] is None
