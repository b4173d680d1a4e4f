"""Who may come in: Host and Origin checks, keys and tickets, for HTTP and WebSocket alike. The edge asks it."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.gateway.edge.identity import IdentityProxies
from penstock.gateway.edge.key_book import KeyBook
from penstock.gateway.edge.key_records import KeyRecord, digest_of, id_of
from penstock.gateway.edge.keys import KeyRing
from penstock.gateway.edge.tickets import SESSION_PREFIX, Redeemed, TicketOffice, Use
from penstock.gateway.limits.callers import ANYBODY, Caller
from penstock.schemas.errors import BrokerUnavailable, Forbidden, Unauthenticated

SESSION_COOKIE = "penstock_session"


class UnsafeBind(ValueError):
    """The gateway was asked to listen beyond this machine without keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuthPolicy:
    """What the edge checks. Without a key ring everybody is the default caller, and the Host must be this machine's."""

    keys: KeyRing | None
    tickets: TicketOffice
    allowed_origins: frozenset[str] = frozenset()
    allowed_hosts: frozenset[str] = frozenset()
    proxies: IdentityProxies = field(default_factory=IdentityProxies)

    @classmethod
    def build(
        cls,
        *,
        keys_file: str | Path | None = None,
        book: KeyBook | None = None,
        ticket_key: str | None = None,
        allowed_origins: Iterable[str] = (),
        allowed_hosts: Iterable[str] = (),
        proxies: IdentityProxies | None = None,
    ) -> AuthPolicy:
        """From settings; `book` has the keys of the topic. Raises KeysFileError for a missing or broken keys file."""
        return cls(
            keys=KeyRing(keys_file, book) if keys_file else None,
            tickets=TicketOffice(ticket_key),
            allowed_origins=frozenset(origin.rstrip("/").lower() for origin in allowed_origins),
            allowed_hosts=frozenset(host.lower() for host in allowed_hosts),
            proxies=proxies or IdentityProxies(),
        )

    def check_host(self, host: str) -> None:
        """Raises Forbidden for a Host that is not this machine, where no key protects the gateway.

        A page that rebinds its own name to 127.0.0.1 passes any Origin check; it cannot change the Host it sends.
        """
        if self.keys is not None:
            return
        name = _host_name(host)
        if not (is_loopback(name) or name in self.allowed_hosts):
            raise Forbidden(
                "without keys only this machine's own names are served, not this Host:"
                " use localhost, add this Host to auth.allowed_hosts, or set auth.keys_file"
            )

    def check_origin(self, origin: str | None, host: str) -> None:
        """Raises Forbidden for a browser page that is neither ours nor on the list. No Origin is no browser page."""
        if origin is None:
            return
        origin = origin.rstrip("/").lower()
        if origin in self.allowed_origins or same_place(origin, host):
            return
        raise Forbidden("pages of this Origin may not call the gateway: add it to auth.allowed_origins")

    def authenticate(
        self, headers: Headers, ticket: str | None = None, uses: Iterable[Use] = (), artifact_id: str | None = None
    ) -> Caller:
        """The caller by a ticket of the URL, for one of these uses, else by Bearer key, x-api-key or session.

        Raises Unauthenticated.
        """
        if ticket is not None:
            return self._of_ticket(self.tickets.redeem(ticket, uses, artifact_id))
        secret = _secret(headers)
        if secret is None and self.keys is not None:  # else browsers could send the cookie of another gateway
            secret = _session(headers)
        if secret is not None and secret.startswith(SESSION_PREFIX):
            return self._of_ticket(self.tickets.redeem(secret, ("session",)))
        if self.keys is None:
            return ANYBODY
        if not secret:
            raise Unauthenticated("send a key: `Authorization: Bearer …` or `x-api-key: …`")
        record = self.keys.find(secret)
        if record is None:
            raise Unauthenticated("this key is unknown or revoked")
        return caller_of_key(record, digest_of(secret))

    def _of_ticket(self, redeemed: Redeemed) -> Caller:
        """The key behind a ticket has to be there. Tickets that were issued without one end when keys are turned on."""
        behind = dataclasses.replace(ANYBODY, tenant=redeemed.tenant, key_id=redeemed.key_id)
        if self.keys is not None and redeemed.key_id is None:
            raise Unauthenticated("this ticket was issued while the gateway had no keys: fetch a new one")
        return self.current(behind.narrowed(redeemed.grant))

    def current(self, caller: Caller) -> Caller:
        """The caller with the rights that its key has now. What acts later than it asked asks this again.

        Raises Unauthenticated when the key was revoked or is another tenant's now, or when the ticket has expired.
        """
        grant = caller.grant
        if grant is not None and grant.expires_at is not None and grant.expires_at <= self.tickets.clock():
            raise Unauthenticated("the ticket has expired: fetch a new one with POST /v1/tickets")
        if self.keys is None or caller.key_id is None:
            return caller
        record = self.keys.record(caller.key_id)
        if record is None or (record.tenant != caller.tenant and not caller.acts_for_others):
            raise Unauthenticated("the key behind this ticket was revoked" if grant else "this key was revoked")
        if caller.acts_for_others:
            if "admin" not in record.scopes:
                raise Unauthenticated("this key is no longer an operator's")
            return caller
        if caller.secret_digest is not None and not record.matches(caller.secret_digest, self.keys.clock()):
            raise Unauthenticated("this key was rotated: send its new secret")
        now = caller_of_key(record, caller.secret_digest)
        if caller.user is not None:
            now = dataclasses.replace(now, user=caller.user)
        return now if grant is None else now.narrowed(grant)

    def caller_of_work(self, tenant: str, key_id: str | None) -> Caller | None:
        """Who work runs for that a tenant left behind; None if the key that it was asked for with was taken back."""
        try:
            caller = self.current(dataclasses.replace(ANYBODY, tenant=tenant, key_id=key_id))
        except Unauthenticated:
            return None
        return caller if caller.allows("submit") else None

    def still_good(self, caller: Caller) -> bool:
        """Whether the caller has all the scopes that it had when it came. Keys that are being read again are good."""
        try:
            return caller.scopes <= self.current(caller).scopes
        except Unauthenticated:
            return False
        except BrokerUnavailable:
            return True


@lru_cache(maxsize=4096)
def caller_of_key(record: KeyRecord, secret_digest: str | None) -> Caller:
    return Caller(
        tenant=record.tenant,
        scopes=frozenset(record.scopes),
        max_priority=record.max_priority,
        limits=record.limits if record.rate is None else dataclasses.replace(record.limits, requests_per_s=record.rate),
        key_id=record.key_id,
        key_name=record.name,
        secret_digest=secret_digest,
    )


def check_bind(host: str, *, keys_file: str | Path | None) -> None:
    """Raises UnsafeBind for an address beyond loopback when no keys file is set."""
    if keys_file is None and not is_loopback(host.strip("[]").lower()):
        raise UnsafeBind(
            f"refusing to listen on {host} without keys: set auth.keys_file (`penstock keys create`) or bind 127.0.0.1"
        )


@lru_cache(maxsize=1024)
def is_loopback(name: str) -> bool:
    """Whether a host name or address can only be this machine."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def address_of(scope: Scope) -> str:
    """Who calls, for limits of an address. Networks of IPv6 clients (/64) count as one: a host has all of its network.

    The server has put the client's address there if a trusted proxy named it.
    """
    client = scope.get("client")
    return _limited_address(client[0]) if client else ""


@lru_cache(maxsize=4096)
def _limited_address(text: str) -> str:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return text
    if isinstance(address, ipaddress.IPv6Address):
        return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))
    return text


def ticket_of(scope: Scope) -> str | None:
    if not scope.get("query_string"):
        return None
    values = parse_qs(scope["query_string"].decode("latin-1")).get("ticket")
    return values[0] if values else None


def sent_by(headers: Headers, ticket: str | None) -> str:
    """How a call identifies its caller, for metrics: nothing, key or ticket."""
    secret = _secret(headers)
    if ticket is not None or (secret or "").startswith(SESSION_PREFIX):
        return "ticket"
    return "nothing" if secret is None else "key"


def key_id_of(headers: Headers) -> str | None:
    """The id in the key of a call, for logs; None for anything that is not made like one."""
    key_id = id_of(_secret(headers) or "")
    return key_id if key_id is not None and re.fullmatch("[0-9a-f]{12}", key_id) else None


def _secret(headers: Headers) -> str | None:
    return _bearer(headers.get("authorization")) or headers.get("x-api-key")


def _session(headers: Headers) -> str | None:
    """The session that a browser sends along for a page of this gateway. Pages of other Origins have tickets."""
    origin = headers.get("origin")
    if origin is not None and not same_place(origin, headers.get("host", "")):
        return None
    for cookie in headers.get("cookie", "").split(";"):
        name, _, value = cookie.strip().partition("=")
        if name == SESSION_COOKIE:
            return value
    return None


def _bearer(value: str | None) -> str | None:
    scheme, _, credential = (value or "").partition(" ")
    return credential.strip() or None if scheme.lower() == "bearer" else None


@lru_cache(maxsize=1024)
def _host_name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".").lower()
    except ValueError:
        return ""


def same_place(origin: str, host: str) -> bool:
    """Same host and port; the scheme is left out, since a proxy that ends TLS changes it."""
    try:
        page, here = urlsplit(origin), urlsplit(f"//{host.lower()}")
        default = {"http": 80, "https": 443}.get(page.scheme)
        page_port, here_port = page.port or default, here.port or default
    except ValueError:
        return False
    return page.scheme in ("http", "https") and page.hostname == here.hostname and page_port == here_port
