"""The settings of queues in penstock.toml: one `[[queues]]` table each, and how they are merged."""

from __future__ import annotations

import re
from typing import Literal

from pydantic import Field, field_validator

from penstock.common.configuration import Section
from penstock.schemas.errors import InvalidRequest, PenstockError
from penstock.schemas.ids import DEFAULT_TENANT, check_tenant
from penstock.schemas.requests import map_within

QueuePolicy = Literal["strict", "weighted", "round_robin", "random"]
QueueFormat = Literal["penstock", "llm-d"]
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


class QueueSection(Section):
    """One topic of another system whose messages become requests."""

    topic: str
    """The whole name of the topic to read, without Penstock's prefix. `penstock topics create` creates it if it is
    missing, and the `result_topic`."""
    format: QueueFormat = "llm-d"
    """llm-d: `{"id", "deadline", "payload"}` with an OpenAI body as payload; penstock: requests as Avro or JSON."""
    tenant: str = DEFAULT_TENANT
    """Whose requests they are: its limits hold for them."""
    pool: str | None = None
    """Where requests go that name no pool; null: to their model's."""
    weight: int = Field(default=1, ge=1, le=1000)
    """Its share under the policies weighted and random."""
    priority: int = Field(default=8, ge=0, le=100)
    """Of requests in the format llm-d, which has none: 0 is the most urgent, 8 and up are low."""
    extra: dict[str, str] = Field(default_factory=dict[str, str])
    """Entries of `extra` for requests that do not have them, as headers for a remote server
    (`caller_headers` of its model): `{x-gateway-inference-objective = "batch"}`."""
    result_topic: str | None = None
    """Where outcomes go, in the queue's format; null: only on inference.result, as those of all requests. What is
    refused before it is sent is then only in the log, as `queues.refused`."""

    @field_validator("topic", "result_topic")
    @classmethod
    def _is_topic(cls, value: str | None) -> str | None:
        if value is not None and (not _TOPIC.fullmatch(value) or value in (".", "..")):
            raise ValueError("must be a name of a topic: letters, digits, dots, underscores and hyphens")
        return value

    @field_validator("extra")
    @classmethod
    def _is_extra(cls, value: dict[str, str]) -> dict[str, str]:
        try:
            map_within(value, "extra")
        except PenstockError as error:
            raise ValueError(error.message) from error
        return value

    @field_validator("tenant")
    @classmethod
    def _is_tenant(cls, value: str) -> str:
        try:
            return check_tenant(value)
        except InvalidRequest as error:
            raise ValueError(error.message) from error


class QueueMergeSection(Section):
    """How the queues of `[[queues]]` are merged."""

    window: int = Field(default=64, ge=1, le=10_000)
    """Requests of all queues that may be under way for one pool at a time; the policy chooses who is next."""
    backoff_s: float = Field(default=5.0, gt=0)
    """Seconds before a message whose request was refused or failed for a passing reason is tried again."""
    group_id: str | None = None
    """The consumer group in which all bridges share the queues. Null: `penstock-queues` behind `kafka.topic_prefix`;
    see `worker.group_id`."""


def check_queues(queues: list[QueueSection]) -> None:
    """Raises ValueError when two queues read one topic, or one feeds another."""
    topics = [queue.topic for queue in queues]
    for topic in topics:
        if topics.count(topic) > 1:
            raise ValueError(f"two queues read the topic {topic}")
    for queue in queues:
        if queue.result_topic in topics:
            raise ValueError(f"the result_topic {queue.result_topic} is a queue itself: its answers would be requests")
