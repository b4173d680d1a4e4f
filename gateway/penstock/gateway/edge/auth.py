"""Who may come in: Host and Origin checks, keys and tickets, for HTTP and WebSocket alike. The edge asks it."""

from __future__ import annotations

import dataclasses
import ipaddress
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.types import Scope

from penstock.gateway.edge.keys import KeyRecord, KeyRing
from penstock.gateway.edge.tickets import TicketOffice
from penstock.gateway.limits.callers import ANYBODY, Caller
from penstock.schemas.errors import Forbidden, Unauthenticated

_CONTENT = re.compile(r"/v1/artifacts/([^/]+)/content")


class UnsafeBind(ValueError):
    """The gateway was asked to listen beyond this machine without keys."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AuthPolicy:
    """What the edge checks. Without a key ring everybody is the default caller, and the Host must be this machine's."""

    keys: KeyRing | None
    tickets: TicketOffice
    allowed_origins: frozenset[str] = frozenset()
    allowed_hosts: frozenset[str] = frozenset()

    @classmethod
    def build(
        cls,
        *,
        keys_file: str | Path | None = None,
        ticket_key: str | None = None,
        allowed_origins: Iterable[str] = (),
        allowed_hosts: Iterable[str] = (),
    ) -> AuthPolicy:
        """From settings. Raises KeysFileError when the keys file is missing or broken."""
        return cls(
            keys=KeyRing(keys_file) if keys_file else None,
            tickets=TicketOffice(ticket_key),
            allowed_origins=frozenset(origin.rstrip("/").lower() for origin in allowed_origins),
            allowed_hosts=frozenset(host.lower() for host in allowed_hosts),
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
        if origin in self.allowed_origins or _same_place(origin, host):
            return
        raise Forbidden("pages of this Origin may not call the gateway: add it to auth.allowed_origins")

    def authenticate(self, headers: Headers, ticket: str | None) -> Caller:
        """The caller by Bearer key, x-api-key or ticket. Raises Unauthenticated."""
        if self.keys is None:
            return ANYBODY
        if ticket is not None:
            key_id = self.tickets.redeem(ticket).key_id
            behind = None if key_id is None else self.keys.record(key_id)
            if behind is None:
                raise Unauthenticated("the key behind this ticket was revoked")
            return caller_of_key(behind)
        secret = _bearer(headers.get("authorization")) or headers.get("x-api-key")
        if not secret:
            raise Unauthenticated("send a key: `Authorization: Bearer …` or `x-api-key: …`")
        record = self.keys.find(secret)
        if record is None:
            raise Unauthenticated("this key is unknown or revoked")
        return caller_of_key(record)

    def authenticate_http(self, scope: Scope, headers: Headers) -> Caller:
        """The caller of an HTTP exchange: by key, or by a ticket for the artifact that it reads.

        Raises Unauthenticated.
        """
        found = artifact_ticket_of(scope)
        if found is None:
            return self.authenticate(headers, None)
        reader = self.tickets.redeem_for_artifact(*found)
        if self.keys is None or reader.key_id is None:
            return reader
        behind = self.keys.record(reader.key_id)
        if behind is None or behind.tenant != reader.tenant:
            raise Unauthenticated("the key behind this ticket was revoked")
        return dataclasses.replace(caller_of_key(behind), scopes=reader.scopes)

    def caller_of_work(self, tenant: str, key_id: str | None) -> Caller | None:
        """Who work runs for that a tenant left behind; None if the key that it was asked for with was taken back."""
        if self.keys is None or key_id is None:
            return dataclasses.replace(ANYBODY, tenant=tenant)
        record = self.keys.record(key_id)
        caller = None if record is None or record.tenant != tenant else caller_of_key(record)
        return caller if caller is not None and caller.allows("submit") else None

    def still_good(self, caller: Caller) -> bool:
        """Whether the caller's key is still there, with the tenant and the scopes that it had."""
        if self.keys is None or caller.key_id is None:
            return True
        record = self.keys.record(caller.key_id)
        return record is not None and (record.tenant, frozenset(record.scopes)) == (caller.tenant, caller.scopes)


@lru_cache(maxsize=4096)
def caller_of_key(record: KeyRecord) -> Caller:
    return Caller(
        tenant=record.tenant,
        scopes=frozenset(record.scopes),
        max_priority=record.max_priority,
        limits=record.limits if record.rate is None else dataclasses.replace(record.limits, requests_per_s=record.rate),
        key_id=record.key_id,
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


def ticket_of(scope: Scope) -> str | None:
    return _ticket(scope) if scope["type"] == "websocket" else None


def artifact_ticket_of(scope: Scope) -> tuple[str, str] | None:
    """The ticket of an exchange that reads an artifact's content, and that artifact's id."""
    path = _CONTENT.fullmatch(scope["path"])
    if path is None or scope["method"] not in ("GET", "HEAD"):
        return None
    ticket = _ticket(scope)
    return None if ticket is None else (ticket, path[1])


def _ticket(scope: Scope) -> str | None:
    if not scope.get("query_string"):
        return None
    values = parse_qs(scope["query_string"].decode("latin-1")).get("ticket")
    return values[0] if values else None


def _bearer(value: str | None) -> str | None:
    scheme, _, credential = (value or "").partition(" ")
    return credential.strip() or None if scheme.lower() == "bearer" else None


@lru_cache(maxsize=1024)
def _host_name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".").lower()
    except ValueError:
        return ""


def _same_place(origin: str, host: str) -> bool:
    """Same host and port; the scheme is left out, since a proxy that ends TLS changes it."""
    try:
        page, here = urlsplit(origin), urlsplit(f"//{host.lower()}")
        default = {"http": 80, "https": 443}.get(page.scheme)
        page_port, here_port = page.port or default, here.port or default
    except ValueError:
        return False
    return page.scheme in ("http", "https") and page.hostname == here.hostname and page_port == here_port
