"""`penstock artifacts`: list, show, fetch, upload and delete artifacts, and sweep the store."""

from __future__ import annotations

import mimetypes
import os
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import IO, Annotated, Any

import httpx
import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from penstock.cli.commands.api_paths import api_path
from penstock.cli.commands.common import (
    ARTIFACTS,
    AsJson,
    Gateway,
    Yes,
    confirm,
    errors,
    print_json,
    print_list,
    print_table,
)
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.option_groups import App

app = App(no_args_is_help=True, help="Artifacts: uploads, images and outputs too large for Kafka.")
ArtifactId = Annotated[str, typer.Argument(metavar="ARTIFACT", help="The artifact's id.")]

PIECE_BYTES = 256 * 1024
TRANSFER = httpx.Timeout(30, read=120)


@app.command("list")
def list_artifacts(
    gateway: Gateway,
    limit: Annotated[int, typer.Option(min=1, help="At most so many.")] = 50,
    as_json: AsJson = False,
) -> None:
    """The caller's artifacts, newest first.

    Example:  penstock artifacts list --limit 10 --json
    """
    found = gateway.first(ARTIFACTS, limit)
    columns = ["artifact", "type", "bytes", "created", "expires"]
    row = itemgetter("id", "media_type", "bytes", "created_at", "expires_at")
    print_list(found, as_json=as_json, columns=columns, row=row, empty="no artifacts")


@app.command()
def show(artifact: ArtifactId, gateway: Gateway, as_json: AsJson = False) -> None:
    """What is known of one: type, bytes, digest, size and seed of an image, when it expires.

    Example:  penstock artifacts show 0b7e8f6c-0f43-4d6e-9c35-1c6bb2d8f7a1
    """
    found = gateway.call("GET", api_path(ARTIFACTS, artifact))
    if as_json:
        print_json(found)
        return
    shown = {name: value for name, value in found.items() if value is not None and name not in ("object", "id", "url")}
    print_table(["", ""], [[name, value] for name, value in shown.items()], "")


@app.command()
def get(
    gateway: Gateway,
    artifact: ArtifactId,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file to write; - for standard output.")
    ] = None,
) -> None:
    """Fetch an artifact's bytes into a file, by default one that is named after it.

    Example:  penstock artifacts get 0b7e8f6c-0f43-4d6e-9c35-1c6bb2d8f7a1 -o cat.png
    """
    facts = gateway.call("GET", api_path(ARTIFACTS, artifact))
    suffix = mimetypes.guess_extension(facts["media_type"]) or ".bin"
    file = output or Path(f"{facts['id']}{suffix}")
    with gateway.stream("GET", api_path(ARTIFACTS, artifact, "content"), timeout=TRANSFER) as answer:
        _save(answer.iter_bytes(PIECE_BYTES), file, facts["bytes"])
    if str(file) != "-":
        typer.echo(str(file))


def _save(pieces: Iterator[bytes], file: Path, size_bytes: int) -> None:
    if str(file) == "-":
        for piece in pieces:
            sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()
        return
    part = file.with_name(f"{file.name}.part")
    try:
        with part.open("wb") as out, _progress(file.name, size_bytes) as advance:
            for piece in pieces:
                out.write(piece)
                advance(len(piece))
        part.replace(file)  # a file of that name is whole
    except OSError as error:
        raise CliFailure(f"{file} cannot be written: {error.strerror}") from error
    finally:
        part.unlink(missing_ok=True)


@app.command()
def put(
    gateway: Gateway,
    file: Annotated[Path, typer.Argument(help="The file to upload.")],
    media_type: Annotated[str | None, typer.Option(help="Its type; by default guessed from its name.")] = None,
    ttl_s: Annotated[float | None, typer.Option("--ttl", help="Seconds for which it is kept.")] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a file; prints the id by which requests refer to it.

    Example:  penstock artifacts put cat.png --ttl 86400
    """
    kind = media_type or mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    try:
        content = file.open("rb")
    except OSError as error:
        raise CliFailure(f"{file} cannot be read: {error.strerror}", exit_code=ExitCode.USAGE) from error
    size = os.fstat(content.fileno()).st_size
    headers = {"content-type": kind, "content-length": str(size)}
    with content, _progress(file.name, size) as advance:
        made: dict[str, Any] = gateway.upload(_pieces(content, advance), headers, TRANSFER, ttl_s=ttl_s)
    if as_json:
        print_json(made)
    else:
        typer.echo(made["id"])


@app.command()
def delete(
    gateway: Gateway,
    artifacts: Annotated[list[str], typer.Argument(metavar="ARTIFACT...", help="Ids of artifacts.")],
    yes: Yes = False,
) -> None:
    """Delete artifacts. One that a conversation refers to lives as long as the conversation.

    Example:  penstock artifacts delete 0b7e8f6c-0f43-4d6e-9c35-1c6bb2d8f7a1 --yes
    """
    if not yes:
        for artifact in artifacts:
            gateway.call("GET", api_path(ARTIFACTS, artifact))  # raises for one that does not exist
        confirm(f"Delete {len(artifacts)} artifact{'s' * (len(artifacts) > 1)}?")
    for artifact in artifacts:
        gateway.call("DELETE", api_path(ARTIFACTS, artifact))
        typer.echo(f"{artifact} deleted")


@app.command()
def sweep(
    gateway: Gateway,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be taken away.")] = False,
    as_json: AsJson = False,
) -> None:
    """Take away, of all tenants, what expired, outputs whose worker died before its event, and broken uploads.

    Gateways do it by themselves every `gateway.sweep_artifacts_s`. It needs a key with the scope `admin`.

    Example:  penstock artifacts sweep --dry-run
    """
    query = {"dry_run": "true"} if dry_run else {}
    swept = gateway.call("POST", "/v1/admin/artifacts/sweep", timeout_s=600, **query)
    if as_json:
        print_json(swept)
        return
    rows = [[one["tenant"], one["artifact_id"], one["reason"], one["bytes"]] for one in swept["data"]]
    print_table(["tenant", "artifact", "reason", "bytes"], rows, "nothing to take away")
    if rows:
        done = "would be taken away" if dry_run else "taken away"
        typer.echo(f"{sum(swept['artifacts'].values())} artifacts, {swept['bytes']} bytes {done}")


def _pieces(content: IO[bytes], advance: Callable[[int], None]) -> Iterator[bytes]:
    while piece := content.read(PIECE_BYTES):
        yield piece
        advance(len(piece))


@contextmanager
def _progress(name: str, size_bytes: int) -> Generator[Callable[[int], None]]:
    """A bar on standard error, where that is a terminal."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        console=errors,
        transient=True,
        disable=not errors.is_terminal,
    )
    with bar:
        task = bar.add_task(name, total=size_bytes)

        def advance(count: int) -> None:
            bar.advance(task, count)

        yield advance
