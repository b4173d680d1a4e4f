"""What a gateway process has, typed: made before the first connection, in place of untyped application state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

from starlette.applications import Starlette
from starlette.requests import HTTPConnection
from starlette.types import Scope

from penstock.common.certificates import Certificates
from penstock.common.clock import now_ms
from penstock.gateway.access.access import Access
from penstock.gateway.edge.auth import AuthPolicy
from penstock.gateway.edge.connections import Connections
from penstock.gateway.edge.edge import Audited
from penstock.gateway.edge.exchanges import RawHeaders
from penstock.gateway.edge.key_book import KeyBook
from penstock.gateway.edge.rules import Rules
from penstock.gateway.edge.shared_answers import SharedAnswers
from penstock.gateway.edge.tickets import TicketOffice
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.metrics import GatewayMetrics, Gauges
from penstock.gateway.service.dependencies import Problem, Tried
from penstock.gateway.service.problem_watch import ProblemWatch
from penstock.gateway.service.service import GatewayService
from penstock.gateway.settings import GatewaySettings
from penstock.schemas.errors import BrokerUnavailable, Overloaded, PenstockError
from penstock.schemas.times import rfc3339

logger = logging.getLogger(__name__)

HISTORY_UNTIL = b"x-history-until"


def _log_failure(reason: str) -> None:
    logger.critical("gateway.failed reason=%s", reason)


@dataclass(kw_only=True, slots=True)
class GatewayContext:
    """`connected` is there once Kafka answered; `waits_for` says until then why it is not."""

    settings: GatewaySettings
    policy: AuthPolicy
    key_book: KeyBook = field(default_factory=KeyBook)
    allowances: Allowances = field(default_factory=Allowances)
    on_failure: Callable[[str], None] = _log_failure
    connected: GatewayService | None = None
    access: Access | None = None
    """There once `connected` is."""
    problems: ProblemWatch | None = None
    """There once `connected` is."""
    waits_for: Problem = field(default_factory=lambda: Problem("the broker was not asked yet"))
    wake_batches: Callable[[], None] = lambda: None
    """There is news of a batch: the runner here looks at once."""
    stop_batches: Callable[[], object] = lambda: None
    """No batch runs here any more: another gateway takes them at once."""
    draining: bool = False
    """The gateway stops."""
    failed: bool = False
    """The gateway stops because of a fault, or of what only a person can mend."""
    usage_problem: Callable[[], str | None] = lambda: None
    """Why totals of usage are not published now."""
    certificates: Certificates = field(init=False)
    shared: SharedAnswers = field(default_factory=SharedAnswers)
    metrics: GatewayMetrics = field(init=False)
    connections: Connections = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = GatewayMetrics(lambda: Gauges() if self.connected is None else self.connected.facts.gauges())
        kafka, registry = self.settings.kafka_settings(), self.settings.schema_registry.access
        self.certificates = Certificates(kafka, registry)
        self.metrics.registry.register(self.certificates)
        self.connections = Connections(self.policy.still_good, self.policy.keys)

    def tried(self, service: GatewayService) -> list[Tried]:
        """The last results of what the gateway depends on, the keys file among them if there is one."""
        why = self.usage_problem()
        usage = Tried("usage", now_ms(), None if why is None else Problem("totals of usage are not published", why))
        tried = [*service.dependencies.results(), service.transactions.result(), usage]
        if self.access is not None:
            tried += self.access.dependencies.results()
        if self.policy.keys is not None:
            found = self.policy.keys.problem()
            tried.append(Tried("keys", now_ms(), None if found is None else Problem(found.text, found.cause)))
        return tried

    @property
    def tickets(self) -> TicketOffice:
        return self.policy.tickets

    def awaited(self, scope: str | None = None) -> PenstockError | None:
        """Why a call of this scope cannot be served yet. Operators are served while the view catches up."""
        if self.connected is None:
            return BrokerUnavailable(f"the gateway waits for its broker: {self.waits_for.text}", retry_after_s=1)
        if scope != "admin" and (reason := self.connected.facts.catching_up()) is not None:
            return Overloaded(
                f"this gateway is {reason}: use another gateway now, or retry here in 1 s", retry_after_s=1
            )
        return None

    def read_headers(self) -> RawHeaders:
        """Up to when this gateway knows the history, unless it knows all of it: lists and counts hold what is known."""
        until_ms = None if self.connected is None else self.connected.facts.history_until_ms()
        return [] if until_ms is None else [(HISTORY_UNTIL, f"{rfc3339(until_ms)}".encode())]

    @property
    def service(self) -> GatewayService:
        """Raises BrokerUnavailable while the gateway is not connected."""
        if self.connected is None:
            raise BrokerUnavailable(f"the gateway waits for its broker: {self.waits_for.text}", retry_after_s=1)
        return self.connected

    @property
    def orders(self) -> Access:
        """Raises BrokerUnavailable while the gateway is not connected."""
        if self.access is None:
            raise BrokerUnavailable(f"the gateway waits for its broker: {self.waits_for.text}", retry_after_s=1)
        return self.access

    async def audit(self, scope: Scope, rules: Rules, caller: Caller, body: bytes) -> Audited:
        """See `Access.begin_action`. Raises BrokerUnavailable."""
        return await self.orders.begin_action(scope, rules, caller, body)

    def prepare_drain(self) -> None:
        """Let go who can follow on at another gateway. OpenAI's calls cannot: they have time to end."""
        self.draining = True
        self.stop_batches()
        if self.connected is not None:
            self.connected.subscriptions.drain()

    def prepare_stop(self) -> None:
        """Let go who waits or follows, so that nothing keeps the server from stopping."""
        if self.connected is not None:
            self.connected.subscriptions.stop()


def put_context(app: Starlette, context: GatewayContext) -> None:
    app.state.context = context


def context_of_app(app: Starlette) -> GatewayContext:
    return cast("GatewayContext", app.state.context)


def context_of(connection: HTTPConnection) -> GatewayContext:
    return context_of_app(connection.app)


def service_of(connection: HTTPConnection) -> GatewayService:
    """The service of the app that serves this connection. Raises BrokerUnavailable while it is not connected."""
    return context_of(connection).service
