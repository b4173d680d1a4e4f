"""`penstock schemas`: the records as Avro, their evolution check, and a registry to register them in."""

from __future__ import annotations

from operator import itemgetter
from typing import Annotated, Any

import typer

from penstock.cli.commands.common import AsJson, print_json, print_list
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.option_groups import App
from penstock.schemas.codec import SCHEMA_IDS, schema_text

app = App(no_args_is_help=True, help="List, show, check and register the Avro schemas.")


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
