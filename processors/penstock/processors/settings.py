"""The worker's one settings object: defaults, then the TOML file of PENSTOCK_CONFIG, then PENSTOCK_* variables."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from penstock.producers.settings import KafkaSettings


class _Section(BaseModel):
    """A section of the worker's own; an unknown key is an error, so that a typing slip does not pass unseen."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class _SharedSection(BaseModel):
    """A section that other processes read too: keys that only they know are theirs."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class KafkaSection(_SharedSection):
    bootstrap_servers: str = "127.0.0.1:9092"
    topic_prefix: str = ""
    client_id: str = "penstock-worker"
    max_record_bytes: int = 1_000_000
    security: dict[str, str] = Field(default_factory=dict[str, str])
    """librdkafka's names: security.protocol, sasl.mechanism, sasl.username, sasl.password, ssl.ca.location."""


class WorkerSection(_Section):
    worker_id: str | None = None
    group_id: str = "penstock-worker"
    pool: str | None = None
    data_dir: Path = Path(".penstock/worker")
    health_host: str = "127.0.0.1"
    health_port: int = 8001

    inflight_cap: int = Field(default=256, ge=4)
    """Requests queued and running at once; lower classes pause earlier, so that a flood leaves room for urgent work."""
    commit_span: int = Field(default=4096, ge=16)
    """Offsets between the oldest unfinished record of a partition and the newest taken."""
    aging_s: float = Field(default=20.0, gt=0)
    aged_share: int = Field(default=8, ge=2)
    """Of this many dispatches, at least one goes to work that has waited longer than aging_s."""

    chunk_linger_ms: int = Field(default=30, ge=0, le=50)
    status_linger_ms: int = Field(default=25, ge=0)
    """A status that is not terminal is published only when it lasts this long."""
    max_execution_s: float = Field(default=900.0, gt=0)
    """The longest run; a request's own execution_timeout_ms can only shorten it."""
    retry_delay_s: float = Field(default=0.05, ge=0)

    drain_s: float = Field(default=20.0, ge=0)
    stall_s: float = Field(default=60.0, gt=0)
    session_timeout_s: float = Field(default=10.0, gt=0)
    heartbeat_s: float = Field(default=2.0, gt=0)
    commit_interval_s: float = Field(default=0.3, gt=0)
    fetch_wait_ms: int = Field(default=100, ge=1)
    state_interval_s: float = Field(default=5.0, gt=0)
    control_horizon_s: float = Field(default=86_400.0, gt=0)
    control_remembered: int = Field(default=100_000, ge=1)


class ConversationsSection(_Section):
    max_topics: int = Field(default=10_000, ge=1)
    threads: int = Field(default=4, ge=1)
    cached: int = Field(default=256, ge=0)
    """Conversations whose records this worker keeps, so that a turn reads only the unseen tail."""
    read_deadline_s: float = Field(default=15.0, gt=0)


class ModelSection(_Section):
    id: str
    source: str
    engine: Literal["text", "embedding", "remote", "noop"]
    tasks: list[str] = Field(default_factory=lambda: ["text_generation"])
    aliases: list[str] = Field(default_factory=list[str])
    options: dict[str, Any] = Field(default_factory=dict[str, Any])


class MemorySection(_Section):
    """What the ledger may grant of this machine's memory."""

    cpu_bytes: int | None = None
    """Null: what the machine (or its cgroup) has."""
    cpu_reserve_bytes: int = Field(default=1 << 30, ge=0)
    gpu_reserve_bytes: int = Field(default=1 << 30, ge=0)


class RegistrySection(_SharedSection):
    url: str | None = None
    write: bool = False


class TopicsSection(_SharedSection):
    durability: str = "replicas"
    """replicas, or fsync: flush conversation topics on every record."""


class WorkerSettings(BaseSettings):
    """All that a worker process reads from outside, read once at its start."""

    model_config = SettingsConfigDict(
        env_prefix="PENSTOCK_", env_nested_delimiter="__", extra="ignore", frozen=True, protected_namespaces=()
    )

    kafka: KafkaSection = Field(default_factory=KafkaSection)
    topics: TopicsSection = Field(default_factory=TopicsSection)
    worker: WorkerSection = Field(default_factory=WorkerSection)
    conversations: ConversationsSection = Field(default_factory=ConversationsSection)
    memory: MemorySection = Field(default_factory=MemorySection)
    schema_registry: RegistrySection = Field(default_factory=RegistrySection)
    models: list[ModelSection] = Field(default_factory=list[ModelSection])

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        config = os.environ.get("PENSTOCK_CONFIG")
        if config is None:
            return (init_settings, env_settings)
        if not Path(config).is_file():
            raise FileNotFoundError(f"PENSTOCK_CONFIG names {config}, which is not a file")
        return (init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=config))

    @property
    def worker_id(self) -> str:
        return self.worker.worker_id or f"{socket.gethostname()}-{os.getpid()}"

    def kafka_settings(self) -> KafkaSettings:
        return KafkaSettings(
            bootstrap_servers=self.kafka.bootstrap_servers,
            topic_prefix=self.kafka.topic_prefix,
            security=dict(self.kafka.security),
            client_id=self.kafka.client_id,
            max_record_bytes=self.kafka.max_record_bytes,
        )

    def inflight_watermarks(self) -> dict[str, tuple[int, int]]:
        """(pause at, resume at) on all work in flight, per class: the lower the class, the earlier it pauses."""
        cap = self.worker.inflight_cap
        shares = {"high": cap, "medium": cap * 3 // 4, "low": cap // 2}
        return {klass: (limit, max(1, limit * 3 // 4)) for klass, limit in shares.items()}
