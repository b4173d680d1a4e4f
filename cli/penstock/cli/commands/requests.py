"""`penstock requests`: list, show, cancel, reprioritize and delete requests."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.commands.api_paths import api_path
from penstock.cli.commands.bulk_requests import Chosen, WaitingFor, command
from penstock.cli.commands.common import (
    AsJson,
    Gateway,
    at_most,
    print_json,
    print_list,
    say_unknown_model,
    waiting_text,
)
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.option_groups import App
from penstock.schemas.records import STATUS_RANKS

Tenant = Annotated[str | None, typer.Option(help="Those of this tenant.")]
RequestId = Annotated[str, typer.Argument(help="The request's id, as `penstock submit` printed it.")]

app = App(no_args_is_help=True, help="List, show, cancel, reprioritize and delete requests.")


@app.command("list")
def list_requests(
    gateway: Gateway,
    status: Annotated[str | None, typer.Option(help="Only these, e.g. running, waiting or unsuccessful.")] = None,
    conversation_id: Annotated[str | None, typer.Option(help="Only those of this conversation.")] = None,
    user_id: Annotated[str | None, typer.Option(help="Only this user's.")] = None,
    session_id: Annotated[str | None, typer.Option(help="Only this session's.")] = None,
    correlation_id: Annotated[str | None, typer.Option(help="Only those with this correlation_id.")] = None,
    task: Annotated[str | None, typer.Option(help="Only these, e.g. embedding.")] = None,
    model: Annotated[str | None, typer.Option(help="Only those of this model.")] = None,
    klass: Annotated[str | None, typer.Option("--class", help="Only these: high, medium or low.")] = None,
    waiting_for: WaitingFor = None,
    tenant: Tenant = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """The caller's requests, newest first; those that wait with the reason. `--tenant` needs the scope admin.

    Examples:

      penstock requests list --status running

      penstock requests list --tenant shop --status waiting
    """
    wanted = {
        "tenant": tenant,
        "conversation_id": conversation_id,
        "user_id": user_id,
        "session_id": session_id,
        "correlation_id": correlation_id,
        "task": task,
        "model": model,
        "class": klass,
        "waiting_for": waiting_for,
    }
    if status not in (None, "waiting", "unsuccessful", *STATUS_RANKS):
        text = f"--status {status}: there are waiting, unsuccessful, {', '.join(STATUS_RANKS)}"
        raise CliFailure(text, exit_code=ExitCode.USAGE)
    root = "/v1/requests" if tenant is None else "/v1/admin/requests"
    found = list(gateway.pages(root, limit + 1, **wanted, status=status, order="desc"))
    columns = ["request", "task", "status", "priority", "model", "created", "why"]
    names = ("request_id", "task", "status", "priority", "model", "created_at")

    def row(one: dict[str, Any]) -> list[Any]:
        return [*map(one.get, names), why(one)]

    print_list(at_most(limit, found), as_json=as_json, columns=columns, row=row, empty="no requests")
    if not found:
        say_unknown_model(gateway, model)


def why(request: dict[str, Any]) -> str | None:
    """Why it waits, with its place in the queue, or why it failed."""
    if request["done"]:
        return (request.get("error") or {}).get("message")
    return waiting_text({**request, "status": ""}).strip(" :") or None


@app.command()
def show(
    request_id: RequestId,
    gateway: Gateway,
    tenant: Annotated[str | None, typer.Option(help="Whose it is, * for any; needs the scope admin.")] = None,
    as_json: AsJson = False,
) -> None:
    """One request, with its result when it has one; --json prints one line. Example: penstock requests show 3f0c…

    With --tenant it is shown without its result and metadata.
    """
    path = api_path("/v1/requests" if tenant is None else "/v1/admin/requests", request_id)
    print_json(gateway.call("GET", path, tenant=tenant), indented=not as_json)


@app.command()
def cancel(chosen: Chosen, gateway: Gateway, as_json: AsJson = False) -> None:
    """Cancel requests, queued or running: those that are named, or all that the options choose.

    One that has ended stays as it ended. Example: penstock requests cancel --user-id u1 --class low --older-than 10m
    """

    def text(found: dict[str, Any]) -> str:
        return f"is {found['status']}" if found.get("done") else "cancel requested"

    command(gateway, chosen, "cancel", "cancel requested", text, as_json=as_json)


@app.command()
def reprioritize(
    gateway: Gateway,
    to: Annotated[str, typer.Option(help="high, medium, low, or a number: 0 the most urgent.")],
    chosen: Chosen,
    as_json: AsJson = False,
) -> None:
    """Give requests that wait another priority: those that are named, or all that the options choose.

    Turns of a conversation keep their order. Example: penstock requests reprioritize --session-id s1 --to high
    """

    def text(found: dict[str, Any]) -> str:
        return f"has priority {found['priority']}"

    priority = int(to) if to.isdecimal() else to
    command(gateway, chosen, "reprioritize", f"priority {to}", text, as_json=as_json, priority=priority)


@app.command()
def delete(request_id: RequestId, gateway: Gateway) -> None:
    """Erase an ended request from every gateway's view; its copies in the log go with retention."""
    gateway.call("DELETE", api_path("/v1/requests", request_id))
    typer.echo(f"{request_id} erased")
