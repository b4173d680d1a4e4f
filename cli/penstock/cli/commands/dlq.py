"""`penstock dlq`: what could not be worked on, listed, shown, run again and purged."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from penstock.cli.commands.api_paths import Route, api_path
from penstock.cli.commands.common import AsJson, Gateway, Yes, confirm, print_json, print_list, say_unknown_model
from penstock.cli.commands.long_calls import interrupted_between_calls, reporting, same_command
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.option_groups import App
from penstock.cli.topics import Cluster
from penstock.common import admin
from penstock.common.kafka_errors import missing_topic
from penstock.common.reader import RawMessage, read_ranges
from penstock.common.settings import KafkaSettings
from penstock.gateway.dead_letters.letters import PURGED, facts_of, payload_json
from penstock.schemas.codec import Codec
from penstock.schemas.errors import DecodeError
from penstock.schemas.records import DeadLetter, DeadLetterAction
from penstock.schemas.registry import reading_codec
from penstock.schemas.texts import shortened
from penstock.schemas.topics import TP

app = App(no_args_is_help=True, help="List, show, redrive and purge dead letters.")
READ_S, CALL_S = 60.0, 60.0


def read_from(cluster: Cluster) -> tuple[KafkaSettings, Codec]:
    """The cluster, and what reads its records: workers may write a registry's ids."""
    settings, kafka = cluster.load()
    return kafka, reading_codec(settings.schema_registry.access)


def newest(settings: KafkaSettings, codec: Codec, limit: int) -> list[tuple[RawMessage, DeadLetter]]:
    """The newest dead letters, oldest first. Of each partition no more than `limit` records are read."""
    give_up = time.monotonic() + READ_S
    offsets = bounds(settings)
    letters: dict[tuple[int, int], tuple[RawMessage, DeadLetter]] = {}
    for message in read_ranges(settings, {tp: (max(b, e - limit), e) for tp, (b, e) in offsets.items()}, give_up):
        try:
            record = codec.decode_any(message.value or b"")
        except DecodeError as error:
            typer.echo(f"{message.partition}/{message.offset} is no dead letter: {error}", err=True)
            continue
        if isinstance(record, DeadLetter):
            letters[message.partition, message.offset] = message, record
        elif isinstance(record, DeadLetterAction) and record.kind == PURGED:
            place = message.partition, record.offset
            of = (message.key or b"").decode("utf-8", "replace")
            if place in letters and (letters[place][1].request_id or "") == of:  # in a mirror it can be another letter
                del letters[place]
    return sorted(letters.values(), key=lambda pair: pair[1].created_at)[-limit:]


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


def as_json(message: RawMessage, letter: DeadLetter, codec: Codec) -> dict[str, Any]:
    """As the gateway shows it to who may read it."""
    return {**facts_of(message, codec).to_json(), **payload_json(letter, codec)}


def _row(letter: dict[str, Any]) -> list[Any]:
    return [
        letter["id"],
        (letter["created_at"] or "")[:19],
        *(letter[name] for name in ("reason", "tenant", "model", "request_id")),
        letter["redriven_as"] or ("" if letter["redrivable"] else "holds no request"),
        shortened(letter["error"], 80),
    ]


@dataclass(kw_only=True)
class Filter:
    """Letters by what they say."""

    reason: Annotated[str | None, typer.Option(help="Only those with this code, e.g. engine_failed.")] = None
    model: Annotated[str | None, typer.Option(help="Only those of this model.")] = None
    tenant: Annotated[str | None, typer.Option(help="Only those of this tenant.")] = None
    request: Annotated[str | None, typer.Option("--request", help="Only those of this request.")] = None
    since: Annotated[str | None, typer.Option(help="Only those from this time on: RFC 3339, or Unix seconds.")] = None
    until: Annotated[str | None, typer.Option(help="Only those before this time.")] = None

    def asked(self) -> dict[str, str]:
        names = ("reason", "model", "tenant", "request", "since", "until")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return {"request_id" if name == "request" else name: value for name, value in given.items()}


@dataclass(kw_only=True)
class Letters(Filter):
    """The letters that a command is about."""

    ids: Annotated[list[str] | None, typer.Argument(help="Ids, as `penstock dlq list` shows them.")] = None
    every: Annotated[bool, typer.Option("--all", help="All letters, where neither ids nor a filter are given.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Do nothing: say what would be done.")] = False
    after: Annotated[
        str | None, typer.Option(help="Continue a command that was interrupted: it says where it stopped.")
    ] = None

    def body(self) -> dict[str, Any]:
        """As the gateway takes them. Raises CliFailure (usage)."""
        asked = self.asked()
        for one in self.ids or ():
            place_of(one)
        if bool(self.ids) + bool(asked) + self.every != 1:
            text = "name letters by ids, or by a filter such as --reason, or all by --all"
            raise CliFailure(text, exit_code=ExitCode.USAGE)
        chosen = {"ids": self.ids} if self.ids else {"filter": asked}
        return {**chosen, "dry_run": self.dry_run, "after": self.after}


def call_until_done(
    context: typer.Context, gateway: Gateway, path: Route, body: dict[str, Any], count: str
) -> Iterator[dict[str, Any]]:
    """The answers of all calls that it takes: the first one fixes the letters, and each of the others handles some.

    A failure or a Ctrl-C says how many letters were done, and the command that continues. Raises CliFailure.
    """
    done, left, after = 0, None, body["after"]

    def text() -> str:
        if not done and after is None:
            return ""
        go_on = "run it again" if after is None else f"continue with: {same_command(context, after=after)}"
        return f"{done} {'would be' if body['dry_run'] else 'were'} {count}: {go_on}"

    with reporting(text), interrupted_between_calls() as check:
        while True:
            answer = gateway.call("POST", path, body={**body, "after": after}, timeout_s=CALL_S)
            done, after = done + answer[count], answer["last_id"]
            yield answer
            if not answer["has_more"]:
                return
            before, left = left, answer.get("remaining")
            if left is None or (before is not None and left >= before):
                raise CliFailure("the gateway makes no progress, or is older than this command")
            typer.echo(f"{done} {count}, {left} left", err=True)
            check()


@app.command("list")
def list_letters(
    gateway: Gateway,
    wanted: Filter,
    cluster: Cluster,
    limit: Annotated[int, typer.Option(min=1, help="The newest so many.")] = 50,
    json_lines: AsJson = False,
) -> None:
    """Dead letters with their reasons, the newest last. With --bootstrap-servers they are read without a gateway.

    Example: penstock dlq list --reason engine_failed --json
    """
    asked = wanted.asked()
    if not cluster.is_given:
        found = gateway.first("/v1/admin/dlq", limit, order="desc", **asked)[::-1]
    elif asked:
        text = "filters are the gateway's: leave --bootstrap-servers, --topic-prefix and --config out"
        raise CliFailure(text, exit_code=ExitCode.USAGE)
    else:
        settings, codec = read_from(cluster)
        found = [as_json(message, letter, codec) for message, letter in newest(settings, codec, limit)]
    columns = ["id", "time", "reason", "tenant", "model", "request", "redriven as", "error"]
    print_list(found, as_json=json_lines, columns=columns, row=_row, empty="no dead letters")
    if not found:
        say_unknown_model(gateway, wanted.model)


@app.command()
def show(
    gateway: Gateway,
    cluster: Cluster,
    letter_id: Annotated[str, typer.Argument(help="As `penstock dlq list` shows it: partition/offset.")],
    raw: Annotated[bool, typer.Option("--raw", help="Only the original bytes, as they were.")] = False,
    json_lines: AsJson = False,
) -> None:
    """One dead letter, with its original if the key may read it. Example: penstock dlq show 2/17 --raw > record.bin"""
    partition, offset = place_of(letter_id)
    if not cluster.is_given:
        letter = gateway.call("GET", api_path("/v1/admin/dlq", partition, offset))
    else:
        settings, codec = read_from(cluster)
        letter = as_json(*read_one(settings, codec, partition, offset), codec)
    if not raw:
        print_json(letter, indented=not json_lines)
    elif letter.get("original_omitted"):
        raise CliFailure("this key may not read the original: that takes the scope read, of the letter's tenant")
    else:
        text: str = letter["original"]
        is_text = len(text.encode()) == letter["bytes"]
        sys.stdout.buffer.write(text.encode() if is_text else bytes.fromhex(text.removeprefix("hex:")))


@app.command()
def redrive(
    context: typer.Context,
    gateway: Gateway,
    letters: Letters,
    rate: Annotated[float | None, typer.Option(min=0.1, help="Letters a second, at most.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Those too that were run again before.")] = False,
    json_lines: AsJson = False,
) -> None:
    """Run dead letters again, each as a new request. Repeated, also after a failure, it runs nothing twice.

    Examples: penstock dlq redrive 2/17

    penstock dlq redrive --reason engine_failed --since 2026-01-31T10:00:00Z --rate 5 --dry-run
    """
    body = {**letters.body(), "rate": rate, "again": again}
    count = skipped = 0
    for answer in call_until_done(context, gateway, "/v1/admin/dlq/redrive", body, "redriven"):
        count, skipped = count + answer["redriven"], skipped + len(answer["skipped"])
        if json_lines:
            print_json(answer)
            continue
        for request_id in answer["request_ids"]:
            typer.echo(request_id)
        say_skipped(answer)
    if not json_lines:
        typer.echo(f"{count} {'would be ' if letters.dry_run else ''}redriven, {skipped} skipped", err=True)
    if letters.ids and skipped and not count:
        raise typer.Exit(ExitCode.FAILED)


def say_skipped(answer: dict[str, Any]) -> None:
    for one in answer["skipped"]:
        typer.echo(f"{one['id']} skipped: {one['message']}", err=True)


@app.command()
def purge(
    context: typer.Context, gateway: Gateway, letters: Letters, yes: Yes = False, json_lines: AsJson = False
) -> None:
    """Take dead letters away for good.

    Examples: penstock dlq purge 2/17 --yes

    penstock dlq purge --reason bad_json --dry-run
    """
    body = letters.body()
    if not yes and not letters.dry_run:
        which = ", ".join(letters.ids or ()) or ("all dead letters" if letters.every else "the letters of this filter")
        confirm(f"Take {which} away for good?")
    answers = list(call_until_done(context, gateway, "/v1/admin/dlq/purge", body, "purged"))
    if json_lines:
        for answer in answers:
            print_json(answer)
    else:
        for answer in answers:
            say_skipped(answer)
        typer.echo(f"{sum(answer['purged'] for answer in answers)} {'would be ' if letters.dry_run else ''}purged")
    if not any(answer["purged"] for answer in answers) and any(answer["skipped"] for answer in answers):
        raise typer.Exit(ExitCode.FAILED)
