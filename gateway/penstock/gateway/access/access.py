"""Orders about keys and limits, and the record of operators' actions: made when the gateway is connected."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from starlette.types import Scope

from penstock.common.settings import KafkaSettings
from penstock.common.transport import AsyncTransport
from penstock.gateway.access.audit_log import AuditLog, audit_event
from penstock.gateway.access.key_follower import KeyFollower
from penstock.gateway.access.key_orders import KeyOrders
from penstock.gateway.edge.edge import Audited
from penstock.gateway.edge.key_book import KeyBook
from penstock.gateway.edge.keys import KeyRing
from penstock.gateway.edge.rules import Rules
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service.dependencies import Dependencies
from penstock.schemas.codec import Codec


@dataclass(frozen=True, kw_only=True, slots=True)
class Access:
    """Belongs to the event loop."""

    follower: KeyFollower
    keys: KeyOrders
    audit: AuditLog
    dependencies: Dependencies
    """Both topics."""

    @classmethod
    async def open(
        cls,
        kafka: KafkaSettings,
        codec: Codec,
        transport: AsyncTransport,
        book: KeyBook,
        ring: KeyRing | None,
        allowances: Allowances,
        probe_s: float,
    ) -> Access:
        """Returns once the keys are read, or when they cannot be read now: then the follower tries on."""
        book.on_limits = allowances.order
        follower = KeyFollower(kafka, codec, book)
        await follower.look()
        keys = KeyOrders(transport, follower, book, ring, allowances, kafka.names, codec)
        audit = AuditLog(transport, kafka, codec)
        dependencies = Dependencies({"key_topic": follower.look, "audit": audit.look}, probe_s)
        return cls(follower=follower, keys=keys, audit=audit, dependencies=dependencies)

    async def begin_action(self, scope: Scope, rules: Rules, caller: Caller, body: bytes) -> Audited:
        """Record an operator's action before it is done; what is returned records its outcome."""
        event = audit_event(scope, rules, caller, body)
        await self.audit.begin(event)
        return partial(self.audit.end, event)
