"""What `penstock doctor` sees of topics that were restored and not reconciled."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from penstock.cli.config import load
from penstock.cli.live_checks import PROBE_S, Check
from penstock.cli.restored.group import GROUP, WorkerGroupSettings
from penstock.common import admin
from penstock.common.group_names import group_name, has_offsets
from penstock.common.reader import read_ranges
from penstock.common.settings import KafkaSettings
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable, DecodeError
from penstock.schemas.records import Origin, ResultEvent
from penstock.schemas.topics import TP

CURE = "stop all workers, gateways and producers, run `penstock topics reconcile`, then start them"
NEWEST = 20
"""Events that are read of each partition."""
READ_S = PROBE_S / 2
ZOMBIE_MS = 60_000
"""For so long a worker that has lost its partitions may publish under its old epoch."""


class Told(NamedTuple):
    """An event of the result topic."""

    at_ms: int
    """When a worker published it."""
    epoch: int
    asked_ms: int
    """When its request was appended."""


def restore_checks(kafka: KafkaSettings, codec: Codec) -> Iterator[Check]:
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
        return
    try:
        told = _newest(kafka, codec, {tp: (max(firsts[tp], ends[tp] - NEWEST), ends[tp]) for tp in results})
    except BrokerUnavailable as error:
        yield Check.warn("restored", f"the newest results were not compared: {error}", "run `penstock doctor` again")
        return
    if begins_again(told):
        detail = f"the generation of the group {group} has begun again: streams that had begun before do not end"
        yield Check.fail("restored", detail, CURE)


def begins_again(told: Iterable[Told]) -> bool:
    """Whether a request that came after the last event of the highest epoch ran under a lower one. Pure.

    A run keeps its epoch over later rebalances: events of a request that came before are no sign.
    """
    found = list(told)
    highest = max((one.epoch for one in found), default=0)
    last_ms = max((one.at_ms for one in found if one.epoch == highest), default=0)
    return any(one.epoch < highest and one.asked_ms > last_ms + ZOMBIE_MS for one in found)


def _newest(kafka: KafkaSettings, codec: Codec, ranges: Mapping[TP, tuple[int, int]]) -> list[Told]:
    """Raises BrokerUnavailable."""
    head = codec.head(ResultEvent, "created_at", "epoch", "origin")
    told: list[Told] = []
    for one in read_ranges(kafka, ranges, time.monotonic() + READ_S):
        try:
            at_ms, epoch, origin, _ = head(one.value or b"")
        except DecodeError:
            continue
        told.append(Told(at_ms, epoch, Origin(**origin).append_time_ms))
    return told
