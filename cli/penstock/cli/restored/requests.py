"""Which records of the request topics still have to run, and where the workers' group begins. Pure.

In a mirrored topic a record has another offset than before. Readers that have seen events of its request follow the
old origin and ignore what a worker publishes under the new one. So such a record is appended again with the header
`penstock-origin`, and with it, in their order, all unfinished records of its partition: turns of a conversation keep
theirs. Elsewhere a done map says which records have ended.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from penstock.cli.restored.outcomes import Key, Outcomes
from penstock.processors.core.commit import donemap
from penstock.processors.core.intake.arrivals import Poison, Taken
from penstock.processors.kafka.batches import Committed
from penstock.schemas.fold import same_origin
from penstock.schemas.origins import origin_header
from penstock.schemas.records import Origin
from penstock.schemas.topics import HORIZON_MS, TP

LONG_AFTER_MS = 2 * HORIZON_MS


@dataclass(frozen=True, kw_only=True, slots=True)
class PartitionPlan:
    """What is to be done with one partition."""

    tp: TP
    commit: Committed
    again: Mapping[int, Origin] = field(default_factory=dict[int, Origin])
    """By offset, in their order: records to append again under these origins, before the commit."""
    unfinished: int
    presumed_ended: int = 0
    """Records that have no outcome and count as ended."""


@dataclass(frozen=True, slots=True)
class _Unfinished:
    tp: TP
    offset: int
    turn: int
    """What orders the requests of a partition: the offset of its first record there."""
    origin: Origin
    """What a worker would publish under."""
    followed: Origin | None


class RequestLogs:
    """Takes all records of the request topics, in order within each partition."""

    def __init__(self, outcomes: Outcomes, committed: Mapping[TP, Committed], now_ms: int) -> None:
        self._outcomes, self._now_ms = outcomes, now_ms
        self._committed = {tp: _Done(*commit) for tp, commit in committed.items()}
        self._unfinished: dict[Key, _Unfinished] = {}
        self._presumed_ended: Counter[TP] = Counter()

    def take(self, tp: TP, offset: int, read: Taken | Poison, *, is_moved: bool) -> None:
        """Take the next record as a worker would read it. `is_moved`: it has the header `penstock-origin`.

        Of several records of one request counts the newest that was moved by a worker or by an earlier call, else the
        first.
        """
        key = (read.tenant or "default", read.request_id) if isinstance(read, Poison) else _key_of(read)
        if key[1] is not None and (ended_ms := self._outcomes.ended_ms((key[0], key[1]))) is not None:
            if read.origin.append_time_ms < ended_ms + HORIZON_MS:  # later the id names another request
                return
        elif self._counts_as_ended(key, read, self._was_done(tp, offset)):
            self._presumed_ended[tp] += 1
            return
        followed = None if key[1] is None else self._outcomes.followed((key[0], key[1]))
        # What has no id is known by its origin.
        known_as = (key[0], key[1] or origin_header(read.origin)[1].decode())
        before = self._unfinished.get(known_as)
        if before is None or is_moved:
            turn = offset if before is None or before.tp != tp else before.turn
            self._unfinished[known_as] = _Unfinished(tp, offset, turn, read.origin, followed)

    def plans(self, ends: Mapping[TP, int]) -> Iterator[PartitionPlan]:
        """One for each partition. `ends`: where the logs end that were read."""
        unfinished: dict[TP, list[_Unfinished]] = {tp: [] for tp in ends}
        for one in self._unfinished.values():
            unfinished[one.tp].append(one)
        for tp, found in unfinished.items():
            found.sort(key=lambda one: one.turn)
            yield replace(_plan(tp, found, ends[tp]), presumed_ended=self._presumed_ended[tp])

    def _was_done(self, tp: TP, offset: int) -> bool:
        return tp in self._committed and self._committed[tp].holds(offset)

    def _counts_as_ended(self, key: tuple[str, str | None], read: Taken | Poison, was_done: bool) -> bool:
        """Whether a record without an outcome has had one, as far as can be known.

        Before its deadline the outcome is missing from the copy, and the request runs again. Later retention may have
        deleted it: it has if the record was committed, or is older than all results. Long after its deadline nobody
        waits for it.
        """
        if isinstance(read, Poison) or key[1] is None or read.deadline_ms is None:
            return was_done
        late_ms = self._now_ms - read.deadline_ms
        oldest_ms = self._outcomes.oldest_ms
        is_older = oldest_ms is not None and read.origin.append_time_ms < oldest_ms
        is_unseen = self._outcomes.followed((key[0], key[1])) is None
        return late_ms >= 0 and (was_done or (is_older and is_unseen) or late_ms >= LONG_AFTER_MS)


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
    """`unfinished` in their order; an earlier call that was interrupted can have left another one in the log."""
    offsets = [one.offset for one in unfinished]
    has_old_origin = any(one.followed is not None and not same_origin(one.followed, one.origin) for one in unfinished)
    if has_old_origin or offsets != sorted(offsets):
        again = {one.offset: one.followed or one.origin for one in unfinished}
        return PartitionPlan(tp=tp, commit=(end, ""), again=again, unfinished=len(unfinished))
    first = offsets[0] if offsets else end
    done = donemap.encode(first, [(one + 1, behind) for one, behind in pairwise([*offsets, end])])
    return PartitionPlan(tp=tp, commit=(first, done), unfinished=len(unfinished))
