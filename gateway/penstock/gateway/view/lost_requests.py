"""Which requests nobody will end: they must end by now, and no delivery will bring their record. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import NamedTuple

from penstock.gateway.view.entries import Entry
from penstock.schemas.records import ControlCommand, Origin, Place, WorkerState
from penstock.schemas.topics import TP

GRACE_MS = 3_000
"""Workers end by themselves what they hold and what is delivered to them: so long they have for that."""
PASSED_OVER_MS = 60_000
"""So long after its end was due, a request whose record is on its log was passed over: its worker began behind it.

It may also run for as long as this. Its worker ignores the question then, which is asked as seldom.
"""
ASK_AGAIN_MS = 10_000
"""The worker that owns the partition may just be starting, or may hold the request."""


class Overdue(NamedTuple):
    """A request that must end by now: it was cancelled, or its deadline has passed."""

    entry: Entry
    origin: Origin
    """The origin that its readers follow."""
    place: Place
    """Where its record stood last."""

    @property
    def tp(self) -> TP:
        return (self.place.topic, self.place.partition)


def overdue(entries: Iterable[Entry], owned: Collection[TP], now_ms: int) -> Iterator[Overdue]:
    """Those that must end, whose end was not asked for lately, and whose partition has an owner who could end them."""
    for entry in entries:
        if entry.done or entry.erased or now_ms < entry.end_asked_ms + ASK_AGAIN_MS:
            continue
        origin = entry.first_record
        if origin is None or now_ms < entry.must_end_ms + GRACE_MS:
            continue
        place = entry.moved_to or Place(topic=origin.topic, partition=origin.partition, offset=origin.offset)
        if (place.topic, place.partition) in owned:
            yield Overdue(entry, origin, place)


def gone(found: Iterable[Overdue], starts: Mapping[TP, int], ends: Mapping[TP, int]) -> list[Overdue]:
    """Those whose record is below the start of its partition's log, or beyond its end."""
    return [one for one in found if not starts.get(one.tp, 0) <= one.place.offset < ends.get(one.tp, 1 << 63)]


def passed_over(found: Iterable[Overdue], now_ms: int) -> list[Overdue]:
    """Those whose end was due long ago.

    Their log has lost its end and has grown again, or somebody has moved the group's offsets on, or their record was
    deleted from the middle of the log. The last status does not help: a live worker that said *running* may have lost
    the partition since, and has dropped the request then.
    """
    return [one for one in found if now_ms >= max(one.entry.must_end_ms, one.entry.end_asked_ms) + PASSED_OVER_MS]


def end_command(lost: Overdue, now_ms: int) -> ControlCommand:
    """What asks the owner of its partition for its end."""
    entry = lost.entry
    return ControlCommand(
        kind="end_lost",
        request_id=entry.request_id,
        tenant=entry.tenant,
        created_at=now_ms,
        created_by="gateway",
        conversation_id=entry.conversation_id,
        origin=lost.origin,
        place=lost.place,
        task=entry.task or None,
    )


def owned_partitions(workers: Iterable[WorkerState]) -> frozenset[TP]:
    """The partitions of request topics that these workers have said are theirs."""
    named = (text.rpartition("/") for worker in workers for text in worker.assigned)
    return frozenset((topic, int(number)) for topic, _, number in named if topic and number.isdecimal())
