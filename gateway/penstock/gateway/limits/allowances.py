"""Decides for one gateway what a caller may do now: by the limits of its tenant and of its key. No I/O.

Work in the log (outstanding requests, tokens, conversations) is counted in `tenants`, so every gateway counts the same.
Rates and open connections are counted here, by each gateway for itself.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.gateway.limits.artifact_bytes import ArtifactBytes
from penstock.gateway.limits.asked import check_asked
from penstock.gateway.limits.callers import Caller
from penstock.gateway.limits.limits import NO_LIMITS, Buckets, Limits, TokenBucket, duration_text
from penstock.gateway.limits.rates import Rate
from penstock.gateway.limits.slots import Holder, Slots, share_of
from penstock.gateway.limits.tenants import Tenants
from penstock.schemas.errors import TenantLimit
from penstock.schemas.records import InferenceRequest

logger = logging.getLogger(__name__)

PUBLIC_PER_S = 100.0
"""Calls of public routes that one address may make each second."""
MAX_KNOWN = 10_000
UNAUTHENTICATED_PER_S = 10.0
"""Calls without a good key that one address may make each second."""
REFUSALS_PER_S = 100.0
REFUSAL_MOST_S = 5.0
MOST_REFUSALS, MOST_REFUSALS_OF_ONE = 8_192, 1_024
"""Refusals that are held back at once, and those of one tenant or address among them. Each holds a connection: with
fewer places than one client has connections, its other refusals go out at once, and it repeats its calls at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Totals:
    """What one gateway has for all callers together; `reserve` is the part that no single tenant can take."""

    max_http: int = 4_096
    max_sockets: int = 4_096
    max_public: int = 256
    max_public_of_one: int = 32
    """What one address can take of them."""
    max_transfers: int = 32
    """Artifacts on their way in or out: an upload is in memory as a whole."""
    large_bodies_bytes: int = 256 * 2**20
    """Bytes of large bodies that are read or held at once."""
    max_live: int = 200_000
    max_pending_submits: int = 2_000
    reserve: float = 0.0


class Allowances:
    """Every question looks at the key of the caller again, so that what waited or takes long acts by its rights of now.

    All raise Unauthenticated (the key was revoked), TenantLimit, Overloaded (both: retry) or Forbidden.
    """

    def __init__(
        self,
        *,
        defaults: Limits = NO_LIMITS,
        by_tenant: Mapping[str, Limits] | None = None,
        totals: Totals | None = None,
        clock: Callable[[], float] = time.monotonic,
        renew: Callable[[Caller], Caller] = lambda caller: caller,
    ) -> None:
        """`renew` gives a caller with the rights that its key has now, and raises Unauthenticated if it has none."""
        self._renew = renew
        self._defaults = defaults
        self._by_tenant = by_tenant or {}
        self._ordered: dict[str, Limits] = {}
        self.totals = totals or Totals()
        self._clock = clock
        self.tenants = Tenants(lambda tenant: self.limits_of(tenant).tokens_per_minute)
        self._submissions, self._calls, self._cancels = Buckets(), Buckets(), Buckets()
        self._public, self._unauthenticated, self._refusals = Buckets(), Buckets(), Buckets()
        self._logged, self._all_unauthenticated = Buckets(), Rate()
        self._known: dict[tuple[str, str | None], tuple[Limits, list[tuple[str, Limits]]]] = {}
        self.artifacts = ArtifactBytes(clock=clock)
        self.http = Slots("HTTP requests", self.totals.max_http)
        self.streams = Slots("streams and waiting requests", self.totals.max_http)
        self.sockets = Slots("WebSockets", self.totals.max_sockets)
        self.transfers = Slots("transfers of artifacts", self.totals.max_transfers)
        self.large_bodies = Slots("bytes of large bodies", self.totals.large_bodies_bytes)
        self.public = Slots("public requests", self.totals.max_public)
        self.refusals = Slots("refusals that wait", MOST_REFUSALS)

    def limits_of(self, tenant: str) -> Limits:
        return self._ordered.get(tenant) or self.configured(tenant)

    def configured(self, tenant: str) -> Limits:
        """Its limits without orders of operators."""
        return self._by_tenant.get(tenant, self._defaults)

    def order(self, tenant: str, limits: Mapping[str, Any] | None) -> None:
        """The limits that replace the tenant's configured ones, as `with_ordered` takes them; None: none do.

        Limits that are not known, as of a newer release, change nothing.
        """
        self._known = {}
        self._ordered.pop(tenant, None)
        try:
            if limits is not None:
                self._ordered[tenant] = self.with_ordered(tenant, limits)
        except ValueError as error:
            logger.warning("limits.unknown tenant=%s error=%s", tenant, error)

    def with_ordered(self, tenant: str, ordered: Mapping[str, Any]) -> Limits:
        """The tenant's configured limits with these in their place; None: no limit. Raises ValueError."""
        return Limits.from_dict({**self.configured(tenant).to_dict(), **ordered})

    def current(self, caller: Caller) -> Caller:
        """The caller with its rights of now. Ask it right before an act that others than `Allowances` decide.

        Raises Unauthenticated.
        """
        return self.with_priority(self._renew(caller))

    def with_priority(self, caller: Caller) -> Caller:
        """The caller with the most urgent priority that all of its limits leave: its default must pass them."""
        most = max(caller.max_priority, *(limits.max_priority for _, limits in self._holders_of(caller)))
        return caller if most == caller.max_priority else dataclasses.replace(caller, max_priority=most)

    # -- rates

    def call(self, caller: Caller) -> None:
        """Count one HTTP request or one frame of a socket. Raises TenantLimit."""
        self._charge(self._calls, caller, "calls_per_s", "calls")

    def submission(self, caller: Caller) -> None:
        """Count one submission. Raises TenantLimit."""
        self._charge(self._submissions, caller, "requests_per_s", "requests")

    def cancel(self, caller: Caller) -> None:
        """Count one request whose end is asked for. Raises TenantLimit."""
        self._charge(self._cancels, caller, "cancels_per_s", "cancels")

    def cancelled_more(self, caller: Caller, count: int) -> None:
        """Count so many more, whose end has been asked for at once: a debt that later ones wait for."""
        now = self._clock()
        for holder, limits in self._holders_of(caller):
            if limits.cancels_per_s is not None and count > 0:
                self._cancels.of(holder, limits.cancels_per_s, now).charge(now, count)

    def public_call(self, address: str) -> None:
        """Count one call of a route that asks for no key. Raises TenantLimit."""
        wait_s = self._public.of(address, PUBLIC_PER_S, self._clock()).take(self._clock())
        if wait_s:
            raise TenantLimit(f"this address may call {PUBLIC_PER_S:g} public routes per second", retry_after_s=wait_s)

    def unauthenticated_call(self, address: str) -> None:
        """Count one call without a good key. Raises TenantLimit; calls with good keys are not counted."""
        now = self._clock()
        self._all_unauthenticated.count(int(now * 1000))
        if wait_s := self._unauthenticated.of(address, UNAUTHENTICATED_PER_S, now).take(now):
            text = f"this address may make {UNAUTHENTICATED_PER_S:g} calls without a good key per second"
            raise TenantLimit(text, retry_after_s=wait_s)

    def unauthenticated_per_s(self) -> float:
        """Of all addresses, over the last minute."""
        return self._all_unauthenticated.per_s(int(self._clock() * 1000))

    def is_logged(self, address: str) -> bool:
        """Whether a call without a good key is logged: one a minute of each address."""
        now = self._clock()
        return self._logged.of(address, 1 / 60, now).take(now) == 0.0

    def refusal_s(self, holder: str, per_s: float = REFUSALS_PER_S) -> float:
        """Seconds to hold a refusal back, so that those of one tenant or address go out at this rate."""
        now = self._clock()
        bucket = self._refusals.of(holder, per_s, now)
        wait_s = min(bucket.wait_s(now), REFUSAL_MOST_S)
        if wait_s < REFUSAL_MOST_S:
            bucket.charge(now, 1)
        return wait_s

    def frame_s(self, caller: Caller) -> float:
        """Count one frame of a socket, into debt if need be; seconds to wait before it is worked on."""
        now = self._clock()
        return max(
            (
                self._calls.of(holder, limits.calls_per_s, now).charge(now, 1)
                for holder, limits in self._holders(caller)
                if limits.calls_per_s is not None
            ),
            default=0.0,
        )

    def _charge(self, buckets: Buckets, caller: Caller, name: str, what: str) -> None:
        now = self._clock()
        asked: list[tuple[str, float, TokenBucket]] = []
        for holder, limits in self._holders(caller):
            rate: float | None = getattr(limits, name)
            if rate is not None:
                asked.append((holder, rate, buckets.of(holder, rate, now)))
        # All or none: what the tenant refuses must not cost the key.
        for holder, rate, bucket in asked:
            wait_s = bucket.wait_s(now)
            if wait_s:
                raise _over(name, rate, f"{holder} may make {rate:g} {what} per second", wait_s)
        for _, _, bucket in asked:
            bucket.take(now)

    def _holders(self, caller: Caller) -> list[tuple[str, Limits]]:
        """Whose limits hold now, by the names that errors use: the tenant's, then the key's. Raises Unauthenticated."""
        return self._holders_of(self._renew(caller))

    def _holders_of(self, caller: Caller) -> list[tuple[str, Limits]]:
        of = (caller.tenant, caller.key_id)
        known = self._known.get(of)
        if known is not None and known[0] is caller.limits:
            return known[1]
        holders = [(f"the tenant {caller.tenant}", self.limits_of(caller.tenant))]
        if caller.key_id is not None:
            holders.append((f"the key {caller.key_id}", caller.limits))
        if len(self._known) >= MAX_KNOWN:
            self._known.clear()
        self._known[of] = (caller.limits, holders)
        return holders

    # -- what is open

    def open_http(self, caller: Caller) -> Callable[[], None]:
        """A slot for one HTTP exchange; call what is returned when it ends."""
        return self.http.take(self._shared(caller, self.totals.max_http, None))

    def open_stream(self, caller: Caller) -> Callable[[], None]:
        """One more for an exchange that waits for an outcome."""
        return self.streams.take(self._shared(caller, self.totals.max_http, "streams"))

    def open_socket(self, caller: Caller) -> Callable[[], None]:
        return self.sockets.take(self._shared(caller, self.totals.max_sockets, "sockets"))

    def open_transfer(self, caller: Caller) -> Callable[[], None]:
        """One more for an upload or a download of an artifact."""
        return self.transfers.take(self._shared(caller, self.totals.max_transfers, None))

    def hold_body(self, caller: Caller, size_bytes: int) -> Callable[[], None]:
        """Room in memory for a large body, until its exchange ends."""
        return self.large_bodies.take(self._shared(caller, self.totals.large_bodies_bytes, None), size_bytes)

    def open_refusal(self, holder: str) -> Callable[[], None]:
        """A slot for a refusal that is held back."""
        return self.refusals.take([(holder, MOST_REFUSALS_OF_ONE)])

    def open_public(self, address: str | None = None) -> Callable[[], None]:
        """A slot for one exchange without a key. Raises TenantLimit where the address has its share."""
        return self.public.take(() if address is None else [(f"the address {address}", self.totals.max_public_of_one)])

    def _shared(self, caller: Caller, total: int, name: str | None) -> list[Holder]:
        """The caller's holders: its tenant takes at most a share of the total."""
        holders: list[Holder] = []
        for holder, limits in self._holders(caller):
            own: int | None = None if name is None else getattr(limits, name)
            if not holders and self.totals.reserve:
                share = share_of(total, self.totals.reserve)
                own = share if own is None else min(own, share)
            holders.append((holder, own))
        return holders

    # -- one request

    def check(self, caller: Caller, request: InferenceRequest, model: str | None) -> None:
        """Whether the caller may ask for this at all, and whether tokens and conversations are left.

        `model` is the id that the request's model stands for, if it is known. Raises Forbidden, TenantLimit.
        """
        for holder, limits in self._holders(caller):
            check_asked(holder, limits, request, model)
        self._check_tokens(caller.tenant)
        if request.conversation_id is not None:
            self.check_conversation(caller, request.conversation_id)

    def _check_tokens(self, tenant: str) -> None:
        now_s = time.time()
        bucket = self.tenants.tokens(tenant, now_s)
        wait_s = 0.0 if bucket is None else bucket.wait_s(now_s, min(1.0, bucket.burst))
        if bucket is not None and wait_s:
            text = f"the tenant {tenant} may use {bucket.burst:g} tokens per minute"
            raise _over("tokens_per_minute", int(bucket.burst), text, wait_s)

    def check_conversation(self, caller: Caller, conversation_id: str) -> None:
        """Raises TenantLimit where this would be one conversation too many."""
        tenant = caller.tenant
        for holder, limits in self._holders(caller):
            limit = limits.conversations
            if limit is not None and not self.tenants.may_begin_conversation(tenant, conversation_id, limit):
                text = f"{holder} may have {limit} conversations: delete some"
                raise _over("conversations", limit, text, 60, param="conversation_id")

    @contextmanager
    def outstanding(self, caller: Caller, *, in_kept_share: bool = False) -> Generator[None]:
        """Around a submission: it counts as outstanding from here on. Raises TenantLimit.

        `in_kept_share`: others than its class fill the gateway, of which the tenant may then have more than its share.
        """
        tenant = caller.tenant
        limit = self._most_outstanding(caller, has_share=not in_kept_share)
        if not self.tenants.reserve(tenant, limit):
            text = f"{limit} requests of the tenant {tenant} are accepted and not done, as many as may be"
            raise _over("outstanding", limit, text, 1)
        try:
            share = share_of(self.totals.max_pending_submits, self.totals.reserve)
            if self.totals.reserve and self.tenants.of(tenant).reserved > share:
                raise TenantLimit(f"{share} requests of the tenant {tenant} are on their way already", retry_after_s=1)
            yield
        finally:
            self.tenants.settle(tenant)

    def _most_outstanding(self, caller: Caller, *, has_share: bool) -> int | None:
        """The log knows tenants and no keys: a key's limit holds against all that its tenant has outstanding."""
        limits = [limits.outstanding for _, limits in self._holders(caller) if limits.outstanding is not None]
        if self.totals.reserve and has_share:
            limits.append(share_of(self.totals.max_live, self.totals.reserve))
        return min(limits, default=None)

    def limits_artifacts(self, caller: Caller) -> bool:
        return any(limits.artifact_bytes is not None for _, limits in self._holders(caller))

    def artifact_room(self, caller: Caller, used_bytes: int, more_bytes: int) -> None:
        """Whether so many bytes may be kept beside those that are. Raises TenantLimit."""
        for holder, limits in self._holders(caller):
            limit = limits.artifact_bytes
            if limit is not None and used_bytes + more_bytes > limit:
                text = f"{holder} may keep {limit} bytes of artifacts; {used_bytes} are kept"
                raise _over("artifact_bytes", limit, text, 60, used=used_bytes)

    # -- for the caller

    def headers(self, caller: Caller) -> list[tuple[bytes, bytes]]:
        """`x-ratelimit-*` as OpenAI sends them, of whichever limit is closer; nothing for what has no limit."""
        now, now_s = self._clock(), time.time()
        requests = [
            self._submissions.of(holder, limits.requests_per_s, now)
            for holder, limits in self._holders_of(caller)
            if limits.requests_per_s is not None
        ]
        told: list[tuple[bytes, bytes]] = []
        if requests:
            told += _headers("requests", min(requests, key=lambda bucket: bucket.remaining(now)), now)
        tokens = self.tenants.tokens(caller.tenant, now_s)
        if tokens is not None:
            told += _headers("tokens", tokens, now_s)
        return told


def _over(
    limit: str, value: float | None, text: str, retry_after_s: float, param: str | None = None, **more: int
) -> TenantLimit:
    details = {"limit": limit, "value": value, **more}
    return TenantLimit(text, param=param, retry_after_s=retry_after_s, details=details)


def _headers(what: str, bucket: TokenBucket, now: float) -> list[tuple[bytes, bytes]]:
    values = {
        "limit": str(math.floor(bucket.burst)),
        "remaining": str(bucket.remaining(now)),
        "reset": duration_text(bucket.reset_s(now)),
    }
    return [(f"x-ratelimit-{name}-{what}".encode(), value.encode()) for name, value in values.items()]
