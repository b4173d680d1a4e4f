"""A re-run against a gateway in memory: killed at each call, and where a turn, the gateway or the fork fails."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from penstock.cli.commands import conversation_rerun, following
from penstock.cli.commands.common import Gateway
from penstock.cli.commands.conversation_rerun import Rerun, messages_in
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.reruns import plan_of

Json = dict[str, Any]
Answer = tuple[int, Any]
When = Callable[[int, str], bool]


class Memory:
    """Conversations and requests as a gateway and its workers keep them. A turn runs until a client waits for it."""

    def __init__(self) -> None:
        self.logs: dict[str, list[Json]] = {}
        self.begins: dict[str, int] = {}
        """Of forks: the offset of their first own message."""
        self.requests: dict[str, Json] = {}
        self.keys: dict[str, str] = {}
        self.calls = 0
        self.before: Callable[[int, str], object] = lambda call, words: None
        self.after: Callable[[int, str], object] = lambda call, words: None
        self.ends_as: Callable[[Json], str] = completes
        self.is_late = False
        """Requests are not listed, and begin when a client waits for them."""
        self.erased: list[str] = []
        """Requests whose messages are still in the log: the next export is the last that has them."""

    def __call__(self, asked: httpx.Request) -> httpx.Response:
        self.calls += 1
        words = f"{asked.method} {asked.url.path}"
        self.before(self.calls, words)
        status, value = self._answer(words, asked)
        self.after(self.calls, words)
        headers = {"idempotency-replayed": "true"} if isinstance(value, dict) and value.get("replayed") else {}
        text = value if isinstance(value, str) else json.dumps(value)
        return httpx.Response(status, text=text, headers=headers)

    def _answer(self, words: str, asked: httpx.Request) -> Answer:
        body = json.loads(asked.content or b"{}")
        if words == "POST /v1/requests":
            if "dry_run" in asked.url.params:
                return 200, {"pool": None}
            return self._submit(body, asked.headers["idempotency-key"])
        if words == "GET /v1/requests":
            name = asked.url.params["conversation_id"]
            found = [self._shown(one) for one in self.requests.values() if one["conversation_id"] == name]
            return 200, {"data": [] if self.is_late else found, "has_more": False}
        if match := re.fullmatch("(GET|DELETE) /v1/requests/(.*)", words):
            return self._erase(match[2]) if match[1] == "DELETE" else self._wait(match[2])
        if words == "POST /v1/conversations":
            self.logs.setdefault(body["id"], [])
            return 200, {}
        match = re.fullmatch(r"\w+ /v1/conversations/([^/]*)(.*)", words)
        assert match is not None, words
        name, what = match.groups()
        if name not in self.logs:
            return self._refusal(404)
        if what == "/fork":
            inherited = [line for line in self.logs[name] if line["source"]["offset"] <= body["through"]]
            self.logs.setdefault(body["id"], inherited)
            self.begins[body["id"]] = body["through"] + 1
            return 201, {}
        return 200, self._export(name) if what == "/export" else {}

    def _export(self, name: str) -> str:
        lines = self.logs[name]
        head = {"object": "conversation.export", "log_id": f"log of {name}", "messages": len(lines), "summaries": 0}
        self.logs[name] = [line for line in lines if line["source"]["request_id"] not in self.erased]
        return "\n".join(map(json.dumps, [head, *lines]))

    def _submit(self, body: Json, key: str) -> Answer:
        if (known := self.keys.get(key)) is not None:
            found = self.requests.get(known)
            return self._refusal(410) if found is None else (202, {"request_id": known, "replayed": True})
        request_id = f"s{len(self.keys)}"
        self.keys[key] = request_id
        self.requests[request_id] = {**body, "request_id": request_id, "status": "running"}
        if self.ends_as(body) == "expired":  # it never began
            self.requests[request_id]["status"] = "expired"
            return 202, {"request_id": request_id}
        if not self.is_late:
            self._begin(self.requests[request_id])
        return 202, {"request_id": request_id}

    def _begin(self, request: Json) -> None:
        for message in request["payload"]["messages"]:
            self._append(request, request["request_id"], "in", message)

    def _wait(self, request_id: str) -> Answer:
        found = self.requests[request_id]
        if found["status"] == "running":
            if self.is_late:
                self._begin(found)
            found["status"] = self.ends_as(found)
            if found["status"] == "completed" and found["task"] == "text_generation":
                self._append(found, request_id, "out", {"role": "assistant", "content": "another answer"})
        return 200, self._shown(found)

    def _erase(self, request_id: str) -> Answer:
        found = self.requests.get(request_id)
        if found is None or found["status"] == "running":
            return self._refusal(410 if found is None else 409)
        del self.requests[request_id]
        self.erased.append(request_id)
        return 200, {}

    def _append(self, body: Json, request_id: str, direction: str, message: Json) -> None:
        name = body["conversation_id"]
        log = self.logs.setdefault(name, [])
        source = {"direction": direction, "request_id": request_id, "metadata": body["metadata"]}
        offset = max([self.begins.get(name, 0), *(line["source"]["offset"] + 1 for line in log)])
        log.append({"type": "message", **message, "source": {**source, "offset": offset}})

    @staticmethod
    def _shown(request: Json) -> Json:
        done, failed = request["status"] != "running", request["status"] not in ("running", "completed")
        error = {"error": {"message": "for a reason"} if failed else None}
        return {**request, **error, "done": done, "result": {}, "timings": {"run_ms": 5}}

    @staticmethod
    def _refusal(status: int) -> Answer:
        return status, {"error": {"message": "refused", "code": "gone" if status == 410 else "not_found"}}

    def strike(self, place: str, error: BaseException, when: When, times: int = 1) -> None:
        """`place`: before or after the first calls for which `when(number, words)` is true."""
        left = iter(range(times))

        def strike(number: int, words: str) -> None:
            if when(number, words) and next(left, None) is not None:
                raise error

        setattr(self, place, strike)

    def said(self, name: str) -> list[str]:
        return [line["content"] for line in self.logs[name]]


@pytest.fixture
def memory() -> Memory:
    """With the conversation `trip`: a note, two turns with an item between them, and an item."""
    made = Memory()
    log = "note in r0, q1 in r1, a1 out r1, item in r2, q2 in r3, a2 out r3, end in r4"
    for offset, (content, direction, request_id) in enumerate(line.split() for line in log.split(", ")):
        source = {"direction": direction, "request_id": request_id, "offset": offset}
        role = "assistant" if direction == "out" else "user"
        made.logs.setdefault("trip", []).append({"type": "message", "role": role, "content": content, "source": source})
    return made


@pytest.fixture
def again(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Json]]:
    """Runs the re-run, with options of its payload, without pauses between polls."""
    monkeypatch.setattr(following, "AGAIN_S", 0)
    monkeypatch.setattr(conversation_rerun, "AGAIN_S", 0)
    with Gateway() as gateway:
        gateway._http = httpx.Client(transport=httpx.MockTransport(memory), base_url=gateway.base_url)
        plan = plan_of(messages_in(gateway, "trip"), "trip", "chat")
        memory.calls = 0
        yield lambda **options: Rerun(gateway, plan, "fork", 8, options, 60).run()


CALLS = 17
"""Of a whole run. The first four look at what exists and make the fork."""
WHOLE = ["note", "q1", "another answer", "item", "q2", "another answer", "end"]


def completes(body: Json) -> str:
    return "completed"


def second_turn(ending: str) -> Callable[[Json], str]:
    return lambda body: ending if body["metadata"]["rerun_offset"] == "4" else "completed"


def failure(run: Callable[..., Json]) -> CliFailure:
    with pytest.raises(CliFailure) as raised:
        run()
    return raised.value


def test_the_whole_is_repeated_with_the_other_answers(memory: Memory, again: Callable[..., Json]) -> None:
    assert again() == {
        "id": "fork", "rerun_of": "trip", "model": "chat", "through": 0, "turns": 2, "asked": 2, "kept_messages": 2
    }  # fmt: skip
    assert memory.said("fork") == WHOLE
    assert memory.calls == CALLS, "the tests below strike at each of them"
    assert again()["asked"] == 0
    assert (memory.said("fork"), len(memory.requests)) == (WHOLE, 4)


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("call", range(1, CALLS + 1))
@pytest.mark.parametrize("case", ["the same options", "other options", "behind a failed turn"])
def test_a_command_that_is_killed_at_any_call_resumes_and_repeats_nothing(
    memory: Memory, again: Callable[..., Json], call: int, place: str, case: str
) -> None:
    behind_failure = case == "behind a failed turn"
    if behind_failure:
        memory.ends_as = second_turn("failed")
        failure(again)
        memory.calls, memory.ends_as = 0, completes
        call = min(call, CALLS - 1)  # a resumed run makes one call less
    memory.strike(place, SystemExit(), lambda number, words: number == call)
    with pytest.raises(SystemExit):
        again()
    assert again(**({"seed": 7} if case == "other options" else {}))["turns"] == 2
    assert memory.said("fork") == WHOLE
    if not behind_failure:
        assert len(memory.keys) == 4


@pytest.mark.parametrize(("ending", "code"), [("failed", ExitCode.FAILED), ("expired", ExitCode.TIMED_OUT)])
def test_a_failed_turn_is_asked_again_and_is_in_the_fork_once(
    memory: Memory, again: Callable[..., Json], ending: str, code: ExitCode
) -> None:
    memory.ends_as = second_turn(ending)
    failed = failure(again)
    assert failed.exit_code == code
    assert f"{ending}: for a reason; 1 of 2 turns are in fork: the same command goes on" in str(failed)
    assert memory.said("fork") == [*WHOLE[:4], *(["q2"] if ending == "failed" else [])]
    assert ending in str(failure(again)), "the same again"
    memory.ends_as = completes
    assert again()["asked"] == 1
    assert memory.said("fork") == WHOLE


def test_a_turn_of_a_killed_command_that_is_not_listed_yet_is_the_same_request(
    memory: Memory, again: Callable[..., Json]
) -> None:
    memory.is_late = True
    memory.strike("after", SystemExit(), lambda _, words: words == "POST /v1/requests" and len(memory.keys) == 3)
    with pytest.raises(SystemExit):
        again()
    memory.ends_as = second_turn("failed")
    assert "failed: for a reason; 1 of 2 turns" in str(failure(again))
    assert (memory.said("fork"), len(memory.keys)) == ([*WHOLE[:4], "q2"], 3)
    memory.ends_as = completes
    assert again()["asked"] == 1
    assert memory.said("fork") == WHOLE


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("call", range(5, CALLS + 1))
def test_an_unreachable_gateway_is_waited_for(
    memory: Memory, again: Callable[..., Json], call: int, place: str
) -> None:
    memory.strike(place, httpx.ConnectError("away"), lambda number, _: number >= call, times=3)
    assert again()["asked"] == 2
    assert memory.said("fork") == WHOLE


def test_an_end_that_is_deleted_meanwhile_ends_the_command(memory: Memory, again: Callable[..., Json]) -> None:
    def delete(_: int, words: str) -> None:
        if words.startswith("GET /v1/requests/") and len(memory.keys) == 4:
            memory.logs["fork"][2:] = []

    memory.after = delete
    assert "some of fork was deleted while it was made" in str(failure(again))
    assert len(memory.keys) == 4


def test_another_conversation_of_that_name_is_left_alone(memory: Memory, again: Callable[..., Json]) -> None:
    source = {"offset": 3, "direction": "in", "request_id": "x"}
    memory.logs["fork"] = [{"type": "message", "role": "user", "content": "mine", "source": source}]
    assert "msg_3 of fork is not of this re-run of trip by chat" in str(failure(again))
    assert (memory.said("fork"), memory.requests) == (["mine"], {})
