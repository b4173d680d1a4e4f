"""A gateway's service with one object in the place of each of its parts, for tests of what stands above it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

from penstock.gateway.context import GatewayContext
from penstock.gateway.document.described_routes import ROUTES, TABLE
from penstock.gateway.edge.bodies import BodyLimits
from penstock.gateway.edge.edge import EdgeParts
from penstock.gateway.edge.rules import RouteKey, RouteTable, Rules
from penstock.gateway.limits.retention import Retention
from penstock.gateway.openai.reached import reach_check
from penstock.gateway.service.dependencies import Dependencies, Tried
from penstock.gateway.service.service import GatewayService
from penstock.gateway.settings import GatewaySettings
from penstock.gateway.threads import Threads
from penstock.schemas.errors import PenstockError


def routes_with(own: dict[RouteKey, Rules]) -> RouteTable:
    """The gateway's table, and routes that only a test has."""
    return RouteTable({**{key: declared.rules for key, declared in ROUTES.items()}, **own})


class ServiceOf(GatewayService):
    """One object is every part that was not given."""

    def __init__(self, part: Any, **parts: Any) -> None:
        self._part = part
        vars(self).update(parts)

    def __getattr__(self, name: str) -> Any:
        if name not in GatewayService.__init__.__code__.co_names:
            raise AttributeError(f"the service has no part {name}")
        return self._part


def service_with(part: Any, artifacts: Any = None, dependencies: Dependencies | None = None) -> GatewayService:
    settings = GatewaySettings()
    return ServiceOf(
        part,
        settings=settings,
        kafka=settings.kafka_settings(),
        artifacts=artifacts,
        threads=Threads(),
        retention=Retention(),
        transactions=Mock(**{"result.return_value": Tried("transactions", 0)}),
        dependencies=dependencies or Dependencies({}, every_s=60),
    )


def edge_of(
    context: GatewayContext,
    routes: RouteTable = TABLE,
    bodies: BodyLimits | None = None,
    awaited: Callable[[str | None], PenstockError | None] = lambda _: None,
) -> EdgeParts:
    """The edge in front of an app with this context."""
    return EdgeParts(
        routes=routes,
        policy=context.policy,
        allowances=context.allowances,
        connections=context.connections,
        bodies=bodies or BodyLimits(),
        awaited=awaited,
        check_reached=reach_check(context),
        metrics=context.metrics.http,
    )
