"""Logs that do not hold the group's offset any more: where reading goes on. It is said, counted and committed.

A broker can lose the end of a log: a failed disk, an older backup, an unclean election. Retention can delete records
that nobody has read. librdkafka must not go on somewhere else by itself, so it is set to report a refused position.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaException, TopicPartition

from penstock.processors.core.commit import donemap
from penstock.processors.kafka.batches import TP, Committed
from penstock.processors.kafka.offsets import Wait, commit_until_taken

logger = logging.getLogger(__name__)

ASK_S = 5.0

OnLostLog = Literal["beginning", "end"]
"""Where reading goes on in a log that is shorter than the group's commit."""


class Extent(NamedTuple):
    """The offsets that a log holds: from `first` to `end`, `end` excluded."""

    first: int
    end: int


def reach_of(committed: Committed) -> int:
    """The end that the log had at least when this was committed: the done map names offsets above the committed one."""
    offset, done_map = committed
    done = donemap.decode(offset, done_map)
    return done[-1][1] if done else offset


def start_in(committed: int, extent: Extent, choice: OnLostLog) -> int:
    """Where reading begins in a log that has lost its end."""
    return extent.first if choice == "beginning" else max(extent.first, min(committed, extent.end))


def extents(kafka: Any, tps: Sequence[TP]) -> dict[TP, Extent]:
    """What the logs hold, of those whose leaders answer."""
    firsts = _offsets_at(kafka, tps, OFFSET_BEGINNING)
    ends = _offsets_at(kafka, tps, OFFSET_END)
    return {tp: Extent(firsts[tp], ends[tp]) for tp in tps if tp in firsts and tp in ends}


def _offsets_at(kafka: Any, tps: Sequence[TP], where: int) -> dict[TP, int]:
    if not tps:
        return {}
    try:
        answer = kafka.offsets_for_times([TopicPartition(*tp, where) for tp in tps], ASK_S)
    except KafkaException as error:
        logger.info("group.extents_unknown partitions=%d error=%s", len(tps), error)
        return {}
    return {(p.topic, p.partition): p.offset for p in answer if p.error is None and p.offset >= 0}


class LostLogs:
    """Decides by `choice`, and counts each partition with `count(reason)`. Belongs to the thread of the consumer."""

    def __init__(self, choice: OnLostLog = "beginning", count: Callable[[str], None] = lambda reason: None) -> None:
        self._choice: OnLostLog = choice
        self._count = count
        self._refused: dict[TP, Committed | None] = {}
        """What the group had committed where a position was refused and reading has not begun again yet."""
        self._read: dict[TP, tuple[int, Collection[Committed]]] = {}
        """Up to where this consumer has read logs that were taken from it, and what it may have committed then."""

    def has_read(self, tp: TP, end: int, committed: Collection[Committed]) -> None:
        """A partition is taken from this consumer, which has read its log up to `end`, and may have `committed`.

        If it gets the partition back it may go on with work on records that it has read, and not committed. That may be
        work of an assignment before this one, of which this one has not read the records again.
        """
        before, _ = self._read.get(tp, (0, ()))
        self._read[tp] = max(end, before), committed

    def position_refused(self, tp: TP, committed: Committed | None) -> None:
        """The log did not hold what this consumer has read. Remembered until an assignment or `begin_again` mends it.

        `committed` is None when the partition had been taken from it before that was heard: what `has_read` was given
        counts then.

        The log may grow beyond the commit before this member has its partition again, and looks whole then.
        """
        self._refused[tp] = committed

    def at_assignment(self, kafka: Any, committed: Mapping[TP, Committed], wait: Wait) -> Mapping[TP, Committed] | None:
        """The committed offsets, lowered where a log is too short for them.

        Returns None when this generation is over. A leader that does not answer is not waited for: a position that its
        log does not hold is reported when it is fetched. `unmended` names the logs of which that is not enough.
        """
        ends = _offsets_at(kafka, list(committed), OFFSET_END)
        grown = self.unmended(committed)
        reach = {tp: self._reach(tp, committed[tp]) for tp in ends}
        short = [tp for tp, end in ends.items() if end < reach[tp] or tp in grown]
        found = extents(kafka, short)
        cut = {
            tp: extent
            for tp, extent in found.items()
            if extent.end < reach[tp] or (tp in grown and extent.first <= committed[tp][0])
        }
        unknown = grown - found.keys()
        for tp in ends:
            if tp not in cut and tp not in unknown:
                self._refused.pop(tp, None)
                if committed[tp] not in self._read.get(tp, (0, ()))[1]:
                    self._read.pop(tp, None)  # others have committed since: what was read here is theirs, or gone
        if not cut:
            return committed
        lowered = self.begin_again(kafka, {tp: committed[tp] for tp in cut}, cut, wait)
        return None if lowered is None else {**committed, **lowered}

    def unmended(self, committed: Mapping[TP, Committed]) -> set[TP]:
        """Logs that did not hold what this consumer has read, where nobody has begun again since.

        They may have grown beyond the commit. Nothing is fetched of them before their extents are known.
        """
        # Where the commit is another one now, the member that had the partition meanwhile has begun again.
        return {
            tp
            for tp, known in self._refused.items()
            if tp in committed and (committed[tp] == known or committed[tp] in self._read.get(tp, (0, ()))[1])
        }

    def _reach(self, tp: TP, committed: Committed) -> int:
        """The end that the log had at least: by the commit, or by what was read here if nobody committed since."""
        end, possible = self._read.get(tp, (0, ()))
        return max(reach_of(committed), end if committed in possible else 0)

    def _forget(self, tp: TP) -> None:
        self._refused.pop(tp, None)
        self._read.pop(tp, None)

    def begin_again(
        self, kafka: Any, committed: Mapping[TP, Committed], cut: Mapping[TP, Extent], wait: Wait
    ) -> dict[TP, Committed] | None:
        """Commit where reading begins in logs that have lost their ends, without a done map. None: not committed.

        The done map names records that are gone. Once the lower offset is committed, no later assignment finds this
        loss again.
        """
        lowered = {tp: (start_in(committed[tp][0], found, self._choice), "") for tp, found in cut.items()}
        if not commit_until_taken(kafka, lowered, wait):
            return None
        for tp, (start, _) in lowered.items():
            self._forget(tp)
            self._count("log_truncated")
            logger.error(
                "group.log_truncated topic=%s partition=%d committed=%d log_end=%d begins=%d on_lost_log=%s: the broker"
                " has lost the end of this log",
                *tp,
                committed[tp][0],
                cut[tp].end,
                start,
                self._choice,
            )
        return lowered

    def records_deleted(self, tp: TP, position: int, first: int) -> None:
        """Retention has deleted records that were not read; reading goes on at the first one that is there."""
        self._forget(tp)
        self._count("records_deleted")
        logger.error(
            "group.records_deleted topic=%s partition=%d position=%d begins=%d: records were deleted before they"
            " were read",
            *tp,
            position,
            first,
        )
