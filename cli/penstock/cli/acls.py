"""`penstock topics acls`: the least rights of each role, as commands of Kafka, as Strimzi's users, or as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from enum import StrEnum
from itertools import groupby
from typing import Annotated, Any

import typer
from pydantic import BaseModel, Field

from penstock.cli.config import ClusterSettings, ConfigFile, QueueSettings, load, use_config
from penstock.cli.rights import Installation, Right, Role
from penstock.common.configuration import ProcessSettings
from penstock.schemas.topics import TopicNames


class Format(StrEnum):
    KAFKA_ACLS = "kafka-acls"
    STRIMZI = "strimzi"


AsFormat = Annotated[Format, typer.Option("--as", help="kafka-acls: commands for a shell; strimzi: KafkaUser YAML.")]


class _Group(BaseModel, extra="ignore"):
    group_id: str | None = None


class _GroupSettings(ProcessSettings):
    """The names of groups, which the processes' own settings check."""

    worker: _Group = Field(default_factory=_Group)
    queue_merge: _Group = Field(default_factory=_Group)
    webhooks: _Group = Field(default_factory=_Group)
    summarizer: _Group = Field(default_factory=_Group)


ALLOW = (
    'allow() { who=$1; shift; "${KAFKA_ACLS:-kafka-acls.sh}" --bootstrap-server "${BOOTSTRAP:-localhost:9092}"'
    ' ${CONFIG:+--command-config "$CONFIG"} --add --force --allow-principal "$who" "$@"; }'
)
"""A function of the shell. CONFIG is the file with the credentials of a user who may alter the cluster's rights."""


def acls(
    config: ConfigFile = None,
    role: Annotated[list[Role] | None, typer.Option(help="One role alone; may be repeated (default: all).")] = None,
    principal: Annotated[
        str | None, typer.Option(help="The user, as User:alice (default: User:penstock-ROLE).")
    ] = None,
    as_format: AsFormat = Format.KAFKA_ACLS,
    topic_prefix: Annotated[str | None, typer.Option("--topic-prefix", help="Prefix of the names.")] = None,
    group: Annotated[
        list[str] | None, typer.Option(help="A group under which a reader of conversations keeps its position.")
    ] = None,
    cluster: Annotated[str, typer.Option(help="With strimzi: the name of the Kafka resource.")] = "kafka",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Print the least rights of each role. Asks no broker; the names come from penstock.toml.

    Roles: gateway, worker, bridge, webhooks, summarizer; producer (a service that submits requests over Kafka),
    results (one that reads outcomes), conversations (one that reads conversations), operator (topics, doctor, dlq). A
    service that submits and waits for outcomes is a producer and a reader of results. Without --role the bridge is left
    out if there are no [[queues]]. Prefixed rules hold for all pools.

    Examples:

      penstock topics acls --role gateway --principal User:gateway | BOOTSTRAP=kafka:9092 CONFIG=admin.properties sh

      penstock topics acls --as strimzi --cluster my-cluster > users.yaml
    """
    use_config(config)
    installation = configured_installation(topic_prefix, group or ())
    chosen = role or [one for one in Role if one != "bridge" or installation.queues]
    found = {one: (principal or f"User:penstock-{one}", installation.rights(one)) for one in chosen}
    if as_json:
        typer.echo(json.dumps([_as_dict(one, who, right) for one, (who, rights) in found.items() for right in rights]))
    elif as_format is Format.STRIMZI:
        typer.echo("---\n".join(strimzi(who, rights, cluster) for who, rights in found.values()), nl=False)
    else:
        typer.echo(ALLOW)
        typer.echo("\n".join(line for one, (who, rights) in found.items() for line in commands(one, who, rights)))


def configured_installation(topic_prefix: str | None = None, replay_groups: Sequence[str] = ()) -> Installation:
    """What the settings say of topics and groups. Raises CliFailure."""
    settings, queues, groups = load(ClusterSettings), load(QueueSettings).queues, load(_GroupSettings)
    ids = {
        "worker": groups.worker.group_id,
        "bridge": groups.queue_merge.group_id,
        "webhooks": groups.webhooks.group_id,
        "summarizer": groups.summarizer.group_id,
        "conversations": ",".join(replay_groups) or None,
    }
    return Installation(
        names=TopicNames(settings.kafka.topic_prefix if topic_prefix is None else topic_prefix),
        groups={process: name for process, name in ids.items() if name is not None},
        sharded=settings.topics.conversation_layout == "sharded",
        fsync=settings.topics.durability == "fsync",
        queues=[one.topic for one in queues],
        queue_results=[one.result_topic for one in queues if one.result_topic],
    )


def commands(role: str, principal: str, rights: Sequence[Right]) -> Iterator[str]:
    """A call of kafka-acls.sh for each resource."""
    yield f"# {role}"
    for resource, operations in _by_resource(rights):
        where = "--cluster" if resource.kind == "cluster" else f"--{resource.kind} {shlex.quote(resource.name)}"
        pattern = " --resource-pattern-type prefixed" if resource.prefixed else ""
        allowed = " ".join(f"--operation {_camel(one)}" for one in operations)
        yield f"allow {shlex.quote(principal)} {allowed} {where}{pattern}"


def strimzi(principal: str, rights: Sequence[Right], cluster: str) -> str:
    """A KafkaUser whose authentication is to be completed (its default here is SCRAM-SHA-512)."""
    name = principal.removeprefix("User:")
    lines = [
        "apiVersion: kafka.strimzi.io/v1",
        "kind: KafkaUser",
        "metadata:",
        f"  name: {json.dumps(name)}",
        "  labels:",
        f"    strimzi.io/cluster: {json.dumps(cluster)}",
        "spec:",
        "  authentication:",
        "    type: scram-sha-512",
        "  authorization:",
        "    type: simple",
        "    acls:",
    ]
    for resource, operations in _by_resource(rights):
        lines += ["      - resource:", f"          type: {resource.kind}"]
        if resource.kind != "cluster":
            pattern = "prefix" if resource.prefixed else "literal"
            lines += [f"          name: {json.dumps(resource.name)}", f"          patternType: {pattern}"]
        lines.append(f"        operations: [{', '.join(_camel(one) for one in operations)}]")
    return "\n".join(lines) + "\n"


def _by_resource(rights: Sequence[Right]) -> Iterator[tuple[Right, list[str]]]:
    def resource(right: Right) -> tuple[str, str, bool]:
        return right.kind, right.name, right.prefixed

    for _, group in groupby(sorted(rights, key=resource), resource):
        found = list(group)
        yield found[0], sorted(right.operation for right in found)


def _camel(operation: str) -> str:
    """DESCRIBE_CONFIGS as the tools have it: DescribeConfigs."""
    return operation.title().replace("_", "")


def _as_dict(role: str, principal: str, right: Right) -> dict[str, Any]:
    pattern = {"pattern": "prefixed" if right.prefixed else "literal"}
    fields = {name: value for name, value in asdict(right).items() if name != "prefixed"}
    return {"role": role, "principal": principal, **fields, **pattern}
