"""What `penstock doctor` sees of topics that were restored and not reconciled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.cli.config import load
from penstock.cli.live_checks import PROBE_S, Check
from penstock.cli.restored.group import GROUP, WorkerGroupSettings
from penstock.common import admin
from penstock.common.group_names import group_name, has_offsets
from penstock.common.reader import read_to_end
from penstock.common.settings import KafkaSettings
from penstock.schemas.codec import Codec
from penstock.schemas.errors import DecodeError
from penstock.schemas.records import ResultEvent

CURE = "stop all workers, run `penstock topics reconcile`, then start them"
NEWEST = 200
"""Events that are read of each partition."""
ZOMBIE_MS = 60_000
"""For so long a worker that has lost its partitions may publish under its old epoch."""


class Told(NamedTuple):
    """When a worker published an event, in ms, and under which epoch."""

    at_ms: int
    epoch: int


def restore_checks(kafka: KafkaSettings, codec: Codec) -> Iterator[Check]:
    """Whether the workers' group is in line with the result topic."""
    names = kafka.names
    counts = admin.known_topics(kafka, PROBE_S)
    results = [(names.result, number) for number in range(counts[names.result])]
    firsts, ends = admin.begin_offsets(kafka, results, PROBE_S), admin.end_offsets(kafka, results, PROBE_S)
    if not any(ends[tp] > firsts[tp] for tp in results):
        return
    requests = [topic for topic in counts if names.is_request_topic(topic)]
    group = group_name(kafka, load(WorkerGroupSettings).worker.group_id, GROUP, requests)
    if not has_offsets(kafka, group, [(topic, number) for topic in requests for number in range(counts[topic])]):
        detail = f"there are results, and the group {group} has no offsets: were the topics restored or mirrored?"
        yield Check.fail("restored", detail, CURE)
    elif begins_again(_newest(kafka, codec, {tp: max(firsts[tp], ends[tp] - NEWEST) for tp in results})):
        detail = f"the generation of the group {group} has begun again: streams that had begun before do not end"
        yield Check.fail("restored", detail, CURE)


def begins_again(told: Iterable[Told]) -> bool:
    """Whether workers publish under a lower epoch than before, for longer than one of before can. Pure."""
    by_time = sorted(told)
    highest = max((one.epoch for one in by_time), default=0)
    last_ms = max((one.at_ms for one in by_time if one.epoch == highest), default=0)
    return bool(by_time) and by_time[-1].at_ms > last_ms + ZOMBIE_MS


def _newest(kafka: KafkaSettings, codec: Codec, begin: dict[tuple[str, int], int]) -> Iterator[Told]:
    head = codec.head(ResultEvent, "created_at", "epoch")
    for (topic, number), offset in begin.items():
        for one in read_to_end(kafka, topic, offset, partition=number, deadline_s=PROBE_S):
            try:
                yield Told(*head(one.value or b"")[:2])
            except DecodeError:
                continue
