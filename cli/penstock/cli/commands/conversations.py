"""`penstock conversations`: list, show, replay and delete conversations."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.commands.common import (
    DEFAULT_URL,
    AsJson,
    Gateway,
    Key,
    Url,
    console,
    print_json,
    print_table,
)

app = typer.Typer(no_args_is_help=True, help="List, show, replay and delete conversations.")
Conversation = Annotated[str, typer.Argument(help="The conversation's id.")]


@app.command("list")
def list_conversations(
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """The caller's conversations. Example: penstock conversations list --json"""
    with Gateway(url, key) as gateway:
        found = list(gateway.pages("/v1/conversations", limit))
    if as_json:
        for item in found:
            print_json(item)
        return
    print_table(["conversation"], [[item["id"]] for item in found], "no conversations")


def item_text(item: dict[str, Any]) -> str:
    """The text of an item; an image stands as the path at which the gateway gives it."""
    content = item.get("content")
    if isinstance(content, str):
        return content
    return " ".join(filter(None, (part.get("text") or part.get("image_url") for part in content or [])))


@app.command()
def show(
    conversation: Conversation,
    limit: Annotated[int, typer.Option(min=1, help="At most so many turns.")] = 1000,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """The turns, oldest first. Example: penstock conversations show trip"""
    with Gateway(url, key) as gateway:
        for item in gateway.pages(f"/v1/conversations/{conversation}/items", limit, order="asc"):
            if as_json:
                print_json(item)
            else:
                console.print(f"[bold]{item['role']}[/bold]", highlight=False)
                console.print(item_text(item), markup=False, highlight=False)


@app.command()
def replay(
    conversation: Conversation,
    from_offset: Annotated[int, typer.Option(min=0, help="Begin at this offset of the topic.")] = 0,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = True,
) -> None:
    """Every record of the conversation's topic with its offset, one JSON line each.

    Example: penstock conversations replay trip --from-offset 10
    """
    with Gateway(url, key) as gateway:
        while True:
            page = gateway.call("GET", f"/v1/conversations/{conversation}/replay", from_offset=from_offset)
            for record in page["data"]:
                print_json(record)
            if not page["has_more"]:
                return
            from_offset = page["next_offset"]


@app.command()
def delete(
    conversation: Conversation,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    url: Url = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Delete a conversation and all its turns. There is no way back."""
    if not yes:
        typer.confirm(f"Delete conversation {conversation} and all its turns?", abort=True)
    with Gateway(url, key) as gateway:
        gateway.call("DELETE", f"/v1/conversations/{conversation}")
    typer.echo(f"{conversation} deleted")
