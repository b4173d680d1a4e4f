"""Dead letters for operators: listed, shown, run again as new requests, purged.

A letter is run again under an id that follows from it, and then marked on its topic as redriven. So whoever was killed
between the two finds the request when it is asked again, and nothing runs twice.

A redrive or a purge of many letters takes several calls. The first call fixes the end offset of each partition, and the
cursor carries them: letters that are written meanwhile, by what was run again too, are not part of it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.common.transport import AsyncTransport
from penstock.gateway.dead_letters.follower import LetterFollower
from penstock.gateway.dead_letters.index import LetterFilter
from penstock.gateway.dead_letters.letters import (
    HEADER_KIND,
    PURGED,
    REDRIVEN,
    LetterCursor,
    LetterFacts,
    LetterGroup,
    LetterPlace,
    letter_id,
    payload_json,
    place_of,
    request_of,
)
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service.submitting import Submitter
from penstock.gateway.threads import Threads
from penstock.gateway.view.view import View
from penstock.schemas.codec import Codec
from penstock.schemas.errors import (
    Conflict,
    Gone,
    IdempotencyKeyReused,
    InternalError,
    InvalidRequest,
    NotFound,
    PenstockError,
    TooLarge,
    Unauthenticated,
)
from penstock.schemas.ids import redriven_request_id
from penstock.schemas.records import DeadLetter, DeadLetterAction, InferenceRequest
from penstock.schemas.topics import HEADER_KEY_ID, HEADER_TRACEPARENT

logger = logging.getLogger(__name__)

MOST = 1_000
"""Letters of one call."""
AT_ONCE = 16
"""Letters whose payloads are in memory."""
BUDGET_S = 10.0
"""A call that has lasted this long handles no further letters. Its answer says how many are left."""
CATCH_UP_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The letters of one call: by id, or by filter. `after`: the cursor of the call before, or the id of a letter."""

    ids: Sequence[str] | None = None
    filter: LetterFilter | None = None
    after: str | None = None


@dataclass(kw_only=True, slots=True)
class Redriven:
    """What one call did. `requests` are the new requests by letter; `skipped` what was not run again, and why."""

    cursor: LetterCursor
    remaining: int
    """Letters that are left for further calls."""
    requests: dict[str, str] = field(default_factory=dict[str, str])
    skipped: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    error: PenstockError | None = None
    """Why the call ended before its letters did."""

    def handled(self, place: LetterPlace, new_id: str | None, *, passed: bool) -> None:
        """Count a letter. `passed`: nothing before it is left, so the next call continues behind it."""
        self.remaining -= 1
        if new_id is not None:
            self.requests[letter_id(place)] = new_id
        if passed:
            self.cursor = replace(self.cursor, place=place)

    def skip(self, place: LetterPlace, error: PenstockError) -> None:
        self.skipped.append({"id": letter_id(place), "code": error.code, "message": error.message})


Items = Sequence[tuple[LetterPlace, LetterFacts | None]]
"""Letters by their places; None: there is none."""


class Redriving:
    """Tenants are not narrowed: who may call this is an operator. Payloads are shown by `may_read` alone."""

    def __init__(
        self,
        letters: LetterFollower,
        submitter: Submitter,
        view: View,
        transport: AsyncTransport,
        codec: Codec,
        kafka: KafkaSettings,
        threads: Threads,
    ) -> None:
        self._letters, self._index = letters, letters.index
        self._submitter = submitter
        self._view = view
        self._transport = transport
        self._codec = codec
        self._kafka = kafka
        self._threads = threads.dead_letters

    async def page(
        self, chosen: LetterFilter, *, after: str | None, limit: int, newest_first: bool
    ) -> tuple[list[LetterFacts], LetterCursor]:
        """Facts of letters in the order of their times, and where they begin and end: oldest first, the end is fixed.

        Raises InvalidRequest, BrokerUnavailable.
        """
        await self._catch_up()
        cursor = LetterCursor() if after is None else LetterCursor.of(after)
        if not newest_first:
            cursor = await self._with_ends(cursor)
        meant = replace(chosen, ends=cursor.ends)
        return await self._rows(meant, after=cursor.place, limit=limit, newest_first=newest_first), cursor

    async def groups(self) -> list[LetterGroup]:
        """Letters that nobody ran again, by reason and model. Raises BrokerUnavailable."""
        await self._catch_up()
        return await self._threads.run(self._letters.groups)

    async def show(self, caller: Caller, text: str) -> dict[str, Any]:
        """One letter, with its payload if the caller may read it.

        Raises NotFound, InvalidRequest, BrokerUnavailable, RegistryUnavailable.
        """
        await self._catch_up()
        place = place_of(text)
        facts = await self._threads.run(self._index.get, place)
        if facts is None:
            raise _absent(place)
        shown = facts.to_json()
        if not may_read(caller, facts.tenant):
            return {**shown, "original_omitted": True}
        found = await self._read([facts.place])
        return {**shown, **await self._threads.run(self._payload, found.get(facts.place))}

    async def redrive(
        self, caller: Caller, chosen: Chosen, *, rate: float | None, dry_run: bool, again: bool
    ) -> Redriven:
        """Run letters again, `rate` a second at most. `again`: those too that were run again before.

        A letter that is refused for now is tried until the call has lasted BUDGET_S. A key that is revoked meanwhile
        ends the call. Raises InvalidRequest, and as `Submitter.submit` when nothing could be done before that.
        """
        began = time.monotonic()
        items, done = await self._begin(chosen, None if again else False)
        step = AT_ONCE if rate is None and not again else 1
        for start in range(0, len(items), step):
            before = len(done.requests)
            done.error = await self._redrive_some(
                caller, items[start : start + step], done, dry_run=dry_run, again=again, give_up=began + BUDGET_S
            )
            if done.error is not None:
                if not (done.requests or done.skipped):
                    raise done.error
                break
            if rate is not None and not dry_run:
                await asyncio.sleep((len(done.requests) - before) / rate)
            if time.monotonic() - began > BUDGET_S:
                break
        return done

    async def purge(self, caller: Caller, chosen: Chosen, *, dry_run: bool) -> Redriven:
        """Take letters away: nobody sees them or runs them again. `requests` has their ids alone.

        What then stands before the first letter that is left is deleted from the topic; other bytes go with retention.
        """
        items, done = await self._begin(chosen, None)
        rows = [row for _, row in items if row is not None]
        for place, row in items:
            if row is None:
                done.skip(place, _absent(place))
            done.handled(place, None if row is None else row.request_id or "", passed=True)
        if rows and not dry_run:
            marked = await asyncio.gather(*(self._mark(caller, row, PURGED) for row in rows), return_exceptions=True)
            if errors := [one for one in marked if one is not None]:  # raised when none is under way any more
                raise errors[0]
            await self._catch_up()
            await self._threads.run(self._trim)
        return done

    async def forget(self, caller: Caller, request_id: str) -> None:
        """Purge the letters of a request that its tenant erases. Raises BrokerUnavailable."""
        await self._threads.run_for(caller.tenant, self._letters.catch_up, CATCH_UP_S)
        of_request = LetterFilter(tenant=caller.tenant, request_id=request_id)
        if await self._rows(of_request, limit=1):
            await self.purge(caller, Chosen(filter=of_request), dry_run=False)

    # -- choosing

    async def _catch_up(self) -> None:
        await self._threads.run(self._letters.catch_up, CATCH_UP_S)

    async def _rows(self, chosen: LetterFilter, *, limit: int, **options: Any) -> list[LetterFacts]:
        try:
            return await self._threads.run(partial(self._index.page, chosen, limit=limit, **options))
        except KeyError:
            raise InvalidRequest("after names no letter that is left; begin anew without it", param="after") from None

    async def _with_ends(self, cursor: LetterCursor) -> LetterCursor:
        """The ends that it carries; without any, those of now."""
        if cursor.ends is not None:
            return cursor
        return replace(cursor, ends=await self._threads.run(self._index.positions))

    async def _begin(self, chosen: Chosen, redriven: bool | None) -> tuple[Items, Redriven]:
        """The letters of this call, and what is left at its beginning."""
        await self._catch_up()
        cursor = LetterCursor() if chosen.after is None else LetterCursor.of(chosen.after)
        if chosen.ids is not None:
            places = list(dict.fromkeys(place_of(one, "ids") for one in chosen.ids))
            if cursor.place is not None:
                if cursor.place not in places:
                    raise InvalidRequest("after names none of the ids", param="after")
                places = places[places.index(cursor.place) + 1 :]
            items = [(one, await self._threads.run(self._index.get, one)) for one in places[:MOST]]
            return items, Redriven(cursor=cursor, remaining=len(places))
        cursor = await self._with_ends(cursor)
        meant = replace(chosen.filter or LetterFilter(), redriven=redriven, ends=cursor.ends)
        rows = await self._rows(meant, after=cursor.place, limit=MOST)
        left = await self._threads.run(partial(self._index.count, meant, after=cursor.place)) if rows else 0
        return [(row.place, row) for row in rows], Redriven(cursor=cursor, remaining=left)

    # -- running again

    async def _redrive_some(
        self, caller: Caller, items: Items, done: Redriven, *, dry_run: bool, again: bool, give_up: float
    ) -> PenstockError | None:
        """Run these again; those that fail for good are skipped. The first error that is not its letter's, and may
        pass: the letter is left."""
        readable = [place for place, row in items if row is not None and _refusal(row, again=again) is None]
        records = {} if dry_run else await self._read(readable)
        found = await asyncio.gather(
            *(
                self._redrive_one(caller, place, row, records, dry_run=dry_run, again=again, give_up=give_up)
                for place, row in items
            ),
            return_exceptions=True,
        )
        passing: PenstockError | None = None
        for (place, _), one in zip(items, found, strict=True):
            if isinstance(one, PenstockError) and (one.retryable or isinstance(one, Unauthenticated)):
                passing = passing or one
            elif isinstance(one, str):
                done.handled(place, one, passed=passing is None)
            elif not isinstance(one, Exception):
                raise one
            elif passing is None:  # else it is skipped again by the next call
                if not isinstance(one, PenstockError):
                    logger.error("dead_letters.not_redriven letter=%s", letter_id(place), exc_info=one)
                    one = InternalError("this letter could not be run again; the gateway's log says why")
                done.skip(place, one)
                done.handled(place, None, passed=True)
        return passing

    async def _redrive_one(
        self,
        caller: Caller,
        place: LetterPlace,
        row: LetterFacts | None,
        records: dict[LetterPlace, RawMessage],
        *,
        dry_run: bool,
        again: bool,
        give_up: float,
    ) -> str:
        if row is None:
            raise _absent(place)
        if (refusal := _refusal(row, again=again)) is not None:
            raise refusal
        assert row.request_id is not None
        assert row.tenant is not None
        new_id = redriven_request_id(row.tenant, row.request_id, row.origin, row.redrives)
        former = self._view.find((row.tenant, row.request_id))
        if former is not None and former.erased:
            raise Gone("its request was erased")
        if dry_run:
            return new_id
        letter, request = await self._threads.run(self._asked, records.get(row.place))
        request = replace(
            request,
            request_id=new_id,
            tenant=row.tenant,
            created_at=now_ms(),
            redriven_from=row.request_id,
            history=letter.history,
        )
        trace, key_id = (_header(letter, name) for name in (HEADER_TRACEPARENT, HEADER_KEY_ID))
        await self._submit(caller.on_behalf_of(row.tenant, key_id), request, trace, give_up)
        await self._mark(caller, row, REDRIVEN, new_id)
        return new_id

    async def _submit(self, caller: Caller, request: InferenceRequest, trace: str | None, give_up: float) -> None:
        """As every request is submitted; one that stands on its topic already stays the only one."""
        while True:
            try:
                await self._submitter.submit_once(await self._submitter.check(caller, request), trace)
                return
            except IdempotencyKeyReused:  # it was routed elsewhere then
                return
            except TooLarge:
                if request.history is None:
                    raise
                request = replace(request, history=None)
            except PenstockError as error:
                if not error.retryable or time.monotonic() > give_up:
                    raise
                await asyncio.sleep(min(error.retry_after_s or 0.5, 1.0))

    async def _read(self, places: Sequence[LetterPlace]) -> dict[LetterPlace, RawMessage]:
        return await self._threads.run(self._letters.read, places) if places else {}

    def _payload(self, message: RawMessage | None) -> dict[str, Any]:
        """For a thread, as `_asked`: the codec waits for schemas."""
        return payload_json(self._decoded(message), self._codec)

    def _asked(self, message: RawMessage | None) -> tuple[DeadLetter, InferenceRequest]:
        letter = self._decoded(message)
        return letter, request_of(letter, self._codec)

    def _decoded(self, message: RawMessage | None) -> DeadLetter:
        if message is None:
            raise NotFound("this dead letter is not on its topic any more")
        return self._codec.decode(message.value or b"", DeadLetter)

    async def _mark(self, caller: Caller, row: LetterFacts, kind: str, request_id: str | None = None) -> None:
        """Say on the letter's partition what was done with it."""
        action = DeadLetterAction(
            kind=kind, offset=row.offset, request_id=request_id, created_at=now_ms(), created_by=caller.key_id
        )
        await self._transport.produce(
            self._kafka.names.dlq,
            self._codec.encode(action),
            key=None if row.request_id is None else row.request_id.encode(),
            headers=[(HEADER_KIND, kind.encode())],
            partition=row.partition,
        )

    def _trim(self) -> None:
        topic = self._kafka.names.dlq
        firsts = {(topic, partition): offset for partition, offset in self._index.first_offsets().items()}
        try:
            begins = admin.begin_offsets(self._kafka, firsts)
            if ahead := {tp: offset for tp, offset in firsts.items() if offset > begins[tp]}:
                admin.delete_records(self._kafka, ahead)
        except PenstockError as error:  # the gateway may lack the right: retention deletes them
            logger.warning("dead_letters.not_trimmed error=%s", error)


def _absent(place: LetterPlace) -> NotFound:
    return NotFound(f"there is no dead letter {letter_id(place)}")


def _refusal(row: LetterFacts, *, again: bool) -> PenstockError | None:
    if not again and row.redriven_as is not None:
        return Conflict(f"it was run again as {row.redriven_as}")
    if not row.redrivable or row.request_id is None or row.tenant is None:
        return InvalidRequest("this letter holds no valid request; it can be shown and purged")
    return None


def may_read(caller: Caller, tenant: str | None) -> bool:
    """Whether the caller's key allows what the tenant asked to be shown. `admin` alone does not."""
    return caller.key_id is None or ("read" in caller.scopes and caller.tenant == tenant)


def _header(letter: DeadLetter, name: str) -> str | None:
    return letter.original_headers.get(name, b"").decode(errors="replace") or None
