"""An image from a caller's URL: only from hosts that the settings name, and only at addresses that were checked.

httpcore speaks HTTP; its connections are opened by a network backend of ours, which resolves the name, checks every
address, and connects to one that it has checked: an answer of DNS that changes a moment later changes nothing. A
redirect is a new URL, checked as the first one. No proxy of the environment is used, and no cookie or credential sent.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import httpcore

from penstock.common.urls.connections import CheckedBackend, Refused, Resolve, resolve
from penstock.common.urls.rules import Target, UrlRules
from penstock.processors.settings import ImagesSection
from penstock.schemas.errors import InvalidRequest, SourceUnavailable, TooLarge

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TRY_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})
_AGENT = b"penstock-images/1"


@dataclass(frozen=True, slots=True)
class _Redirect:
    location: str


class ImageFetcher:
    """Fetches bytes. One is enough for a worker; each fetch has a connection of its own."""

    def __init__(
        self,
        rules: UrlRules,
        *,
        max_bytes: int,
        timeout_s: float,
        max_redirects: int,
        resolve: Resolve = resolve,
        network: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._rules = rules
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._max_redirects = max_redirects
        self._resolve = resolve
        self._network = network or cast("httpcore.AsyncNetworkBackend", httpcore.AnyIOBackend())
        self._ssl: ssl.SSLContext | None = None

    async def fetch(self, url: str, *, param: str) -> bytes:
        """The body of a 200 answer. Raises InvalidRequest for what is not allowed or not there, TooLarge, and
        SourceUnavailable, which is worth another try, when the host was not reached or did not answer in time.
        """
        target = self._rules.target(url, param=param)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._followed(target, param)
        except TimeoutError as error:
            raise SourceUnavailable(
                f"{param}: {target.host} did not send the image within {self._timeout_s:g} s", param=param
            ) from error

    async def _followed(self, target: Target, param: str) -> bytes:
        for _ in range(self._max_redirects + 1):
            found = await self._once(target, param)
            if isinstance(found, bytes):
                return found
            target = self._rules.target(found.location, param=param, after=target)
        raise InvalidRequest(f"{param} redirects more than {self._max_redirects} times", param=param)

    async def _once(self, target: Target, param: str) -> bytes | _Redirect:
        backend = CheckedBackend(target, self._resolve, self._network)
        self._ssl = self._ssl or ssl.create_default_context()
        headers = [
            (b"Host", target.host_header),
            (b"User-Agent", _AGENT),
            (b"Accept", b"image/*"),
            (b"Accept-Encoding", b"identity"),
            (b"Connection", b"close"),
        ]
        url = httpcore.URL(
            scheme=target.scheme.encode(), host=target.host.encode(), port=target.port, target=target.path
        )
        try:
            async with (
                httpcore.AsyncConnectionPool(self._ssl, network_backend=backend) as pool,
                pool.stream("GET", url, headers=headers) as response,
            ):
                return await self._read(response, target, param)
        except Refused:
            raise InvalidRequest(
                f"{param}: {target.host} has an address that images may not come from", param=param
            ) from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            raise SourceUnavailable(
                f"{param}: {target.host} was not reached or broke off ({type(error).__name__})", param=param
            ) from error

    async def _read(self, response: httpcore.Response, target: Target, param: str) -> bytes | _Redirect:
        headers = {name.lower(): value for name, value in response.headers}
        status = response.status
        if status in _REDIRECTS and b"location" in headers:
            return _Redirect(headers[b"location"].decode("latin-1"))
        if status in _TRY_LATER:
            raise SourceUnavailable(f"{param}: {target.host} answered {status}", param=param)
        if status != 200:
            raise InvalidRequest(f"{param}: {target.host} answered {status}", param=param)
        if headers.get(b"content-encoding", b"identity").lower() != b"identity":
            raise InvalidRequest(f"{param}: {target.host} sent an encoded body, which was not asked for", param=param)
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self._max_bytes:
            raise self._too_large(param)
        body = bytearray()
        async for piece in response.aiter_stream():
            body += piece
            if len(body) > self._max_bytes:
                raise self._too_large(param)
        return bytes(body)

    def _too_large(self, param: str) -> TooLarge:
        return TooLarge(
            f"{param} has more than {self._max_bytes} bytes", param=param, details={"limit_bytes": self._max_bytes}
        )


def fetcher_of(settings: ImagesSection, also: Sequence[str] = ()) -> ImageFetcher:
    """As a worker's settings say. `also`: further hosts, which may have private addresses."""
    return ImageFetcher(
        UrlRules(tuple(settings.allow_hosts), (*settings.internal_hosts, *also)),
        max_bytes=settings.max_bytes,
        timeout_s=settings.timeout_s,
        max_redirects=settings.max_redirects,
    )
