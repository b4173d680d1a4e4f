"""`penstock audit`: what operators did."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from penstock.cli.commands.common import AsJson, Gateway, print_list
from penstock.schemas.texts import shortened


def audit(
    gateway: Gateway,
    action: Annotated[str | None, typer.Option(help="Only actions with this text, as /v1/admin/keys.")] = None,
    key_id: Annotated[str | None, typer.Option("--key-id", help="Only by this key.")] = None,
    since: Annotated[str | None, typer.Option(help="Only from this time on: RFC 3339, or Unix seconds.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 20,
    as_json: AsJson = False,
) -> None:
    """List what operators did, newest first: who, what, from where, and the status of the answer.

    The key needs the scope admin. An action without a status was cut off, or is not done yet.

    Example: penstock audit --action keys --limit 100
    """
    found = gateway.first("/v1/admin/audit", limit, action=action, key_id=key_id, since=since)
    columns = ["at", "who", "from", "action", "target", "parameters", "status"]
    print_list(found, as_json=as_json, columns=columns, row=_row, empty="no actions")


def _row(event: dict[str, Any]) -> list[Any]:
    who = event["user"] or event["key_name"] or event["key_id"] or "anybody"
    parameters = "" if event["parameters"] is None else shortened(json.dumps(event["parameters"]), 80)
    return [
        event["at"][:19],
        who,
        *(event[name] for name in ("address", "action", "target")),
        parameters,
        event["status"],
    ]
