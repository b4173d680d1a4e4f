"""One command about many requests: the options that choose them, and the calls until none is left."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any

import typer

from penstock.cli.commands.common import Gateway, print_json
from penstock.cli.failures import CliFailure, ExitCode

AT_ONCE = 5_000
CALL_S = 300
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3_600, "d": 86_400}


class PriorityClass(StrEnum):
    HIGH = "high"
    MEDIUM = "medium"
    LOW = "low"


Model = Annotated[str | None, typer.Option(help="Those for this model.")]
Class = Annotated[PriorityClass | None, typer.Option("--class", help="Those of this class, as it is now.")]
Task = Annotated[str | None, typer.Option(help="Those of this task.")]
Status = Annotated[str | None, typer.Option(help="Those in this status, e.g. queued.")]
OlderThan = Annotated[str | None, typer.Option(help="Those accepted so long ago: 30s, 10m, 2h or 1d.")]
Tenant = Annotated[str | None, typer.Option(help="Those of this tenant, or * for all; needs the scope admin.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count them.")]


def seconds_of(age: str) -> int:
    """Raises CliFailure (usage)."""
    found = re.fullmatch(r"(\d+)\s*([smhd]?)", age.strip())
    if found is None:
        raise CliFailure(f"{age!r} is no age: write it as 30s, 10m, 2h or 1d", exit_code=ExitCode.USAGE)
    return int(found[1]) * _SECONDS[found[2]]


def chosen(
    request_ids: list[str] | None,
    *,
    model: str | None,
    class_: PriorityClass | None,
    task: str | None,
    status: str | None,
    older_than: str | None,
    tenant: str | None,
) -> dict[str, Any]:
    """The fields of a filter; empty if ids are named. Raises CliFailure (usage) if neither or both are."""
    fields = {
        "model": model,
        "class": class_,
        "task": task,
        "status": status,
        "older_than_s": None if older_than is None else seconds_of(older_than),
        "tenant": tenant,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    if bool(request_ids) == bool(fields):
        text = "name the ids of requests, or choose them: --model, --class, --task, --status, --older-than"
        raise CliFailure(text, exit_code=ExitCode.USAGE)
    return fields


def command_all(gateway: Gateway, path: str, body: dict[str, Any], done: str, *, dry_run: bool, as_json: bool) -> None:
    """Call until none is left, and say how many there are and how far it is. A repeat goes on where it was broken off.

    `done`: what is said of them.
    """
    matched = gateway.call("POST", path, body={**body, "dry_run": True}, timeout_s=CALL_S)["count"]
    count = 0
    while not dry_run and matched:
        part = gateway.call("POST", path, body={**body, "limit": AT_ONCE}, timeout_s=CALL_S)
        count += part["count"]
        if not part["has_more"]:
            break
        typer.echo(f"{count} of {max(matched, count)}", err=True)
    if as_json:
        print_json({"matched": matched, "count": count, "dry_run": dry_run})
    elif dry_run:
        typer.echo(f"{matched} requests match; nothing was done")
    else:
        typer.echo(f"{count} requests: {done}")
