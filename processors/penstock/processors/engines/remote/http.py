"""An HTTP answer of an OpenAI-compatible server: its lines as they come, and its refusals as typed errors."""

from __future__ import annotations

import asyncio
import json
import os
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from email.utils import parsedate_to_datetime
from io import BytesIO
from typing import Any, cast

import aiohttp
import certifi
from aiohttp.abc import AbstractResolver

from penstock.schemas.errors import (
    ContextLengthExceeded,
    EngineFailed,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
    PenstockError,
    RetryKind,
)
from penstock.schemas.sse import SseLines
from penstock.schemas.texts import encodable, shortened

MOST_BYTES = 256 << 20
"""Of an answer that comes whole: the vectors of a long list of texts."""
_MOST_OF_REFUSAL = _MOST_OF_HEADER = 64 << 10
CONNECT_S = 10.0
_HEADER_VALUE = re.compile(r"[!-~]([ -~]*[!-~])?")


def request_headers(model: str, options: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What every request carries: `headers` of the options, whose values are texts or `{env = "NAME"}`, and the key.

    Secrets are in the environment, and are never logged. Raises InvalidRequest for a variable that is not set.
    """
    given: Any = options.get("headers", {})
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{model}: options.headers is a table of names and values", param="models")
    headers: dict[str, str] = {}
    for name, value in cast("Mapping[str, Any]", given).items():
        if isinstance(value, Mapping):
            value = _secret(model, str(cast("Mapping[str, Any]", value).get("env", "")), f"the header {name}", env)
        headers[str(name).lower()] = str(value)
    if key_name := options.get("api_key_env"):
        headers["authorization"] = f"Bearer {_secret(model, str(key_name), 'the key', env)}"
    return headers


def take_headers(extra: Mapping[str, str], names: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """(the entries of `extra` that are headers of these names in lower case, the others).

    Raises InvalidRequest for a value that no header can have, and for a header that is given twice.
    """
    headers: dict[str, str] = {}
    others: dict[str, str] = {}
    for name, value in extra.items():
        if name.lower() not in names:
            others[name] = value
        elif name.lower() in headers:
            raise InvalidRequest(f"extra.{name} is a header that is given twice", param=f"extra.{name}")
        elif _HEADER_VALUE.fullmatch(value):
            headers[name.lower()] = value
        else:
            raise InvalidRequest(
                f"extra.{name} is sent as a header: its value must be printable ASCII", param=f"extra.{name}"
            )
    return headers, others


def _secret(model: str, variable: str, what: str, env: Mapping[str, str]) -> str:
    if not (value := env.get(variable, "")):
        raise InvalidRequest(f"{model}: the variable {variable}, which should hold {what}, is not set")
    return value


class RemoteClient:
    """Calls of one server, each on a connection of its own. It keeps no cookies, and follows no redirects.

    `url` is what paths are put behind.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str],
        *,
        connections: int,
        timeout_s: float,
        resolver: AbstractResolver | None = None,
    ) -> None:
        """`timeout_s`: the longest time until an answer begins, and between two pieces of it. On an event loop."""
        self._url, self._begin_s = url, CONNECT_S + timeout_s
        self._session = aiohttp.ClientSession(
            headers=headers,
            # llama.cpp's server ends the connection behind a stream that it calls kept alive.
            connector=aiohttp.TCPConnector(limit=connections, resolver=resolver, force_close=True, ssl=_trusting()),
            timeout=aiohttp.ClientTimeout(connect=CONNECT_S, sock_read=timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            max_line_size=_MOST_OF_HEADER,
            max_field_size=_MOST_OF_HEADER,
        )

    @asynccontextmanager
    async def post(
        self, path: str, body: Mapping[str, Any] | aiohttp.FormData, headers: Mapping[str, str]
    ) -> AsyncGenerator[aiohttp.ClientResponse]:
        """An answer, not read yet.

        Raises PenstockError for a refusal, UnicodeEncodeError for half a surrogate pair, and what aiohttp raises.
        """
        data: Any = body
        if not isinstance(body, aiohttp.FormData):
            text = json.dumps(body, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
            data = BytesIO(text.encode())  # sent in pieces: bytes would be written in one go, which holds the loop up
            headers = {**headers, "content-type": "application/json"}
        async with AsyncExitStack() as stack:
            async with asyncio.timeout(self._begin_s):  # a server may not even read the body
                call = self._session.post(self._url + path, data=data, headers=headers, allow_redirects=False)
                answer = await stack.enter_async_context(call)
            if answer.status >= 400:
                raise await refusal(answer)
            yield answer

    async def close(self) -> None:
        await self._session.close()


def _trusting() -> ssl.SSLContext:
    """Trusts the authorities of the machine, or of SSL_CERT_FILE, and those of certifi: an image may have none."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


def unreached(error: aiohttp.ClientConnectionError) -> str:
    """Why there is no connection, without the server's address: callers see it."""
    if isinstance(error, aiohttp.ClientConnectorError) and error.errno:
        return os.strerror(error.errno) if error.errno > 0 else "its name cannot be resolved"
    return f"no connection within {CONNECT_S:.0f} s" if isinstance(error, TimeoutError) else type(error).__name__


class UnusableAnswer(EngineFailed):
    """The server made something that cannot be taken. It is not asked again: each drawing may cost money."""

    retry_kind = RetryKind.FINAL


async def json_within(answer: aiohttp.ClientResponse, most_bytes: int | None = None) -> Any:
    """The whole body, MOST_BYTES at most. Raises UnusableAnswer for one that has more bytes, ValueError for no JSON."""
    body, most_bytes = bytearray(), most_bytes or MOST_BYTES
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > most_bytes:
            raise UnusableAnswer(f"the remote server answered with more than {most_bytes} bytes")
    return await asyncio.to_thread(json.loads, body)


async def lines_of(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Raises UnusableAnswer for a line of more than MOST_BYTES."""
    lines, begun = SseLines(), 0
    async for piece in answer.content.iter_any():
        ended = lines.feed(piece)
        begun = len(piece) if ended else begun + len(piece)
        if begun > MOST_BYTES:
            raise UnusableAnswer(f"the remote server answered with a line of more than {MOST_BYTES} bytes")
        for line in ended:
            yield line
    yield lines.rest()


def message_of(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return encodable(shortened(str(text or "no reason given"), 300))


async def refusal(answer: aiohttp.ClientResponse) -> PenstockError:
    """The typed error of a refusal, whose body has not been read."""
    try:
        body = await json_within(answer, _MOST_OF_REFUSAL)
    except (ValueError, RecursionError, UnusableAnswer):
        body = {}
    if answer.status in (401, 403):  # some servers quote a part of the key
        return EngineFailed(f"the remote server refused our credentials ({answer.status})")
    message = f"the remote server said {answer.status}: {message_of(body)}"
    error: Any = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    if answer.status in (429, 503):
        return Overloaded(message, retry_after_s=retry_after(answer))
    if code == "context_length_exceeded":
        return ContextLengthExceeded(message)
    if answer.status == 404:
        return ModelNotFound(message, param="model")
    if 400 <= answer.status < 500 and answer.status != 408:
        return InvalidRequest(message)
    return EngineFailed(message, retry_after_s=retry_after(answer))


def retry_after(answer: aiohttp.ClientResponse) -> float | None:
    """Seconds, from either form of the header; at most a minute. None when it says nothing."""
    value = answer.headers.get("retry-after", "")
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, TypeError):
            return None
    return max(0.0, min(60.0, seconds))
