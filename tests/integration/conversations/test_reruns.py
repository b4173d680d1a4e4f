"""Conversations asked again of another model: in order, in a fork, over kills of whoever takes part."""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image

from conversing import append, penstock
from kit.assets import prepared
from penstock.gateway.edge.keys import create_key
from support import create_topics, wait_until
from system import NOOP, Process, System

DELAY_MS = 1_000
"""So long a turn of the slow model runs, while something is done to it."""
Json = dict[str, Any]


def SYSTEM() -> dict[str, Any]:
    eyes = {
        "source": str(prepared("tiny-image-to-text")),
        "engine": "vision",
        "tasks": ["image_to_text", "text_generation"],
        "preload": False,
    }
    return {
        "models": [
            {**NOOP, "id": "old", "options": {"tokens": 2}},
            {**NOOP, "id": "new", "tasks": ["text_generation", "summarization"], "options": {"echo": True}},
            {**NOOP, "id": "slow", "options": {"echo": True, "first_delay_ms": DELAY_MS}},
            {"id": "eyes", **eyes},
            {"id": "eyes-2", **eyes},
        ]
    }


def ask(gateway: Process, conversation: str, text: Any, model: str = "old", **fields: Any) -> Json:
    payload = {"messages": [{"role": "user", "content": text}], "temperature": 0}
    body = {"task": "text_generation", "model": model, "conversation_id": conversation, "payload": payload, **fields}
    answer = httpx.post(f"{gateway.url}/v1/requests?wait=60", json=body, timeout=90)
    assert (answer.status_code, answer.json().get("status")) == (200, "completed"), answer.text
    return answer.json()


def lines(gateway: Process, conversation: str) -> list[Json]:
    answer = httpx.get(f"{gateway.url}/v1/conversations/{conversation}/export", timeout=60)
    if answer.status_code == 404:
        return []
    return [line for line in map(json.loads, answer.text.splitlines()[1:]) if line["type"] == "message"]


def answered(gateway: Process, conversation: str) -> list[Json]:
    return [line for line in lines(gateway, conversation) if line["source"]["direction"] == "out"]


def questions(gateway: Process, conversation: str) -> list[str]:
    return [line["content"] for line in lines(gateway, conversation) if line["role"] == "user"]


def requests_of(gateway: Process, conversation: str) -> list[Json]:
    found = httpx.get(f"{gateway.url}/v1/requests?limit=100&conversation_id={conversation}").json()
    return found["data"]


def rerun(gateway: Process, *words: str) -> Json:
    result = penstock(gateway, "rerun", *words, "--json")
    assert result.exit_code == 0, result.output + repr(result.exception)
    return json.loads(result.stdout)


def refused(gateway: Process, *words: str) -> str:
    result = penstock(gateway, *words)
    assert (result.exit_code, type(result.exception)) == (1, SystemExit), result.output
    return result.output


def begun(gateway: Process, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock.cli.main", "conversations", "rerun", *words, "--url", gateway.url]
    return subprocess.Popen(
        command, env={**os.environ, "COLUMNS": "200"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def several(gateway: Process, conversation: str, count: int) -> None:
    for number in range(count):
        ask(gateway, conversation, f"q{number}")


def test_turns_are_asked_again_in_order_and_the_rest_stays_in_its_place(gateway: Process) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "gate", "arguments": "{}"}}
    append(gateway, "trip", [{"role": "system", "content": "Be brief."}])
    ask(gateway, "trip", "q0")
    append(gateway, "trip", [{"role": "system", "content": "It is night."}, {"role": "user", "content": "noted"}])
    append(
        gateway,
        "trip",
        [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "shut", "tool_call_id": "c1"},
        ],
    )
    ask(gateway, "trip", "q1")
    made = rerun(gateway, "trip", "--model", "new")
    assert made == {
        "id": "trip-new",
        "rerun_of": "trip",
        "model": "new",
        "through": 0,
        "turns": 2,
        "asked": 2,
        "kept_messages": 4,
    }
    about = httpx.get(f"{gateway.url}/v1/conversations/trip-new").json()
    assert about["forked_from"] == {"conversation_id": "trip", "through": 0}
    original, fork = lines(gateway, "trip"), lines(gateway, "trip-new")
    assert [(one["role"], one.get("tool_calls"), one.get("tool_call_id")) for one in fork] == [
        (one["role"], one.get("tool_calls"), one.get("tool_call_id")) for one in original
    ]
    assert [one["content"] for one in fork if one["source"]["direction"] == "in"] == [
        one["content"] for one in original if one["source"]["direction"] == "in"
    ]
    assert [one["source"]["model"] for one in answered(gateway, "trip-new")] == ["new", "new"]
    # The other model was told its own answers, and the items: of system messages a prompt has the newest, first.
    told = json.loads(fork[-1]["content"])
    said = [one["content"] for one in fork[:-1] if one["role"] != "system"]
    assert [one["content"] for one in told] == ["It is night.", *said]
    assert fork[-1]["source"]["metadata"] == {
        "rerun_of": "trip",
        "rerun_model": "new",
        "rerun_offset": str(original[-2]["source"]["offset"]),
    }
    assert {one["priority"] for one in requests_of(gateway, "trip-new")} == {8}
    count = len(requests_of(gateway, "trip-new"))
    assert rerun(gateway, "trip", "--model", "new")["asked"] == 0
    assert (lines(gateway, "trip-new"), len(requests_of(gateway, "trip-new"))) == (fork, count)
    ask(gateway, "trip", "q2")
    assert rerun(gateway, "trip", "--model", "new")["asked"] == 1, "what came since"
    assert questions(gateway, "trip-new") == ["q0", "noted", "q1", "q2"]
    assert "is not of this re-run of trip by old" in refused(
        gateway, "rerun", "trip", "--model", "old", "--fork", "trip-new"
    )


def test_both_are_compared_by_their_questions(gateway: Process) -> None:
    append(gateway, "both", [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}])
    append(gateway, "both", [{"role": "assistant", "content": "Hello!"}])
    several(gateway, "both", 2)
    rerun(gateway, "both", "--model", "new")
    ask(gateway, "both-new", "more", "new")
    result = penstock(gateway, "compare", "both", "both-new", "--json")
    assert result.exit_code == 0, result.output
    found = [json.loads(line) for line in result.stdout.splitlines()]
    assert [[one["content"] for one in pair["asked"]] for pair in found] == [["q0"], ["q1"], ["more"]]
    assert [pair["equal"] for pair in found] == [False, False, None]
    ((old,), (new,)) = (found[0]["answers"][name] for name in ("both", "both-new"))
    assert (old["content"], old["model"], new["model"]) == ("word0 word1 ", "old", "new")
    assert old["usage"]["completion_tokens"] == 2
    assert old["run_ms"] >= 0
    assert new["run_ms"] >= 0
    assert found[2]["answers"]["both"] is None
    result = penstock(gateway, "compare", "both", "both-new")
    assert result.exit_code == 0, result.output
    assert "both (old, 2 tokens, " in result.stdout
    assert result.stdout.endswith("1 inherited by both, 2 different, 1 only in both-new\n")
    rerun(gateway, "both", "--model", "old", "--fork", "both-again")
    result = penstock(gateway, "compare", "both", "both-again")
    assert result.stdout.endswith("1 inherited by both, 2 equal\n")


def test_a_part_of_a_fork_with_a_summary_is_asked_again(gateway: Process) -> None:
    several(gateway, "root", 2)
    answer = httpx.post(f"{gateway.url}/v1/conversations/root/fork", json={"through": 3, "id": "branch"})
    assert answer.status_code == 201, answer.text
    ask(gateway, "branch", "q2")
    done = httpx.post(f"{gateway.url}/v1/conversations/branch/summarize?wait=60", json={"model": "new"}, timeout=90)
    assert done.json()["status"] == "completed", done.text
    ask(gateway, "branch", "q3")
    ask(gateway, "branch", "q4")
    places = {one["content"]: one["source"]["offset"] for one in lines(gateway, "branch")}
    one_turn = ("--after", "1", "--through", f"msg_{places['q2']}", "--fork", "part")
    assert rerun(gateway, "branch", "--model", "new", *one_turn)["turns"] == 2
    assert questions(gateway, "part") == ["q0", "q1", "q2"]
    inside = refused(gateway, "rerun", "branch", "--model", "new", "--after", str(places["q3"]), "--fork", "inside")
    assert f"name msg_{places['q3'] + 1}" in inside
    assert lines(gateway, "inside") == []
    assert rerun(gateway, "branch", "--model", "new")["through"] is None, "nothing stands before the first turn"
    assert questions(gateway, "branch-new") == [f"q{number}" for number in range(5)]


def test_images_come_along(gateway: Process) -> None:
    drawn = io.BytesIO()
    Image.new("RGB", (60, 40), (220, 30, 30)).save(drawn, "PNG")
    image = {"data": base64.b64encode(drawn.getvalue()).decode(), "media_type": "image/png"}
    ask(gateway, "album", [{"type": "image", "image": image}, {"type": "text", "text": "What colour is it?"}], "eyes")
    append(gateway, "album", [{"role": "assistant", "content": [{"type": "image", "image": image}]}])
    ask(gateway, "album", "And now?", "eyes")
    made = rerun(gateway, "album", "--model", "eyes-2", "--temperature", "0", "--max-tokens", "20")
    assert (made["turns"], made["kept_messages"]) == (2, 1)
    shown = [[image["sha256"] for image in one.get("images", ())] for one in lines(gateway, "album-eyes-2")]
    assert shown == [[image["sha256"] for image in one.get("images", ())] for one in lines(gateway, "album")]
    assert answered(gateway, "album-eyes-2")[0]["content"] == "It is red."


def test_what_cannot_be_run_again_is_refused_before_anything_is_made(
    system: System, gateway: Process, tmp_path: Path
) -> None:
    several(gateway, "plain", 1)
    append(gateway, "notes", [{"role": "user", "content": "Nobody answered."}])
    assert httpx.post(f"{gateway.url}/v1/conversations", json={"id": "empty"}).is_success
    assert "model_not_found" in refused(gateway, "rerun", "plain", "--model", "nobody", "--fork", "refused")
    for conversation in ("notes", "empty"):
        said = refused(gateway, "rerun", conversation, "--model", "new", "--fork", "refused")
        assert "has no turn there that can be run again" in said
    assert "does not exist" in refused(gateway, "rerun", "nowhere", "--model", "new", "--fork", "refused")
    assert "does not exist" in refused(gateway, "compare", "plain", "nowhere")
    keys = tmp_path / "keys.json"
    secret = create_key(keys, tenant="others")
    keyed = system.gateway("keyed", env={"PENSTOCK_AUTH__KEYS_FILE": str(keys)}).wait_ready()
    foreign = refused(keyed, "rerun", "plain", "--model", "new", "--fork", "refused", "--key", secret)
    assert "does not exist" in foreign
    assert keyed.stop() == 0
    assert httpx.get(f"{gateway.url}/v1/conversations/refused").status_code == 404


@pytest.mark.parametrize(
    ("number", "options"),
    [
        pytest.param(signal.SIGKILL, (), marks=pytest.mark.thorough),
        (signal.SIGKILL, ("--max-tokens", "900")),
        (signal.SIGINT, ()),
    ],
)
def test_a_command_that_is_ended_is_gone_on_with_and_asks_nothing_twice(
    gateway: Process, number: int, options: tuple[str, ...]
) -> None:
    """With other options the turn that is under way is another request: it is waited for all the same."""
    name = f"ended-{number}{len(options)}"
    several(gateway, name, 4)
    process = begun(gateway, name, "--model", "slow")
    wait_until(lambda: len(lines(gateway, f"{name}-slow")) == 3, 60)  # the second turn runs
    process.send_signal(number)
    said = process.communicate(timeout=30)[1]
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert f"1 of 4 turns are in {name}-slow: the same command goes on" in said
    assert len(lines(gateway, f"{name}-slow")) < 8, "it was ended in the middle"
    assert rerun(gateway, name, "--model", "slow", *options)["turns"] == 4
    assert questions(gateway, f"{name}-slow") == ["q0", "q1", "q2", "q3"]
    assert len(answered(gateway, f"{name}-slow")) == 4
    assert len(requests_of(gateway, f"{name}-slow")) == 4


def test_a_turn_that_fails_ends_it_and_is_asked_anew_by_the_same_command(gateway: Process) -> None:
    several(gateway, "failing", 3)
    process = begun(gateway, "failing", "--model", "slow")
    wait_until(lambda: len(lines(gateway, "failing-slow")) == 3, 60)
    (live,) = (one for one in requests_of(gateway, "failing-slow") if not one["done"])
    assert httpx.post(f"{gateway.url}/v1/requests/{live['request_id']}/cancel").is_success
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 1, said
    assert "turn 2 of 3 (msg_2): cancelled" in said
    assert "1 of 3 turns are in failing-slow: the same command goes on" in said
    assert questions(gateway, "failing-slow") == ["q0", "q1"]
    # With another option the request is another one; what failed leaves nothing behind all the same.
    assert rerun(gateway, "failing", "--model", "slow", "--max-tokens", "900")["asked"] == 2
    assert questions(gateway, "failing-slow") == ["q0", "q1", "q2"]
    told = json.loads(answered(gateway, "failing-slow")[-1]["content"])
    assert [one["role"] for one in told] == ["user", "assistant", "user", "assistant", "user"]


def test_deletions_meanwhile(gateway: Process) -> None:
    append(gateway, "parent", [{"role": "system", "content": "Be brief."}])
    several(gateway, "parent", 3)
    process = begun(gateway, "parent", "--model", "slow")
    wait_until(lambda: answered(gateway, "parent-slow"), 60)
    assert httpx.delete(f"{gateway.url}/v1/conversations/parent").is_success
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 0, said
    assert [one["role"] for one in lines(gateway, "parent-slow")] == ["system", *["user", "assistant"] * 3]
    assert "does not exist" in refused(gateway, "rerun", "parent", "--model", "slow")

    several(gateway, "kept", 3)
    process = begun(gateway, "kept", "--model", "slow")
    wait_until(lambda: len(lines(gateway, "kept-slow")) == 3, 60)
    assert httpx.delete(f"{gateway.url}/v1/conversations/kept-slow").is_success
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 1, said
    assert lines(gateway, "kept-slow") == [], "it was not begun anew"


def test_a_worker_and_a_gateway_are_killed_meanwhile(system: System, gateway: Process) -> None:
    several(gateway, "kills", 4)
    process = begun(gateway, "kills", "--model", "slow")
    wait_until(lambda: len(lines(gateway, "kills-slow")) == 1, 60)
    worker = system.process("w1")
    worker.kill9()
    system.worker().wait_ready()
    wait_until(lambda: len(lines(gateway, "kills-slow")) == 3, 60)
    gateway.kill9()
    again = system.gateway(port=gateway.port).wait_ready()
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    assert questions(again, "kills-slow") == ["q0", "q1", "q2", "q3"]
    assert len(answered(again, "kills-slow")) == 4


def test_a_re_run_in_another_pool_takes_the_items_there(make_system: Callable[..., System]) -> None:
    models = [{**NOOP, "id": "small", "pool": "a"}, {**NOOP, "id": "large", "pool": "b"}]
    system = make_system(models=models)
    for pool in ("a", "b"):
        create_topics(system.bootstrap, system.prefix, pool=pool)
        system.worker(pool, env={"PENSTOCK_WORKER__POOL": pool}).wait_ready()
    gateway = system.gateway().wait_ready()
    ask(gateway, "pools", "q0", "small")
    append(gateway, "pools", [{"role": "user", "content": "noted"}, {"role": "assistant", "content": "So it is."}])
    ask(gateway, "pools", "q1", "small")
    rerun(gateway, "pools", "--model", "large", "--after", "1")
    assert questions(gateway, "pools-large") == ["q0", "noted", "q1"]
    assert {one["pool"] for one in requests_of(gateway, "pools-large")} == {"b"}
