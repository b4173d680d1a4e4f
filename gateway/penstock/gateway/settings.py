"""The gateway's one settings object: defaults, then the TOML that PENSTOCK_CONFIG names, then PENSTOCK_* variables."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from penstock.producers.settings import KafkaSettings


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _SharedSection(BaseModel):
    """A section that other processes read too: keys that only they know are theirs."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class KafkaSection(_SharedSection):
    bootstrap_servers: str = "127.0.0.1:9092"
    """Brokers to begin with, `host:port`, separated by commas."""
    topic_prefix: str = ""
    """Stands before every topic name, so that several installations can share a cluster."""
    client_id: str = "penstock-gateway"
    """The name by which the brokers' logs and quotas know this process."""
    max_record_bytes: int = 1_000_000
    """The largest record that this process writes: key, value and headers together."""
    security: dict[str, str] = Field(default_factory=dict[str, str])
    """librdkafka's names: security.protocol, sasl.mechanism, sasl.username, sasl.password, ssl.ca.location."""


class GatewaySection(_Section):
    host: str = "127.0.0.1"
    """The address to listen on; beyond loopback only with `auth.keys_file`."""
    port: int = 8000
    """The port to listen on."""
    view_path: Path = Path(".penstock/gateway.sqlite")
    """The SQLite file of this gateway's view; deleted, it is rebuilt from the topics."""
    artifacts_dir: Path = Path(".penstock/artifacts")
    """The folder of artifacts; gateways that share it serve each other's uploads."""
    client_queue_frames: int = Field(1024, ge=8)
    """Frames that wait for one client before it is let go as too slow."""
    max_pending_submits: int = Field(2_000, ge=1)
    """Requests on their way to Kafka at once; more are refused with 503."""
    max_live: int = Field(200_000, ge=100)
    """Requests accepted and not done that this gateway holds; more are refused with 503."""
    max_body_bytes: int = Field(2_000_000, ge=1_000)
    """The largest body of an HTTP request; an artifact may have 64 MiB."""
    max_http: int = Field(4_096, ge=1)
    """HTTP exchanges open at once; more are refused with 503."""
    max_sockets: int = Field(4_096, ge=1)
    """WebSockets open at once; more are closed with 1013."""
    horizon_h: float = Field(24.0, gt=0)
    """The view keeps requests of the last two horizons, in hours, and a new gateway begins there."""
    rediscover_s: float = Field(10.0, gt=0)
    """Seconds between looks for topics that are new."""
    drain_s: float = Field(5.0, ge=0)
    """Seconds that open exchanges have to end when the gateway is told to stop."""
    access_log: bool = False
    """Log each HTTP request."""


class AuthSection(_Section):
    keys_file: Path | None = None
    """Without keys everybody is the default tenant, and only loopback may be bound."""
    ticket_key: str | None = None
    """Shared by all gateways; without it each makes its own, and its tickets are good only there."""
    allowed_origins: list[str] = Field(default_factory=list[str])
    """Origins, besides its own, whose pages may call the gateway, as `https://app.example`."""
    allowed_hosts: list[str] = Field(default_factory=list[str])
    """Without keys: Host names, besides this machine's own, that are served."""


class RegistrySection(_SharedSection):
    url: str | None = None
    """A Confluent-compatible registry: our schemas are registered there, and ids from it are read."""
    write: bool = False
    """Write the registry's ids in place of our own."""


class TopicsSection(_SharedSection):
    durability: Literal["replicas", "fsync"] = "replicas"
    """replicas: what all in-sync replicas hold is durable; fsync: every record is flushed too, against power loss."""


class ConversationsSection(_SharedSection):
    max_topics: int = Field(default=10_000, ge=1)
    """Conversations that there may be in all; a request that would begin one more fails."""


class GatewaySettings(BaseSettings):
    """All that a gateway process reads from outside, read once at its start."""

    model_config = SettingsConfigDict(
        env_prefix="PENSTOCK_", env_nested_delimiter="__", extra="ignore", frozen=True, protected_namespaces=()
    )

    kafka: KafkaSection = Field(default_factory=KafkaSection)
    gateway: GatewaySection = GatewaySection()  # pyright: ignore[reportCallIssue]
    auth: AuthSection = Field(default_factory=AuthSection)
    schema_registry: RegistrySection = Field(default_factory=RegistrySection)
    topics: TopicsSection = Field(default_factory=TopicsSection)
    conversations: ConversationsSection = Field(default_factory=ConversationsSection)

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

    def kafka_settings(self) -> KafkaSettings:
        return KafkaSettings(
            bootstrap_servers=self.kafka.bootstrap_servers,
            topic_prefix=self.kafka.topic_prefix,
            security=dict(self.kafka.security),
            client_id=self.kafka.client_id,
            max_record_bytes=self.kafka.max_record_bytes,
        )
