"""`penstock conversations`: create, list, show, fork, sum up, delete; its longer commands have modules of their own."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any

import httpx
import typer

from penstock.cli.commands.api_paths import api_path
from penstock.cli.commands.common import (
    AsJson,
    Gateway,
    Yes,
    confirm,
    console,
    print_json,
    print_list,
    print_table,
    sse_frames,
)
from penstock.cli.commands.conversation_files import export, import_
from penstock.cli.commands.conversation_replay import replay
from penstock.cli.commands.following import AGAIN_S, SILENCE_S, GatewayAbsence
from penstock.cli.commands.item_words import item_role, item_text
from penstock.cli.commands.submitting import MaxTokens, Sent, Timeout, Wait, given, run
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.option_groups import App
from penstock.common.durations import seconds


@dataclass(kw_only=True)
class Facts:
    """Options; what is not named stays as it is. The three of the policy are one thing, which is set as a whole."""

    title: Annotated[str | None, typer.Option(help='A name for people; "" takes it away.')] = None
    metadata: Annotated[
        list[str] | None,
        typer.Option(help='NAME=VALUE, in place of all that there was; "" for none. May stand several times.'),
    ] = None
    every_turns: Annotated[
        int | None, typer.Option(min=0, help="Sum up after so many turns; a policy in place of what there was.")
    ] = None
    every_tokens: Annotated[
        int | None, typer.Option(min=0, help="Sum up after so many tokens, about; with --every-turns what comes first.")
    ] = None
    summary_model: Annotated[str | None, typer.Option(help="Which model sums up. Default: the best for it.")] = None
    as_settings: Annotated[
        bool, typer.Option("--as-settings", help="Sum up as [summarizer] says, by no policy of its own.")
    ] = False

    def body(self) -> dict[str, Any]:
        """The fields that are to change. Raises CliFailure (usage)."""
        body: dict[str, Any] = {}
        if self.title is not None:
            body["title"] = self.title or None
        if self.metadata is not None:
            body["metadata"] = dict(_pair(one) for one in self.metadata if one)
        policy = given(
            {"every_turns": self.every_turns, "every_tokens": self.every_tokens, "model": self.summary_model}
        )
        if policy.keys() == {"model"}:
            raise CliFailure("--summary-model goes with --every-turns or --every-tokens", exit_code=ExitCode.USAGE)
        if policy and self.as_settings:
            raise CliFailure("--as-settings is in place of a policy of its own", exit_code=ExitCode.USAGE)
        if policy or self.as_settings:
            body["summarize"] = policy or None
        return body


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise CliFailure(f"--metadata {text!r} is not NAME=VALUE", exit_code=ExitCode.USAGE)
    return name, value


def facts_text(conversation: dict[str, Any]) -> str:
    rows = {
        "title": conversation["title"],
        "created": when(conversation["created_at"]),
        "last active": when(conversation["last_active_at"]),
        "expires": when(conversation.get("expires_at")),
        "metadata": " ".join(f"{name}={value}" for name, value in conversation["metadata"].items()) or None,
        "summed up": _policy_text(conversation["summarize"]),
    }
    return "\n".join([conversation["id"], *(f"  {name}: {told}" for name, told in rows.items() if told is not None)])


def _policy_text(policy: dict[str, Any] | None) -> str:
    if policy is None:
        return "as the settings say"
    counts = [f"{policy[f'every_{unit}']} {unit}" for unit in ("turns", "tokens") if policy[f"every_{unit}"]]
    if not counts:
        return "not by itself"
    return f"every {' or '.join(counts)}" + (f" by {policy['model']}" if policy["model"] else "")


def when(seconds: int | None) -> str | None:
    """A time in seconds since the epoch, as it is here."""
    return None if seconds is None else datetime.fromtimestamp(seconds).astimezone().isoformat(" ")


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
