"""The least rights of each role on Kafka's resources, for `penstock topics acls` and `doctor`. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from penstock.schemas.topics import TopicNames

CLUSTER = "kafka-cluster"
"""The name under which Kafka's authorizer knows the cluster."""
READER_GROUP = "penstock-reader"
"""librdkafka asks for the coordinator of each consumer's group, also of one that assigns itself its partitions."""
OFFSETS_TOPIC = "__consumer_offsets"


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Right:
    """Allows one operation, by Kafka's name for it. `prefixed`: on all resources whose names begin so."""

    kind: Literal["topic", "group", "cluster"]
    name: str
    operation: str
    prefixed: bool = False

    def allows(self, kind: str, name: str, operation: str) -> bool:
        """Whether it is on this resource, and of the operation or of one that includes it."""
        is_on = name.startswith(self.name) if self.prefixed else name == self.name
        return kind == self.kind and is_on and self.operation in (operation, *INCLUDED_IN.get(operation, ()))


INCLUDED_IN = {"DESCRIBE": ("READ", "WRITE", "DELETE", "ALTER"), "DESCRIBE_CONFIGS": ("ALTER_CONFIGS",)}
"""By operation, those whose rights include it."""


class Role(StrEnum):
    """Who uses Kafka: a process of Penstock, a service with the client library, or a person."""

    GATEWAY = "gateway"
    WORKER = "worker"
    BRIDGE = "bridge"
    WEBHOOKS = "webhooks"
    SUMMARIZER = "summarizer"
    PRODUCER = "producer"
    RESULTS = "results"
    CONVERSATIONS = "conversations"
    OPERATOR = "operator"


_TABLE: Mapping[str, Mapping[str, str]] = {
    "gateway": {
        "READ": "requests result status control desired model worker dlq delivery idempotency key audit usage facts"
        " conversations",
        "WRITE": "requests control desired worker dlq idempotency key audit usage facts conversations",
        "CREATE": "own_topics",
        "DELETE": "own_topics dlq",
        "DESCRIBE": "absent_log reader_group",
        "DESCRIBE_CONFIGS": "own_topics",
    },
    "worker": {
        "READ": "requests result control desired worker conversations group",
        "WRITE": "requests result status dlq model worker conversations",
        "CREATE": "own_topics",
        "DESCRIBE": "absent_log former_group reader_group",
        "DESCRIBE_CONFIGS": "own_topics",
    },
    "bridge": {
        "READ": "requests result status model worker key queues group",
        "WRITE": "requests worker dlq queue_results",
        "DESCRIBE": "former_group reader_group",
    },
    "webhooks": {
        "READ": "requests result status control group",
        "WRITE": "delivery worker dlq",
        "DESCRIBE": "former_group reader_group",
    },
    "summarizer": {
        "READ": "result status model facts conversations group",
        "WRITE": "text worker",
        "DESCRIBE": "absent_log former_group reader_group",
    },
    "producer": {"READ": "model", "WRITE": "requests control", "DESCRIBE": "result status reader_group"},
    "results": {"READ": "result status", "DESCRIBE": "reader_group"},
    "conversations": {"READ": "conversations group", "DESCRIBE": "result absent_log reader_group"},
    "operator": {
        "READ": "all group",
        "WRITE": "requests facts audit usage",
        "CREATE": "all queues queue_results",
        "ALTER": "all",
        "ALTER_CONFIGS": "all flushed",
        "DESCRIBE": "conversations queues queue_results former_group reader_group",
        "DESCRIBE_CONFIGS": "cluster queues queue_results",
    },
}

_GROUPS = {
    "worker": ("worker", ("penstock-worker",)),
    "operator": ("worker", ("penstock-worker",)),
    "bridge": ("bridge", ("penstock-queues",)),
    "webhooks": ("webhooks", ("penstock-webhooks", "penstock-webhooks-statuses")),
    "summarizer": ("summarizer", ("penstock-summarizer",)),
}
"""By role the setting of its group, and the names of its groups without a prefix."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Installation:
    """What the rights depend on.

    `groups`: by process, the group id that is configured; under `conversations` those of replays, separated by
    commas. `queues`, `queue_results`: topics of `[[queues]]`.
    """

    names: TopicNames
    groups: Mapping[str, str] = field(default_factory=dict[str, str])
    sharded: bool = False
    fsync: bool = False
    queues: Sequence[str] = ()
    queue_results: Sequence[str] = ()

    def rights(self, role: Role) -> list[Right]:
        """All that the role needs, none twice."""
        found = [
            right
            for operation, words in _TABLE[role].items()
            for word in words.split()
            for right in self._on(word, role, operation)
        ]
        return sorted(set(found))

    def _on(self, word: str, role: Role, operation: str) -> Iterator[Right]:
        """The rights to an operation on what a word of the table names."""
        p = self.names.prefix
        literal: Sequence[str] = ()
        prefixed: Sequence[str] = ()
        match word:
            case "requests":
                prefixed = [f"{p}inference.{name}" for name in ("request.", "image.request", "embedding.request")]
            case "text":
                prefixed = [f"{p}inference.request."]
            case "all":
                prefixed = [f"{p}inference."]
            case "conversations" if self.sharded:
                literal = [self.names.conversation_log]
            case "conversations":
                prefixed = [f"{p}conversation.", f"{p}conversations."]
            case "own_topics" | "absent_log" if self.sharded:
                pass
            case "own_topics":
                prefixed = [f"{p}conversation.", f"{p}conversations."]
            case "absent_log":
                literal = [self.names.conversation_log]
            case "queues":
                literal = self.queues
            case "queue_results":
                literal = self.queue_results
            case "flushed":
                literal = [OFFSETS_TOPIC] if self.fsync else []
                prefixed = [f"{p}conversation.", f"{p}conversations."] if self.fsync and not self.sharded else []
            case "group" | "former_group":
                yield from self._groups(role, operation, former=word == "former_group")
            case "reader_group":
                yield Right(kind="group", name=READER_GROUP, operation=operation)
            case "cluster":
                yield Right(kind="cluster", name=CLUSTER, operation=operation)
            case _:
                literal = [getattr(self.names, {"facts": "conversation_facts"}.get(word, word))]
        for name in literal:
            yield Right(kind="topic", name=name, operation=operation)
        for name in prefixed:
            yield Right(kind="topic", name=name, operation=operation, prefixed=True)

    def _groups(self, role: Role, operation: str, *, former: bool) -> Iterator[Right]:
        """`former`: the groups' names without the prefix, at which a process looks that is not given a name."""
        process, bases = _GROUPS.get(role, (role, tuple[str, ...]()))
        configured, prefix = self.groups.get(process), self.names.prefix
        if former:
            names = bases if prefix and configured is None else ()
        elif configured is None:
            names = [prefix + base for base in bases]
        else:
            names = [configured + base.removeprefix(bases[0]) for base in bases] or configured.split(",")
        for name in names:
            yield Right(kind="group", name=name, operation=operation)
