"""Who is calling: the tenant and the rights that the edge found for a connection, and how routes ask for them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import HTTPConnection

from penstock.gateway.limits.limits import NO_LIMITS, Limits
from penstock.schemas.errors import Forbidden, NotFound, Unauthenticated

DEFAULT_PRIORITY = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Grant:
    """What a ticket leaves of the rights of its key. A field that is None narrows nothing."""

    scopes: frozenset[str]
    request_id: str | None = None
    conversation_id: str | None = None
    user_id: str | None = None
    user: str | None = None
    """The person that asked for the ticket, as of `Caller`."""
    expires_at: float | None = None
    """Seconds since the epoch. Exchanges that are open then end. None: only the key ends them."""

    @property
    def narrows(self) -> bool:
        """Whether it leaves less than all of the tenant's requests."""
        return not (self.request_id is self.conversation_id is self.user_id is None)


class Reached(Protocol):
    """What a request says of itself: `Entry`, or the record that is to be submitted; or who uploaded an artifact."""

    @property
    def request_id(self) -> str | None: ...
    @property
    def conversation_id(self) -> str | None: ...
    @property
    def user_id(self) -> str | None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """The rights of one connection. Everything a caller reaches is narrowed to its tenant, and to its grant."""

    tenant: str = "default"
    scopes: frozenset[str] = frozenset({"submit", "read", "cancel", "admin"})
    max_priority: int = 0
    """The most urgent priority allowed (0 is the most urgent)."""
    limits: Limits = NO_LIMITS
    """What this key may have; its tenant's limits hold beside them."""
    key_id: str | None = None
    key_name: str | None = None
    user: str | None = None
    """The person behind the call, as an identity proxy has named it."""
    secret_digest: str | None = field(default=None, repr=False)
    """SHA-256 of the secret that was sent; None for a ticket."""
    grant: Grant | None = None
    """Of a caller that came with a ticket."""
    acts_for_others: bool = False
    """An operator's command about another tenant's request: the tenant is not that of the key."""
    former_key_id: str | None = None
    """Of a caller that acts for others: the key that the request came with first."""

    def on_behalf_of(self, tenant: str, former_key_id: str | None) -> Caller:
        """An operator that submits a tenant's request again: the tenant's limits hold, and those of the key do not."""
        return Caller(tenant=tenant, key_id=self.key_id, acts_for_others=True, former_key_id=former_key_id)

    @property
    def used_key_id(self) -> str | None:
        """The key whose usage its requests are."""
        return self.former_key_id if self.acts_for_others else self.key_id

    def narrowed(self, grant: Grant) -> Caller:
        """The caller with what a ticket leaves of its rights."""
        return dataclasses.replace(
            self, scopes=frozenset(filter(self.allows, grant.scopes)), user=grant.user, grant=grant
        )

    @property
    def may_end(self) -> bool:
        """Whether its rights can end while an exchange is open."""
        return self.key_id is not None or self.grant is not None

    @property
    def is_narrowed(self) -> bool:
        return self.grant is not None and self.grant.narrows

    def reaches(self, request: Reached) -> bool:
        """Whether the grant leaves this request of the tenant."""
        grant = self.grant
        return grant is None or (
            grant.request_id in (None, request.request_id)
            and grant.conversation_id in (None, request.conversation_id)
            and grant.user_id in (None, request.user_id)
        )

    def check_reaches(self, request: Reached) -> None:
        """Raises NotFound, as for a request of another tenant."""
        if not self.reaches(request):
            raise NotFound("there is no such request")

    def reaches_conversation(self, conversation_id: str) -> bool:
        """Whether the grant leaves all requests of a conversation."""
        grant = self.grant
        if grant is None or not grant.narrows:
            return True
        return (grant.request_id, grant.conversation_id, grant.user_id) == (None, conversation_id, None)

    def check_conversation(self, conversation_id: str) -> None:
        """Raises Forbidden where the grant does not leave all requests of a conversation."""
        if not self.reaches_conversation(conversation_id):
            raise Forbidden("this ticket does not reach that conversation", param="conversation_id")

    def check_submits(self) -> None:
        """Raises Forbidden for a ticket of one request."""
        if self.grant is not None and self.grant.request_id is not None:
            raise Forbidden("this ticket is for one request: it submits none")

    def check_new(self, request: Reached) -> None:
        """Raises Forbidden for a new request that the grant does not leave."""
        self.check_submits()
        if (grant := self.grant) is None or not grant.narrows:
            return
        for name in ("conversation_id", "user_id"):
            # A turn reads all of its conversation, which may be of several users: none but the ticket's own.
            wanted = getattr(grant, name)
            if getattr(request, name) != wanted:
                only = f"with {name} {wanted} only" if wanted is not None else f"without {name} only"
                raise Forbidden(f"this ticket submits requests {only}", param=name)

    def allows(self, scope: str) -> bool:
        return scope in self.scopes or "admin" in self.scopes

    def require(self, scope: str) -> None:
        """Raises Forbidden when the key lacks the scope."""
        if not self.allows(scope):
            details = {"scopes": sorted(self.scopes)}
            raise Forbidden(f"this key may not do that: it lacks the scope `{scope}`", details=details)

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
    """The caller of a connection, with the rights that its key has now: each call looks again.

    Raises Unauthenticated when the key was revoked, Forbidden when it lost the scope that the route needs.
    """
    current = connection.scope.get("state", {}).get("current_caller")
    if current is None:
        raise Unauthenticated("no caller was established for this connection")
    return current()
