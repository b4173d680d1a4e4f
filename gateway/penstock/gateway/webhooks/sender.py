"""One call of a receiver: bounded in time and in what is read, to an address that was checked, no redirect followed."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections.abc import Sequence
from email.utils import parsedate_to_datetime
from functools import partial
from typing import cast

import httpcore

from penstock.common.urls.connections import CheckedBackend, Refused, Resolve, addresses
from penstock.common.urls.rules import Target
from penstock.gateway.callbacks import Callbacks
from penstock.gateway.threads import Pool
from penstock.gateway.webhooks.policy import Answer
from penstock.schemas.errors import InvalidRequest

logger = logging.getLogger(__name__)

NAMES_AT_ONCE, NAMES_OF_ONE = 64, 8
"""Names that are resolved at once, and of one tenant. A lookup that hangs keeps its thread when its call is over."""
READ_BYTES = 65_536
"""So much of an answer's body is read at most; nobody looks at it."""

Header = tuple[bytes, bytes]


class Sender:
    """Each call has a connection of its own."""

    def __init__(
        self,
        callbacks: Callbacks,
        timeout_s: float,
        resolve: Resolve | None = None,
        network: httpcore.AsyncNetworkBackend | None = None,
    ) -> None:
        self._callbacks = callbacks
        self._timeout_s = timeout_s
        self._resolve = resolve
        self._names = Pool("names", NAMES_AT_ONCE, NAMES_OF_ONE)
        self._network = network or cast("httpcore.AsyncNetworkBackend", httpcore.AnyIOBackend())
        self._ssl: ssl.SSLContext | None = None

    def close(self) -> None:
        """Resolve no more names."""
        self._names.close()

    async def post(self, tenant: str, url: str, headers: Sequence[Header], body: bytes) -> Answer:
        """Never raises but CancelledError: an error becomes the answer's error."""
        try:
            target = self._callbacks.target(url)  # the settings may be others than when it was submitted
            async with asyncio.timeout(self._timeout_s):
                return await self._post(tenant, target, headers, body)
        except InvalidRequest as error:
            return Answer(error=error.message, final=True)
        except Refused:
            return Answer(error="its address is not public; webhooks.internal_hosts may name the host", final=True)
        except TimeoutError:
            return Answer(error=f"no answer within {self._timeout_s:g} s")
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException, OSError) as error:
            return Answer(error=f"not reached, or broken off ({type(error).__name__})")
        except Exception as error:  # callers choose URLs, receivers their headers: neither stops the others' webhooks
            logger.exception("webhooks.call_failed")
            return Answer(error=type(error).__name__)

    async def _post(self, tenant: str, target: Target, headers: Sequence[Header], body: bytes) -> Answer:
        self._ssl = self._ssl or ssl.create_default_context()
        url = httpcore.URL(
            scheme=target.scheme.encode(), host=target.host.encode(), port=target.port, target=target.path
        )
        sent = [
            (b"Host", target.host_header),
            (b"Content-Length", str(len(body)).encode()),
            (b"Connection", b"close"),
            *headers,
        ]
        resolve = self._resolve or partial(self._names.run_for, tenant, addresses)
        backend = CheckedBackend(target, resolve, self._network)
        async with (
            httpcore.AsyncConnectionPool(self._ssl, network_backend=backend) as pool,
            pool.stream("POST", url, headers=sent, content=body) as response,
        ):
            read = 0
            async for piece in response.aiter_stream():
                read += len(piece)
                if read > READ_BYTES:
                    break
            answered = {name.lower(): value for name, value in response.headers}
            return Answer(status_code=response.status, retry_after_s=retry_after_s(answered.get(b"retry-after")))


def retry_after_s(value: bytes | None) -> float | None:
    """Seconds until then; None for what is neither seconds nor a date."""
    text = (value or b"").decode("latin-1").strip()
    if text.isascii() and text.isdigit() and len(text) < 10:
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, OverflowError):
        return None
