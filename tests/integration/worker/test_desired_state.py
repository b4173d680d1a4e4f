"""Orders of operators, end to end: the command, the gateway, the topic, a real worker, and a restart of it."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner, Result

from odd_records import write_odd_records
from penstock.cli.main import app
from support import wait_until
from system import Process, System

FAST = {
    "id": "fast",
    "source": "noop",
    "engine": "noop",
    "options": {"tokens": 9},
    "defaults": {"max_tokens": 2},
    "priority": 4,
}
OTHER = {"id": "other", "source": "noop", "engine": "noop", "options": {"tokens": 1}}


class Site:
    def __init__(self, system: System) -> None:
        self.system = system
        self.worker: Process = system.worker()
        self.gateway: Process = system.gateway()
        self.worker.wait_ready()
        self.gateway.wait_ready()

    def run(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, ["models", *arguments, "--url", self.gateway.url])

    def models(self, *arguments: str) -> Any:
        """What a `penstock models` command prints."""
        result = self.run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        return lines if arguments[0] == "list" else lines[-1]

    def ask(self, *, wait: int = 20, **fields: Any) -> dict[str, Any]:
        return self.gateway.request(self.gateway.submit("a b", **fields), wait)

    def state(self, name: str) -> str | None:
        found = [one for one in self.models("list") if one["id"] == name]
        return found[0]["state"] if found else None

    def becomes(self, name: str, state: str, deadline_s: float) -> None:
        wait_until(lambda: self.state(name) == state, deadline_s, lambda: f"{name} is {self.state(name)}")

    def restart_worker(self) -> None:
        self.worker.stop()
        self.worker = self.system.worker()
        self.worker.wait_ready()


SYSTEM = {
    "models": [OTHER, FAST],
    "worker_options": {"state_interval_s": 15},
    "gateway_options": {"worker_late_s": 60},
    "processes": [],
}


@pytest.fixture(scope="module")
def site(system: System) -> Site:
    write_odd_records(system.bootstrap, [(system.names.desired, 0)], 20, seed=9, keyed=True)
    return Site(system)


def test_a_change_is_told_when_it_happens(site: Site) -> None:
    """A worker told how its models stand every few seconds alone: what was just loaded was shown as absent."""
    for order, state in (("unload", "absent"), ("load", "ready")) * 3:
        site.models(order, "other")
        site.becomes("other", state, 10)


def test_defaults_change_the_answer_and_no_model_gets_the_best(site: Site) -> None:
    wait_until(lambda: site.state("fast") == "ready", 30, "the model is ready")
    done = site.ask()
    assert (done["status"], done["model"]) == ("completed", "fast"), "priority 4 goes before 5"
    assert done["result"]["usage"]["completion_tokens"] == 2
    longer = site.ask(payload={"prompt": "a", "max_tokens": 5})
    assert longer["result"]["usage"]["completion_tokens"] == 5


def test_an_order_is_observed_before_its_command_ends(site: Site) -> None:
    """Each command judged what stood there before its order had come to a worker."""
    for arguments in (("pause", "--class", "low"), ("resume", "--class", "low"), ("pin", "other"), ("unpin", "other")):
        revision = site.models(*arguments, "--wait")["revision"]
        facts = httpx.get(f"{site.gateway.url}/v1/admin/orders/{revision}").json()
        assert (facts["observed"], facts["waiting_workers"]) == (True, [])
        assert facts["observed_revision"] >= revision
    unloaded = site.models("unload", "other", "--wait")
    assert (unloaded["state"], unloaded["replicas"][0]["state"]) == ("absent", "absent")
    loaded = site.models("load", "other", "--wait")
    assert (loaded["state"], loaded["waiting_workers"]) == ("ready", [])
    assert loaded["observed_revision"] >= loaded["desired"]["revision"]


def test_an_add_that_failed_and_its_replacement_each_get_their_own_judgement(site: Site) -> None:
    nowhere = site.run("add", "late", "--source", "/nowhere/late", "--engine", "text", "--wait", "--timeout", "60")
    assert nowhere.exit_code == 1, nowhere.output
    assert "late failed" in nowhere.stderr
    assert "/nowhere/late is neither a folder" in nowhere.stderr, "an operator is told the cause"
    readiness = httpx.get(f"{site.gateway.url}/readyz").json()["reason"]
    assert "/nowhere/late is neither a folder" in readiness
    replaced = site.models("add", "late", "--source", "x", "--engine", "noop", "--replace", "--wait")
    assert (replaced["state"], replaced["engine"], replaced["cause"]) == ("ready", "noop", None)
    site.models("remove", "late", "--wait")
    assert site.state("late") is None


def test_an_added_model_that_nobody_asks_for_is_not_waited_for(site: Site) -> None:
    lazy = site.run("add", "lazy", "--source", "x", "--engine", "noop", "--set", "preload=false", "--wait")
    assert (lazy.exit_code, lazy.stdout) == (0, "lazy is absent: it is loaded when somebody asks for it\n")
    assert site.ask(model="lazy")["status"] == "completed"
    site.models("remove", "lazy", "--wait")


def test_a_model_is_added_obeyed_after_a_restart_and_removed(site: Site) -> None:
    added = site.models("add", "new", "--source", "x", "--engine", "noop", "--alias", "fresh", "--wait")
    assert (added["id"], added["state"]) == ("new", "ready")
    assert site.ask(model="fresh")["model"] == "new"
    site.models("pin", "new")
    site.models("unload", "other", "--wait")
    site.restart_worker()
    wait_until(lambda: site.state("new") == "ready", 30, lambda: str(site.models("list")))
    assert site.models("show", "new")["pinned"]
    assert site.state("other") == "absent", "what was unloaded stays so until somebody asks"
    assert site.ask(model="other")["status"] == "completed"
    site.models("remove", "new")
    wait_until(lambda: site.state("new") is None, 30, "it has left the list")
    body = {"task": "text_generation", "model": "new", "payload": {"prompt": "x"}}
    refused = httpx.post(f"{site.gateway.url}/v1/requests", json=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


def test_a_paused_class_waits_through_a_restart(site: Site) -> None:
    site.models("pause", "--class", "low")
    wait_until(lambda: site.ask(priority=9, wait=1)["status"] != "completed", 30, "low is paused")
    assert site.ask(priority=5)["status"] == "completed"
    site.restart_worker()
    waiting = site.ask(priority=9, wait=1)
    assert waiting["status"] != "completed"
    site.models("resume", "--class", "low")
    assert site.gateway.request(waiting["request_id"], 30)["status"] == "completed"
