"""What the `penstock submit` commands share: text from stdin, waiting for the outcome, and what Ctrl-C leaves."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from penstock.cli.commands.api_paths import Route
from penstock.cli.commands.bulk_requests import seconds_of
from penstock.cli.commands.common import (
    Gateway,
    given,
    outcome_text,
    print_json,
    waiting_text,
)
from penstock.cli.commands.following import command_at, follow, wait_for
from penstock.cli.failures import CliFailure, ExitCode
from penstock.schemas.limits import LIMITS
from penstock.schemas.topics import MOST_PRIORITY

Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the outcome.")]
Timeout = Annotated[float, typer.Option(min=0, help="Seconds to wait for the outcome.")]

MaxTokens = Annotated[int | None, typer.Option(min=1, max=LIMITS.max_tokens, help="Longest answer, in tokens.")]

SILENCE_S = 60.0


@dataclass(kw_only=True)
class Sent:
    """To whom a request goes, and how urgent it is."""

    model: Annotated[str | None, typer.Option(help="Default: the best for the task.")] = None
    priority: Annotated[
        int | None,
        typer.Option(min=0, max=MOST_PRIORITY, help="0 the most urgent; 0-3 high, 4-7 medium, 8 and up low."),
    ] = None
    start_after: Annotated[
        str | None, typer.Option(help="Not to start before: 30s, 10m or 2h from now, an RFC 3339 time or Unix seconds.")
    ] = None

    @property
    def fields(self) -> dict[str, Any]:
        """Those of a request. Raises CliFailure (usage) for what is no length of time."""
        later = self.start_after
        if later is not None and later.strip()[-1:] in "smhd":
            later = time.time() + seconds_of(later)
        return {"model": self.model, "priority": self.priority, "start_after": later}

    def body(self, task: str, payload: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """A request of what was given: the gateway fills in the rest."""
        return {**given({"task": task, **self.fields, **more}), "payload": given(payload)}


def text_of(argument: str) -> str:
    """The argument itself, or all of stdin for `-`. Raises CliFailure (usage) for what is empty, or is no text."""
    text = argument
    if argument == "-":
        try:
            text = sys.stdin.buffer.read().decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise CliFailure(f"- reads text from stdin, and that is none: {error}", exit_code=ExitCode.USAGE) from error
    if not text.strip():
        source = ", which - reads from stdin," if argument == "-" else ""
        raise CliFailure(f"the text{source} is empty", exit_code=ExitCode.USAGE)
    return text


def run(
    gateway: Gateway,
    body: Mapping[str, Any],
    *,
    timeout_s: float,
    wait: bool = True,
    stream: bool = False,
    as_json: bool = False,
    text: Callable[[Mapping[str, Any]], str] = outcome_text,
    path: Route = "/v1/requests",
) -> None:
    """Submit, wait, print the output as `text` makes it of the outcome. Raises CliFailure unless it completed."""
    accepted = gateway.call("POST", path, body=body)
    request_id = accepted["request_id"]
    if not wait:
        print_json(accepted) if as_json else typer.echo(request_id)
        return
    with left_running(gateway, request_id):
        if stream and not as_json:
            status = follow_text(gateway, request_id, timeout_s)
            raise typer.Exit(ExitCode.OK if status == "completed" else ExitCode.FAILED)
        found = wait_for(gateway, request_id, timeout_s, lambda line: typer.echo(line, err=True))
    if as_json:
        print_json(found)
    require_completed(request_id, found)
    if not as_json:
        typer.echo(text(found))


@contextmanager
def left_running(gateway: Gateway, request_id: str) -> Generator[None]:
    """Ctrl-C ends the wait, never the request: what was accepted has its outcome, and the line says where."""
    try:
        yield
    except KeyboardInterrupt:
        watch, cancel = (command_at(gateway, words, request_id) for words in ("watch", "requests cancel"))
        typer.echo(f"\nstill running: {watch}\nto cancel it:  {cancel}", err=True)
        raise typer.Exit(int(ExitCode.INTERRUPTED)) from None


def require_completed(request_id: str, found: Mapping[str, Any]) -> None:
    """Raises CliFailure for a request that ended otherwise."""
    if found["status"] != "completed":
        raise CliFailure(
            f"{request_id} {found['status']}: {(found.get('error') or {}).get('message', '')}",
            exit_code=ExitCode.TIMED_OUT if found["status"] == "expired" else ExitCode.FAILED,
        )


def follow_text(gateway: Gateway, request_id: str, timeout_s: float) -> str:
    """Prints chunks as they come; returns the final status. An attempt that began anew is said on stderr."""
    told = False
    for frame in follow(gateway, request_id, timeout_s=timeout_s, submitted=True):
        match frame["type"]:
            case "chunk" | "snapshot":
                if told and frame["type"] == "snapshot":
                    typer.echo("\n[the text so far, again]", err=True)
                typer.echo(frame["text"], nl=False)
                told = True
            case "status" if frame.get("detail"):
                typer.echo(f"[{waiting_text(frame)}]", err=True)
            case "restarted":
                typer.echo("\n[the worker was lost; the answer begins again]", err=True)
            case "result":
                if not told and frame["status"] == "completed":
                    typer.echo(outcome_text(frame), nl=False)
                typer.echo()
                if frame.get("error"):
                    typer.echo(f"{frame['status']}: {frame['error']['message']}", err=True)
                return str(frame["status"])
            case _:
                pass
    raise AssertionError("a follow ends with its result")
