"""`penstock requests cancel` and `reprioritize` for many: what is asked of the gateway, and what people read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from penstock.cli.commands import bulk_requests
from penstock.cli.commands.common import Gateway
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.main import app


class Calls:
    """A gateway with so many requests that match."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []

    def call(self, _: Gateway, method: str, path: str, *, body: Any = None, **more: Any) -> Any:
        self.paths.append(path)
        self.bodies.append(body)
        if body.get("dry_run"):
            return {"count": self.waiting, "has_more": False}
        if "limit" not in body:
            return {"request_id": "r1", "priority": body["priority"]}
        count = min(self.waiting, body["limit"])
        self.waiting -= count
        return {"count": count, "has_more": self.waiting > 0}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made = Calls(12_000)
    monkeypatch.setattr(Gateway, "call", lambda *arguments, **named: made.call(*arguments, **named))
    return made


def test_many_are_cancelled_some_at_a_time_with_progress(calls: Calls) -> None:
    arguments = ["requests", "cancel", "--model", "m", "--class", "low", "--older-than", "10m"]
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.stdout) == (0, "12000 requests: cancel requested\n")
    assert done.stderr.splitlines() == ["5000 of 12000", "10000 of 12000"]
    assert calls.bodies[0] == {"model": "m", "class": "low", "older_than_s": 600, "dry_run": True}
    assert [body["limit"] for body in calls.bodies[1:]] == [bulk_requests.AT_ONCE] * 3


def test_a_dry_run_counts(calls: Calls) -> None:
    done = CliRunner().invoke(app, ["requests", "reprioritize", "--to", "high", "--tenant", "*", "--dry-run", "--json"])
    assert json.loads(done.stdout) == {"matched": 12_000, "count": 0, "dry_run": True}
    assert calls.bodies == [{"tenant": "*", "priority": "high", "dry_run": True}]


def test_labels_choose_too(calls: Calls) -> None:
    labels = ["--conversation-id", "c1", "--user-id", "u1", "--session-id", "s1", "--correlation-id", "k1"]
    done = CliRunner().invoke(app, ["requests", "cancel", *labels, "--dry-run"])
    assert (done.exit_code, done.stdout) == (0, "12000 requests match; nothing was done\n")
    given = {"conversation_id": "c1", "user_id": "u1", "session_id": "s1", "correlation_id": "k1"}
    assert calls.bodies == [{**given, "dry_run": True}]


def test_who_names_none_is_told_the_options(calls: Calls) -> None:
    done = CliRunner().invoke(app, ["requests", "cancel"])
    labels = "--conversation-id, --user-id, --session-id, --correlation-id"
    wanted = f"--model, --class, --task, --status, {labels}, --older-than, --tenant"
    assert (done.exit_code, done.stderr) == (2, f"penstock: name the ids of requests, or choose them: {wanted}\n")
    for option in wanted.split(", "):
        assert option in CliRunner().invoke(app, ["requests", "cancel", "--help"]).output


@pytest.mark.parametrize(("to", "asked"), [("high", "high"), ("3", 3)])
def test_named_requests_get_a_class_or_a_number(calls: Calls, to: str, asked: Any) -> None:
    done = CliRunner().invoke(app, ["requests", "reprioritize", "r1", "--to", to])
    assert (done.exit_code, done.stdout) == (0, f"r1 has priority {asked}\n")
    assert (calls.paths, calls.bodies) == (["/v1/requests/r1/reprioritize"], [{"priority": asked}])


@pytest.mark.parametrize(
    "arguments", [["cancel"], ["cancel", "r1", "--model", "m"], ["cancel", "--older-than", "soon"]]
)
def test_what_is_meant_must_be_said(calls: Calls, arguments: list[str]) -> None:
    done = CliRunner().invoke(app, ["requests", *arguments])
    assert isinstance(done.exception, CliFailure | SystemExit)
    assert not calls.paths


@pytest.mark.parametrize(("age", "seconds"), [("30", 30), ("30s", 30), ("10m", 600), ("2 h", 7_200), ("1d", 86_400)])
def test_ages(age: str, seconds: int) -> None:
    assert bulk_requests.seconds_of(age) == seconds


@pytest.mark.parametrize("age", ["", "m", "-1m", "1w", "1.5h"])
def test_what_is_no_age(age: str) -> None:
    with pytest.raises(CliFailure) as failed:
        bulk_requests.seconds_of(age)
    assert failed.value.exit_code is ExitCode.USAGE
