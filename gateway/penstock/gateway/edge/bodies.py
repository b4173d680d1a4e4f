"""Bodies of HTTP requests: how large they may be and how long they may take, counted as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope

from penstock.gateway.edge.errors import EdgeRefusal
from penstock.gateway.edge.rules import Access, Rules, Takes
from penstock.schemas.errors import InvalidRequest, PenstockError, TooLarge, UnsupportedParameter
from penstock.schemas.finite_json import read_body

BYTES_PER_S = 256 * 1024
"""What has come lengthens the time for the rest: a large upload is not cut off while it moves."""
FILE_BYTES_PER_S = 16 * 1024
"""Files come over slow lines too, and there are few at a time."""
NO_BODY_BYTES = 64 * 1024
PUBLIC_BODY_BYTES = 64 * 1024
PUBLIC_BODY_S = 5.0
MOST_PARTS = 1_000_000
"""As many as a body of 2 MB can have."""
ESCAPES_OF_A_PART = 8
"""So many escapes in texts take as long as one value. Some clients escape each `/` of base64."""
_PARTS = (b",", b":", b"[", b"{")
_DRAIN_BYTES = 64 * 1024 * 1024
_DRAIN_S = 10.0


class BodyTooSlow(InvalidRequest):
    """The rest of the body did not come in time."""

    http_status = 408


@dataclass(frozen=True, kw_only=True, slots=True)
class BodyLimits:
    """The largest body in bytes, with long texts, with a file, and of lines; and the seconds that one has to come."""

    max_bytes: int = 2_000_000
    max_large_bytes: int = 0
    """0: as `max_bytes`."""
    max_file_bytes: int = 2_000_000
    max_lines_bytes: int = 2_000_000
    timeout_s: float = 30.0

    def of(self, rules: Rules, scope: Scope) -> int:
        """Bytes that this exchange may bring."""
        if rules.takes is Takes.LINES:
            return self.max_lines_bytes
        if brings_file(rules, scope):
            return self.max_file_bytes
        if rules.access is not Access.CALLER:
            return PUBLIC_BODY_BYTES
        if rules.takes in (Takes.LARGE_JSON, Takes.FORM):
            return max(self.max_bytes, self.max_large_bytes)
        return min(NO_BODY_BYTES, self.max_bytes) if rules.takes is Takes.NOTHING else self.max_bytes

    def refusal(self, rules: Rules, scope: Scope) -> TooLarge:
        """Of a body that is larger than `of`, naming what the limit is called."""
        limit = self.of(rules, scope)
        if rules.takes is Takes.LINES:
            return too_large(limit, setting="gateway.max_batch_bytes")
        if brings_file(rules, scope):
            return too_large(limit, setting="artifacts.max_bytes")
        if rules.takes in (Takes.LARGE_JSON, Takes.FORM):
            return too_large(
                limit,
                setting="gateway.max_large_body_bytes",
                instead="; upload a large image to /v1/artifacts, and send its artifact_id on /v1/requests",
            )
        return too_large(limit, setting="gateway.max_body_bytes" if limit == self.max_bytes else None)

    def body(
        self,
        rules: Rules,
        scope: Scope,
        receive: Receive,
        hold: Callable[[int], None] = lambda size: None,
        declared: int | None = None,
        look: Callable[[], object] = lambda: None,
    ) -> Body:
        """The receiver of this exchange's body. Raises what `hold` raises.

        `look` is called for each piece but the first, and raises PenstockError if the rest is not wanted. `hold` takes
        room in memory for a body that is larger than `max_bytes`: for `declared` bytes at once, and
        where no length is declared for as many as it may have, once it is so large.
        """
        large = None
        if self._is_large_in_memory(rules, scope) and (declared is None or declared > self.max_bytes):
            if declared is not None:
                hold(declared)
            large = Large(self.max_bytes, hold if declared is None else None)
        timeout_s = self.timeout_s if rules.access is Access.CALLER else min(PUBLIC_BODY_S, self.timeout_s)
        rate = FILE_BYTES_PER_S if brings_file(rules, scope) else BYTES_PER_S
        refusal = self.refusal(rules, scope)
        return Body(
            receive,
            self.of(rules, scope),
            timeout_s,
            rate,
            paced=rules.takes is Takes.LINES,
            refusal=refusal,
            large=large,
            look=look,
        )

    def _is_large_in_memory(self, rules: Rules, scope: Scope) -> bool:
        """Whether the body lies in memory as a whole and may be larger than `max_bytes`."""
        return (
            rules.access is Access.CALLER and not brings_file(rules, scope) and self.of(rules, scope) > self.max_bytes
        )


def brings_file(rules: Rules, scope: Scope) -> bool:
    """Whether the body is a file, or a form that may hold some: it lies on the disk or in the store while it comes."""
    return rules.takes in (Takes.FILE, Takes.LINES) or (rules.takes is Takes.FORM and is_multipart(scope))


class Large:
    """What a body is held to when it is larger than most: room in memory, and few parts.

    All of it is parsed at once on the event loop. A long text takes a fraction of a second there, the same bytes in
    small parts take ten: lists, objects and escapes are counted as they come.
    """

    __slots__ = ("_counted", "_hold", "_parts", "_plain_bytes")

    def __init__(self, plain_bytes: int, hold: Callable[[int], None] | None) -> None:
        """`hold` takes room for the most bytes that the body may have; None if there is room already."""
        self._plain_bytes = plain_bytes
        self._hold = hold
        self._counted = self._parts = 0

    def look(self, piece: bytes, most_bytes: int) -> None:
        """Raises PenstockError."""
        self._counted += len(piece)
        self._parts += sum(map(piece.count, _PARTS)) + piece.count(b"\\") // ESCAPES_OF_A_PART
        if self._counted <= self._plain_bytes:
            return
        if self._hold is not None:
            hold, self._hold = self._hold, None
            hold(most_bytes)
        if self._parts > MOST_PARTS:
            raise TooLarge(
                f"a body of more than {self._plain_bytes} bytes may have {MOST_PARTS} values, brackets and commas",
                details={"limit_parts": MOST_PARTS},
            )


class Body:
    """The `receive` of one exchange, which lets no more through than the limit, and not later than its time."""

    __slots__ = (
        "_bytes_per_s",
        "_counted",
        "_deadline",
        "_large",
        "_limit",
        "_look",
        "_paced",
        "_receive",
        "_received_at",
        "_refusal",
        "_timeout_s",
        "late",
        "whole",
    )

    def __init__(
        self,
        receive: Receive,
        limit: int,
        timeout_s: float,
        bytes_per_s: int = BYTES_PER_S,
        *,
        paced: bool = False,
        refusal: TooLarge | None = None,
        large: Large | None = None,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        """`paced`: the app works on each piece before it asks for the next, and that time is not the client's."""
        self._paced = paced
        self._refusal = refusal or too_large(limit)
        self._large = large
        self._look = look
        self._received_at = 0.0
        self._bytes_per_s = bytes_per_s
        self._receive = receive
        self._limit = limit
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._counted = 0
        self.late = False
        self.whole = False
        """Whether all of it has come; what is received after that is the client's going."""

    async def __call__(self) -> Message:
        """Raises EdgeRefusal with TooLarge or BodyTooSlow."""
        if self.whole:
            return await self._receive()
        if self._deadline is None and self._is_here():
            return self._counted_in(await self._receive())
        now_s = asyncio.get_running_loop().time
        if self._deadline is None:
            self._deadline = now_s() + self._timeout_s
        elif self._paced:
            self._deadline += now_s() - self._received_at
        try:
            async with asyncio.timeout_at(self._deadline + self._counted / self._bytes_per_s):
                message = await self._receive()
        except TimeoutError:
            self.late = True
            raise EdgeRefusal(BodyTooSlow(f"the body did not come within {self._timeout_s:g} s")) from None
        self._received_at = now_s()
        return self._counted_in(message)

    async def content(self) -> bytes:
        """All of it. Raises EdgeRefusal."""
        pieces: list[bytes] = []
        while not self.whole:
            pieces.append((await self()).get("body", b""))
        return b"".join(pieces)

    def _is_here(self) -> bool:
        """Whether all of it has come already, as far as the server says: then nothing has to be timed."""
        exchange: Any = getattr(self._receive, "__self__", None)
        return getattr(exchange, "more_body", True) is False

    def _counted_in(self, message: Message) -> Message:
        if message["type"] == "http.request":
            piece = message.get("body", b"")
            try:
                if self._counted:
                    self._look()
                self._counted += len(piece)
                if self._counted > self._limit:
                    raise self._refusal
                if self._large is not None:
                    self._large.look(piece, self._limit)
            except PenstockError as error:
                raise EdgeRefusal(error) from None
            self.whole = not message.get("more_body", False)
        else:
            self.whole = True
        return message


def refuse_fields(body: bytes) -> None:
    """Refuse a body where a route takes none. Some clients send an empty object with every POST.

    Raises UnsupportedParameter with the first field, InvalidRequest.
    """
    if not body.strip():
        return
    try:
        fields = read_body(body)
    except InvalidRequest:
        fields = body
    if isinstance(fields, dict):
        for name in cast("dict[str, Any]", fields):
            raise UnsupportedParameter(f"{name[:100]} is not supported: this route takes no body", param=name[:100])
    elif fields is not None:
        raise InvalidRequest("this route takes no body")


def is_multipart(scope: Scope) -> bool:
    """Whether the body brings files along."""
    kinds = (value for name, value in scope["headers"] if name == b"content-type")
    return next(kinds, b"").lstrip().lower().startswith(b"multipart/form-data")


def too_large(limit: int, what: str = "the body", *, setting: str | None = None, instead: str = "") -> TooLarge:
    """`setting`: what the limit is called. `instead`: what the caller can do."""
    called = "" if setting is None else f", `{setting}`"
    return TooLarge(f"{what} is larger than {limit} bytes{called}{instead}", details={"limit_bytes": limit})


def declared_length(scope: Scope) -> int | None:
    """Bytes that follow, if the request says so. With a transfer-encoding it does not, whatever else it says."""
    declared: int | None = None
    for name, value in scope["headers"]:
        if name == b"transfer-encoding":
            return None
        if name == b"content-length" and value.isdigit():
            declared = int(value)
    return 0 if declared is None and scope["method"] in ("GET", "HEAD", "DELETE", "OPTIONS") else declared


async def discard_body(scope: Scope, receive: Receive) -> None:
    """Read the body away, within limits, keeping nothing: most clients look for an answer only when they have sent all.

    Without this they see a reset connection where the 413 should be.
    """
    if "expect" in Headers(scope=scope):
        return
    discarded = 0
    try:
        async with asyncio.timeout(_DRAIN_S):
            while discarded < _DRAIN_BYTES:
                message = await receive()
                discarded += len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return
