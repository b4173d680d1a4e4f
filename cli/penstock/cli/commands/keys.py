"""`penstock keys`: API keys with their tenant, scopes, urgency and limits, of a running gateway or of a keys file."""

from __future__ import annotations

import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from penstock.cli.commands.api_paths import api_path
from penstock.cli.commands.common import AsJson, Gateway, print_list
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.option_groups import App
from penstock.schemas.topics import MOST_PRIORITY

app = App(
    no_args_is_help=True,
    help="Create, list, rotate, limit and revoke API keys.\n\nWith --url the gateway there does it, and all gateways of"
    " the installation follow within a second; --key then has the scope admin. Without it a keys file is changed:"
    " make the first key so, and name the file to the gateways as auth.keys_file.",
)
DEFAULT_FILE = Path("penstock-keys.json")
T = TypeVar("T")
KeyId = Annotated[str, typer.Argument(help="As `penstock keys list` shows it.")]


File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        envvar="PENSTOCK_AUTH__KEYS_FILE",
        help="The gateway's auth.keys_file (default: penstock-keys.json, where no --url is given).",
    ),
]


def _file(gateway: Gateway, file: Path | None) -> Path | None:
    """The file to change; None: the gateway of --url has the keys. An option goes before the other's variable.

    Raises CliFailure (usage) for two options, or two variables.
    """
    if not gateway.url or file is None:
        return None if gateway.url else file or DEFAULT_FILE
    url_by_variable = gateway.url == os.environ.get("PENSTOCK_URL")
    if url_by_variable == (str(file) == os.environ.get("PENSTOCK_AUTH__KEYS_FILE")):
        text = "--url and --file (or PENSTOCK_URL and PENSTOCK_AUTH__KEYS_FILE) are both set: keep one of them"
        raise CliFailure(text, exit_code=ExitCode.USAGE)
    return file if url_by_variable else None


@app.command()
def create(
    gateway: Gateway,
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
    expires: Annotated[str | None, typer.Option(help="When it ends: RFC 3339, or Unix seconds.")] = None,
    file: File = None,
) -> None:
    """Make a key and print it, this once.

    Examples:

      penstock keys create --tenant acme --limit outstanding=10

      penstock keys create --url http://gateway:8000 --tenant acme --expires 2027-01-01T00:00:00Z
    """
    from penstock.gateway.edge.keys import create_key
    from penstock.gateway.limits.limits import Limits
    from penstock.schemas.times import time_ms

    path = _file(gateway, file)
    with _failures():
        limits = Limits.from_texts(limit or [])
        rights: dict[str, Any] = {
            "tenant": tenant,
            "scopes": scopes.split(","),
            "max_priority": max_priority,
            "rate": rate,
            "name": name,
        }
        if path is None:
            body = {**rights, "limits": limits.to_dict(), "expires_at": expires}
            secret = gateway.call("POST", "/v1/admin/keys", body=body)["secret"]
            note = "kept as a hash by the gateways, which take it now. It is not shown again."
        else:
            expires_at = None if expires is None else time_ms(expires, "expires") // 1000
            secret = create_key(path, **rights, limits=limits, expires_at=expires_at)
            note = f"kept as a hash in {path}; the gateway reads it as auth.keys_file. It is not shown again."
    typer.echo(secret)
    typer.echo(note, err=True)


@app.command("list")
def list_all(gateway: Gateway, file: File = None, as_json: AsJson = False) -> None:
    """All keys, without their secrets; those of a gateway with the keys of its file."""
    from penstock.gateway.edge.keys import list_keys

    path = _file(gateway, file)
    if path is None:
        found = gateway.pages("/v1/admin/keys", 1_000_000)
    else:
        with _failures():
            found = [record.to_json("file") for record in list_keys(path)]
    columns = ["id", "tenant", "scopes", "max priority", "rate", "limits", "name", "created", "expires", "source"]
    print_list(found, as_json=as_json, columns=columns, row=_row, empty="no keys")


@app.command()
def rotate(
    gateway: Gateway,
    key_id: KeyId,
    grace_s: Annotated[float, typer.Option(min=0, help="Seconds for which the old secret works too.")] = 3_600.0,
    file: File = None,
) -> None:
    """Give a key a new secret and print it, this once. Its id and its rights stay.

    A secret that has leaked: revoke the key.

    Example: penstock keys rotate 3f0c9a1b2c4d --url http://gateway:8000 --grace-s 600
    """
    from penstock.gateway.edge.keys import rotate_key

    path = _file(gateway, file)
    if path is None:
        route = api_path("/v1/admin/keys", key_id, "rotate")
        secret = gateway.call("POST", route, body={"grace_s": grace_s})["secret"]
    else:
        with _failures():
            secret = _found(rotate_key(path, key_id, grace_s), path, key_id)
    typer.echo(secret)
    typer.echo(f"the old secret works for {grace_s:g} s more. This one is not shown again.", err=True)


@app.command("limit")
def limit_key(
    gateway: Gateway,
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY_ID] NAME=VALUE…", help="Limits by the names of [gateway.limits]."),
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="In place of a key: the limits of this tenant.")] = None,
    file: File = None,
) -> None:
    """Replace the limits of a key, or of a tenant while gateways run.

    Without any NAME=VALUE a key has no limits of its own, and a tenant has those of the configuration again. `NAME=`
    takes a configured limit away from a tenant.

    Examples:

      penstock keys limit 3f0c9a1b2c4d outstanding=10 models=tiny,small

      penstock keys limit --tenant acme outstanding=100 tokens_per_minute= --url http://gateway:8000

      penstock keys limit --tenant acme --url http://gateway:8000
    """
    from penstock.gateway.edge.keys import change_key
    from penstock.gateway.limits.limits import Limits

    path, texts = _file(gateway, file), words or []
    with _failures():
        if tenant is not None:
            _limit_tenant(gateway, path, tenant, texts)
            return
        if not texts:
            raise CliFailure("name the key, or a tenant by --tenant", exit_code=ExitCode.USAGE)
        key_id, limits = texts[0], Limits.from_texts(texts[1:])
        if path is None:
            gateway.call("POST", api_path("/v1/admin/keys", key_id), body={"limits": limits.to_dict()})
        else:
            _found(change_key(path, key_id, lambda key: replace(key, limits=limits)), path, key_id)
    typer.echo(f"{key_id} {limits.to_text() or 'has no limits of its own'}")


@app.command()
def revoke(gateway: Gateway, key_id: KeyId, file: File = None) -> None:
    """Take a key away; running gateways notice within a second, and end its connections.

    Example: penstock keys revoke 3f0c9a1b2c4d --url http://gateway:8000
    """
    from penstock.gateway.edge.keys import revoke_key

    path = _file(gateway, file)
    if path is None:
        gateway.call("DELETE", api_path("/v1/admin/keys", key_id))
    else:
        with _failures():
            _found(revoke_key(path, key_id), path, key_id)
    typer.echo(f"{key_id} revoked")


def _limit_tenant(gateway: Gateway, path: Path | None, tenant: str, texts: list[str]) -> None:
    from penstock.gateway.limits.limits import Limits

    if path is not None:
        text = "limits of tenants are in [gateway.limits] of the configuration; with --url running gateways change them"
        raise CliFailure(text, exit_code=ExitCode.USAGE)
    route = api_path("/v1/admin/limits", tenant)
    if texts:
        limits = Limits.from_texts([text for text in texts if not text.endswith("=")]).to_dict()
        body = {**limits, **{text[:-1]: None for text in texts if text.endswith("=")}}
        found = gateway.call("POST", route, body=body)
    else:
        found = gateway.call("DELETE", route)
    in_force = " ".join(f"{name}={value}" for name, value in found["in_force"].items())
    typer.echo(f"{tenant} {in_force or 'has no limits'}")


def _row(key: Mapping[str, Any]) -> list[Any]:
    from penstock.gateway.limits.limits import Limits

    return [
        *(key["id"], key["tenant"], ",".join(key["scopes"]), key["max_priority"]),
        "no limit" if key["rate"] is None else f"{key['rate']:g}/s",
        Limits.from_dict(key["limits"]).to_text(),
        key["name"],
        *((key[name] or "")[:10] for name in ("created_at", "expires_at")),
        key["source"],
    ]


def _found(found: T | None, path: Path, key_id: str) -> T:
    if found is None or found is False:
        raise CliFailure(f"{path} has no key {key_id}; `penstock keys list` shows them")
    return found


@contextmanager
def _failures() -> Generator[None]:
    """What a user can mend as one line."""
    from penstock.gateway.edge.keys import KeysFileError
    from penstock.schemas.errors import Conflict, InvalidRequest

    try:
        yield
    except KeysFileError as error:
        raise CliFailure(str(error)) from error
    except (ValueError, InvalidRequest, Conflict) as error:
        raise CliFailure(str(error), exit_code=ExitCode.USAGE) from error
