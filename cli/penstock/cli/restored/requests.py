"""Which records of the request topics still have to run, and where the workers' group begins. Pure.

In a mirrored topic a record has another offset than before. Readers that have seen events of its request follow the
old origin and ignore what a worker publishes under the new one. So such a record is appended again with the header
`penstock-origin`, and with it, in their order, all unfinished records of its partition: turns of a conversation keep
theirs. Elsewhere a done map says which records have ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.cli.restored.outcomes import Key, Outcomes
from penstock.processors.core.commit import donemap
from penstock.processors.core.requests.arrivals import Poison, Taken
from penstock.processors.kafka.batches import Committed
from penstock.schemas.fold import same_origin
from penstock.schemas.records import Origin
from penstock.schemas.topics import HORIZON_MS, TP


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionPlan:
    """What is to be done with one partition."""

    tp: TP
    commit: Committed
    again: Mapping[int, Origin] = field(default_factory=dict[int, Origin])
    """By offset: records to append again under these origins, before the commit."""
    unfinished: int


@dataclass(frozen=True, slots=True)
class _Unfinished:
    tp: TP
    offset: int
    origin: Origin
    """What a worker would publish under."""
    followed: Origin | None


class RequestLogs:
    """Takes all records of the request topics, in order within each partition."""

    def __init__(self, outcomes: Outcomes, committed: Mapping[TP, Committed], now_ms: int) -> None:
        self._outcomes, self._now_ms = outcomes, now_ms
        self._committed = {tp: _Done(*commit) for tp, commit in committed.items()}
        self._named: dict[Key, _Unfinished] = {}
        self._nameless: list[_Unfinished] = []

    def take(self, tp: TP, offset: int, read: Taken | Poison, *, is_moved: bool) -> None:
        """Take the next record as a worker would read it. `is_moved`: it has the header `penstock-origin`.

        Of several records of one request counts the newest that was moved by a worker or by an earlier call, else the
        first.
        """
        key = (read.tenant or "default", read.request_id) if isinstance(read, Poison) else _key_of(read)
        if self._has_ended(key, read, self._was_done(tp, offset)):
            return
        followed = None if key[1] is None else self._outcomes.followed((key[0], key[1]))
        one = _Unfinished(tp, offset, read.origin, followed)
        if key[1] is None:
            self._nameless.append(one)
        elif (key[0], key[1]) not in self._named or is_moved:
            self._named[key[0], key[1]] = one

    def plans(self, ends: Mapping[TP, int]) -> Iterator[PartitionPlan]:
        """One for each partition. `ends`: where the logs end that were read."""
        unfinished: dict[TP, list[_Unfinished]] = {tp: [] for tp in ends}
        for one in (*self._named.values(), *self._nameless):
            unfinished[one.tp].append(one)
        for tp, found in unfinished.items():
            found.sort(key=lambda one: one.offset)
            yield _plan(tp, found, ends[tp])

    def _was_done(self, tp: TP, offset: int) -> bool:
        return tp in self._committed and self._committed[tp].holds(offset)

    def _has_ended(self, key: tuple[str, str | None], read: Taken | Poison, was_done: bool) -> bool:
        """Without an outcome, what was committed counts as ended once its deadline has passed.

        Before that the outcome is missing from the copy, and the request runs again.
        """
        if key[1] is None:
            return was_done
        ended_ms = self._outcomes.ended_ms((key[0], key[1]))
        if ended_ms is not None:
            return read.origin.append_time_ms < ended_ms + HORIZON_MS  # later the id names another request
        deadline_ms = None if isinstance(read, Poison) else read.deadline_ms
        return was_done and (deadline_ms is None or deadline_ms <= self._now_ms)


class _Done:
    """What a commit names as done."""

    def __init__(self, offset: int, done_map: str) -> None:
        self._offset, self._flags = offset, donemap.decode_flags(offset, done_map)

    def holds(self, offset: int) -> bool:
        at = offset - self._offset
        return at < 0 or (at < len(self._flags) and self._flags[at] == 1)


def _key_of(read: Taken) -> tuple[str, str | None]:
    return read.request.tenant, read.request.request_id


def _plan(tp: TP, unfinished: list[_Unfinished], end: int) -> PartitionPlan:
    if any(one.followed is not None and not same_origin(one.followed, one.origin) for one in unfinished):
        again = {one.offset: one.followed or one.origin for one in unfinished}
        return PartitionPlan(tp=tp, commit=(end, ""), again=again, unfinished=len(unfinished))
    first = unfinished[0].offset if unfinished else end
    offsets = [one.offset for one in unfinished]
    done = donemap.encode(first, [(one + 1, behind) for one, behind in pairwise([*offsets, end])])
    return PartitionPlan(tp=tp, commit=(first, done), unfinished=len(unfinished))
