"""`penstock stats`, `devices` and `workers`: how much is under way, and who holds which memory."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

import typer

from penstock.cli.commands.common import AsJson, Gateway, print_json, print_list, print_table
from penstock.cli.commands.models import size_text
from penstock.cli.option_groups import App

MEMORY = ("limit", "reserved", "measured", "foreign")


def stats(
    gateway: Gateway,
    everybody: Annotated[
        bool, typer.Option("--all", help="Of all tenants, with queues and workers; the key needs the scope admin.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """What the caller has under way, how its requests ended, and its limits. Rates are means over the last minute.

    Example: penstock stats --all
    """
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


def devices(gateway: Gateway, as_json: AsJson = False) -> None:
    """The devices of all workers: what may be granted, what is, and which models hold it.

    The key needs the scope admin.

    Example: penstock devices --json
    """
    found = gateway.call("GET", "/v1/admin/devices")["data"]
    columns = ["device", *MEMORY, "models"]
    print_list(found, as_json=as_json, columns=columns, row=_device_row, empty="no worker is there")


def _device_row(device: Mapping[str, Any]) -> list[str | None]:
    return [
        f"{device['worker_id']} {device['device']}",
        *(size_text(device[f"{name}_bytes"]) for name in MEMORY),
        ", ".join(f"{one['model']} {size_text(one['bytes'])}" for one in device["holders"] or []),
    ]


app = App(no_args_is_help=True, help="The workers and what they do.")


@app.command("list")
def list_workers(gateway: Gateway, as_json: AsJson = False) -> None:
    """Each worker with its models, queues and work. Example: penstock workers list --json"""
    found = gateway.call("GET", "/v1/admin/stats").get("workers", [])
    columns = ["worker", "state", "models", "queued", "running", "seen"]
    print_list(found, as_json=as_json, columns=columns, row=_row, empty="no workers")


def _row(worker: dict[str, Any]) -> list[Any]:
    return [
        worker["worker_id"],
        worker["state"],
        ", ".join(f"{m['model']} ({m['state']})" for m in worker.get("models", [])),
        " ".join(f"{name}:{count}" for name, count in worker.get("queued", {}).items()),
        worker.get("running"),
        f"{time.time() - datetime.fromisoformat(worker['updated_at']).timestamp():.0f} s ago",
    ]
