"""What each tenant has under way and has used, counted from the log, so that every gateway counts the same. Pure.

`docs/decisions/0018` tells how far two gateways can overshoot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from penstock.gateway.limits.limits import TokenBucket
from penstock.gateway.limits.rates import Rate

MINUTE_S = 60.0
NEW_CONVERSATION_S = 600.0
"""A conversation that a request named counts as long without being listed: the worker makes its topic at the turn."""

FORGET_MS = 3_600_000
"""A tenant without anything is forgotten so long after it was last heard of."""


@dataclass(slots=True)
class TenantWork:
    outstanding: int = 0
    reserved: int = 0
    """Submissions on their way to the log, which it does not hold yet."""
    accepted: Rate = field(default_factory=Rate)
    urgent: Rate = field(default_factory=Rate)
    """Those of them of the classes high and medium."""
    ended: Rate = field(default_factory=Rate)
    outcomes: dict[str, int] = field(default_factory=dict[str, int])
    conversations: set[str] = field(default_factory=set[str])
    """Those that exist, as of the last listing."""
    named: dict[str, float] = field(default_factory=dict[str, float])
    """Those that requests have named since, and when (seconds): the latest last."""
    tokens: TokenBucket | None = None
    heard_ms: int = 0
    """When a request or an outcome of it was last read."""

    def is_idle(self, now_ms: int) -> bool:
        busy = self.outstanding or self.reserved or self.conversations or self.named
        return not busy and now_ms - self.heard_ms > FORGET_MS


class Tenants:
    """Fed by the view: each live request begins once and ends once; each outcome comes once."""

    def __init__(self, tokens_per_minute: Callable[[str], int | None] = lambda _: None) -> None:
        """`tokens_per_minute`: a tenant's limit. It is charged from the log, for all gateways."""
        self._tokens_per_minute = tokens_per_minute
        self._work: dict[str, TenantWork] = {}

    def of(self, tenant: str) -> TenantWork:
        work = self._work.get(tenant)
        if work is None:
            work = self._work[tenant] = TenantWork()
        return work

    def known(self) -> Mapping[str, TenantWork]:
        return self._work

    def clear(self) -> None:
        """A view that starts again reports everything."""
        self._work.clear()

    # -- from the log

    def began(self, tenant: str, count: int = 1) -> None:
        """The view knows of so many more live requests of the tenant."""
        self.of(tenant).outstanding += count

    def ended(self, tenant: str) -> None:
        """It knows of one less: its outcome was read, or it was pruned."""
        self.of(tenant).outstanding -= 1

    def on_request(self, tenant: str, conversation_id: str | None, time_ms: int, *, urgent: bool = False) -> None:
        """A request was read at `time_ms`, see `Census.read_ms`. `urgent`: of the class high or medium."""
        work = self.of(tenant)
        work.heard_ms = max(work.heard_ms, time_ms)
        work.accepted.count(time_ms)
        if urgent:
            work.urgent.count(time_ms)
        if conversation_id is not None and conversation_id not in work.conversations:
            work.named[conversation_id] = max(time_ms / 1000, work.named.pop(conversation_id, 0.0))

    def on_outcome(self, tenant: str, status: str, time_ms: int) -> None:
        """The end of a request was read at `time_ms`."""
        work = self.of(tenant)
        work.heard_ms = max(work.heard_ms, time_ms)
        work.ended.count(time_ms)
        work.outcomes[status] = work.outcomes.get(status, 0) + 1

    def on_tokens(self, tenant: str, tokens: int, time_ms: int) -> None:
        """A request that ended at `time_ms`, by the log, used so many: who reads late charges no more at once."""
        bucket = self.tokens(tenant, time_ms / 1000) if tokens else None
        if bucket is not None:
            bucket.charge(time_ms / 1000, tokens)

    def on_conversations(self, tenant: str, listed: set[str], now_s: float) -> None:
        """The tenant's conversations that exist now. The set is kept, not copied: there may be very many."""
        work = self.of(tenant)
        work.conversations = listed
        for one in work.named.keys() & listed:
            del work.named[one]
        while work.named and now_s - work.named[oldest := next(iter(work.named))] >= NEW_CONVERSATION_S:
            del work.named[oldest]
        if work.is_idle(int(now_s * 1000)):
            del self._work[tenant]

    # -- asked at the edge

    def reserve(self, tenant: str, limit: int | None) -> bool:
        """Whether one more request may go to the log; it counts until `settle`, then the log's own count has it."""
        work = self.of(tenant)
        if limit is not None and work.outstanding + work.reserved >= limit:
            return False
        work.reserved += 1
        return True

    def settle(self, tenant: str) -> None:
        """The log has it now, or never will."""
        self.of(tenant).reserved -= 1

    def tokens(self, tenant: str, now_s: float) -> TokenBucket | None:
        """The tenant's tokens, if they are limited: a minute's worth may be used at once; a debt is paid first."""
        per_minute = self._tokens_per_minute(tenant)
        if per_minute is None:
            return None
        work = self.of(tenant)
        if work.tokens is None or work.tokens.burst != per_minute:
            work.tokens = TokenBucket(per_minute / MINUTE_S, per_minute, now_s)
        return work.tokens

    def may_begin_conversation(self, tenant: str, conversation_id: str, limit: int) -> bool:
        """Whether a request may name this conversation: it exists, or there is room for one more."""
        work = self.of(tenant)
        if conversation_id in work.conversations or conversation_id in work.named:
            return True
        return len(work.conversations) + len(work.named) < limit

    def conversation_began(self, tenant: str, conversation_id: str, now_s: float) -> None:
        """One was made here, before the next listing."""
        self.of(tenant).named.setdefault(conversation_id, now_s)

    def conversation_gone(self, tenant: str, conversation_id: str) -> None:
        """One was deleted here."""
        work = self.of(tenant)
        work.conversations.discard(conversation_id)
        work.named.pop(conversation_id, None)


def by_tenant(listed: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    """The ids of conversations given as (tenant, id)."""
    found: dict[str, set[str]] = {}
    for tenant, conversation_id in listed:
        found.setdefault(tenant, set()).add(conversation_id)
    return found
