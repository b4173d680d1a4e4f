"""`penstock requests cancel` and `reprioritize` for many: the calls to the gateway and the output."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kit.cli import Json, ScriptedGateway, invoke
from penstock.cli.commands import bulk_requests
from penstock.cli.failures import CliFailure, ExitCode

CANCEL, TO = "POST /v1/requests/cancel", "POST /v1/requests/reprioritize"
BEFORE = "2026-01-31T10:00:00.000Z"
MATCH = {"count": 12_000, "has_more": False, "accepted_before": BEFORE}
PARTS = [{"count": count, "has_more": more} for count, more in ((5_000, True), (5_000, True), (2_000, False))]
LOW: Json = {"model": "m", "class": "low", "older_than_s": 600}
LABELS = "--conversation-id c1 --user-id u1 --session-id s1 --correlation-id k1"
ASKED: Json = {"conversation_id": "c1", "user_id": "u1", "session_id": "s1", "correlation_id": "k1"}
ONE = "POST /v1/requests/r1/reprioritize"
DRY: Json = {"dry_run": True}
HIGH: Json = {"priority": "high"}


@pytest.mark.parametrize(
    ("arguments", "script", "stdout", "stderr", "bodies"),
    [
        (
            "cancel --model m --class low --older-than 10m", {CANCEL: [MATCH, *PARTS]},
            "12000 requests: cancel requested\n", "5000 of 12000\n10000 of 12000\n",
            [{**LOW, **DRY}, *[{**LOW, "limit": bulk_requests.AT_ONCE, "accepted_before": BEFORE}] * 3],
        ),
        (
            "reprioritize --to high --tenant * --dry-run --json", {TO: MATCH},
            json.dumps({"matched": 12_000, "count": 0, "dry_run": True}) + "\n", "",
            [{"tenant": "*", "priority": "high", **DRY}],
        ),
        (
            f"cancel {LABELS} --dry-run", {CANCEL: MATCH}, "12000 requests match; nothing was done\n", "",
            [{**ASKED, **DRY}],
        ),
        ("reprioritize r1 --to high", {ONE: HIGH}, "r1 has priority high\n", "", [HIGH]),
        ("reprioritize r1 --to 3", {ONE: {"priority": 3}}, "r1 has priority 3\n", "", [{"priority": 3}]),
    ],
)  # fmt: skip
def test_calls_and_output(
    gateway: ScriptedGateway, arguments: str, script: Json, stdout: str, stderr: str, bodies: list[Any]
) -> None:
    gateway.play(script)
    done = gateway.run("requests", *arguments.split())
    assert (done.exit_code, done.stdout, done.stderr) == (0, stdout, stderr)
    assert gateway.bodies == bodies


def test_calls_end_although_others_match_meanwhile(gateway: ScriptedGateway) -> None:
    gateway.play({CANCEL: [MATCH, PARTS[0]]})
    done = gateway.run("requests", "cancel", "--model", "m")
    assert (done.exit_code, done.stdout) == (0, "15000 requests: cancel requested\n")


def test_a_redrive_ends_when_the_gateway_makes_no_progress(gateway: ScriptedGateway) -> None:
    """It called for ever."""
    left = {"redriven": 1, "request_ids": ["r"], "skipped": [], "remaining": 5, "has_more": True, "last_id": "0/1@0:9"}
    gateway.play({"POST /v1/admin/dlq/redrive": left})
    done = gateway.run("dlq", "redrive", "--reason", "x", "--key", "secret")
    assert (done.exit_code, len(gateway.bodies)) == (1, 2)
    words = f"penstock dlq redrive --reason x --after 0/1@0:9 --url {gateway.url}"
    assert done.stderr.endswith(f"2 were redriven: continue with: {words}\n")
    assert [body["after"] for body in gateway.bodies] == [None, "0/1@0:9"]


def test_the_options_that_choose_requests_are_named_and_exist() -> None:
    done = invoke("requests", "cancel")
    labels = "--conversation-id, --user-id, --session-id, --correlation-id"
    wanted = f"--model, --class, --task, --status, {labels}, --older-than, --tenant"
    assert (done.exit_code, done.stderr) == (2, f"penstock: name the ids of requests, or choose them: {wanted}\n")
    assert all(option in invoke("requests", "cancel", "--help").output for option in wanted.split(", "))


@pytest.mark.parametrize(("age", "seconds"), [("30", 30), ("30s", 30), ("10m", 600), ("2 h", 7_200), ("1d", 86_400)])
def test_ages(age: str, seconds: int) -> None:
    assert bulk_requests.seconds_of(age) == seconds


@pytest.mark.parametrize("age", ["", "m", "-1m", "1w", "1.5h"])
def test_other_ages_are_refused(age: str) -> None:
    with pytest.raises(CliFailure) as failed:
        bulk_requests.seconds_of(age)
    assert failed.value.exit_code is ExitCode.USAGE
