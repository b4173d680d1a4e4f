"""`penstock stats`: how much is under way, and what was used."""

from __future__ import annotations

from collections.abc import Mapping
from operator import itemgetter
from typing import Annotated, Any

import typer

from penstock.cli.commands.common import AsJson, Gateway, print_json, print_list, print_table, raise_for_error
from penstock.cli.option_groups import App, with_fields

app = App(help="How much is under way, and what was used.")

GROUPS = ("day", "tenant", "model", "key")
FIGURES = ("requests", "completed", "input_tokens", "output_tokens", "images", "device_seconds")
ALL_ROWS = 1_000_000


@app.callback(invoke_without_command=True)
@with_fields
def stats(
    context: typer.Context,
    gateway: Gateway,
    everybody: Annotated[
        bool, typer.Option("--all", help="Of all tenants, with queues and workers; the key needs the scope admin.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What the caller has under way, how its requests ended, and its limits. Rates are means over the last minute.

    Example: penstock stats --all
    """
    if context.invoked_subcommand is not None:
        return
    found = gateway.call("GET", "/v1/admin/stats" if everybody else "/v1/stats")
    if as_json:
        print_json(found)
        return
    print_table(["what", "now"], [list(row) for row in facts(found)], "nothing")
    for name in ("queues", "limits"):
        table = {kind: facts for kind, facts in (found.get(name) or {}).items() if isinstance(facts, Mapping)}
        if table:
            columns = list(dict.fromkeys(column for facts in table.values() for column in facts))
            typer.echo()
            print_table([name, *columns], [[kind, *map(row.get, columns)] for kind, row in table.items()], "")


def facts(found: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The numbers of stats by name; of workers and models how many are in which state. Pure."""
    rows: list[tuple[str, Any]] = [
        (name, found[name]) for name in ("tenant", "inflight", "conversations") if name in found
    ]
    for group in ("rates", "outcomes", "clients"):
        rows += [(f"{group} {name}", value) for name, value in (found.get(group) or {}).items()]
    for group in ("workers", "models"):
        states = [one["state"] for one in found.get(group, [])]
        rows += [(f"{group} {state}", states.count(state)) for state in dict.fromkeys(states)]
    limits = found.get("limits") or {}
    return [*rows, *((f"limit {name}", value) for name, value in limits.items() if not isinstance(value, Mapping))]


@app.command()
def usage(
    gateway: Gateway,
    first: Annotated[
        str | None, typer.Option("--from", help="The first UTC day, YYYY-MM-DD (default: 30 days).")
    ] = None,
    last: Annotated[str | None, typer.Option("--to", help="The last UTC day, included (default: today).")] = None,
    by: Annotated[str, typer.Option(help="Some of day, model, tenant, key; empty for one total.")] = "day,model",
    everybody: Annotated[bool, typer.Option("--all", help="Of all tenants; the key needs the scope admin.")] = False,
    tenant: Annotated[str | None, typer.Option(help="Of this tenant; the key needs the scope admin.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, with all figures.")] = False,
    as_json: AsJson = False,
) -> None:
    """What the caller's tenant used: requests that ended, tokens, images, seconds on devices. Oldest day first.

    Examples:

      penstock stats usage --from 2026-11-01 --by model

      penstock stats usage --all --by day,tenant,key --csv > usage.csv
    """
    path = "/v1/admin/usage" if everybody or tenant is not None else "/v1/usage"
    query = {"from": first, "to": last, "group_by": by, "tenant": tenant, "order": "asc"}
    if as_csv:
        asked = {name: value for name, value in query.items() if value is not None}
        answer = gateway.answer("GET", path, params=asked, headers={"accept": "text/csv"})
        raise_for_error(answer)
        typer.echo(answer.text, nl=False)
        return
    found = gateway.pages(path, ALL_ROWS, **query)
    names = [f"{name}_id" if name == "key" else name for name in GROUPS if name in by.split(",")]
    columns = [*names, *FIGURES]
    print_list(found, as_json=as_json, columns=columns, row=itemgetter(*columns), empty="nothing was used")
