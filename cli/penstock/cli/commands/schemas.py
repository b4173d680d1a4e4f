"""`penstock schemas`: the records as Avro, their evolution check and registration, and the AsyncAPI document."""

from __future__ import annotations

import json
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.commands.common import AsJson, print_json, print_list
from penstock.cli.config import load, use_config
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.installs import importing
from penstock.cli.option_groups import App
from penstock.schemas.codec import SCHEMA_IDS, schema_text

app = App(no_args_is_help=True, help="List, show, check and register the Avro schemas; the AsyncAPI document.")


@app.command("list")
def list_schemas(as_json: AsJson = False) -> None:
    """The records with their schema ids."""
    found = [{"record": name, "versions": len(ids), "ids": list(ids)} for name, ids in SCHEMA_IDS.items()]
    columns = ["record", "version", "id", "hex"]
    print_list(found, as_json=as_json, columns=columns, row=_row, empty="no schemas")


def _row(schema: dict[str, Any]) -> list[Any]:
    newest = schema["ids"][-1]
    return [schema["record"], schema["versions"], newest, f"0x{newest:08X}"]


@app.command()
def show(record: Annotated[str, typer.Argument(help="E.g. InferenceRequest.")]) -> None:
    """A record's schema, as its .avsc file has it. Example: penstock schemas show ResultEvent > ResultEvent.avsc"""
    if record not in SCHEMA_IDS:
        raise CliFailure(f"there is no record {record}; there are {', '.join(SCHEMA_IDS)}", exit_code=ExitCode.USAGE)
    typer.echo(schema_text(record), nl=False)


@app.command()
def check(as_json: AsJson = False) -> None:
    """Hold the schemas against every released version: old readers and new ones must understand each other."""
    from penstock.schemas.evolution import check_all

    found = check_all()
    broken = {name: problems for name, problems in found.items() if problems}
    if as_json:
        print_json({"compatible": not broken, "problems": broken})
    else:
        for name, problems in broken.items():
            for problem in problems:
                typer.echo(f"{name}: {problem}", err=True)
    if broken:
        raise CliFailure(f"{len(broken)} records are not compatible with a released version")
    if not as_json:
        typer.echo(f"{len(found)} records are fully compatible with all released versions")


@app.command("asyncapi")
def print_asyncapi(
    topic_prefix: Annotated[str, typer.Option("--topic-prefix", help="Prefix of the names of topics.")] = "",
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", "-c", help="penstock.toml: with its prefix and the topics of its queues and webhooks."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            "--against", help="An older document: print what breaks its clients, and exit 1 if anything does."
        ),
    ] = None,
) -> None:
    """Print the AsyncAPI document of topics and WebSocket, as a gateway's /asyncapi.json, or compare it with an older.

    Example:  penstock schemas asyncapi > penstock-asyncapi.json, and after an update of Penstock:
    penstock schemas asyncapi --against penstock-asyncapi.json
    """
    with importing("gateway"):
        from penstock.gateway.document.asyncapi import asyncapi, configured_asyncapi, document_text
        from penstock.gateway.document.asyncapi_changes import breaking_changes, is_new_contract
        from penstock.gateway.settings import GatewaySettings
    if config is not None and topic_prefix:
        raise typer.BadParameter("the prefix is in the file of --config", param_hint="--topic-prefix")
    if config is None:
        document = asyncapi(topic_prefix)
    else:
        use_config(config)
        document = configured_asyncapi(load(GatewaySettings))
    if against is None:
        typer.echo(document_text(document))
        return
    try:
        older = json.loads(against.read_text(encoding="utf-8"))
        broken, announced = breaking_changes(older, document), is_new_contract(older, document)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        text = f"{against} cannot be read as a document of `penstock schemas asyncapi`: {error}"
        raise CliFailure(text, exit_code=ExitCode.USAGE) from error
    for line in broken:
        typer.echo(line)
    version = document["info"]["version"]
    if broken:
        how = "with a new first number of its version" if announced else "without a new first number of its version"
        raise CliFailure(f"{len(broken)} changes break clients of {against}, {how} ({version})")
    typer.echo(f"clients of {against} work with version {version}")


@app.command()
def register(
    url: Annotated[str, typer.Option("--registry", envvar="PENSTOCK_SCHEMA_REGISTRY__URL", help="Its base URL.")],
    as_json: AsJson = False,
) -> None:
    """Register all records in a Confluent-compatible registry. Example: penstock schemas register --registry http://…"""
    from penstock.schemas.registry import RegistryClient

    client = RegistryClient(url)
    there = {name: client.register(f"penstock.v1.{name}", schema_text(name)) for name in SCHEMA_IDS}
    found = [{"record": name, "id": schema_id} for name, schema_id in there.items()]
    columns, row = ["record", "id there"], itemgetter("record", "id")
    print_list(found, as_json=as_json, columns=columns, row=row, empty="nothing to register")
