"""`penstock conversations`: list, show, follow, replay, export, import, sum up and delete conversations."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.commands.common import AsJson, Gateway, console, print_json, print_list
from penstock.cli.commands.conversation_files import export, import_
from penstock.cli.commands.conversation_following import follow
from penstock.cli.commands.conversation_replay import replay
from penstock.cli.commands.item_words import item_role, item_text
from penstock.cli.commands.submitting import Sent, Timeout, Wait, given, run
from penstock.cli.option_groups import App

app = App(no_args_is_help=True, help="List, show, follow, replay, export, import, sum up and delete conversations.")
Conversation = Annotated[str, typer.Argument(help="The conversation's id.")]


@app.command("list")
def list_conversations(
    gateway: Gateway,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """The caller's conversations. Example: penstock conversations list --json"""
    found = list(gateway.pages("/v1/conversations", limit))
    columns, empty = ["conversation"], "no conversations"
    print_list(found, as_json=as_json, columns=columns, row=lambda item: [item["id"]], empty=empty)


@app.command()
def show(
    gateway: Gateway,
    conversation: Conversation,
    limit: Annotated[int, typer.Option(min=1, help="At most so many turns.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """The turns, oldest first. Example: penstock conversations show trip"""
    for item in gateway.pages(f"/v1/conversations/{conversation}/items", limit, order="asc"):
        if as_json:
            print_json(item)
        else:
            console.print(f"[bold]{item_role(item)}[/bold]", highlight=False)
            console.print(item_text(item), markup=False, highlight=False)


app.command()(follow)
app.command()(replay)
app.command()(export)
app.command("import")(import_)


@app.command()
def summarize(
    gateway: Gateway,
    sent: Sent,
    conversation: Conversation,
    through_offset: Annotated[
        int | None, typer.Option(min=0, help="Up to this offset of the topic. Default: its end.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest summary.")] = None,
    wait: Wait = True,
    timeout: Timeout = 900,
    as_json: AsJson = False,
) -> None:
    """Sum up a conversation and add the summary to it: it stands for older turns in later prompts.

    Example: penstock conversations summarize trip --max-tokens 200
    """
    asked = {"model": sent.model, "priority": sent.priority}
    body = given({**asked, "through_offset": through_offset, "max_tokens": max_tokens})
    path = f"/v1/conversations/{conversation}/summarize"
    run(gateway, body, timeout_s=timeout, wait=wait, as_json=as_json, path=path)


@app.command()
def delete(
    gateway: Gateway,
    conversation: Conversation,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a conversation and all its turns. There is no way back."""
    if not yes:
        typer.confirm(f"Delete conversation {conversation} and all its turns?", abort=True)
    gateway.call("DELETE", f"/v1/conversations/{conversation}")
    typer.echo(f"{conversation} deleted")
