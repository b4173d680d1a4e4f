"""Commands about many: requests that are chosen, and lists that others write to while a command reads them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kit.cli import Json, ScriptedGateway, invoke
from kit.refusals import refused
from penstock.cli.commands import bulk_requests
from penstock.cli.failures import CliFailure, ExitCode

CANCEL, TO = "POST /v1/requests/cancel", "POST /v1/requests/reprioritize"
BEFORE = "2026-01-31T10:00:00.000Z"
MATCH = {"count": 12_000, "has_more": False, "accepted_before": BEFORE}
PARTS = [{"count": count, "has_more": more} for count, more in ((5_000, True), (5_000, True), (2_000, False))]
LOW: Json = {"model": "m", "class": "low", "older_than_s": 600}
LABELS = "--conversation-id c1 --user-id u1 --session-id s1 --correlation-id k1 --waiting-for memory"
ASKED: Json = {
    "conversation_id": "c1",
    "user_id": "u1",
    "session_id": "s1",
    "correlation_id": "k1",
    "waiting_for": "memory",
}
ONE = "POST /v1/requests/r1/reprioritize"
WRONG: Json = {"error": {"message": "no time", "code": "invalid_request"}}
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
        (
            "cancel r1 r2 --tenant shop --dry-run", {CANCEL: MATCH}, "12000 requests match; nothing was done\n", "",
            [{"ids": ["r1", "r2"], "tenant": "shop", **DRY}],
        ),
        # Others match meanwhile.
        (
            "cancel --model m", {CANCEL: [MATCH, PARTS[0]]},
            "15000 requests: cancel requested\n", "5000 of 12000\n10000 of 12000\n15000 of 12000\n",
            [{"model": "m", **DRY}, *[{"model": "m", "limit": bulk_requests.AT_ONCE, "accepted_before": BEFORE}] * 3],
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


def test_a_redrive_ends_when_the_gateway_makes_no_progress(gateway: ScriptedGateway) -> None:
    left = {"redriven": 1, "request_ids": ["r"], "skipped": [], "remaining": 5, "has_more": True, "last_id": "0/1@0:9"}
    gateway.play({"POST /v1/admin/dlq/redrive": left})
    done = gateway.run("dlq", "redrive", "--reason", "x", "--key", "secret")
    assert (done.exit_code, len(gateway.bodies)) == (1, 2)
    words = f"penstock dlq redrive --reason x --after 0/1@0:9 --url {gateway.url}"
    assert done.stderr.endswith(f"2 were redriven: continue with: {words}\n")
    assert [body["after"] for body in gateway.bodies] == [None, "0/1@0:9"]


def letters(count: str, done: int, *skipped: str) -> Json:
    told = [{"id": one, "code": "not_found", "message": "there is no such letter"} for one in skipped]
    return {count: done, "request_ids": [], "skipped": told, "remaining": 0, "has_more": False, "last_id": None}


SKIPPED = "2/17 skipped: there is no such letter\n"
ASK = "penstock: nobody can be asked here: add --yes\n"


@pytest.mark.parametrize(
    ("arguments", "answer", "code", "stderr", "calls"),
    [
        ("purge --all", letters("purged", 3), 2, ASK, 0),
        ("purge --all --yes", letters("purged", 3), 0, "", 1),
        ("purge --all --dry-run", letters("purged", 3), 0, "", 1),
        ("purge 2/17 --yes", letters("purged", 0, "2/17"), 1, SKIPPED, 1),
        ("redrive 2/17", letters("redriven", 0, "2/17"), 1, f"{SKIPPED}0 redriven, 1 skipped\n", 1),
        # What holds no request stays: a filter that finds only such letters has done all that can be done.
        ("redrive --all", letters("redriven", 0, "2/17"), 0, f"{SKIPPED}0 redriven, 1 skipped\n", 1),
        ("redrive abc", letters("redriven", 0), 2, "penstock: abc: write it as partition/offset, as 2/17\n", 0),
        ("redrive --since x", (400, WRONG), 1, "penstock: no time (invalid_request)\n", 1),
    ],
)
def test_commands_about_dead_letters(
    gateway: ScriptedGateway, arguments: str, answer: Any, code: int, stderr: str, calls: int
) -> None:
    gateway.play({f"POST /v1/admin/dlq/{arguments.split()[0]}": answer})
    done = gateway.run("dlq", *arguments.split())
    assert (done.exit_code, done.stderr, len(gateway.bodies)) == (code, stderr, calls)


@pytest.mark.parametrize(("command", "route"), [("requests list", "/v1/requests"), ("dlq list", "/v1/admin/dlq")])
def test_an_empty_list_says_that_the_model_of_its_filter_does_not_exist(
    gateway: ScriptedGateway, command: str, route: str
) -> None:
    models = {"data": [{"id": "chat", "aliases": ["default"]}]}
    gateway.play({f"GET {route}": {"data": [], "has_more": False}, "GET /v1/models": models})
    for model, said in (("bogus", "there is no model bogus; `penstock models list` shows"), ("default", "")):
        done = gateway.run(*command.split(), "--model", model)
        assert (done.exit_code, done.stderr[: len(said) or None].replace("\n", " ")) == (0, said)


def test_the_statuses_that_a_list_takes_are_named(gateway: ScriptedGateway) -> None:
    done = gateway.run("requests", "list", "--status", "bogus")
    assert (done.exit_code, gateway.asked) == (2, [])
    assert all(name in done.stderr for name in ("waiting", "queued", "completed"))


@pytest.mark.parametrize("command", ["conversations delete nope", "artifacts delete nope"])
def test_what_does_not_exist_is_said_before_anybody_is_asked(gateway: ScriptedGateway, command: str) -> None:
    gateway.play({f"GET /v1/{command.split()[0]}/nope": (404, {"error": {"message": "nope", "code": "not_found"}})})
    done = gateway.run(*command.split())
    assert (done.exit_code, done.stderr) == (1, "penstock: nope (not_found)\n")
    gateway.play({f"GET /v1/{command.split()[0]}/nope": {}})
    assert gateway.run(*command.split()).stderr == ASK
    assert [one.partition(" ")[0] for one in gateway.asked] == ["GET"]


def test_the_options_that_choose_requests_are_named_and_exist() -> None:
    done = invoke("requests", "cancel")
    labels = "--conversation-id, --user-id, --session-id, --correlation-id"
    wanted = f"--model, --class, --task, --status, {labels}, --older-than, --waiting-for, --tenant"
    assert (done.exit_code, done.stderr) == (2, f"penstock: name the ids of requests, or choose them: {wanted}\n")
    assert all(option in invoke("requests", "cancel", "--help").output for option in wanted.split(", "))


AGES = {"30": 30, "30s": 30, "10m": 600, "2 h": 7_200, "1d": 86_400, "1.5h": 5_400}


@pytest.mark.parametrize("age", [*AGES, "", "m", "-1m", "1w"])
def test_ages_have_a_number_and_a_unit_and_others_are_refused(age: str) -> None:
    with refused(None if age in AGES else CliFailure, exit_code=ExitCode.USAGE):
        assert bulk_requests.seconds_of(age) == AGES.get(age)


REPLAY = "GET /v1/conversations/trip/replay"


def page(offsets: list[int], *, has_more: bool) -> Json:
    """Of a log that has grown to four records when its first page is read."""
    return {"data": [{"offset": one} for one in offsets], "has_more": has_more, "last_id": f"{offsets[-1]}@4"}


def test_a_replay_ends_where_the_log_ended_at_its_first_page(gateway: ScriptedGateway) -> None:
    script: Json = {
        f"{REPLAY}?from_offset=1": page([1], has_more=True),
        f"{REPLAY}?from_offset=1&after=1%404": page([2, 3], has_more=False),
        REPLAY: (500, {"error": {"message": "this call follows the end of the log", "code": "internal_error"}}),
    }
    gateway.play(script)
    done = gateway.run("conversations", "replay", "trip", "--from-offset", "1")
    assert (done.exit_code, [json.loads(line)["offset"] for line in done.stdout.splitlines()]) == (0, [1, 2, 3])


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("conversations list", "/v1/conversations"),
        ("conversations show trip", "/v1/conversations/trip/items"),
        ("conversations forks trip", "/v1/conversations/trip/forks"),
        ("conversations export --pattern *", "/v1/conversations"),
        ("requests list", "/v1/requests"),
        ("artifacts list", "/v1/artifacts"),
        ("dlq list", "/v1/admin/dlq"),
    ],
)
def test_a_list_is_read_whole_before_its_first_line_is_written(
    gateway: ScriptedGateway, command: str, path: str
) -> None:
    """What reads the output can write to the list."""
    one = {"id": "one", "type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}
    refusal = {"error": {"message": "no second page", "code": "internal_error"}}
    gateway.play({f"GET {path}": [{"data": [one], "has_more": True, "last_id": "one"}, (500, refusal)]})
    done = gateway.run(*command.split(), *([] if "export" in command else ["--json"]))
    assert (done.exit_code, done.stdout, len(gateway.asked)) == (1, "", 2)


def shown(request_id: str, status: str, created_at: str | None) -> Json:
    return {"request_id": request_id, "status": status, "done": False, "created_at": created_at}


@pytest.mark.parametrize(("limit", "more"), [(3, False), (2, True)])
def test_a_list_that_goes_on_says_so_on_stderr(gateway: ScriptedGateway, limit: int, more: bool) -> None:
    rows = [shown(f"r{number}", "queued", f"2026-01-01T00:00:0{number}Z") for number in range(3)]
    gateway.play({"GET /v1/requests": {"data": rows, "has_more": False}})
    done = gateway.run("requests", "list", "--limit", str(limit), "--json")
    assert len(done.stdout.splitlines()) == limit
    assert done.stderr == ("there are more than these 2: --limit shows them\n" if more else "")
