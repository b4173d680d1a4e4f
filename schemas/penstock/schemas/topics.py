"""Topic names, keys, headers, the partitioner, and how each topic is configured: the contract as code."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.schemas.ids import DEFAULT_TENANT
from penstock.schemas.records import InferenceRequest
from penstock.schemas.tasks import topic_of

HEADER_ATTEMPT = "penstock-attempt"
HEADER_ORIGIN = "penstock-origin"
HEADER_NAMES = "penstock-names"
HEADER_NOT_BEFORE = "penstock-not-before"
"""On requests: `start_after`, for who cannot set the field; milliseconds since the epoch."""
HEADER_TRACEPARENT = "traceparent"
HEADER_CONTENT_TYPE = "content-type"
HEADER_KEY_ID = "penstock-key-id"
"""On requests: id of the API key that submitted it. Gateways set it."""
HEADER_CALLBACK = "penstock-callback"
"""On results of a request with a `callback_url`, and on statuses if it has `callback_statuses`: that URL."""

TP = tuple[str, int]
"""(topic, partition)"""

CLASSES: tuple[str, ...] = ("high", "medium", "low")
MOST_PRIORITY = 1_000
"""The least urgent."""
CLASS_PRIORITIES = {"high": 2, "medium": 5, "low": 8}
"""The priority that stands for a class where only the class is named."""
RANKS: dict[str, int] = {klass: rank for rank, klass in enumerate(CLASSES)}
"""Of classes: lower starts first."""
RETRY_TIERS = ("1s", "10s", "1m", "10m")
CONTROL_DAYS = 3
"""So long commands are on their topic: what they were about is deleted too by then."""
AUDIT_DAYS = 90
"""Actions of operators are kept for so long."""
DELIVERY_SEGMENT_MS = 4 * 3_600_000
"""Only closed segments are compacted, and a process that gets a partition of deliveries reads all of it."""
REPORTS_SEGMENT_MS = 600_000
"""The same of the worker topic: a process that starts reads all of it, and each process writes every two seconds."""
USAGE_SEGMENT_MS = 3_600_000
"""The same of totals of usage: a gateway reads all of them before it serves."""
HORIZON_MS = 24 * 3_600_000
"""Bounds every time to live and the idempotency window."""


def priority_class(priority: int) -> str:
    """0-3 high, 4-7 medium, 8 and up low."""
    return "high" if priority <= 3 else "medium" if priority <= 7 else "low"


def conversation_key(tenant: str, conversation_id: str) -> str:
    """The id for the default tenant, `{tenant}.{id}` for others."""
    return conversation_id if tenant == DEFAULT_TENANT else f"{tenant}.{conversation_id}"


def conversation_of_key(key: str) -> tuple[str, str]:
    """(tenant, id) of the conversation with this key."""
    tenant, dot, conversation_id = key.rpartition(".")
    return (tenant, conversation_id) if dot else (DEFAULT_TENANT, key)


def request_key(request: InferenceRequest) -> bytes:
    """The record key: a turn's conversation, so that its turns share a partition, else the request id."""
    if request.conversation_id is not None and topic_of(request.task) != "embedding":
        return conversation_key(request.tenant, request.conversation_id).encode()
    return request.request_id.encode()


@dataclass(frozen=True, slots=True)
class TopicNames:
    """The names of all topics under an optional prefix."""

    prefix: str = ""

    def request(self, task: str, priority: int, pool: str | None = None) -> str:
        """Where a request of this task and priority goes."""
        topic = topic_of(task)
        name = f"inference.request.{priority_class(priority)}" if topic == "text" else f"inference.{topic}.request"
        return self._pooled(name, pool)

    def text_topics(self, pool: str | None = None) -> list[str]:
        """High, medium, low."""
        return [self._pooled(f"inference.request.{klass}", pool) for klass in CLASSES]

    def request_topics(self, pool: str | None = None) -> list[str]:
        """The text topics, then image and embedding."""
        others = ("inference.image.request", "inference.embedding.request")
        return [*self.text_topics(pool), *(self._pooled(name, pool) for name in others)]

    def conversation_topics(self, pool: str | None = None) -> list[str]:
        """Those on which turns of conversations come: with equal partitions they meet in one worker."""
        return self.request_topics(pool)[:-1]

    def _pooled(self, name: str, pool: str | None) -> str:
        return f"{self.prefix}{name}" if pool is None else f"{self.prefix}{name}.{pool}"

    @property
    def result(self) -> str:
        return self.prefix + "inference.result"

    @property
    def status(self) -> str:
        return self.prefix + "inference.status"

    @property
    def control(self) -> str:
        return self.prefix + "inference.control"

    @property
    def dlq(self) -> str:
        return self.prefix + "inference.dlq"

    @property
    def desired(self) -> str:
        return self.prefix + "inference.desired"

    @property
    def model(self) -> str:
        return self.prefix + "inference.model"

    @property
    def worker(self) -> str:
        return self.prefix + "inference.worker"

    @property
    def delivery(self) -> str:
        return self.prefix + "inference.delivery"

    @property
    def idempotency(self) -> str:
        """Claims of Idempotency-Keys."""
        return self.prefix + "inference.idempotency"

    @property
    def key(self) -> str:
        """API keys, and limits of tenants."""
        return self.prefix + "inference.key"

    @property
    def audit(self) -> str:
        """Actions of operators."""
        return self.prefix + "inference.audit"

    @property
    def usage(self) -> str:
        """Totals of usage by day, tenant, model and key."""
        return self.prefix + "inference.usage"

    @property
    def conversation_facts(self) -> str:
        return self.prefix + "inference.conversation"

    @property
    def conversation_log(self) -> str:
        """The records of all conversations, where they share one topic."""
        return self.prefix + "inference.conversation.log"

    def retry(self, tier: str) -> str:
        return f"{self.prefix}inference.retry.{tier}"

    def conversation(self, tenant: str, conversation_id: str) -> str:
        """`conversation.{id}`, or `conversations.{tenant}.{id}` for a tenant of its own."""
        if tenant == DEFAULT_TENANT:
            return f"{self.prefix}conversation.{conversation_id}"
        return f"{self.prefix}conversations.{tenant}.{conversation_id}"

    def parse_conversation(self, topic: str) -> tuple[str, str] | None:
        """(tenant, conversation id) of a conversation topic, else None."""
        if not topic.startswith(self.prefix):
            return None
        match topic.removeprefix(self.prefix).split("."):
            case ["conversation", conversation_id]:
                return DEFAULT_TENANT, conversation_id
            case ["conversations", tenant, conversation_id]:
                return tenant, conversation_id
            case _:
                return None

    def is_request_topic(self, topic: str) -> bool:
        """Whether requests come on this topic, in any pool."""
        return topic.startswith(self.prefix) and topic.removeprefix(self.prefix).startswith(
            ("inference.request.", "inference.image.request", "inference.embedding.request")
        )

    def is_own(self, topic: str) -> bool:
        """Whether Penstock reads or writes this topic itself."""
        own = topic.startswith(self.prefix) and topic.removeprefix(self.prefix).startswith("inference.")
        return own or self.parse_conversation(topic) is not None

    def class_of_topic(self, topic: str) -> str | None:
        """high, medium or low for a text topic; None where the record's priority decides."""
        parts = topic.removeprefix(self.prefix).split(".")
        return parts[2] if parts[:2] == ["inference", "request"] and len(parts) > 2 and parts[2] in CLASSES else None


def kind_of_topic(topic: str) -> str | None:
    """text, image or embedding for a request topic under any prefix and of any pool, else None."""
    match = _REQUEST_TOPIC.search(topic)
    return None if match is None else match[1] or "text"


def pool_of_topic(topic: str) -> str | None:
    """The pool of a request topic under any prefix; None for one of the common pool, and for other topics."""
    match = _REQUEST_TOPIC.search(topic)
    return None if match is None else match[2]


GATEWAY_KEY = "gateway/"
"""Begins the keys of GatewayState on the worker topic. All other keys there are ids of workers."""


def is_of_gateway(key: bytes | None) -> bool:
    """Whether a record of the worker topic with this key is a GatewayState, or the tombstone of one."""
    return key is not None and key.startswith(GATEWAY_KEY.encode())


_REQUEST_TOPIC = re.compile(r"inference\.(?:(image|embedding)\.request|request\.(?:high|medium|low))(?:\.([^.]+))?$")


def record_of_topic(topic: str) -> str | None:
    """The name of the record that a topic holds, under any prefix and of any pool, else None."""
    if kind_of_topic(topic) is not None:
        return "InferenceRequest"
    if _CONVERSATION_TOPIC.search(topic):
        return "ConversationMessage"
    match = _OTHER_TOPIC.search(topic)
    return None if match is None else _RECORDS_OF_TOPICS[match[1]]


_CONVERSATION_TOPIC = re.compile(r"(?:^|[._-])(?:conversation\.[^.]+|conversations\.[^.]+\.[^.]+)$")
_RECORDS_OF_TOPICS = {
    "result": "ResultEvent",
    "status": "StatusEvent",
    "dlq": "DeadLetter",
    "control": "ControlCommand",
    "desired": "DesiredState",
    "model": "ModelInfo",
    "worker": "WorkerState",
    "delivery": "WebhookDelivery",
    "conversation": "ConversationFacts",
    "idempotency": "KeyClaim",
    "key": "KeyState",
    "audit": "AuditEvent",
    "usage": "UsageTotal",
}
_OTHER_TOPIC = re.compile(rf"inference\.({'|'.join(_RECORDS_OF_TOPICS)})$")


def murmur2(data: bytes) -> int:
    """Kafka's murmur2 (org.apache.kafka.common.utils.Utils), as an unsigned 32-bit number."""
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    length = len(data)
    h = (0x9747B28C ^ length) & mask
    whole = length & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * m & mask
        k ^= k >> 24
        h = (h * m & mask) ^ (k * m & mask)
    rest = data[whole:]
    if rest:
        h = (h ^ int.from_bytes(rest, "little")) * m & mask
    h = (h ^ (h >> 13)) * m & mask
    return h ^ (h >> 15)


def partition_for(key: bytes, partitions: int) -> int:
    """The partition that Java's default partitioner gives a key."""
    return (murmur2(key) & 0x7FFFFFFF) % partitions


@dataclass(frozen=True, kw_only=True, slots=True)
class TopicSpec:
    """How a topic is to be: partitions, replication and its configuration as Kafka takes it (text)."""

    name: str
    partitions: int
    replication: int
    config: Mapping[str, str] = field(default_factory=dict[str, str])


_DAY_MS = 24 * 3_600_000


def _durable(brokers: int, durability: str, flush: bool) -> dict[str, str]:
    config: dict[str, str] = {}
    if brokers >= 3:
        config |= {"min.insync.replicas": "2", "unclean.leader.election.enable": "false"}
    if flush and durability == "fsync":
        config["flush.messages"] = "1"
    return config


def topic_specs(
    names: TopicNames,
    *,
    partitions: int = 4,
    brokers: int = 1,
    durability: str = "replicas",
    pool: str | None = None,
    shared_conversations: bool = False,
) -> list[TopicSpec]:
    """All topics of one installation (or the request topics of one pool). `durability` is replicas or fsync.

    `shared_conversations`: with the one that holds all conversations, in place of a topic for each.
    """
    replication = 3 if brokers >= 3 else 1

    def spec(name: str, count: int, days: int | None, policy: str, *, flush: bool, **config: str) -> TopicSpec:
        retention = {} if days is None else {"retention.ms": str(days * _DAY_MS)}
        settings = {"cleanup.policy": policy, **retention, **_durable(brokers, durability, flush)}
        settings |= {key.replace("_", "."): value for key, value in config.items()}
        return TopicSpec(name=name, partitions=count, replication=replication, config=settings)

    append_time = {"message_timestamp_type": "LogAppendTime"}
    requests = [spec(n, partitions, 3, "delete", flush=True, **append_time) for n in names.request_topics(pool)]
    if pool is not None:
        return requests
    return [
        *requests,
        *(spec(names.retry(tier), partitions, 3, "delete", flush=True) for tier in RETRY_TIERS),
        spec(names.dlq, partitions, 30, "delete", flush=True),
        spec(names.result, partitions, 3, "delete", flush=True),
        spec(names.status, partitions, 3, "delete", flush=False),
        spec(names.delivery, partitions, 3, "compact,delete", flush=True, segment_ms=str(DELIVERY_SEGMENT_MS)),
        spec(names.idempotency, partitions, 3, "delete", flush=False, **append_time),
        spec(names.control, 1, CONTROL_DAYS, "compact,delete", flush=False, **append_time),
        spec(names.desired, 1, None, "compact", flush=False),
        spec(names.model, 1, None, "compact", flush=False),
        spec(names.worker, 1, 1, "compact,delete", flush=False, segment_ms=str(REPORTS_SEGMENT_MS)),
        spec(names.conversation_facts, 1, None, "compact", flush=True),
        spec(names.key, 1, None, "compact", flush=True),
        spec(names.audit, 1, AUDIT_DAYS, "delete", flush=True),
        spec(names.usage, 1, None, "compact", flush=True, segment_ms=str(USAGE_SEGMENT_MS)),
        *(
            [spec(names.conversation_log, partitions, None, "compact", flush=True, max_compaction_lag_ms=str(_DAY_MS))]
            if shared_conversations
            else []
        ),
    ]


def conversation_topic_config(*, brokers: int = 1, durability: str = "replicas") -> dict[str, str]:
    """The configuration of a conversation's topic: compacted, nothing else ever removes a turn."""
    return {"cleanup.policy": "compact", **_durable(brokers, durability, flush=True)}
