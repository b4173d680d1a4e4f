"""The bridge's one settings object: defaults, then the TOML that PENSTOCK_CONFIG names, then PENSTOCK_* variables."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from penstock.common.configuration import (
    ArtifactsSection,
    KafkaProcessSettings,
    RegistrySection,
    Section,
    SharedSection,
    TelemetrySection,
)
from penstock.common.model_entry import ModelEntry
from penstock.gateway.limits.settings import LimitsSection
from penstock.gateway.queues.settings import QueueMergeSection, QueuePolicy, QueueSection, check_queues
from penstock.schemas.topics import TopicNames


class BridgeSection(Section):
    health_host: str = "127.0.0.1"
    """The address of /healthz, /readyz and /metrics."""
    health_port: int = Field(default=8002, ge=0, le=65_535)
    """The port of /healthz, /readyz and /metrics; each bridge of a machine needs its own."""
    artifacts_dir: str | None = None
    """Only when the bridge sees the artifacts under another name than `artifacts.location`: a folder or a URL."""


class GatewayShare(SharedSection):
    limits: LimitsSection = Field(default_factory=LimitsSection)
    """What each tenant may have."""
    worker_late_s: float = Field(default=8.0, gt=0)
    """Seconds after its last report for which a worker counts as alive."""


class KeysFile(SharedSection):
    keys_file: Path | None = None
    """Without keys everybody is the default tenant, and only loopback may be bound."""


class BridgeSettings(KafkaProcessSettings):
    """All that a bridge process reads from outside, read once at its start."""

    process = "bridge"

    bridge: BridgeSection = BridgeSection()  # pyright: ignore[reportCallIssue]
    gateway: GatewayShare = Field(default_factory=GatewayShare)
    auth: KeysFile = Field(default_factory=KeysFile)
    artifacts: ArtifactsSection = Field(default_factory=ArtifactsSection)
    schema_registry: RegistrySection = Field(default_factory=RegistrySection)
    telemetry: TelemetrySection = Field(default_factory=TelemetrySection)
    models: list[ModelEntry] = Field(default_factory=list[ModelEntry])
    queue_policy: QueuePolicy = "weighted"
    """Which of `[[queues]]` is next when several have messages; strict takes them in their order."""
    queue_merge: QueueMergeSection = QueueMergeSection()  # pyright: ignore[reportCallIssue]
    queues: list[QueueSection] = Field(default_factory=list[QueueSection])
    """Topics of other systems whose messages become requests."""

    @field_validator("queues")
    @classmethod
    def _queues_differ(cls, queues: list[QueueSection]) -> list[QueueSection]:
        check_queues(queues)
        return queues

    @model_validator(mode="after")
    def _queues_are_others(self) -> Self:
        names = TopicNames(self.kafka.topic_prefix)
        for queue in self.queues:
            for topic in (queue.topic, queue.result_topic):
                if topic is not None and names.is_own(topic):
                    raise ValueError(f"queues: {topic} is a topic of Penstock's own: queues are those of other systems")
        return self

    @property
    def artifacts_location(self) -> str:
        """The folder or URL of artifacts, as this process sees it."""
        return self.bridge.artifacts_dir or self.artifacts.location
