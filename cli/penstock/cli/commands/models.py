"""`penstock models`: how models stand, and orders about them: over the gateway, as desired state of their pool."""

from __future__ import annotations

import json
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, cast
from urllib.parse import quote

import typer

from penstock.cli.commands.common import (
    DEFAULT_URL,
    AsJson,
    Gateway,
    Key,
    Url,
    errors,
    print_json,
    print_table,
)
from penstock.cli.failures import CliFailure, ExitCode
from penstock.common.engine_kinds import KINDS

app = typer.Typer(
    no_args_is_help=True,
    help="The models: list, add, remove, load, unload, pin, pause. Needs a key with the scope admin.",
)

Json = dict[str, Any]
Name = Annotated[str, typer.Argument(help="The model's id, or an alias.")]
Pool = Annotated[str | None, typer.Option("--pool", help="Its pool, when several have a model of that name.")]
Wait = Annotated[bool, typer.Option("--wait", help="Until it is so on a worker, with progress.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0, help="With --wait: seconds, at most.")]
WAIT_S = 600.0
POLL_S = 0.5
ROOT = "/v1/admin/models"


def path_of(name: str, action: str = "") -> str:
    return f"{ROOT}/{quote(name, safe='/')}" + (f"/{action}" if action else "")


def size_text(size_bytes: int | None) -> str | None:
    return None if size_bytes is None else f"{size_bytes / 2**20:,.0f} MiB"


def state_text(facts: Mapping[str, Any]) -> str:
    """A state for people: with how far its loading is."""
    progress = facts.get("progress")
    return (
        f"{facts['state']} {progress:.0%}" if progress is not None and facts["state"] == "loading" else facts["state"]
    )


@app.command("list")
def list_models(url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Each engine of each model, on each worker. Example: penstock models list --json"""
    with Gateway(url, key) as gateway:
        models = gateway.call("GET", ROOT)["data"]
    if as_json:
        for model in models:
            print_json(model)
        return
    rows = [row for model in models for row in _rows(model)]
    columns = ["model", "pool", "state", "worker", "replica", "device", "memory", "queued", "running", "why"]
    print_table(columns, rows, "no models; `penstock models add` adds one")


def _rows(model: Json) -> list[list[Any]]:
    marks = [name for name in ("pinned", "paused") if model[name]]
    name = f"{model['id']} ({', '.join(marks)})" if marks else model["id"]
    if not model["replicas"]:
        return [[name, model["pool"], state_text(model), None, None, None, None, None, None, model["reason"]]]
    return [
        [
            name,
            model["pool"],
            state_text(replica),
            replica["worker_id"],
            replica["replica"],
            replica["device"],
            size_text(replica["memory_bytes"] or replica["reserved_bytes"]),  # what is measured, else what is booked
            replica["queued"],
            replica["running"],
            replica["reason"],
        ]
        for replica in model["replicas"]
    ]


@app.command()
def show(name: Name, pool: Pool = None, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """All about one model. Example: penstock models show chat"""
    with Gateway(url, key) as gateway:
        print_json(gateway.call("GET", path_of(name), pool=pool), indented=not as_json)


@app.command()
def add(
    name: Annotated[str | None, typer.Argument(help="Its id; may stand in the file.")] = None,
    source: Annotated[str | None, typer.Option(help="A hub id, folder, .gguf file, or URL.")] = None,
    engine: Annotated[str | None, typer.Option(help=f"{', '.join(KINDS)}.")] = None,
    task: Annotated[list[str] | None, typer.Option(help="A task that it serves; may stand several times.")] = None,
    alias: Annotated[list[str] | None, typer.Option(help="Another name; may stand several times.")] = None,
    pool: Annotated[str | None, typer.Option(help="The pool whose workers serve it.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, …")] = None,
    pinned: Annotated[bool, typer.Option("--pinned", help="Never unload it for another model.")] = False,
    field: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE of any other key of [[models]], the value as JSON or text."),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A TOML or JSON file of one entry.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Change a model that there is.")] = False,
    wait: Wait = False,
    timeout: Timeout = WAIT_S,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Serve one more model. Example: penstock models add chat --source owner/name --engine text --set keep_alive=5m"""
    given = {"id": name, "source": source, "engine": engine, "tasks": task, "aliases": alias, "pool": pool}
    given |= {"device": device, "pinned": pinned or None}
    entry = {} if file is None else read_entry(file)
    entry |= {field: value for field, value in given.items() if value is not None} | set_fields(field or [])
    with Gateway(url, key) as gateway:
        wish = gateway.call("POST", ROOT, body=entry, replace="true" if replace else None)
        _answer(gateway, wish, as_json, wait, timeout, lambda model: model["state"] == "ready")


def read_entry(file: Path) -> Json:
    """One `[[models]]` table, alone in its file or in a list `models`. Raises CliFailure (usage)."""
    try:
        text = file.read_text()
        read: Any = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise CliFailure(f"{file}: {error}", exit_code=ExitCode.USAGE) from error
    listed: Any = read.get("models") if isinstance(read, dict) else None
    if isinstance(listed, list) and len(cast("list[Any]", listed)) == 1:
        read = listed[0]
    if not isinstance(read, dict) or "models" in read:
        raise CliFailure(f"{file} must hold one model: its keys, or one [[models]] table", exit_code=ExitCode.USAGE)
    return cast("Json", read)


def set_fields(pairs: list[str]) -> Json:
    """The fields of `NAME=VALUE` pairs. Raises CliFailure (usage)."""
    fields: Json = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise CliFailure(f"--set {pair}: write it as NAME=VALUE", exit_code=ExitCode.USAGE)
        try:
            fields[name] = json.loads(text)
        except ValueError:
            fields[name] = text
    return fields


@app.command()
def remove(name: Name, pool: Pool = None, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Serve a model no more; requests for it fail. Example: penstock models remove chat"""
    with Gateway(url, key) as gateway:
        wish = gateway.call("DELETE", path_of(name), pool=pool)
    _say(wish, as_json)


@app.command()
def load(
    name: Name,
    pool: Pool = None,
    wait: Wait = False,
    timeout: Timeout = WAIT_S,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Load a model and keep it loaded, also after a restart. Example: penstock models load chat --wait"""
    with Gateway(url, key) as gateway:
        wish = gateway.call("POST", path_of(name, "load"), pool=pool)
        _answer(gateway, wish, as_json, wait, timeout, lambda model: model["state"] == "ready")


@app.command()
def unload(
    name: Name,
    pool: Pool = None,
    wait: Wait = False,
    timeout: Timeout = WAIT_S,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Free its memory until somebody asks for the model again. Example: penstock models unload chat --wait"""
    with Gateway(url, key) as gateway:
        wish = gateway.call("POST", path_of(name, "unload"), pool=pool)
        _answer(gateway, wish, as_json, wait, timeout, lambda model: model["state"] in ("absent", "failed"))


@app.command()
def pin(name: Name, pool: Pool = None, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Never unload it for another model. Example: penstock models pin chat"""
    _order(url, key, path_of(name, "pin"), pool, as_json)


@app.command()
def unpin(name: Name, pool: Pool = None, url: Url = DEFAULT_URL, key: Key = None, as_json: AsJson = False) -> None:
    """Let it be unloaded for others again. Example: penstock models unpin chat"""
    _order(url, key, path_of(name, "unpin"), pool, as_json)


OneClass = Annotated[str | None, typer.Option("--class", help="In place of a model: high, medium or low.")]
OneName = Annotated[str | None, typer.Argument(help="The model's id, or an alias.")]


@app.command()
def pause(
    name: OneName = None,
    one_class: OneClass = None,
    pool: Pool = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Let nothing of a model, or of a class, start; it waits. Example: penstock models pause --class low"""
    _order(url, key, _model_or_class(name, one_class, "pause"), pool, as_json)


@app.command()
def resume(
    name: OneName = None,
    one_class: OneClass = None,
    pool: Pool = None,
    url: Url = DEFAULT_URL,
    key: Key = None,
    as_json: AsJson = False,
) -> None:
    """Let it start again. Example: penstock models resume chat"""
    _order(url, key, _model_or_class(name, one_class, "resume"), pool, as_json)


def _model_or_class(name: str | None, one_class: str | None, action: str) -> str:
    if (name is None) == (one_class is None):
        raise CliFailure(f"name a model or a --class to {action}, one of the two", exit_code=ExitCode.USAGE)
    return path_of(name, action) if name is not None else f"/v1/admin/classes/{quote(one_class or '')}/{action}"


def _order(url: str, key: str | None, path: str, pool: str | None, as_json: bool) -> None:
    with Gateway(url, key) as gateway:
        _say(gateway.call("POST", path, pool=pool), as_json)


def _say(wish: Json, as_json: bool) -> None:
    if as_json:
        print_json(wish)
        return
    where = f" in the pool {wish['pool']}" if wish["pool"] else ""
    typer.echo(f"{wish['action']} {wish['kind']} {wish['name']}{where}: ordered; its workers obey, later ones too")


def _answer(
    gateway: Gateway, wish: Json, as_json: bool, wait: bool, timeout_s: float, reached: Callable[[Json], bool]
) -> None:
    if not wait:
        _say(wish, as_json)
        return
    model = wait_for(gateway, wish["name"], wish["pool"], timeout_s, reached)
    if as_json:
        print_json(model)
    else:
        typer.echo(f"{model['id']} is {model['state']}")


def wait_for(gateway: Gateway, name: str, pool: str | None, timeout_s: float, reached: Callable[[Json], bool]) -> Json:
    """The model when it is as it should be, telling how it stands meanwhile.

    Raises CliFailure when it fails (1) or takes too long (4).
    """
    give_up = time.monotonic() + timeout_s
    said, failing_since = "", 0.0
    while True:
        model = gateway.call("GET", path_of(name), pool=pool)
        if reached(model):
            return model
        now = f"{state_text(model)}{': ' + model['reason'] if model['reason'] else ''}"
        if now != said:
            errors.print(f"{name}: {now}", highlight=False, markup=False)
            said, failing_since = now, time.monotonic()
        if model["state"] == "failed" and time.monotonic() - failing_since > FAILED_S:
            raise CliFailure(f"{name} failed: {model['reason'] or 'the worker log says why'}")
        if time.monotonic() >= give_up:
            raise CliFailure(f"{name} is still {model['state']} after {timeout_s:g} s", exit_code=ExitCode.TIMED_OUT)
        time.sleep(POLL_S)


FAILED_S = 10.0
"""A model that has failed for so long is not waited for: what it says may still be of before the order."""
