"""`penstock keys`: API keys with their tenant, scopes, urgency and rate. Only their hashes are kept."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.commands.common import AsJson, print_json, print_table
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.option_groups import App
from penstock.schemas.topics import MOST_PRIORITY

app = App(no_args_is_help=True, help="Create, list and revoke API keys.")
File = Annotated[
    Path, typer.Option("--file", "-f", envvar="PENSTOCK_AUTH__KEYS_FILE", help="The gateway's auth.keys_file.")
]
DEFAULT_FILE = Path("penstock-keys.json")


@app.command()
def create(
    tenant: Annotated[str, typer.Option(help="Whose key it is: [a-z0-9-]{1,63}.")] = "default",
    scopes: Annotated[str, typer.Option(help="Of submit, read, cancel, admin.")] = "submit,read,cancel",
    max_priority: Annotated[
        int, typer.Option(min=0, max=MOST_PRIORITY, help="The most urgent priority allowed; 0 is all.")
    ] = 0,
    rate: Annotated[float | None, typer.Option(help="Submissions per second; none is without limit.")] = None,
    limit: Annotated[
        list[str] | None,
        typer.Option(help="NAME=VALUE, of the names of [gateway.limits]; lists by commas. May stand several times."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="For people.")] = None,
    file: File = DEFAULT_FILE,
) -> None:
    """Make a key and print it, this once. Example: penstock keys create --tenant acme --limit outstanding=10"""
    from penstock.gateway.edge.keys import KeysFileError, create_key
    from penstock.gateway.limits.limits import Limits
    from penstock.schemas.errors import InvalidRequest

    try:
        secret = create_key(
            file,
            tenant=tenant,
            scopes=scopes.split(","),
            max_priority=max_priority,
            rate=rate,
            limits=Limits.from_texts(limit or []),
            name=name,
        )
    except (ValueError, KeysFileError, InvalidRequest) as error:
        raise CliFailure(str(error), exit_code=ExitCode.USAGE) from error
    typer.echo(secret)
    typer.echo(f"kept as a hash in {file}; the gateway reads it as auth.keys_file. It is not shown again.", err=True)


@app.command("list")
def list_all(file: File = DEFAULT_FILE, as_json: AsJson = False) -> None:
    """All keys of the file, without their secrets."""
    from penstock.gateway.edge.keys import KeysFileError, list_keys

    try:
        found = list_keys(file)
    except KeysFileError as error:
        raise CliFailure(str(error)) from error
    if as_json:
        for record in found:
            print_json({name: value for name, value in record.to_dict().items() if name != "sha256"})
        return
    rows = [
        [
            record.key_id,
            record.tenant,
            ",".join(record.scopes),
            record.max_priority,
            "no limit" if record.rate is None else f"{record.rate:g}/s",
            record.limits.to_text(),
            record.name,
            datetime.fromtimestamp(record.created_at, UTC).strftime("%Y-%m-%d"),
        ]
        for record in found
    ]
    print_table(["id", "tenant", "scopes", "max priority", "rate", "limits", "name", "created"], rows, "no keys")


@app.command()
def revoke(
    key_id: Annotated[str, typer.Argument(help="As `penstock keys list` shows it.")], file: File = DEFAULT_FILE
) -> None:
    """Take a key away; running gateways notice within a second, and end its connections."""
    from penstock.gateway.edge.keys import KeysFileError, revoke_key

    try:
        gone = revoke_key(file, key_id)
    except KeysFileError as error:
        raise CliFailure(str(error)) from error
    if not gone:
        raise CliFailure(f"{file} has no key {key_id}; `penstock keys list` shows them")
    typer.echo(f"{key_id} revoked")
