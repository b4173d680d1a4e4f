"""One command about many requests: the options that choose them, and the calls until none is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any

import typer

from penstock.cli.commands.api_paths import Route, api_path
from penstock.cli.commands.common import Gateway, print_json
from penstock.cli.commands.long_calls import interrupted_between_calls, reporting
from penstock.cli.failures import CliFailure, ExitCode
from penstock.common.durations import seconds

AT_ONCE = 5_000
CALL_S = 300


WaitingFor = Annotated[str | None, typer.Option(help="Those that wait for this reason, e.g. memory.")]


class PriorityClass(StrEnum):
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


def seconds_of(age: str) -> float:
    """Raises CliFailure (usage)."""
    try:
        return float(seconds(age))
    except (ValueError, TypeError):
        text = f"{age!r} is no length of time: write it as 30s, 10m, 2h or 1d"
        raise CliFailure(text, exit_code=ExitCode.USAGE) from None


@dataclass(kw_only=True)
class Chosen:
    """Which requests a command is about: those that are named, or all that the options choose."""

    request_ids: Annotated[list[str] | None, typer.Argument(help="Ids of requests.")] = None
    model: Annotated[str | None, typer.Option(help="Those for this model.")] = None
    class_: Annotated[PriorityClass | None, typer.Option("--class", help="Those of this class, as it is now.")] = None
    task: Annotated[str | None, typer.Option(help="Those of this task.")] = None
    status: Annotated[str | None, typer.Option(help="Those in this status, e.g. queued.")] = None
    conversation_id: Annotated[str | None, typer.Option(help="Those of this conversation.")] = None
    user_id: Annotated[str | None, typer.Option(help="Those of this user.")] = None
    session_id: Annotated[str | None, typer.Option(help="Those of this session.")] = None
    correlation_id: Annotated[str | None, typer.Option(help="Those with this correlation_id.")] = None
    older_than: Annotated[str | None, typer.Option(help="Those accepted so long ago: 30s, 10m, 2h or 1d.")] = None
    waiting_for: WaitingFor = None
    tenant: Annotated[str | None, typer.Option(help="Those of this tenant, or * for all; needs the scope admin.")] = (
        None
    )
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count them.")] = False

    def fields(self) -> dict[str, Any]:
        """The fields of a filter, or the tenant whose ids are named. Raises CliFailure (usage) if neither or both are
        given."""
        fields = {
            "model": self.model,
            "class": self.class_,
            "task": self.task,
            "status": self.status,
            "conversation_id": self.conversation_id,
            "user_id": self.user_id,
            "session_id": self.session_id,
            "correlation_id": self.correlation_id,
            "older_than_s": None if self.older_than is None else seconds_of(self.older_than),
            "waiting_for": self.waiting_for,
            "tenant": self.tenant,
        }
        given = {name: value for name, value in fields.items() if value is not None}
        if bool(self.request_ids) == bool(given.keys() - {"tenant"} if self.request_ids else given):
            options = ", ".join(f"--{name.removesuffix('_s').replace('_', '-')}" for name in fields)
            raise CliFailure(f"name the ids of requests, or choose them: {options}", exit_code=ExitCode.USAGE)
        return given


def command(
    gateway: Gateway,
    chosen: Chosen,
    action: str,
    done: str,
    text: Callable[[dict[str, Any]], str],
    *,
    as_json: bool,
    **more: Any,
) -> None:
    """Command requests one by one where they are named, else all at once. `text`: what is said of one.

    `done`: what is said of all of them. `more`: fields of the command.
    """
    fields = chosen.fields()
    if fields or chosen.dry_run:
        body = {**fields, **({"ids": chosen.request_ids} if chosen.request_ids else {}), **more}
        command_all(gateway, api_path("/v1/requests", action), body, done, dry_run=chosen.dry_run, as_json=as_json)
        return
    for request_id in chosen.request_ids or ():
        found = gateway.call("POST", api_path("/v1/requests", request_id, action), body=more or None)
        if as_json:
            print_json(found)
        else:
            typer.echo(f"{request_id} {text(found)}")


def command_all(
    gateway: Gateway, path: Route, body: dict[str, Any], done: str, *, dry_run: bool, as_json: bool
) -> None:
    """Command those that match now, in calls of `AT_ONCE`, and report progress. Requests that are accepted later are
    left out, so that the calls end.

    `done`: what is said of them.
    """
    found = gateway.call("POST", path, body={**body, "dry_run": True}, timeout_s=CALL_S)
    matched, before = found["count"], found.get("accepted_before")
    body, count = {**body, "limit": AT_ONCE, **({} if before is None else {"accepted_before": before})}, 0
    said = lambda: f"{count} of {matched} requests: {done}; the same command continues with the others"  # noqa: E731
    with reporting(said), interrupted_between_calls() as check:
        for _ in range(0 if dry_run else -(-matched // AT_ONCE)):
            part = gateway.call("POST", path, body=body, timeout_s=CALL_S)
            count += part["count"]
            if not part["has_more"]:
                break
            typer.echo(f"{count} of {matched}", err=True)
            check()
    if as_json:
        print_json({"matched": matched, "count": count, "dry_run": dry_run})
    elif dry_run:
        typer.echo(f"{matched} requests match; nothing was done")
    else:
        typer.echo(f"{count} requests: {done}")
