"""`penstock conversations replay`: one conversation by a gateway, or many from Kafka at a group's position."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from penstock.cli.commands.api_paths import api_path
from penstock.cli.commands.common import AsJson, Gateway, print_json
from penstock.cli.failures import CliFailure, ExitCode
from penstock.cli.topics import Cluster
from penstock.schemas.ids import DEFAULT_TENANT
from penstock.schemas.times import rfc3339, time_ms


@dataclass(kw_only=True)
class Many:
    """The options of a replay of many conversations."""

    pattern: Annotated[
        str | None, typer.Option(help="Many conversations, read from Kafka: a glob on their ids, as 'trip-*'.")
    ] = None
    group: Annotated[
        str | None, typer.Option(help="With --pattern: a consumer group that keeps the positions; a repeat goes on.")
    ] = None
    since: Annotated[
        str | None, typer.Option(help="With --pattern: begin at this time: RFC 3339, or Unix seconds.")
    ] = None
    rate: Annotated[float | None, typer.Option(help="With --pattern: at most so many records per second.")] = None
    follow: Annotated[
        bool, typer.Option("--follow", help="With --pattern: go on with new records and new conversations.")
    ] = False
    tenant: Annotated[str, typer.Option(help="With --pattern: whose conversations.")] = DEFAULT_TENANT

    def check_unused(self) -> None:
        """Raises CliFailure when an option of Kafka's replay is given for a gateway's."""
        for name in ("group", "since", "rate", "follow"):
            if getattr(self, name):
                raise CliFailure(f"--{name} is for --pattern", exit_code=ExitCode.USAGE)


def replay(
    gateway: Gateway,
    many: Many,
    cluster: Cluster,
    conversation: Annotated[str | None, typer.Argument(help="The conversation's id.")] = None,
    from_offset: Annotated[int | None, typer.Option(min=0, help="Begin at this offset of the topic.")] = None,
    as_json: AsJson = True,
) -> None:
    """Every record of a conversation's topic with its offset, one JSON line each; with --pattern of many conversations.

    It ends at the end that each conversation had when the replay began.

    Examples:

      penstock conversations replay trip --from-offset 10

      penstock conversations replay --pattern 'trip-*' --group search --follow -b kafka:9092
    """
    if (conversation is None) == (many.pattern is None):
        raise CliFailure("name a conversation, or many by --pattern", exit_code=ExitCode.USAGE)
    if conversation is None:
        _replay_many(many, cluster, from_offset)
        return
    many.check_unused()
    path, after = api_path("/v1/conversations", conversation, "replay"), None
    while True:
        page = gateway.call("GET", path, from_offset=from_offset, after=after)
        for record in page["data"]:
            print_json(record)
        if not page["has_more"]:
            return
        after = page["last_id"]  # it carries the end


def _replay_many(many: Many, cluster: Cluster, from_offset: int | None) -> None:
    from penstock.producers import Client
    from penstock.schemas.registry import reading_codec

    settings, kafka = cluster.load()
    since_ms = None if many.since is None else time_ms(many.since, "since")
    codec = reading_codec(settings.schema_registry.access)
    with Client(kafka, tenant=many.tenant, codec=codec) as client:
        batches = client.replay_conversations(
            many.pattern or "*",
            group=many.group,
            from_offset=from_offset,
            since_ms=since_ms,
            rate=many.rate,
            follow=many.follow,
        )
        with closing(batches):
            for batch in batches:  # written before the next is asked for, which says that this one is dealt with
                typer.echo("\n".join(json.dumps(_line(record), ensure_ascii=False) for record in batch))


def _line(record: Any) -> dict[str, Any]:
    """As a gateway shows it, and whose record it is."""
    message = record.message
    told = None if message is None else {**message.to_dict(), "created_at": rfc3339(message.created_at)}
    return {
        "conversation_id": record.conversation_id,
        "offset": record.offset,
        "key": record.key,
        "time": rfc3339(record.timestamp_ms),
        "message": told,
    }
