"""The one settings object of `penstock webhooks`: defaults, then the TOML of PENSTOCK_CONFIG, then variables."""

from __future__ import annotations

from pydantic import Field

from penstock.common.configuration import KafkaSection, ProcessSettings, RegistrySection
from penstock.common.settings import KafkaSettings
from penstock.gateway.callbacks import WebhooksSection


class WebhooksSettings(ProcessSettings):
    """All that such a process reads from outside, read once at its start."""

    kafka: KafkaSection = Field(default_factory=KafkaSection)
    schema_registry: RegistrySection = Field(default_factory=RegistrySection)
    webhooks: WebhooksSection = WebhooksSection()  # pyright: ignore[reportCallIssue]

    def kafka_settings(self) -> KafkaSettings:
        return self.kafka.clients("webhooks")
