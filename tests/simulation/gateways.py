"""A gateway: it follows requests, commands and events, and asks for the ends of those whose records are gone.

The product's own entries and rules; what is around them in a gateway is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from penstock.gateway.view import lost_requests
from penstock.gateway.view.entries import Entry
from penstock.gateway.view.lost_requests import Overdue
from penstock.processors.core.intake.arrivals import Poison
from penstock.schemas.records import ControlCommand, Origin, Place, ResultEvent, StatusEvent
from simulation.log import TP, Stored
from simulation.truth import Subject

if TYPE_CHECKING:
    from simulation.cluster import Cluster

LOOK_S = 3.0


class Gateway:
    """Sees each record as it is appended."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._live: dict[Subject, Entry] = {}
        self._ended: set[Subject] = set()
        self._results = 0
        cluster.world.at(LOOK_S, None, "the gateway looks for lost requests", self._look)

    # -- what it follows

    def _entry(self, subject: Subject) -> Entry | None:
        if subject in self._ended:
            return None
        return self._live.setdefault(subject, Entry(*subject, 0))

    def request(self, tp: TP, stored: Stored) -> None:
        read = self._cluster.intake.read(tp[0], tp[1], stored.offset, stored.append_ms, stored.headers, stored.value)
        if isinstance(read, Poison) or (entry := self._entry((read.request.tenant, read.request.request_id))) is None:
            return
        origin = read.origin
        if (origin.topic, origin.partition, origin.offset) == (*tp, stored.offset):
            entry.on_request(read.request, origin)
        else:
            entry.moved_to = Place(topic=tp[0], partition=tp[1], offset=stored.offset)

    def status(self, event: StatusEvent) -> None:
        if (entry := self._entry((event.tenant, event.request_id))) is not None:
            entry.on_status(event, listened=False)

    def result(self, event: ResultEvent) -> None:
        subject = (event.tenant, event.request_id)
        if (entry := self._entry(subject)) is None:
            return
        self._results += 1
        entry.on_result(event, self._results)
        if entry.done:
            self._ended.add(subject)
            del self._live[subject]

    def commanded(self, command: ControlCommand) -> None:
        entry = self._live.get((command.tenant, command.request_id))
        if entry is None:
            return
        if command.kind == "end_lost":
            entry.end_asked_ms = self._cluster.world.wall_ms
        elif command.kind == "cancel" and not entry.cancelled_ms:
            entry.cancelled_ms = self._cluster.world.wall_ms
        elif command.kind == "erase":
            entry.erased = True

    # -- what it does

    def _look(self) -> None:
        world, group = self._cluster.world, self._cluster.log.group
        world.at(LOOK_S, None, "the gateway looks for lost requests", self._look)
        owned = {tp for member in group.members.values() for tp in member.assigned}
        found = list(lost_requests.overdue(list(self._live.values()), owned, world.wall_ms))
        gone = self._gone(found)
        passed_over = lost_requests.passed_over(found, world.wall_ms)
        for lost in [*gone, *(one for one in passed_over if one.entry not in {other.entry for other in gone})]:
            self._cluster.command(lost_requests.end_command(lost, world.wall_ms))

    def _gone(self, found: Iterable[Overdue]) -> list[Overdue]:
        logs = self._cluster.log.partitions
        starts = {tp: log.start for tp, log in logs.items()}
        return lost_requests.gone(found, starts, {tp: log.end for tp, log in logs.items()})

    def left(self) -> list[Entry]:
        """Those that must end by now, which no delivery may bring: their record is gone, or may be passed over.

        Not while a worker holds another request at that place, where the log was cut: it is asked again when that ends.
        """
        held = {work.key for life in self._cluster.lives() for work in life.inside.works()}
        return [one for one in self._lost() if one.cancelled_ms and _key_of(one) not in held]

    def _lost(self) -> list[Entry]:
        lost = [one.entry for one in self._gone(self._without_outcome())]
        truth = self._cluster.truth
        passed_over = [one for subject, one in self._live.items() if subject in truth.passed_over and not one.erased]
        return lost + [one for one in passed_over if one not in lost and one.first_record is not None]

    def _without_outcome(self) -> list[Overdue]:
        found: list[Overdue] = []
        for entry in self._live.values():
            origin = entry.first_record
            if origin is not None and not entry.erased:
                found.append(Overdue(entry, origin, entry.moved_to or _place_of(origin)))
        return found

    def calm(self) -> None:
        """All faults are over: who waits for one that is lost cancels it. Its own deadline may be hours away."""
        for entry in self._lost():
            self._cluster.command(
                ControlCommand(
                    kind="cancel",
                    request_id=entry.request_id,
                    tenant=entry.tenant,
                    created_at=self._cluster.world.wall_ms,
                )
            )


def _key_of(entry: Entry) -> tuple[str, int, int]:
    place = entry.moved_to or entry.first_record
    assert place is not None
    return place.topic, place.partition, place.offset


def _place_of(origin: Origin) -> Place:
    return Place(topic=origin.topic, partition=origin.partition, offset=origin.offset)
