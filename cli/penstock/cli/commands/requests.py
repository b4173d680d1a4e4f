"""`penstock requests`: list, show, cancel and delete requests."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.commands.common import DEFAULT_URL, AsJson, Gateway, Key, Url, print_json, print_table

RequestId = Annotated[str, typer.Argument(help="The request's id, as `penstock submit` printed it.")]
RequestIds = Annotated[list[str], typer.Argument(help="Ids of requests.")]

app = typer.Typer(no_args_is_help=True, help="List, show, cancel and delete requests.")


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
def cancel(request_ids: RequestIds, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Cancel one or more requests, queued or running. One that has ended stays as it ended."""
    with Gateway(url, key) as gateway:
        for request_id in request_ids:
            found = gateway.call("POST", f"/v1/requests/{request_id}/cancel")
            if as_json:
                print_json(found)
            else:
                typer.echo(f"{request_id} {'is ' + found['status'] if found.get('done') else 'cancel requested'}")


@app.command()
def delete(request_id: RequestId, url: Url = DEFAULT_URL, key: Key = None) -> None:
    """Erase an ended request from every gateway's view; its copies in the log go with retention."""
    with Gateway(url, key) as gateway:
        gateway.call("DELETE", f"/v1/requests/{request_id}")
    typer.echo(f"{request_id} erased")
