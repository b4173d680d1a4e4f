"""`penstock config`: what is set, and whether it is right."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, cast

import typer
from pydantic_settings import BaseSettings

from penstock.cli.config import ClusterSettings, ConfigFile, load, masked, to_toml, use_config
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.imported_models import imported
from penstock.cli.option_groups import App
from penstock.schemas.finite_json import loads_finite

app = App(no_args_is_help=True, help="Show, check and import the configuration (penstock.toml, then PENSTOCK_*).")


def settings_types() -> list[type[BaseSettings]]:
    """The settings objects of all processes that are installed here."""
    found: list[type[BaseSettings]] = [ClusterSettings]
    try:
        from penstock.processors.settings import WorkerSettings

        found.append(WorkerSettings)
    except ModuleNotFoundError:
        pass
    try:
        from penstock.gateway.bridge.settings import BridgeSettings
        from penstock.gateway.settings import GatewaySettings
        from penstock.gateway.summarizer.settings import SummarizerSettings
        from penstock.gateway.webhooks.settings import WebhooksSettings

        found += [GatewaySettings, BridgeSettings, WebhooksSettings, SummarizerSettings]
    except ModuleNotFoundError:
        pass
    return found


def checked() -> dict[str, Any]:
    """All sections with their effective values. Raises CliFailure with a line for each wrong field or section."""
    merged: dict[str, Any] = {}
    wrong: dict[str, None] = {}
    """What several processes read is wrong for each of them, and named once."""
    for settings_type in settings_types():
        try:
            loaded = load(settings_type).model_dump(mode="json")
        except CliFailure as failure:
            wrong |= dict.fromkeys(str(failure).splitlines())
            continue
        for section, value in loaded.items():
            known = merged.get(section)
            merged[section] = {**known, **value} if isinstance(known, Mapping) and isinstance(value, Mapping) else value
    if wrong:
        raise CliFailure("\n".join(wrong), exit_code=ExitCode.USAGE)
    _check_together(merged)
    return merged


def _check_together(merged: Mapping[str, Any]) -> None:
    """Raises CliFailure for settings that are right one by one and cannot be so together."""
    _check_ports(merged)
    keys_file = merged.get("auth", {}).get("keys_file")
    if keys_file is not None and not Path(keys_file).is_file():
        cure = f"`penstock keys create --file {shlex.quote(str(keys_file))}` makes it"
        raise CliFailure(f"configuration: auth.keys_file: {keys_file} is not there; {cure}", exit_code=ExitCode.USAGE)


def _check_ports(merged: Mapping[str, Any]) -> None:
    own = ("health_host", "health_port")
    names = (("gateway", "host", "port"), ("worker", *own), ("webhooks", *own), ("summarizer", *own))
    if merged.get("queues"):
        names += (("bridge", *own),)
    taken = [
        (f"{part}.{port}", merged.get(part, {}).get(host), merged.get(part, {}).get(port)) for part, host, port in names
    ]
    for (one, host, port), (other, other_host, other_port) in combinations(taken, 2):
        same_host = host == other_host or {host, other_host} & {"0.0.0.0", "::"}
        if port and port == other_port and same_host:
            raise CliFailure(
                f"configuration: {one} and {other} are both {port}: give one of them another",
                exit_code=ExitCode.USAGE,
            )


@app.command()
def show(
    config: ConfigFile = None, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """Print the effective settings; secrets are starred.

    Example:  penstock config show --config penstock.toml
    """
    use_config(config)
    settings = masked(checked())
    typer.echo(json.dumps(settings, indent=2) if as_json else to_toml(settings), nl=as_json)


@app.command()
def check(config: ConfigFile = None) -> None:
    """Say whether the settings are right; names each field that is not.

    Example:  penstock config check && penstock worker
    """
    path = use_config(config)
    checked()
    typer.echo(f"the configuration is right ({path or 'defaults and environment only'})")


@app.command("import")
def import_models(
    models: Annotated[Path, typer.Argument(help='A JSON list of ModelConfig objects, or {"models": [...]}.')],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write (default: standard output).")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
) -> None:
    """Write a penstock.toml of another inference manager's list of models, and say what had no counterpart.

    An object has model_id, model_type (text2text, text2image, image2text, image_processing, or a task), model_path or
    api_endpoint, vram_required_mb, loading_time_sec, priority, max_batch_size and parameters. A path becomes a model
    that workers load, an endpoint one of the engine remote; parameters become the model's defaults. In Penstock a
    priority of 0 is given up last: compare. Notes go to standard error.

    Example:  penstock config import models.json --output penstock.toml && penstock config check
    """
    found = imported(_model_list(models))
    for note in found.notes:
        typer.echo(note, err=True)
    if not found.entries:
        raise CliFailure(f"{models}: none of its models can be imported", exit_code=ExitCode.FAILED)
    text = to_toml({"models": found.entries})
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        with output.open("w" if force else "x") as file:
            file.write(text)
    except FileExistsError:
        raise CliFailure(f"{output} exists: --force replaces it", exit_code=ExitCode.USAGE) from None
    typer.echo(f"{output}: models {', '.join(entry['id'] for entry in found.entries)}", err=True)


def _model_list(path: Path) -> list[Any]:
    try:
        found = loads_finite(path.read_text())
    except OSError as error:
        raise CliFailure(f"{path} cannot be read: {error.strerror}", exit_code=ExitCode.USAGE) from error
    except ValueError as error:
        raise CliFailure(f"{path} is not valid JSON: {error}", exit_code=ExitCode.USAGE) from error
    if isinstance(found, dict):
        found = cast("dict[str, Any]", found).get("models")
    if not isinstance(found, list):
        raise CliFailure(f"{path} must hold a list of models", exit_code=ExitCode.USAGE)
    return cast("list[Any]", found)
