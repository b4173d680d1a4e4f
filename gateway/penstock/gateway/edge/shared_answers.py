"""Answers that many clients ask for again and again: made once for all that take one that is some seconds old.

A client says how old by `Cache-Control: max-age=2` in its request (RFC 9111). Without it each answer is made anew.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable

from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.edge.conditions import not_modified
from penstock.gateway.limits.callers import Caller

FRESH_S = 2.0
"""No shared answer is older, whatever a client would take."""
MOST, MOST_BYTES = 64, 4_000_000
"""Answers that are kept, and of one."""
_MAX_AGE = re.compile(r"(?:^|[\s,])max-age=(\d+)")
_HEADERS = {"cache-control": "private, no-cache", "vary": "accept"}
JSON, CSV = "application/json", "text/csv"
Make = Callable[[], Awaitable[bytes]]
_Made = tuple[float, str, asyncio.Task[tuple[bytes, str]]]
"""When it was begun, its media type, and the answer with its entity tag."""


class SharedAnswers:
    """Runs on the event loop. A route that shares its answers makes them by `answer`, and is declared as `shared`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._made: OrderedDict[Hashable, _Made] = OrderedDict()

    async def answer(self, request: Request, caller: Caller, make: Make, media_type: str = JSON) -> Response:
        """What `make` gives, or gave a moment ago for a caller of the tenant that asked the same, or is about to
        give it; 304 if the client has it already. `media_type` follows from `wants_csv` alone.
        """
        key, age_s = _key(request, caller), _age_s(request)
        if key is None or not age_s:
            return Response(await make(), media_type=media_type, headers=_HEADERS)
        if not self._is_fresh(key, age_s):
            task = asyncio.create_task(_with_etag(make))
            self._made[key] = made = (self._clock(), media_type, task)
            self._made.move_to_end(key)
            task.add_done_callback(lambda _: self._ended(key, made))
            if len(self._made) > MOST:
                self._made.popitem(last=False)
        return await self._held(key, request)

    async def held(self, request: Request, caller: Caller) -> Response | None:
        """What `answer` would give if nothing has to be made for it."""
        key = _key(request, caller)
        return None if key is None or not self._is_fresh(key, _age_s(request)) else await self._held(key, request)

    def _is_fresh(self, key: Hashable, age_s: float) -> bool:
        if (made := self._made.get(key)) is None:
            return False
        began_s, _, task = made
        return age_s > 0 and (not task.done() or self._clock() - began_s < age_s)

    def _ended(self, key: Hashable, made: _Made) -> None:
        """Keep it for a while. What fails is not kept: the next call tries again."""
        *_, task = made
        if task.cancelled() or task.exception() is not None or len(task.result()[0]) > MOST_BYTES:
            self._drop(key, made)
        else:
            asyncio.get_running_loop().call_later(FRESH_S, self._drop, key, made)

    def _drop(self, key: Hashable, made: _Made) -> None:
        if self._made.get(key) is made:
            del self._made[key]

    async def _held(self, key: Hashable, request: Request) -> Response:
        _, media_type, task = self._made[key]
        content, etag = await asyncio.shield(task)
        headers = {**_HEADERS, "etag": etag}
        if not_modified(request.headers.get("if-none-match"), etag):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type=media_type, headers=headers)


def wants_csv(request: Request) -> bool:
    """Whether the call asks for a table, of the routes that have one."""
    return CSV in request.headers.get("accept", "")


def _key(request: Request, caller: Caller) -> Hashable | None:
    """None for a call that shares nothing. A narrowed ticket reaches less than its tenant."""
    if caller.is_narrowed:
        return None
    return caller.tenant, request.scope["path"], request.scope["query_string"], wants_csv(request)


def _age_s(request: Request) -> float:
    """So old an answer may be; 0 for one that is made anew."""
    said = _MAX_AGE.search(request.headers.get("cache-control", ""))
    return 0.0 if said is None else min(float(said[1]), FRESH_S)


async def _with_etag(make: Make) -> tuple[bytes, str]:
    content = await make()
    return content, f'"{hashlib.sha256(content).hexdigest()[:16]}"'
