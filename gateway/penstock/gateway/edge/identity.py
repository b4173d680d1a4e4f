"""The person behind a call, as an identity proxy in front of the gateway names it in a header."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from functools import lru_cache

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.schemas.errors import Forbidden, InvalidRequest

PEER = "penstock.peer"
MOST_CHARS = 200


class KeepsPeer:
    """In front of what replaces `client` by the address that a proxy has named: who has connected stays known."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[PEER] = scope.get("client")
        await self._app(scope, receive, send)


class IdentityProxies:
    """`networks`: where they connect from. Without a header nobody is named."""

    def __init__(self, header: str | None = None, networks: Iterable[str] = ()) -> None:
        self._header = header
        self._networks = [ipaddress.ip_network(network) for network in networks]
        self._trusts = lru_cache(1024)(self._is_proxy)

    def user_of(self, scope: Scope, headers: Headers) -> str | None:
        """None if the call names nobody. Raises Forbidden where another peer sends the header, InvalidRequest."""
        sent = [] if self._header is None else headers.getlist(self._header)
        if not sent:
            return None
        peer = scope.get(PEER)
        if peer is None or not self._trusts(peer[0]):
            raise Forbidden(f"only identity proxies may send {self._header}: see gateway.user_proxies")
        try:
            (name,) = (one.encode("latin-1").decode().strip() for one in sent)
        except ValueError as error:
            raise InvalidRequest(f"{self._header} must name one user, in UTF-8", param=self._header) from error
        if len(name) > MOST_CHARS or not name.isprintable():
            raise InvalidRequest(f"{self._header} must be up to {MOST_CHARS} printable characters", param=self._header)
        return name or None

    def _is_proxy(self, text: str) -> bool:
        try:
            address = ipaddress.ip_address(text)
        except ValueError:  # a socket of the file system
            return False
        mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
        return any((mapped or address) in network for network in self._networks)
