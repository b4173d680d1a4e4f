"""`penstock dlq`: what could not be worked on, with its reason and original bytes, read from the topic itself."""

from __future__ import annotations

import re
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.commands.common import AsJson, print_json, print_table
from penstock.cli.config import ClusterSettings, load, use_config
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.reaching import require_kafka
from penstock.cli.topics import Bootstrap, Config, Prefix, kafka_settings
from penstock.common import admin
from penstock.common.kafka_errors import missing_topic
from penstock.common.reader import RawMessage, read_ranges
from penstock.common.settings import KafkaSettings
from penstock.schemas.codec import Codec
from penstock.schemas.errors import DecodeError
from penstock.schemas.records import DeadLetter
from penstock.schemas.registry import reading_codec
from penstock.schemas.texts import shortened
from penstock.schemas.topics import TP

app = typer.Typer(no_args_is_help=True, help="List and show dead letters.")
READ_S = 60.0


def cluster(bootstrap: str | None, prefix: str | None, config: Path | None) -> tuple[KafkaSettings, Codec]:
    """The cluster, and what reads its records: workers may write a registry's ids."""
    use_config(config)
    settings = load(ClusterSettings)
    return require_kafka(kafka_settings(settings, bootstrap, prefix)), reading_codec(settings.schema_registry.url)


def newest(settings: KafkaSettings, codec: Codec, limit: int) -> list[tuple[RawMessage, DeadLetter]]:
    """The newest dead letters, oldest first. Of each partition no more than `limit` records are read."""
    give_up = time.monotonic() + READ_S
    offsets = bounds(settings)
    letters: list[tuple[RawMessage, DeadLetter]] = []
    for message in read_ranges(settings, {tp: (max(b, e - limit), e) for tp, (b, e) in offsets.items()}, give_up):
        try:
            letters.append((message, codec.decode(message.value or b"", DeadLetter)))
        except DecodeError as error:
            typer.echo(f"{message.partition}/{message.offset} is no dead letter: {error}", err=True)
    return sorted(letters, key=lambda pair: pair[1].created_at)[-limit:]


def place_of(letter_id: str) -> tuple[int, int]:
    """(partition, offset). Raises CliFailure (usage)."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", letter_id)
    if numbers is None:
        raise CliFailure(f"{letter_id}: write it as partition/offset, as 2/17", exit_code=ExitCode.USAGE)
    return int(numbers[1]), int(numbers[2])


def read_one(settings: KafkaSettings, codec: Codec, partition: int, offset: int) -> tuple[RawMessage, DeadLetter]:
    """One dead letter: its record is read and no other. Raises CliFailure."""
    tp, letter_id = (settings.names.dlq, partition), f"{partition}/{offset}"
    begin, end = bounds(settings).get(tp, (0, 0))
    if begin <= offset < end:
        give_up = time.monotonic() + READ_S
        for message in read_ranges(settings, {tp: (offset, offset + 1)}, give_up):
            try:
                return message, codec.decode(message.value or b"", DeadLetter)
            except DecodeError as error:
                raise CliFailure(f"{letter_id} is no dead letter: {error}") from error
    raise CliFailure(f"there is no dead letter {letter_id}; `penstock dlq list` shows them")


def bounds(settings: KafkaSettings) -> dict[TP, tuple[int, int]]:
    """The first offset and the end of each partition of the topic."""
    topic = settings.names.dlq
    count = admin.partition_counts(settings, [topic]).get(topic)
    if count is None:
        raise missing_topic(topic)
    partitions = [(topic, number) for number in range(count)]
    first, end = admin.begin_offsets(settings, partitions), admin.end_offsets(settings, partitions)
    return {tp: (first[tp], end[tp]) for tp in partitions}


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
    found = newest(*cluster(bootstrap_servers, topic_prefix, config), limit)
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
            shortened(letter.reason, 80),
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
    json_lines: AsJson = False,
) -> None:
    """One dead letter with its original. Example: penstock dlq show 2/17 --raw > record.bin"""
    partition, offset = place_of(letter_id)
    message, letter = read_one(*cluster(bootstrap_servers, topic_prefix, config), partition, offset)
    if raw:
        sys.stdout.buffer.write(letter.original)
    else:
        print_json(as_json(message, letter), indented=not json_lines)
