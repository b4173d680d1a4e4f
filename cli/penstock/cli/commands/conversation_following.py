"""`penstock conversations follow`: a conversation as it goes on, over restarts of the gateway."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import typer

from penstock.cli.commands.api_paths import api_path
from penstock.cli.commands.common import AsJson, Gateway, console, print_json, sse_frames
from penstock.cli.commands.following import AGAIN_S, SILENCE_S, GatewayAbsence
from penstock.cli.commands.item_words import item_role, item_text
from penstock.cli.failures import CliFailure


def follow(
    gateway: Gateway,
    conversation: Annotated[str, typer.Argument(help="The conversation's id.")],
    after: Annotated[
        str | None, typer.Option(help="Begin behind this offset; -1: at the first message. Default: now.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """The messages as they are appended, until the conversation is deleted or Ctrl-C is pressed.

    Example: penstock conversations follow trip --after -1
    """
    for event in item_frames(gateway, conversation, after):
        if as_json:
            print_json(event)
        elif event["type"] == "item":
            console.print(f"[bold]{item_role(event['item'])}[/bold]", highlight=False)
            console.print(item_text(event["item"]), markup=False, highlight=False)
        elif event["type"] == "deleted":
            typer.echo(f"{conversation} was deleted", err=True)


def item_frames(gateway: Gateway, conversation: str, after: str | None) -> Iterator[dict[str, Any]]:
    """Events up to `deleted`. A lost gateway is waited for and resumed at. Raises CliFailure.

    What tells where a new connection begins is not repeated.
    """
    absence, cursor, began = GatewayAbsence(answered=False), after, False
    while True:
        headers = {} if cursor is None else {"last-event-id": cursor}
        path, timeout = api_path("/v1/conversations", conversation, "events"), httpx.Timeout(10.0, read=SILENCE_S)
        try:
            with gateway.stream("GET", path, headers=headers, timeout=timeout) as answer:
                for event in sse_frames(answer):
                    absence.answered()
                    cursor = event["cursor"] or cursor
                    if event["type"] != "following" or not began:
                        yield event
                    began = True
                    if event["type"] == "deleted":
                        return
        except CliFailure as failure:
            absence.wait(failure)
        else:
            time.sleep(AGAIN_S)
