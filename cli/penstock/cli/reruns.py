"""What another model is asked again of a conversation, what is kept as it is, and how far a fork has come. Pure.

A re-run repeats the requests of the original in order. A turn is asked again if its answer is text alone. Everything
else is kept: items by callers, questions without an answer, answers that call tools or hold images. What follows a
call builds on it, so the call must be the one that its answer names.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.cli.exported import Line, request_of
from penstock.cli.failures import CliFailure, ExitCode

MOST_ID_CHARS = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What one request of the original becomes in the fork."""

    offset: int
    """Of its first message, in the original."""
    messages: tuple[Line, ...]
    """What the fork's request appends: a turn's question, or all messages of what is kept."""
    is_turn: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A re-run of the conversation `source` by `model`."""

    source: str
    model: str
    through: int | None
    """Offset of the last message that both have; None when the re-run begins with the first message."""
    steps: tuple[Step, ...]

    @property
    def turns(self) -> int:
        return sum(step.is_turn for step in self.steps)

    def marks(self, step: Step) -> dict[str, str]:
        """The metadata of the fork's request. Its messages have it too: so a repeat knows them again."""
        return {"rerun_of": self.source, "rerun_model": self.model, "rerun_offset": str(step.offset)}

    def request(
        self, step: Step, fork_id: str, priority: int, options: Mapping[str, Any], pool: str | None = None
    ) -> dict[str, Any]:
        """The request of a step. `options` are fields of a turn's payload; `pool` is that of the model."""
        body: Line = {**request_of(step.messages, fork_id), "priority": priority, "metadata": self.marks(step)}
        if not step.is_turn:  # it names no model to find the pool by, and the fork's first request chooses its pool
            return body if pool is None else {**body, "pool": pool}
        return {**body, "task": "text_generation", "model": self.model, "payload": {**body["payload"], **options}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """How many steps stand whole in a fork, and the requests that left a part of the next one there."""

    done: int
    left_over: tuple[str, ...]


def default_fork_id(source: str, model: str) -> str:
    """The same for the same conversation and model, so that a repeat of the command goes on.

    Raises CliFailure (usage) when it would be too long.
    """
    made = f"{source}-{re.sub('[^A-Za-z0-9_-]+', '-', model)}"
    if len(made) > MOST_ID_CHARS:
        raise CliFailure(f"{made} is too long for an id: name another by --fork", exit_code=ExitCode.USAGE)
    return made


def offset_of(item: str, option: str) -> int:
    """The offset that an item's id or a number stands for. Raises CliFailure (usage)."""
    found = re.fullmatch(r"(?:(?:msg|fc|fco)_)?([0-9]+)(?:_[0-9]+)?", item)
    if found is None:
        raise CliFailure(f"{option} {item}: write the id of an item, as msg_3, or its offset", exit_code=ExitCode.USAGE)
    return int(found[1])


def plan_of(
    messages: Sequence[Line], source: str, model: str, *, after: int | None = None, through: int | None = None
) -> Plan:
    """The re-run of exported messages behind the offset `after`; by default from the first turn on.

    Of what begins behind the offset `through` nothing is taken. Raises CliFailure: no turn is asked again, or `after`
    is inside one.
    """
    begin = after
    if begin is None:
        turns = (group[0]["source"]["offset"] for group in _requests(messages) if _is_asked_again(group))
        begin = next(turns, 0) - 1
    shared = [line["source"]["offset"] for line in messages if line["source"]["offset"] <= begin]
    if after is not None and not shared:
        raise CliFailure(f"{source} has no message at or before {after}: --after names the last one that is kept")
    asked = {line["source"].get("request_id", "") for line in messages[: len(shared)]}
    steps: list[Step] = []
    for group in _requests(messages[len(shared) :]):
        first, last = group[0]["source"], group[-1]["source"]
        if last["direction"] == "out" and last.get("request_id") in asked:
            raise CliFailure(f"--after is inside of a turn of {source}: name msg_{last['offset']}, its answer")
        if through is None or first["offset"] <= through:
            steps.append(_step(group))
    if not any(step.is_turn for step in steps):
        raise CliFailure(f"{source} has no turn there that can be run again")
    return Plan(source=source, model=model, through=shared[-1] if shared else None, steps=tuple(steps))


def _requests(messages: Iterable[Line]) -> list[list[Line]]:
    """The messages of each request, in the order of their first ones."""
    found: dict[str, list[Line]] = {}
    for line in messages:
        source = line["source"]
        found.setdefault(source.get("request_id") or f"@{source['offset']}", []).append(line)
    return list(found.values())


def _is_asked_again(group: Sequence[Line]) -> bool:
    *asked, last = group
    is_answer = last["source"]["direction"] == "out" and bool(asked)
    return is_answer and not last.get("tool_calls") and not last.get("images")


def _step(group: Sequence[Line]) -> Step:
    is_turn = _is_asked_again(group)
    messages = group[:-1] if is_turn else group
    return Step(offset=group[0]["source"]["offset"], messages=tuple(messages), is_turn=is_turn)


def progress_of(plan: Plan, own: Iterable[Line], fork_id: str) -> Progress:
    """How far the fork has come, by its own messages. Raises CliFailure if it has others than the plan's."""
    done, left_over = 0, list[str]()
    for group in _requests(own):
        head = group[0]["source"]
        step = plan.steps[done] if done < len(plan.steps) else None
        if step is None or head.get("metadata") != plan.marks(step):
            raise CliFailure(
                f"msg_{head['offset']} of {fork_id} is not of this re-run of {plan.source} by {plan.model}:"
                " name another --fork"
            )
        if _is_whole(step, group):
            done += 1
        else:
            left_over.append(head["request_id"])
    return Progress(done=done, left_over=tuple(left_over))


def _is_whole(step: Step, group: Sequence[Line]) -> bool:
    if step.is_turn:
        return group[-1]["source"]["direction"] == "out"
    return len(group) == len(step.messages)


def idempotency_key(log_id: str, body: Mapping[str, Any], attempt: int) -> str:
    """The same for the same step of the same fork, which has one log."""
    text = json.dumps([log_id, body, attempt], sort_keys=True)
    return f"rerun-{hashlib.sha256(text.encode()).hexdigest()}"
