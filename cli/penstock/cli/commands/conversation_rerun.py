"""`penstock conversations rerun`: the turns of a conversation, asked again of another model, in a fork.

All that a killed re-run needs to go on stands in the fork: its messages say which of the original they repeat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import typer

from penstock.cli.commands.api_paths import api_path
from penstock.cli.commands.common import AsJson, Gateway, print_json
from penstock.cli.commands.conversation_files import CONVERSATIONS, EVERY, exported
from penstock.cli.commands.following import AGAIN_S, Deadline, Patience, command_at, wait_for
from penstock.cli.commands.long_calls import reporting
from penstock.cli.commands.submitting import (
    MOST_ATTEMPTS,
    MaxTokens,
    Timeout,
    erase,
    given,
    require_completed,
    submit_once,
)
from penstock.cli.exported import Line, parsed
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.reruns import Plan, Progress, Step, default_fork_id, idempotency_key, offset_of, plan_of, progress_of
from penstock.schemas.topics import MOST_PRIORITY

LOW = 8
SAME = "the same command goes on"

T = TypeVar("T")


@dataclass(kw_only=True)
class Sampling:
    """How the other model answers. What the original's requests said is not kept in a conversation."""

    max_tokens: MaxTokens = None
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None
    seed: Annotated[int | None, typer.Option(help="Of the sampling.")] = None

    def payload(self) -> dict[str, Any]:
        return given({"max_tokens": self.max_tokens, "temperature": self.temperature, "seed": self.seed})


def rerun(
    gateway: Gateway,
    conversation: Annotated[str, typer.Argument(help="The conversation's id.")],
    model: Annotated[str, typer.Option(help="Who is asked again.")],
    sampling: Sampling,
    fork_id: Annotated[
        str | None, typer.Option("--fork", help="The id of the fork. Default: made of the conversation and the model.")
    ] = None,
    after: Annotated[
        str | None, typer.Option(help="The last item that both have. Default: the one before the first turn.")
    ] = None,
    through: Annotated[str | None, typer.Option(help="Leave out what begins behind this item.")] = None,
    priority: Annotated[int, typer.Option(min=0, max=MOST_PRIORITY, help="0 the most urgent; 8 and up low.")] = LOW,
    timeout: Timeout = 900,
    as_json: AsJson = False,
) -> None:
    """Ask another model what the users of a conversation asked, turn by turn, in a fork of it.

    Each turn sees the answers of the new model. Kept as they are: items that callers appended, questions without an
    answer, answers with calls of tools or images. A turn that fails ends the re-run. The same command goes on.

    Examples:

      penstock conversations rerun trip --model chat

      penstock conversations rerun trip --model chat --after msg_3 --through msg_4 --fork trip-once

      penstock conversations compare trip trip-chat
    """
    own_id = fork_id or default_fork_id(conversation, model)
    if own_id == conversation:
        raise CliFailure("--fork must be another conversation", exit_code=ExitCode.USAGE)
    begin, end = (
        None if one is None else offset_of(one, name) for one, name in ((after, "--after"), (through, "--through"))
    )
    plan = plan_of(messages_in(gateway, conversation), conversation, model, after=begin, through=end)
    result = Rerun(gateway, plan, own_id, priority, sampling.payload(), timeout).run()
    if as_json:
        print_json(result)
    else:
        typer.echo(f"{own_id}: {result['turns']} turns by {model}, {result['asked']} asked now")
        typer.echo(
            f"beside each other: {command_at(gateway, f'conversations compare {conversation}', own_id)}", err=True
        )


def messages_in(gateway: Gateway, conversation: str) -> list[Line]:
    """All messages of a conversation that count, as they are exported. Raises CliFailure."""
    return _read(gateway, conversation)[1]


def _read(gateway: Gateway, conversation: str) -> tuple[str, list[Line]]:
    """The id of the conversation's log, and its messages."""
    with exported(gateway, conversation) as lines:
        head, *rest = (parsed(text, number) for number, text in enumerate(lines, 1))
    return head["log_id"], [line for line in rest if line["type"] == "message"]


@dataclass(frozen=True, slots=True)
class Rerun:
    """A plan that is carried out. `timeout_s`: for each request."""

    gateway: Gateway
    plan: Plan
    fork_id: str
    priority: int
    options: Mapping[str, Any]
    timeout_s: float

    def run(self) -> dict[str, Any]:
        """Ask what is not answered yet. Raises CliFailure, which says how far it came."""
        pool = self._checked_pool()
        self._begin()
        done = before = 0
        with reporting(lambda: f"{self._turns(0, done)} of {self.plan.turns} turns are in {self.fork_id}: {SAME}"):
            log_id, done = self._gone_on_with()
            before = done
            for step in self.plan.steps[done:]:
                self._run(log_id, done, self._body(step, pool))
                done += 1
            self._check_whole(log_id)
        return {
            "id": self.fork_id,
            "rerun_of": self.plan.source,
            "model": self.plan.model,
            "through": self.plan.through,
            "turns": self.plan.turns,
            "asked": self._turns(before, done),
            "kept_messages": sum(len(step.messages) for step in self.plan.steps if not step.is_turn),
        }

    def _turns(self, begin: int, end: int) -> int:
        return sum(step.is_turn for step in self.plan.steps[begin:end])

    def _checked_pool(self) -> str | None:
        """The pool of the model. Raises CliFailure where the first turn would be refused, before anything is made."""
        first = next(step for step in self.plan.steps if step.is_turn)
        return self.gateway.call("POST", "/v1/requests", body=self._body(first, None), dry_run="true")["pool"]

    def _body(self, step: Step, pool: str | None) -> dict[str, Any]:
        return self.plan.request(step, self.fork_id, self.priority, self.options, pool)

    def _begin(self) -> None:
        """Make the fork, unless it is there. Without a message to go on from it is a conversation of its own."""
        if self.plan.through is None:
            self.gateway.call("POST", CONVERSATIONS, body={"id": self.fork_id})
        else:
            body = {"through": self.plan.through, "id": self.fork_id}
            self.gateway.call("POST", api_path(CONVERSATIONS, self.plan.source, "fork"), body=body)

    # -- what an earlier re-run left

    def _gone_on_with(self) -> tuple[str, int]:
        """The id of the fork's log, and how many steps stand there. What failed is erased, what runs is waited for."""
        for request in self._under_way():
            self._say(f"[{request['request_id']} of an earlier re-run is under way]")
            self._wait_for(request["request_id"])
        log_id, progress = self._look()
        for request_id in progress.left_over:
            self._say(f"[erasing the question of {request_id}, which has no answer]")
            erase(self.gateway, request_id)
        deadline = Deadline(self.timeout_s, f"penstock conversations show {self.fork_id}")
        while progress.left_over:
            deadline.check(progress.left_over[0], "not erased")
            time.sleep(AGAIN_S)
            progress = self._look()[1]
        return log_id, progress.done

    def _under_way(self) -> Iterable[Mapping[str, Any]]:
        found = self.gateway.pages("/v1/requests", EVERY, conversation_id=self.fork_id)
        return [request for request in found if not request["done"]]

    def _look(self) -> tuple[str, Progress]:
        log_id, messages = _read(self.gateway, self.fork_id)
        inherited = -1 if self.plan.through is None else self.plan.through
        own = (line for line in messages if line["source"]["offset"] > inherited)
        return log_id, progress_of(self.plan, own, self.fork_id)

    # -- steps

    def _run(self, log_id: str, number: int, body: Mapping[str, Any]) -> None:
        """Have the fork go on by the step of this number, once. Raises CliFailure unless it completes."""
        name = self._name(number)
        for attempt in range(MOST_ATTEMPTS):
            key = idempotency_key(log_id, body, attempt)
            # Not to create it again if it was deleted meanwhile.
            self._patiently(lambda: self.gateway.call("GET", api_path(CONVERSATIONS, self.fork_id)))
            sent = self._patiently(lambda key=key: submit_once(self.gateway, body, key))
            if sent is None:
                continue
            found = self._wait_for(sent.request_id)
            if sent.is_repeat:
                progress = self._patiently(self._look)[1]
                if progress.done <= number and not progress.left_over:
                    continue  # it failed before it began, or what it brought is gone
            if found["status"] != "completed":
                self._say(f"{name}: {found['status']}")
            require_completed(sent.request_id, found)
            self._say(f"{name}: {_cost(found)}")
            return
        raise CliFailure(f"{MOST_ATTEMPTS} requests for {name} failed")

    def _wait_for(self, request_id: str) -> dict[str, Any]:
        return wait_for(self.gateway, request_id, self.timeout_s, self._say)

    def _patiently(self, ask: Callable[[], T]) -> T:
        """What the gateway answers, also if it is restarted meanwhile. Raises CliFailure."""
        patience = Patience(answered=True)
        while True:
            try:
                return ask()
            except CliFailure as failure:
                patience.wait(failure)

    def _check_whole(self, log_id: str) -> None:
        """Raises CliFailure unless the fork holds all steps."""
        log_id_now, progress = self._patiently(self._look)
        if log_id_now != log_id or progress.done < len(self.plan.steps):
            raise CliFailure(f"some of {self.fork_id} was deleted while it was made")

    def _name(self, number: int) -> str:
        step = self.plan.steps[number]
        if step.is_turn:
            return f"turn {self._turns(0, number) + 1} of {self.plan.turns} (msg_{step.offset})"
        return f"{len(step.messages)} messages as they are (msg_{step.offset})"

    @staticmethod
    def _say(line: str) -> None:
        typer.echo(line, err=True)


def _cost(found: Mapping[str, Any]) -> str:
    """Tokens and run time of a completed request."""
    usage = found["result"].get("usage") or {}
    tokens, run_ms = usage.get("completion_tokens"), (found["timings"] or {}).get("run_ms")
    facts = [f"{tokens} tokens" if tokens is not None else "", f"{run_ms} ms" if run_ms is not None else ""]
    return ", ".join(filter(None, facts)) or "completed"
