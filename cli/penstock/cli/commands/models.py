"""`penstock models`: how models stand, and orders about them: over the gateway, as desired state of their pool."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Final, cast

import typer

from penstock.cli.commands.api_paths import ApiPath, api_path
from penstock.cli.commands.common import AsJson, Gateway, errors, print_json, print_list, print_table
from penstock.cli.commands.order_waits import ROOT, WAIT_S, OrderWait, Reached, path_of, reason_text, state_text
from penstock.cli.config import find_config, read_toml
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.option_groups import App
from penstock.common.engine_kinds import KINDS
from penstock.common.model_entry import parse_entry
from penstock.schemas.errors import InvalidRequest

app = App(
    no_args_is_help=True,
    help="The models: list, add, remove, load, unload, pin, pause. Needs a key with the scope admin.",
)

Json = dict[str, Any]
ORDERS: Final = "/v1/admin/orders"
Name = Annotated[str, typer.Argument(help="The model's id, or an alias.")]
Pool = Annotated[str | None, typer.Option("--pool", help="Its pool, when several have a model of that name.")]


@dataclass
class Waiting:
    """Whether a command waits for what it has ordered."""

    wait: Annotated[
        bool, typer.Option("--wait", help="Until all workers of the pool have observed it and it is so, with progress.")
    ] = False
    timeout: Annotated[float, typer.Option("--timeout", min=0, help="With --wait: seconds, at most.")] = WAIT_S


def size_text(size_bytes: int | None) -> str | None:
    return None if size_bytes is None else f"{size_bytes / 2**20:,.0f} MiB"


@app.command("list")
def list_models(gateway: Gateway, as_json: AsJson = False) -> None:
    """Each engine of each model, on each worker; without the scope admin each model. Example: penstock models list"""
    try:
        models = gateway.call("GET", ROOT)["data"]
    except CliFailure as failure:
        if not failure.forbidden:
            raise
        _list_public(gateway.call("GET", "/v1/models", task="all")["data"], as_json=as_json)
        return
    told = all(model["paused"] is not None for model in models)
    orders = gateway.call("GET", ORDERS)["data"] if told else []
    if as_json:
        for model in models:
            print_json(model)
        return
    rows = [row for model in models for row in _rows(model)]
    for line in _paused_classes(orders):
        errors.print(line, highlight=False)
    for model in models:
        if missing := model.get("missing_on"):
            errors.print(
                f"the model {model['id']}{_in_pool(model)} is missing on {', '.join(missing)}", highlight=False
            )
    if not told:
        errors.print("the topic of orders is missing: create it with `penstock topics create`", highlight=False)
    columns = ["model", "pool", "state", "worker", "replica", "device", "memory", "queued", "running", "why"]
    print_table(columns, rows, "no models; `penstock models add` adds one")


def _list_public(models: list[Json], *, as_json: bool) -> None:
    """As every key may see them."""

    def row(model: Json) -> list[Any]:
        return [model["id"], model["pool"], model["state"], ", ".join(model["tasks"]), model["reason"]]

    columns = ["model", "pool", "state", "tasks", "why"]
    print_list(models, as_json=as_json, columns=columns, row=row, empty="no models")


def _paused_classes(orders: list[Json]) -> list[str]:
    """A line for each class that is paused: its requests wait, whatever their models say."""
    return [
        f"the class {order['name']}{_in_pool(order)} is paused since {order['created_at']}{_by(order)}:"
        f" `penstock models resume --class {order['name']}` lets it start again"
        for order in orders
        if order["kind"] == "class" and order["paused"]
    ]


def _in_pool(order: Json) -> str:
    return "" if order["pool"] is None else f" in the pool {order['pool']}"


def _by(order: Json) -> str:
    return "" if order["created_by"] in (None, "anybody") else f" by the key {order['created_by']}"


@app.command()
def diff(
    gateway: Gateway,
    config: Annotated[
        Path | None, typer.Option("--config", "-c", help="penstock.toml (default: as elsewhere).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """What was ordered that the file does not say: by whom, and since when. Ends with 1 if there is anything.

    Example: penstock models diff --config penstock.toml
    """
    found = find_config(config)
    entries = [] if found is None else read_toml(found).get("models", [])
    orders = gateway.call("GET", ORDERS)["data"]
    rows = [row for order in orders for row in differences(order, entries)]
    columns = ["kind", "name", "pool", "field", "file", "ordered", "since", "by"]
    row_of = itemgetter(*columns)
    print_list(rows, as_json=as_json, columns=columns, row=row_of, empty="all is as the file says")
    if rows:
        raise typer.Exit(int(ExitCode.FAILED))


def differences(order: Json, entries: list[Json]) -> list[Json]:
    """What an order has other than the file's entries, one row a field. Pure."""
    about = {name: order[name] for name in ("kind", "name", "pool")}
    told = {"since": order["created_at"], "by": order["created_by"]}
    in_file = [one for one in entries if one.get("id") == order["name"] and one.get("pool") in (None, order["pool"])]
    own = _fields(in_file[0]) if in_file and order["kind"] == "model" else None
    ordered = None if order["entry"] is None else _fields(order["entry"])
    fields: list[tuple[str, Any, Any]] = []
    if order["removed"] or (own is None and ordered is not None):
        fields += [("served", own is not None, ordered is not None)] if (own is None) != order["removed"] else []
    elif ordered is not None and own is not None:
        names = sorted((own.keys() | ordered.keys()) - {"pinned"})
        fields += [(name, own.get(name), ordered.get(name)) for name in names if own.get(name) != ordered.get(name)]
    fields += [("paused", False, True)] if order["paused"] else []
    pinned = order["pinned"] if order["pinned"] is not None else (ordered or own or {}).get("pinned", False)
    if pinned != (own or {}).get("pinned", False):
        fields.append(("pinned", not pinned, pinned))
    fields += [] if order["loaded"] is None else [("loaded", None, order["loaded"])]
    return [{**about, "field": name, "file": was, "ordered": now, **told} for name, was, now in fields]


def _fields(entry: Json) -> Json:
    """What an entry says that is not the default anyway; of headers, which may hold keys, the names."""
    try:
        fields = parse_entry(entry).model_dump(mode="json", exclude_defaults=True)
        options = fields.get("options", {})
        return fields | ({"options": options | {"headers": sorted(options["headers"])}} if "headers" in options else {})
    except InvalidRequest as error:
        raise CliFailure(f"the model {entry.get('id')}: {error}", exit_code=ExitCode.USAGE) from error


def _rows(model: Json) -> list[list[Any]]:
    marks = [name for name in ("pinned", "paused") if model[name]]
    name = f"{model['id']} ({', '.join(marks)})" if marks else model["id"]
    if not model["replicas"]:
        return [[name, model["pool"], state_text(model), None, None, None, None, None, None, reason_text(model)]]
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
            reason_text(replica),
        ]
        for replica in model["replicas"]
    ]


@app.command()
def show(name: Name, pool: Pool = None, *, gateway: Gateway, as_json: AsJson = False) -> None:
    """All about one model. Example: penstock models show chat"""
    print_json(gateway.call("GET", path_of(name), pool=pool), indented=not as_json)


@app.command()
def add(
    gateway: Gateway,
    waiting: Waiting,
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
        typer.Option(
            "--set", help="NAME=VALUE of any other key of [[models]], the value as JSON or text; options.slots=4."
        ),
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A TOML or JSON file of one entry.")] = None,
    replace: Annotated[bool, typer.Option("--replace", help="Change a model that there is.")] = False,
    as_json: AsJson = False,
) -> None:
    """Serve one more model. Example: penstock models add chat --source owner/name --engine text --set keep_alive=5m"""
    if name is not None and file is None and name.endswith((".json", ".toml")) and Path(name).is_file():
        raise CliFailure(f"{name} is a file: give it with --file {name}", exit_code=ExitCode.USAGE)
    if name is None and file is None:
        raise CliFailure("give the model's name, or its entry by --file; see --help", exit_code=ExitCode.USAGE)
    given = {"id": name, "source": source, "engine": engine, "tasks": task, "aliases": alias, "pool": pool}
    given |= {"device": device, "pinned": pinned or None}
    entry = {} if file is None else read_entry(file)
    entry |= {field: value for field, value in given.items() if value is not None} | set_fields(field or [])
    order = gateway.call("POST", ROOT, body=entry, replace="true" if replace else None)
    _answer(gateway, order, waiting, as_json, _loaded_if_kept)


def _loaded_if_kept(model: Json) -> bool:
    """Whether a model that was added stands as it will: one that nobody keeps loaded waits for its first request.

    One that takes the place of a loaded model is loaded in any case. One that is paused is loaded for nobody who asks.
    """
    kept = model["pinned"] or (model["desired"] or {}).get("loaded") or (model["preload"] and not model["paused"])
    return model["state"] == "ready" or (model["state"] == "absent" and not kept)


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
    """The fields of `NAME=VALUE` pairs; a dot leads into a table, as `options.slots=4`. Raises CliFailure (usage)."""
    fields: Json = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise CliFailure(f"--set {pair}: write it as NAME=VALUE", exit_code=ExitCode.USAGE)
        *tables, last = name.split(".")
        table = fields
        for key in tables:
            table = table.setdefault(key, {})
            if not isinstance(table, dict):
                raise CliFailure(f"--set {pair}: {key} is no table", exit_code=ExitCode.USAGE)
        try:
            table[last] = json.loads(text)
        except ValueError:
            table[last] = text
    return fields


@app.command()
def remove(name: Name, pool: Pool = None, *, waiting: Waiting, gateway: Gateway, as_json: AsJson = False) -> None:
    """Serve a model no more; requests for it fail. Example: penstock models remove chat --wait"""
    order = gateway.call("DELETE", path_of(name), pool=pool)
    _answer(gateway, order, waiting, as_json)


@app.command()
def load(name: Name, pool: Pool = None, *, waiting: Waiting, gateway: Gateway, as_json: AsJson = False) -> None:
    """Load a model and keep it loaded, also after a restart. Example: penstock models load chat --wait"""
    order = gateway.call("POST", path_of(name, "load"), pool=pool)
    _answer(gateway, order, waiting, as_json, lambda model: model["state"] == "ready")


@app.command()
def unload(name: Name, pool: Pool = None, *, waiting: Waiting, gateway: Gateway, as_json: AsJson = False) -> None:
    """Free its memory until somebody asks for the model again. Example: penstock models unload chat --wait"""
    order = gateway.call("POST", path_of(name, "unload"), pool=pool)
    _answer(gateway, order, waiting, as_json, lambda model: model["state"] in ("absent", "failed"))


@app.command()
def pin(name: Name, pool: Pool = None, *, waiting: Waiting, gateway: Gateway, as_json: AsJson = False) -> None:
    """Never unload it for another model. Example: penstock models pin chat"""
    order = gateway.call("POST", path_of(name, "pin"), pool=pool)
    _answer(gateway, order, waiting, as_json)


@app.command()
def unpin(name: Name, pool: Pool = None, *, waiting: Waiting, gateway: Gateway, as_json: AsJson = False) -> None:
    """Let it be unloaded for others again. Example: penstock models unpin chat"""
    order = gateway.call("POST", path_of(name, "unpin"), pool=pool)
    _answer(gateway, order, waiting, as_json)


@dataclass
class Paused:
    """The model, or the class, that nothing of is to start."""

    name: Annotated[str | None, typer.Argument(help="The model's id, or an alias.")] = None
    one_class: Annotated[str | None, typer.Option("--class", help="In place of a model: high, medium or low.")] = None
    pool: Pool = None

    def path(self, action: str) -> ApiPath:
        if (self.name is None) == (self.one_class is None):
            raise CliFailure(f"name a model or a --class to {action}, one of the two", exit_code=ExitCode.USAGE)
        if self.name is not None:
            return path_of(self.name, action)
        return api_path("/v1/admin/classes", self.one_class or "", action)


@app.command()
def pause(paused: Paused, waiting: Waiting, gateway: Gateway, as_json: AsJson = False) -> None:
    """Let nothing of a model, or of a class, start; it waits. Example: penstock models pause --class low"""
    _answer(gateway, gateway.call("POST", paused.path("pause"), pool=paused.pool), waiting, as_json)


@app.command()
def resume(paused: Paused, waiting: Waiting, gateway: Gateway, as_json: AsJson = False) -> None:
    """Let it start again. Example: penstock models resume chat"""
    _answer(gateway, gateway.call("POST", paused.path("resume"), pool=paused.pool), waiting, as_json)


def _answer(gateway: Gateway, order: Json, to_wait: Waiting, as_json: bool, reached: Reached | None = None) -> None:
    """Print what was ordered; if it is waited for, once it was observed and the model stands as it is to be."""
    subject = f"{order['action']} {order['kind']} {order['name']}"
    subject += f" in the pool {order['pool']}" if order["pool"] else ""
    shown, text = order, f"{subject}: ordered; its workers follow it, later ones too"
    if to_wait.wait:
        waiting = OrderWait(gateway, order, to_wait.timeout)
        waiting.until_observed()
        text = f"{subject}: all its workers have observed it"
        if reached is not None:
            shown = waiting.until(reached)
            text = _outcome(shown, order["action"])
    if as_json:
        print_json(shown)
    else:
        typer.echo(text)


def _outcome(model: Json, action: str) -> str:
    text = f"{model['id']} is {model['state']}"
    if action != "add" or model["state"] != "absent":
        return text
    return f"{text}: " + ("it is paused" if model["paused"] else "it is loaded when somebody asks for it")
