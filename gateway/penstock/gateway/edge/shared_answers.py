"""Answers that many clients ask for again and again: made once for all that take one that is a second old.

A client says so by `Cache-Control: max-age=1` in its request (RFC 9111). Without it each answer is made anew.
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

FRESH_S = 1.0
"""No shared answer is older, whatever a client would take."""
MOST = 64
"""Answers that are kept."""
_MAX_AGE = re.compile(r"(?:^|[\s,])max-age=0*[1-9]")
Make = Callable[[], Awaitable[bytes]]


class SharedAnswers:
    """Runs on the event loop. `answer` is all that a route needs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._made: OrderedDict[Hashable, tuple[float, asyncio.Task[tuple[bytes, str]]]] = OrderedDict()

    async def answer(self, request: Request, whose: Hashable, make: Make) -> Response:
        """JSON that `make` gives, or gave for another caller within `FRESH_S`; 304 if the client has it already.

        `whose`: callers with the same value get the same answer at one path and query; None shares nothing.
        """
        headers = {"cache-control": "private, no-cache"}
        if whose is None or not _MAX_AGE.search(request.headers.get("cache-control", "")):
            return Response(await make(), media_type="application/json", headers=headers)
        content, etag = await self._shared((whose, request.scope["path"], request.scope["query_string"]), make)
        headers["etag"] = etag
        if not_modified(request.headers.get("if-none-match"), etag):
            return Response(status_code=304, headers=headers)
        return Response(content, media_type="application/json", headers=headers)

    async def _shared(self, key: Hashable, make: Make) -> tuple[bytes, str]:
        """What fails is not kept: all who waited for it get the error, and the next call tries again."""
        began_s, task = self._made.get(key, (0.0, None))
        if task is None or self._clock() - began_s >= FRESH_S:
            task = asyncio.create_task(_with_etag(make))
            self._made[key] = (self._clock(), task)
            self._made.move_to_end(key)
            if len(self._made) > MOST:
                self._made.popitem(last=False)
        try:
            return await asyncio.shield(task)
        except Exception:
            if self._made.get(key, (0.0, None))[1] is task:
                del self._made[key]
            raise


async def _with_etag(make: Make) -> tuple[bytes, str]:
    content = await make()
    return content, f'"{hashlib.sha256(content).hexdigest()[:16]}"'
