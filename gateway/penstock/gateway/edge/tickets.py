"""Tickets: signed stand-ins for a key, with some of its rights and for a time.

Browsers send no headers with a WebSocket, an EventSource or an `<img>`, and a page must not hold the key itself.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from penstock.gateway.limits.callers import Caller, Grant
from penstock.schemas.errors import Overloaded, Unauthenticated

Use = Literal["socket", "read", "session", "artifact"]
"""What a ticket is for.

`socket` opens one WebSocket, once at each gateway. `read` reads one request or conversation until it expires.
`session` stands for its key on any route until it expires. `artifact` reads the content of one artifact.
"""
TTL_S: dict[Use, tuple[float, float]] = {
    "socket": (60.0, 600.0),
    "read": (3_600.0, 86_400.0),
    "session": (3_600.0, 86_400.0),
}
"""The default and the longest time to live, in seconds."""
SESSION_PREFIX = "st_"
"""Begins session tickets: it distinguishes them from keys in an Authorization header."""
_PURPOSES: dict[Use, bytes] = {
    "socket": b"penstock-ticket:",
    "read": b"penstock-read:",
    "session": b"penstock-session:",
    "artifact": b"penstock-artifact:",
}
"""A part of what is signed: a ticket for one use does not pass for another."""
_MAX_REMEMBERED = 100_000
_TICKET_IN_URL = re.compile(r"(?i)(\bticket=)[^&\s\"']+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Redeemed:
    """What a ticket stands for. `key_id` is None for one that was issued while the gateway had no keys."""

    tenant: str
    key_id: str | None
    grant: Grant


class TicketOffice:
    """Signs tickets and redeems each socket ticket at most once in this process. All gateways share the signing key."""

    def __init__(self, key: str | bytes | None, clock: Callable[[], float] = time.time) -> None:
        """Without a key one is drawn at random: tickets are then good at this gateway only."""
        raw = key.encode() if isinstance(key, str) else key
        self._key = hashlib.sha256(raw).digest() if raw else secrets.token_bytes(32)
        self.clock = clock
        self._used: dict[str, float] = {}

    def issue(
        self,
        caller: Caller,
        *,
        use: Use = "socket",
        scopes: Iterable[str] | None = None,
        ttl_s: float | None = None,
        **narrowed: str | None,
    ) -> tuple[str, float]:
        """A ticket with some of the caller's rights, and when it expires (seconds since the epoch).

        `scopes`: None for all of the caller's. `narrowed`: the fields of `Grant` that name what it reaches.
        """
        expires_at = self.clock() + (TTL_S[use][0] if ttl_s is None else ttl_s)
        claims: dict[str, Any] = {
            "t": caller.tenant,
            "s": sorted(caller.scopes if scopes is None else scopes),
            "k": caller.key_id,
            "e": expires_at,
            "n": secrets.token_urlsafe(12),
            **({} if caller.user is None else {"u": caller.user}),
            **{name: value for name, value in narrowed.items() if value is not None},
        }
        return self._signed(claims, use), expires_at

    def issue_for_artifact(self, caller: Caller, artifact_id: str, ttl_s: float) -> tuple[str, float]:
        """A ticket that reads one artifact of the caller's tenant, and when it expires (seconds since the epoch).

        One that a session asks for expires with the session.
        """
        expires_at = self.clock() + ttl_s
        if caller.grant is not None and caller.grant.expires_at is not None:
            expires_at = min(expires_at, caller.grant.expires_at)
        claims = {"t": caller.tenant, "a": artifact_id, "k": caller.key_id, "e": expires_at}
        return self._signed(claims, "artifact"), expires_at

    def redeem(self, ticket: str, uses: Iterable[Use] = ("socket",), artifact_id: str | None = None) -> Redeemed:
        """What a ticket for one of these uses stands for. `artifact_id`: the artifact that is read.

        Raises Unauthenticated for one that is forged, expired, for something else or (`socket`) used before.
        """
        use, claims = self._claims(ticket, uses)
        now, expires_at = self.clock(), float(claims["e"])
        if use == "artifact" and claims["a"] != artifact_id:
            raise Unauthenticated("the ticket is for another artifact")
        if expires_at <= now:
            renew = "POST /v1/artifacts/{id}/url" if use == "artifact" else "POST /v1/tickets"
            raise Unauthenticated(f"the ticket has expired: fetch a new one with {renew}")
        if use == "socket":
            self._spend(str(claims["n"]), expires_at, now)
        grant = Grant(
            scopes=frozenset(claims.get("s", ("read",))),
            user=claims.get("u"),
            expires_at=expires_at if use in ("read", "session") else None,
            **{name: claims.get(name) for name in ("request_id", "conversation_id", "user_id")},
        )
        return Redeemed(tenant=claims["t"], key_id=claims["k"], grant=grant)

    def _spend(self, nonce: str, expires_at: float, now: float) -> None:
        if nonce in self._used:
            raise Unauthenticated("the ticket was used before: fetch a new one with POST /v1/tickets")
        if len(self._used) >= _MAX_REMEMBERED:
            self._used = {used: until for used, until in self._used.items() if until > now}
            if len(self._used) >= _MAX_REMEMBERED:
                raise Overloaded("too many tickets were used within a minute", retry_after_s=TTL_S["socket"][0])
        self._used[nonce] = expires_at

    def _signed(self, claims: dict[str, Any], use: Use) -> str:
        body = _b64(json.dumps(claims, separators=(",", ":")).encode())
        return f"{SESSION_PREFIX if use == 'session' else ''}{body}.{_b64(self._sign(body, use))}"

    def _claims(self, ticket: str, uses: Iterable[Use]) -> tuple[Use, dict[str, Any]]:
        """Raises Unauthenticated for what was signed for none of these uses."""
        body, _, signature = ticket.removeprefix(SESSION_PREFIX).partition(".")
        try:
            signed = _unb64(signature)
            for use in uses:
                if hmac.compare_digest(signed, self._sign(body, use)):
                    return use, json.loads(_unb64(body))
        except ValueError:
            pass
        raise Unauthenticated("the ticket is none of this gateway's for this route")

    def _sign(self, body: str, use: Use) -> bytes:
        return hmac.new(self._key, _PURPOSES[use] + body.encode(), hashlib.sha256).digest()


def mask_tickets(text: str) -> str:
    """The text with the value of every `ticket=` parameter replaced."""
    return _TICKET_IN_URL.sub(r"\1***", text)


class TicketMask(logging.Filter):
    """Masks tickets in the server's lines about WebSockets, which have the URL."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(mask_tickets(arg) if isinstance(arg, str) else arg for arg in record.args)
        if isinstance(record.msg, str):
            record.msg = mask_tickets(record.msg)
        return True


def mask_server_logs() -> None:
    """Put the mask on the logger through which uvicorn writes URLs; calling it again changes nothing."""
    target = logging.getLogger("uvicorn.error")
    if not any(isinstance(existing, TicketMask) for existing in target.filters):
        target.addFilter(TicketMask())


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
