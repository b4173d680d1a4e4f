"""An HTTP answer of an OpenAI-compatible server: its lines as they come, and its refusals as typed errors."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Collection, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, cast

import httpx

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
_MOST_OF_REFUSAL = 64 << 10
_HEADER_VALUE = re.compile(r"[!-~]([ -~]*[!-~])?")


def request_headers(model: str, options: Mapping[str, Any], env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What every request carries: `headers` of the options, whose values are texts or `{env = "NAME"}`, and the key.

    Secrets stand in the environment, and are never logged. Raises InvalidRequest for a variable that is not set.
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


class UnusableAnswer(EngineFailed):
    """The server made something that cannot be taken. It is not asked again: each drawing may cost money."""

    retry_kind = RetryKind.FINAL


async def json_within(answer: httpx.Response, most_bytes: int | None = None) -> Any:
    """The whole body, MOST_BYTES at most. Raises UnusableAnswer for one that has more bytes, ValueError for no JSON."""
    body, most_bytes = bytearray(), most_bytes or MOST_BYTES
    async for piece in answer.aiter_bytes():
        body += piece
        if len(body) > most_bytes:
            raise UnusableAnswer(f"the remote server answered with more than {most_bytes} bytes")
    return await asyncio.to_thread(json.loads, body)


async def lines_of(answer: httpx.Response) -> AsyncIterator[bytes]:
    """Raises UnusableAnswer for a line of more than MOST_BYTES."""
    lines, begun = SseLines(), 0
    async for piece in answer.aiter_bytes():
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


async def refusal(answer: httpx.Response) -> PenstockError:
    """The typed error of a refusal, whose body has not been read."""
    try:
        body = await json_within(answer, _MOST_OF_REFUSAL)
    except (ValueError, RecursionError, UnusableAnswer):
        body = {}
    if answer.status_code in (401, 403):  # some servers quote a part of the key
        return EngineFailed(f"the remote server refused our credentials ({answer.status_code})")
    message = f"the remote server said {answer.status_code}: {message_of(body)}"
    error: Any = body.get("error") if isinstance(body, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    if answer.status_code in (429, 503):
        return Overloaded(message, retry_after_s=retry_after(answer))
    if code == "context_length_exceeded":
        return ContextLengthExceeded(message)
    if answer.status_code == 404:
        return ModelNotFound(message, param="model")
    if 400 <= answer.status_code < 500 and answer.status_code != 408:
        return InvalidRequest(message)
    return EngineFailed(message, retry_after_s=retry_after(answer))


def retry_after(answer: httpx.Response) -> float | None:
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
