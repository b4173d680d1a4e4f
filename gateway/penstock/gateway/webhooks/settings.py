"""The one settings object of `penstock webhooks`: defaults, then the TOML of PENSTOCK_CONFIG, then variables."""

from __future__ import annotations

from pydantic import Field

from penstock.common.configuration import KafkaProcessSettings, RegistrySection, TelemetrySection
from penstock.gateway.callbacks import WebhooksSection


class WebhooksSettings(KafkaProcessSettings):
    """All that such a process reads from outside, read once at its start."""

    process = "webhooks"

    schema_registry: RegistrySection = Field(default_factory=RegistrySection)
    telemetry: TelemetrySection = Field(default_factory=TelemetrySection)
    webhooks: WebhooksSection = WebhooksSection()  # pyright: ignore[reportCallIssue]
