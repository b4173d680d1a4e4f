"""The plan of a re-run, and the progress of its fork; without a gateway."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.refusals import refused
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.reruns import (
    Plan,
    Progress,
    default_fork_id,
    idempotency_key,
    offset_of,
    plan_of,
    progress_of,
)  # fmt: skip

Line = dict[str, Any]
CALLS = [{"id": "c1", "type": "function", "function": {"name": "gate", "arguments": "{}"}}]
IMAGE = {"artifact_id": "a", "media_type": "image/png", "size_bytes": 3, "sha256": "d"}

REQUESTS = ("turn", "two_inputs", "items", "unanswered", "calls", "drawn")
"""Kinds of requests that a conversation consists of."""


def message(role: str, content: str, request_id: str, direction: str = "in", **more: Any) -> Line:
    source = {"direction": direction, "request_id": request_id}
    return {"type": "message", "role": role, "content": content, "source": source, **more}


def request(kind: str, request_id: str) -> list[Line]:
    question = message("user", f"question of {request_id}", request_id)
    kinds = {
        "turn": [question, message("assistant", "answer", request_id, "out")],
        "two_inputs": [
            message("system", "Be brief.", request_id), question, message("assistant", "answer", request_id, "out")
        ],
        "items": [message("system", "A note.", request_id), message("assistant", "Said elsewhere.", request_id)],
        "unanswered": [question],
        "calls": [question, message("assistant", "", request_id, "out", tool_calls=CALLS)],
        "drawn": [question, message("assistant", "", request_id, "out", images=[IMAGE])],
    }  # fmt: skip
    return kinds[kind]


def conversation(*kinds: str) -> list[Line]:
    """The messages of requests r0, r1 …, at every second offset."""
    found = [line for number, kind in enumerate(kinds) for line in request(kind, f"r{number}")]
    for number, line in enumerate(found):
        line["source"]["offset"] = 2 * number
    return found


def fork_of(plan: Plan, steps: int, *, begin: int = 1_000) -> list[Line]:
    """The own messages of a fork after so many steps."""
    found: list[Line] = []
    for number, step in enumerate(plan.steps[:steps]):
        request_id = f"s{number}"
        own = [message(one["role"], one["content"], request_id) for one in step.messages]
        own += [message("assistant", "another answer", request_id, "out")] if step.is_turn else []
        for line in own:
            line["source"] |= {"metadata": plan.marks(step), "offset": begin + len(found)}
            found.append(line)
    return found


def places(plan: Plan) -> list[tuple[int, int, bool]]:
    return [(step.offset, len(step.messages), step.is_turn) for step in plan.steps]


def test_turns_are_repeated_and_other_messages_are_kept_in_place() -> None:
    kinds = ("items", "two_inputs", "unanswered", "calls", "turn", "drawn", "items")
    plan = plan_of(conversation(*kinds), "trip", "chat")
    assert (plan.through, plan.turns) == (2, 2)
    assert places(plan) == [(4, 2, True), (10, 1, False), (12, 2, False), (16, 1, True), (20, 2, False), (24, 2, False)]


def test_nothing_is_shared_if_a_turn_comes_first() -> None:
    plan = plan_of(conversation("turn", "turn"), "trip", "chat")
    assert (plan.through, places(plan)) == (None, [(0, 1, True), (4, 1, True)])


def test_a_part_is_chosen_by_the_last_shared_item_and_the_last_one() -> None:
    messages = conversation("turn", "items", "turn", "turn", "items")
    plan = plan_of(messages, "trip", "chat", after=3, through=8)
    assert (plan.through, places(plan)) == (2, [(4, 2, False), (8, 1, True)])
    assert places(plan_of(messages, "trip", "chat", after=4))[0] == (6, 1, False), "the rest of what came together"
    assert len(plan_of(messages, "trip", "chat", through=13).steps) == 4, "a turn whose question stands before it"


@pytest.mark.parametrize(
    ("kinds", "limits", "said"),
    [
        ((), {}, "has no turn there"),
        (("items", "unanswered", "calls", "drawn"), {}, "has no turn there"),
        (("turn", "turn"), {"after": 6}, "has no turn there"),
        (("items", "turn"), {"through": 2}, "has no turn there"),
        (("turn", "turn"), {"after": 0}, "name msg_2, its answer"),
        (("turn", "two_inputs"), {"after": 5}, "name msg_8, its answer"),
    ],
)
def test_a_part_without_a_turn_is_refused(kinds: tuple[str, ...], limits: dict[str, int], said: str) -> None:
    with pytest.raises(CliFailure, match=said):
        plan_of(conversation(*kinds), "trip", "chat", **limits)


def test_the_last_shared_item_must_exist() -> None:
    messages = conversation("turn")
    for line in messages:
        line["source"]["offset"] += 5
    with pytest.raises(CliFailure, match="no message at or before 4"):
        plan_of(messages, "trip", "chat", after=4)


@given(st.lists(st.sampled_from(REQUESTS), max_size=12))
def test_a_plan_repeats_all_questions_in_order_and_knows_the_progress_of_a_fork(kinds: list[str]) -> None:
    messages = conversation(*kinds)
    if not {"turn", "two_inputs"} & {*kinds}:
        with pytest.raises(CliFailure, match="has no turn there"):
            plan_of(messages, "trip", "chat")
        return
    plan = plan_of(messages, "trip", "chat")
    shared = [line for line in messages if line["source"]["offset"] <= (-1 if plan.through is None else plan.through)]
    repeated = [*shared, *(line for step in plan.steps for line in step.messages)]
    answers = [line for line in messages if line["content"] == "answer"]
    assert repeated == [line for line in messages if line not in answers]
    assert plan.turns == len(answers)
    assert plan.steps[0].is_turn
    for done in range(len(plan.steps) + 1):
        assert progress_of(plan, fork_of(plan, done), "fork") == Progress(done=done, left_over=())


@given(st.lists(st.sampled_from(REQUESTS), max_size=6), st.data())
def test_an_interrupted_fork_has_complete_steps_and_a_rest(kinds: list[str], data: st.DataObject) -> None:
    plan = plan_of(conversation(*kinds, "turn"), "trip", "chat")
    whole = fork_of(plan, len(plan.steps))
    cut = data.draw(st.integers(0, len(whole)))
    steps = [[*lines] for _, lines in groupby(whole, key=lambda line: line["source"]["request_id"])]
    done, rest = 0, whole[:cut]
    while done < len(steps) and len(rest) >= len(steps[done]):
        rest = rest[len(steps[done]) :]
        done += 1
    left_over = (f"s{done}",) if rest else ()
    assert progress_of(plan, whole[:cut], "fork") == Progress(done=done, left_over=left_over)


def test_a_failed_step_is_left_over_also_if_it_was_repeated() -> None:
    plan = plan_of(conversation("turn", "turn"), "trip", "chat")
    first, second = fork_of(plan, 2)[:2], fork_of(plan, 2)[2:]
    failed = {**second[0], "source": {**second[0]["source"], "request_id": "failed"}}
    assert progress_of(plan, [*first, failed], "fork") == Progress(done=1, left_over=("failed",))
    assert progress_of(plan, [*first, failed, *second], "fork") == Progress(done=2, left_over=("failed",))


def test_a_fork_with_other_messages_is_refused() -> None:
    messages = conversation("turn", "turn")
    plan = plan_of(messages, "trip", "chat")
    own = fork_of(plan, 2)
    another = message("user", "Else?", "x")
    another["source"]["offset"] = 2_000
    of_others = [fork_of(plan_of(messages, *names), 1) for names in (("trip", "small"), ("other", "chat"))]
    for others in (*of_others, own[2:], [*own, another]):
        with pytest.raises(CliFailure, match="is not of this re-run of trip by chat: name another --fork"):
            progress_of(plan, others, "fork")


def test_requests_of_turns_name_the_model_and_those_of_items_the_items() -> None:
    plan = plan_of(conversation("turn", "drawn"), "trip", "chat")
    turn, kept = (plan.request(step, "fork", 8, {"seed": 7}) for step in plan.steps)
    assert turn == {
        "task": "text_generation", "model": "chat", "conversation_id": "fork", "priority": 8,
        "payload": {"messages": [{"role": "user", "content": "question of r0"}], "seed": 7},
        "metadata": {"rerun_of": "trip", "rerun_model": "chat", "rerun_offset": "0"},
    }  # fmt: skip
    assert (kept["task"], kept["priority"], "model" in kept, "seed" in kept["payload"]) == (
        "conversation_items", 8, False, False
    )  # fmt: skip
    assert [one["role"] for one in kept["payload"]["messages"]] == ["user", "assistant"]
    pools = [plan.request(step, "fork", 8, {}, "code").get("pool") for step in plan.steps]
    assert pools == [None, "code"], "a turn finds it by its model"


def test_the_idempotency_key_names_log_body_and_attempt() -> None:
    body = {"a": 1, "b": 2}
    keys = {idempotency_key(log, one, attempt) for log in "LM" for one in (body, {"a": 2}) for attempt in (0, 1)}
    assert len(keys) == 8
    assert idempotency_key("L", {"b": 2, "a": 1}, 0) in keys


def test_a_fork_is_named_by_the_conversation_and_the_model() -> None:
    assert default_fork_id("trip", "org/chat:7b v2") == "trip-org-chat-7b-v2"
    with refused(CliFailure, match="name another by --fork", exit_code=ExitCode.USAGE):
        default_fork_id("t" * 120, "c" * 20)


ITEMS = {"msg_3": 3, "3": 3, "fc_12_0": 12, "fco_4": 4}


@pytest.mark.parametrize("item", [*ITEMS, "", "msg_", "msg_x", "-1", "other_3", "3.0"])
def test_an_item_is_named_by_its_id_or_its_offset(item: str) -> None:
    with refused(None if item in ITEMS else CliFailure, match="--after", exit_code=ExitCode.USAGE):
        assert offset_of(item, "--after") == ITEMS.get(item)
