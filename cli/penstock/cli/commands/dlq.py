"""`penstock dlq`: what could not be worked on, with its reason and original bytes, read from the topic itself."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.commands.common import AsJson, print_json, print_table
from penstock.cli.config import ClusterSettings, load, use_config
from penstock.cli.failures import CliFailure
from penstock.cli.topics import Bootstrap, Config, Prefix, kafka_settings
from penstock.producers.reader import RawMessage, read_to_end
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import DecodeError
from penstock.schemas.records import DeadLetter

app = typer.Typer(no_args_is_help=True, help="List and show dead letters.")
SHOWN_BYTES = 400


def letters(bootstrap: str | None, prefix: str | None, config: Path | None) -> list[tuple[RawMessage, DeadLetter]]:
    """All dead letters, oldest first."""
    use_config(config)
    settings = kafka_settings(load(ClusterSettings), bootstrap, prefix)
    codec = default_codec()
    found: list[tuple[RawMessage, DeadLetter]] = []
    for message in read_to_end(settings, settings.names.dlq, deadline_s=60):
        try:
            found.append((message, codec.decode(message.value or b"", DeadLetter)))
        except DecodeError as error:
            typer.echo(f"{message.partition}/{message.offset} is no dead letter: {error}", err=True)
    return sorted(found, key=lambda pair: pair[1].created_at)


def as_json(message: RawMessage, letter: DeadLetter) -> dict[str, Any]:
    """Bytes as text where they are UTF-8, else as hex."""
    return {
        "id": f"{message.partition}/{message.offset}",
        "time": time_text(letter.created_at),
        "request_id": letter.request_id,
        "tenant": letter.tenant,
        "reason_code": letter.reason_code,
        "reason": letter.reason,
        "attempts": letter.attempts,
        "origin": letter.origin.to_dict(),
        "worker_id": letter.worker_id,
        "bytes": len(letter.original),
        "original": bytes_text(letter.original),
        "headers": {name: bytes_text(value) for name, value in letter.original_headers.items()},
    }


def time_text(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def bytes_text(value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return "hex:" + value.hex()


@app.command("list")
def list_letters(
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 50,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    config: Config = None,
    json_lines: AsJson = False,
) -> None:
    """Dead letters with their reasons. Example: penstock dlq list --json"""
    found = letters(bootstrap_servers, topic_prefix, config)[-limit:]
    if json_lines:
        for message, letter in found:
            print_json(as_json(message, letter))
        return
    rows = [
        [
            f"{message.partition}/{message.offset}",
            time_text(letter.created_at),
            letter.reason_code,
            f"{letter.origin.topic}/{letter.origin.partition}@{letter.origin.offset}",
            letter.request_id,
            letter.reason[:60],
        ]
        for message, letter in found
    ]
    print_table(["id", "time", "code", "origin", "request", "reason"], rows, "no dead letters")


@app.command()
def show(
    letter_id: Annotated[str, typer.Argument(help="As `penstock dlq list` shows it: partition/offset.")],
    raw: Annotated[bool, typer.Option("--raw", help="Only the original bytes, as they were.")] = False,
    bootstrap_servers: Bootstrap = None,
    topic_prefix: Prefix = None,
    config: Config = None,
    json_lines: AsJson = True,
) -> None:
    """One dead letter with its original. Example: penstock dlq show 2/17 --raw > record.bin"""
    for message, letter in letters(bootstrap_servers, topic_prefix, config):
        if f"{message.partition}/{message.offset}" == letter_id:
            if raw:
                sys.stdout.buffer.write(letter.original)
            else:
                print_json(as_json(message, letter))
            return
    raise CliFailure(f"there is no dead letter {letter_id}; `penstock dlq list` shows them")
