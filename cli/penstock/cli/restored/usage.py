"""Totals of usage, which name offsets of the result topic. A mirror has other offsets, and another topic id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from penstock.schemas.records import UsageShare, UsageTotal

Place = tuple[int, int]
"""Offset and timestamp (ms) of an outcome's record."""


def moved(
    totals: Iterable[UsageTotal], topic_id: str, outcomes: Mapping[int, Sequence[Place]], now_ms: int
) -> list[UsageTotal]:
    """The totals to write again, with offsets of this result topic: those of another one. Pure.

    `outcomes`: by partition, in the order of the log. An outcome counts as counted up to the time of the last one.
    """

    def share(one: UsageShare) -> UsageShare:
        if one.partition < 0:
            return one
        places = outcomes.get(one.partition, ())
        first = next((offset for offset, at_ms in places if at_ms > one.last_at), None)
        return replace(one, through=first if first is not None else places[-1][0] + 1 if places else 0)

    return [
        replace(one, topic_id=topic_id, updated_at=now_ms, shares=[share(each) for each in one.shares])
        for one in totals
        if one.topic_id != topic_id
    ]
