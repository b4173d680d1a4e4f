"""`penstock conversations`: create, list, show, fork, sum up, delete; its longer commands have modules of their own."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.commands.api_paths import api_path
from penstock.cli.commands.common import AsJson, Gateway, Yes, confirm, console, print_json, print_list, print_table
from penstock.cli.commands.conversation_facts import Facts, facts_text, when
from penstock.cli.commands.conversation_files import export, import_
from penstock.cli.commands.conversation_following import follow
from penstock.cli.commands.conversation_replay import replay
from penstock.cli.commands.item_words import item_role, item_text
from penstock.cli.commands.submitting import MaxTokens, Sent, Timeout, Wait, given, run
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.option_groups import App
from penstock.common.durations import seconds

app = App(
    no_args_is_help=True,
    help="Create, list, show, follow, replay, fork, export, import, sum up and delete conversations.",
)
Conversation = Annotated[str, typer.Argument(help="The conversation's id.")]


@app.command("list")
def list_conversations(
    gateway: Gateway,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """The caller's conversations. Example: penstock conversations list --json"""
    found = gateway.first("/v1/conversations", limit)
    print_list(
        found,
        as_json=as_json,
        columns=["conversation", "title", "last active", "expires"],
        row=lambda item: [
            item["id"],
            item["title"] or "",
            when(item["last_active_at"]) or "",
            when(item.get("expires_at")) or "",
        ],
        empty="no conversations",
    )


@app.command()
def create(
    gateway: Gateway,
    facts: Facts,
    conversation: Annotated[
        str | None, typer.Argument(help="Its id: [A-Za-z0-9_-]{1,128}. Default: a new one.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a conversation, or change the one that has this id.

    Example: penstock conversations create trip --title "A trip to Paris" --every-turns 20
    """
    body = {**({} if conversation is None else {"id": conversation}), **facts.body()}
    _print(gateway.call("POST", "/v1/conversations", body=body), as_json=as_json)


@app.command("set")
def change(gateway: Gateway, facts: Facts, conversation: Conversation, as_json: AsJson = False) -> None:
    """Set a conversation's title, metadata, or when it is summed up by itself; without options, show them.

    Example: penstock conversations set trip --every-tokens 4000 --summary-model small
    """
    body, path = facts.body(), api_path("/v1/conversations", conversation)
    _print(gateway.call("POST", path, body=body) if body else gateway.call("GET", path), as_json=as_json)


def _print(conversation: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(conversation)
    else:
        console.print(facts_text(conversation), markup=False, highlight=False)


@app.command()
def show(
    gateway: Gateway,
    conversation: Conversation,
    limit: Annotated[int, typer.Option(min=1, help="At most so many turns.")] = 1000,
    as_json: AsJson = False,
) -> None:
    """The turns, oldest first. Example: penstock conversations show trip"""
    for item in gateway.first(api_path("/v1/conversations", conversation, "items"), limit, order="asc"):
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
def fork(
    gateway: Gateway,
    conversation: Conversation,
    through: Annotated[str, typer.Option(help="The last item that both have: its id, or its offset.")],
    fork_id: Annotated[str | None, typer.Option("--id", help="The id of the fork. Default: a new one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Begin a conversation that goes on from a message of another, and print its id.

    Example: penstock conversations fork trip --through msg_3 --id trip-by-train
    """
    body = given({"through": int(through) if through.isdecimal() else through, "id": fork_id})
    made = gateway.call("POST", api_path("/v1/conversations", conversation, "fork"), body=body)
    if as_json:
        print_json(made)
    else:
        typer.echo(made["id"])


@app.command()
def forks(
    gateway: Gateway,
    conversation: Conversation,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    tree: Annotated[
        bool, typer.Option("--tree", help="All conversations of its tree, from the root on, whatever their number.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """The conversations that go on from messages of another. Example: penstock conversations forks trip --tree"""
    path = api_path("/v1/conversations", conversation, "tree" if tree else "forks")
    found = gateway.call("GET", path)["data"] if tree else gateway.first(path, limit)

    def row(item: dict[str, Any]) -> list[str]:
        name = "  " * item.get("depth", 0) + item["id"] + (" (deleted)" if item.get("deleted") else "")
        return [name, str(item.get("forked_from", {}).get("through", ""))]

    print_list(found, as_json=as_json, columns=["conversation", "through"], row=row, empty="no forks")


@app.command()
def summarize(
    gateway: Gateway,
    sent: Sent,
    conversation: Conversation,
    through_offset: Annotated[
        int | None, typer.Option(min=0, help="Up to this offset of the conversation. Default: its end.")
    ] = None,
    max_tokens: MaxTokens = None,
    wait: Wait = True,
    timeout: Timeout = 900,
    as_json: AsJson = False,
) -> None:
    """Sum up a conversation and add the summary to it: it stands for older turns in later prompts.

    Example: penstock conversations summarize trip --max-tokens 200
    """
    body = given({**sent.fields, "through_offset": through_offset, "max_tokens": max_tokens})
    path = api_path("/v1/conversations", conversation, "summarize")
    run(gateway, body, timeout_s=timeout, wait=wait, as_json=as_json, path=path)


@app.command()
def delete(
    gateway: Gateway,
    conversation: Conversation,
    yes: Yes = False,
) -> None:
    """Delete a conversation and all its turns. There is no way back."""
    path = api_path("/v1/conversations", conversation)
    if not yes:
        gateway.call("GET", path)  # raises if it does not exist
        confirm(f"Delete conversation {conversation} and all its turns?")
    gateway.call("DELETE", path)
    typer.echo(f"{conversation} deleted")


@app.command()
def sweep(
    gateway: Gateway,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what is due.")] = False,
    within: Annotated[
        str | None, typer.Option(help="With --dry-run: what is due by then if nobody touches it, as 12h or 7d.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Delete the conversations that nobody has touched for as long as their tenant keeps them, of all tenants.

    Gateways do it by themselves every `gateway.sweep_conversations_s`, where
    `gateway.limits.conversation_retention_s` is set. One with an open request stays until that has ended. It needs a
    key with the scope `admin`.

    Example:  penstock conversations sweep --dry-run --within 7d
    """
    query = {"dry_run": "true"} if dry_run else {}
    if within is not None:
        if not dry_run:
            raise CliFailure("--within is for --dry-run: what is not due is not deleted", exit_code=ExitCode.USAGE)
        query["within_s"] = str(_seconds(within))
    swept = gateway.call("POST", "/v1/admin/conversations/sweep", timeout_s=120, **query)
    if as_json:
        print_json(swept)
        return
    columns = ["tenant", "conversation", "last active", "expires", "kept for", "stays for"]
    rows = [
        [
            one["tenant"],
            one["conversation_id"],
            one["last_active_at"],
            one["expires_at"],
            f"{one['retention_s'] / 86_400:g} days",
            "an open request" if one["open_request"] else "",
        ]
        for one in swept["data"]
    ]
    print_table(columns, rows, "nothing is due")
    if rows:
        are = "are due" if dry_run else "are deleted from now on"
        typer.echo(f"{swept['conversations']} conversations {are}")


def _seconds(text: str) -> float:
    """Raises CliFailure (usage)."""
    try:
        return float(seconds(text))
    except (ValueError, TypeError):
        raise CliFailure(f"--within {text!r} is no time to come, as 12h or 7d", exit_code=ExitCode.USAGE) from None
