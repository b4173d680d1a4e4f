"""Tickets: signed stand-ins for a key in URLs, for browsers, which send no headers with a WebSocket or an `<img>`.

Those for WebSockets live for 60 seconds and are good once; those for artifacts are bound to one artifact's content.
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
from collections.abc import Callable
from typing import Any, cast

from penstock.gateway.limits.callers import Caller
from penstock.schemas.errors import Overloaded, Unauthenticated

TICKET_TTL_S = 60
_SOCKET, _ARTIFACT = b"penstock-ticket:", b"penstock-artifact:"
"""What a ticket was signed for: none passes for one of the other kind."""
_MAX_REMEMBERED = 100_000
_TICKET_IN_URL = re.compile(r"(?i)(\bticket=)[^&\s\"']+")


class TicketOffice:
    """Signs tickets and redeems each at most once in this process. All gateways share the signing key."""

    def __init__(self, key: str | bytes | None, clock: Callable[[], float] = time.time) -> None:
        """Without a key one is drawn at random: tickets are then good at this gateway only."""
        raw = key.encode() if isinstance(key, str) else key
        self._key = hashlib.sha256(raw).digest() if raw else secrets.token_bytes(32)
        self._clock = clock
        self._used: dict[str, float] = {}

    def issue(self, caller: Caller) -> tuple[str, float]:
        """A ticket that carries the caller's rights, and when it expires (seconds since the epoch)."""
        expires_at = self._clock() + TICKET_TTL_S
        claims: dict[str, Any] = {
            "t": caller.tenant,
            "s": sorted(caller.scopes),
            "p": caller.max_priority,
            "k": caller.key_id,
            "e": expires_at,
            "n": secrets.token_urlsafe(12),
        }
        return self._signed(claims, _SOCKET), expires_at

    def issue_for_artifact(self, caller: Caller, artifact_id: str, ttl_s: float) -> tuple[str, float]:
        """A ticket that reads one artifact of the caller's tenant, and when it expires (seconds since the epoch)."""
        expires_at = self._clock() + ttl_s
        claims = {"t": caller.tenant, "a": artifact_id, "k": caller.key_id, "e": expires_at}
        return self._signed(claims, _ARTIFACT), expires_at

    def redeem_for_artifact(self, ticket: str, artifact_id: str) -> Caller:
        """Who may read the artifact, and no more than that. Raises Unauthenticated for any other ticket."""
        claims = self._claims(ticket, _ARTIFACT)
        if claims["a"] != artifact_id:
            raise Unauthenticated("the ticket is for another artifact")
        if claims["e"] <= self._clock():
            raise Unauthenticated("the ticket has expired: fetch a new URL with POST /v1/artifacts/{id}/url")
        return Caller(tenant=claims["t"], scopes=frozenset({"read"}), key_id=claims["k"])

    def redeem(self, ticket: str) -> Caller:
        """The caller of a ticket. Raises Unauthenticated for one that is forged, expired or used before."""
        claims = self._claims(ticket, _SOCKET)
        now = self._clock()
        if claims["e"] <= now:
            raise Unauthenticated("the ticket has expired: fetch a new one with POST /v1/tickets")
        self._spend(str(claims["n"]), float(claims["e"]), now)
        return Caller(
            tenant=claims["t"],
            scopes=frozenset(claims["s"]),
            max_priority=claims["p"],
            key_id=claims["k"],
        )

    def _spend(self, nonce: str, expires_at: float, now: float) -> None:
        if nonce in self._used:
            raise Unauthenticated("the ticket was used before: fetch a new one with POST /v1/tickets")
        if len(self._used) >= _MAX_REMEMBERED:
            self._used = {used: until for used, until in self._used.items() if until > now}
            if len(self._used) >= _MAX_REMEMBERED:
                raise Overloaded("too many tickets were used within a minute", retry_after_s=TICKET_TTL_S)
        self._used[nonce] = expires_at

    def _signed(self, claims: dict[str, Any], purpose: bytes) -> str:
        body = _b64(json.dumps(claims, separators=(",", ":")).encode())
        return f"{body}.{_b64(self._sign(body, purpose))}"

    def _claims(self, ticket: str, purpose: bytes) -> dict[str, Any]:
        """Raises Unauthenticated for what was not signed for this purpose."""
        body, _, signature = ticket.partition(".")
        try:
            if hmac.compare_digest(_unb64(signature), self._sign(body, purpose)):
                return cast("dict[str, Any]", json.loads(_unb64(body)))
        except ValueError:
            pass
        raise Unauthenticated("the ticket is not one of ours")

    def _sign(self, body: str, purpose: bytes) -> bytes:
        return hmac.new(self._key, purpose + body.encode(), hashlib.sha256).digest()


def mask_tickets(text: str) -> str:
    """The text with the value of every `ticket=` parameter replaced."""
    return _TICKET_IN_URL.sub(r"\1***", text)


class TicketMask(logging.Filter):
    """Masks tickets in the lines of access logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.args, tuple):
            record.args = tuple(mask_tickets(arg) if isinstance(arg, str) else arg for arg in record.args)
        if isinstance(record.msg, str):
            record.msg = mask_tickets(record.msg)
        return True


def mask_access_logs() -> None:
    """Put the mask on the loggers through which uvicorn writes URLs; calling it again changes nothing."""
    for name in ("uvicorn.access", "uvicorn.error"):
        target = logging.getLogger(name)
        if not any(isinstance(existing, TicketMask) for existing in target.filters):
            target.addFilter(TicketMask())


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
