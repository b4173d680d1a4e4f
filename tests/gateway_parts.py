"""A gateway's service with one object in the place of each of its parts, for tests of what stands above it."""

from __future__ import annotations

from typing import Any

from penstock.gateway.service.service import GatewayService
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.codec import default_codec


def service_with(part: Any, artifacts: Any = None) -> GatewayService:
    settings = GatewaySettings()
    return GatewayService(
        settings=settings,
        kafka=settings.kafka_settings(),
        artifacts=artifacts,
        codec=default_codec(),
        facts=part,
        submitting=part,
        lookups=part,
        subscriptions=part,
        control=part,
        model_orders=part,
    )
