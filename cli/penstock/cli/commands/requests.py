"""`penstock requests`: list, show, cancel, reprioritize and delete requests."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.commands import bulk_requests
from penstock.cli.commands.common import DEFAULT_URL, AsJson, Gateway, Key, Url, print_json, print_table

RequestId = Annotated[str, typer.Argument(help="The request's id, as `penstock submit` printed it.")]
SomeIds = Annotated[list[str] | None, typer.Argument(help="Ids of requests.")]

app = typer.Typer(no_args_is_help=True, help="List, show, cancel, reprioritize and delete requests.")


@app.command("list")
def list_requests(
    status: Annotated[str | None, typer.Option(help="Only these, e.g. running.")] = None,
    user_id: Annotated[str | None, typer.Option(help="Only this user's.")] = None,
    session_id: Annotated[str | None, typer.Option(help="Only this session's.")] = None,
    correlation_id: Annotated[str | None, typer.Option(help="Only those with this correlation_id.")] = None,
    task: Annotated[str | None, typer.Option(help="Only these, e.g. embedding.")] = None,
    model: Annotated[str | None, typer.Option(help="Only those of this model.")] = None,
    klass: Annotated[str | None, typer.Option("--class", help="Only these: high, medium or low.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 20,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """The caller's requests, newest first. Example: penstock requests list --status running"""
    wanted = {
        "status": status,
        "user_id": user_id,
        "session_id": session_id,
        "correlation_id": correlation_id,
        "task": task,
        "model": model,
        "class": klass,
    }
    with Gateway(url, key) as gateway:
        found = list(gateway.pages("/v1/requests", limit, **wanted, order="desc"))
    if as_json:
        for item in found:
            print_json(item)
        return
    rows = [
        [item["request_id"], item["task"], item["status"], item["priority"], item.get("model"), item.get("created_at")]
        for item in found
    ]
    print_table(["request", "task", "status", "priority", "model", "created"], rows, "no requests")


@app.command()
def show(request_id: RequestId, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """One request, with its result when it has one; --json prints one line. Example: penstock requests show 3f0c…"""
    with Gateway(url, key) as gateway:
        print_json(gateway.call("GET", f"/v1/requests/{request_id}"), indented=not as_json)


@app.command()
def cancel(
    request_ids: SomeIds = None,
    model: bulk_requests.Model = None,
    class_: bulk_requests.Class = None,
    task: bulk_requests.Task = None,
    status: bulk_requests.Status = None,
    older_than: bulk_requests.OlderThan = None,
    tenant: bulk_requests.Tenant = None,
    dry_run: bulk_requests.DryRun = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Cancel requests, queued or running: those that are named, or all that the options choose.

    One that has ended stays as it ended. Example: penstock requests cancel --model m --class low --older-than 10m
    """
    fields = bulk_requests.chosen(
        request_ids, model=model, class_=class_, task=task, status=status, older_than=older_than, tenant=tenant
    )
    with Gateway(url, key) as gateway:
        if fields or dry_run:
            body = fields or {"ids": request_ids}
            bulk_requests.command_all(
                gateway, "/v1/requests/cancel", body, "cancel requested", dry_run=dry_run, as_json=as_json
            )
            return
        for request_id in request_ids or ():
            found = gateway.call("POST", f"/v1/requests/{request_id}/cancel")
            if as_json:
                print_json(found)
            else:
                typer.echo(f"{request_id} {'is ' + found['status'] if found.get('done') else 'cancel requested'}")


@app.command()
def reprioritize(
    to: Annotated[str, typer.Option(help="high, medium, low, or a number: 0 the most urgent.")],
    request_ids: SomeIds = None,
    model: bulk_requests.Model = None,
    class_: bulk_requests.Class = None,
    task: bulk_requests.Task = None,
    status: bulk_requests.Status = None,
    older_than: bulk_requests.OlderThan = None,
    tenant: bulk_requests.Tenant = None,
    dry_run: bulk_requests.DryRun = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Give requests that wait another priority: those that are named, or all that the options choose.

    Turns of a conversation keep their order. Example: penstock requests reprioritize 3f0c… --to high
    """
    fields = bulk_requests.chosen(
        request_ids, model=model, class_=class_, task=task, status=status, older_than=older_than, tenant=tenant
    )
    priority = int(to) if to.isdecimal() else to
    with Gateway(url, key) as gateway:
        if fields or dry_run:
            body = {**(fields or {"ids": request_ids}), "priority": priority}
            bulk_requests.command_all(
                gateway, "/v1/requests/reprioritize", body, f"priority {to}", dry_run=dry_run, as_json=as_json
            )
            return
        for request_id in request_ids or ():
            found = gateway.call("POST", f"/v1/requests/{request_id}/reprioritize", body={"priority": priority})
            if as_json:
                print_json(found)
            else:
                typer.echo(f"{request_id} has priority {found['priority']}")


@app.command()
def delete(request_id: RequestId, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Erase an ended request from every gateway's view; its copies in the log go with retention."""
    with Gateway(url, key) as gateway:
        gateway.call("DELETE", f"/v1/requests/{request_id}")
    typer.echo(f"{request_id} erased")
