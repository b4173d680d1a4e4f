"""Who is calling: the tenant and the rights that the edge found for a connection, and how routes ask for them."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import HTTPConnection

from penstock.gateway.limits.limits import NO_LIMITS, Limits
from penstock.schemas.errors import Forbidden, Unauthenticated

DEFAULT_PRIORITY = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """The rights of one connection. Everything a caller reaches is narrowed to its tenant."""

    tenant: str = "default"
    scopes: frozenset[str] = frozenset({"submit", "read", "cancel", "admin"})
    max_priority: int = 0
    """The most urgent priority allowed (0 is the most urgent)."""
    limits: Limits = NO_LIMITS
    """What this key may have; its tenant's limits hold beside them."""
    key_id: str | None = None

    def allows(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    def require(self, scope: str) -> None:
        """Raises Forbidden when the key lacks the scope."""
        if not self.allows(scope):
            raise Forbidden(f"this key may not do that: it lacks the scope `{scope}`")

    def priority(self, asked: int | None) -> int:
        """The priority to submit with: what was asked, else the default as far as the key allows it.

        Raises Forbidden for one more urgent than the key's.
        """
        if asked is None:
            return max(DEFAULT_PRIORITY, self.max_priority)
        if asked < self.max_priority:
            raise Forbidden(
                f"this key may not ask for priority {asked}: its most urgent is {self.max_priority}", param="priority"
            )
        return asked


ANYBODY = Caller()
"""The one caller of a gateway without keys, which listens on loopback only."""


def caller_of(connection: HTTPConnection) -> Caller:
    """The caller that the edge found. Raises Unauthenticated if a route was reached around it."""
    caller = connection.scope.get("state", {}).get("caller")
    if not isinstance(caller, Caller):
        raise Unauthenticated("no caller was established for this connection")
    return caller
