"""`penstock watch`: what happens to one request, as it happens."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.commands.common import DEFAULT_URL, AsJson, Gateway, Key, Url, print_json, sse_frames
from penstock.cli.commands.submit import outcome_text
from penstock.cli.failures import CliFailure, ExitCode


def watch(
    request_id: Annotated[str, typer.Argument(help="As `penstock submit --no-wait` printed it.")],
    after: Annotated[str | None, typer.Option(help="A cursor: go on behind it.")] = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Follow a request to its outcome: statuses on stderr, text on stdout; --json prints every frame as a line.

    Example: penstock watch 3f0c… --json
    """
    headers = {"last-event-id": after} if after else {}
    status: str | None = None
    told = False
    with Gateway(url, key) as gateway:
        with gateway.stream("GET", f"/v1/requests/{request_id}/events", headers=headers) as answer:
            for frame in sse_frames(answer):
                if frame["type"] == "result":
                    status = frame["status"]
                    if not (as_json or told) and after is None and status == "completed":
                        typer.echo(outcome_text(frame), nl=False)
                if as_json:
                    print_json(frame)
                elif frame["type"] == "status":
                    place = f" (position {frame['position']})" if frame.get("position") is not None else ""
                    typer.echo(f"[{frame['status']}{place}]", err=True)
                elif frame["type"] in ("chunk", "snapshot"):
                    typer.echo(frame["text"], nl=False)
                    told = True
                elif frame["type"] == "restarted":
                    typer.echo(f"\n[began again, attempt {frame.get('attempt')}]", err=True)
        if status is None:  # already over, or the cursor stood behind everything
            found = gateway.call("GET", f"/v1/requests/{request_id}")
            status = found["status"]
            if as_json:
                print_json(found)
            elif status == "completed" and after is None:
                typer.echo(outcome_text(found), nl=False)
    if not as_json:
        typer.echo(f"\n[{status}]", err=True)
    if status != "completed":
        raise CliFailure(f"{request_id} {status}", exit_code=ExitCode.FAILED)
