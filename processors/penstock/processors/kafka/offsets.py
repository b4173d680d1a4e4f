"""What the group has committed, read so that unknown never means none.

A coordinator that is away, that is loading or that does not answer is asked again. Only a clear "no offset" counts as
none, and then the start of the log is committed before any work, so that the group never looks new again.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

from penstock.common.kafka_errors import missing_right
from penstock.processors.kafka.batches import TP, Committed

logger = logging.getLogger(__name__)

ASK_S = 10.0
AGAIN_S = 0.5

FENCED = frozenset(
    (
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError.GROUP_ID_NOT_FOUND,  # a broker that lost its newest records, with the group among them
    )
)
"""Answers that say that this generation is over for this member: another assignment will come."""

Wait = Callable[[float, str], bool]
"""Waits so many seconds, for this reason; True when there is no point in going on."""


def group_identity(kafka: Any) -> tuple[int, str]:
    """The generation and this member's id, as the coordinator gave them. -1 while it is no member."""
    group: bytes = kafka.consumer_group_metadata() or b""
    known = group.startswith(b"CGMDv2:")
    return (struct.unpack_from("<i", group, 7)[0] if known else -1), kafka.memberid() or ""


def committed_or_start(kafka: Any, tps: Sequence[TP], wait: Wait) -> dict[TP, Committed] | None:
    """The committed offset and metadata of each partition; the start of the log, then committed, where there is none.

    Returns None when `wait` ends it, or when the broker says that this generation is over.
    """
    if not tps:
        return {}
    committed = _ask("committed offsets", wait, lambda: kafka.committed([TopicPartition(*tp) for tp in tps], ASK_S))
    if committed is None:
        return None
    known = {(p.topic, p.partition): (p.offset, p.metadata or "") for p in committed if p.offset >= 0}
    without = [tp for tp in tps if tp not in known]
    if not without:
        return known
    starts = _ask("first offsets", wait, lambda: _first_offsets(kafka, without))
    if starts is None:
        return None
    begun: dict[TP, Committed] = {(p.topic, p.partition): (p.offset, "") for p in starts}
    if not commit_until_taken(kafka, begun, wait):
        return None
    logger.info("group.start_offsets committed=%d", len(starts))
    return known | begun


def _first_offsets(kafka: Any, tps: Sequence[TP]) -> list[TopicPartition]:
    positions = kafka.offsets_for_times([TopicPartition(*tp, OFFSET_BEGINNING) for tp in tps], ASK_S)
    if any(p.offset < 0 and p.error is None for p in positions):
        raise KafkaException(KafkaError(KafkaError._NO_OFFSET))  # pyright: ignore[reportPrivateUsage]
    return positions


def _ask(what: str, wait: Wait, question: Callable[[], list[TopicPartition]]) -> list[TopicPartition] | None:
    """Ask until the broker answers for every partition. An offset without error and below 0 means "no offset"."""
    while True:
        try:
            answer = question()
            error = next((p.error for p in answer if p.error is not None), None)
            strange = [p for p in answer if p.error is None and p.offset < 0 and p.offset != OFFSET_INVALID]
            if error is None and not strange:
                return answer
            reason = error.str() if error is not None else str(strange)
        except KafkaException as failure:
            reason = failure.args[0].str()
        if wait(AGAIN_S, f"{what} are unknown: {reason}"):
            return None


def commit_until_taken(kafka: Any, offsets: Mapping[TP, Committed], wait: Wait) -> bool:
    """Commit where work begins, again and again if need be; False when this generation is over."""
    while True:
        results, error = commit_now(kafka, offsets)
        if all(results.values()):
            return True
        if error is not None and error.code() in FENCED:
            logger.warning("group.start_offsets_refused error=%s: waiting for the next assignment", error)
            return False
        reason = "not taken" if error is None else _refusal(kafka, offsets, error)
        if wait(AGAIN_S, f"the first offsets cannot be committed: {reason}"):
            return False


def _refusal(kafka: Any, offsets: Mapping[TP, Committed], error: KafkaError) -> str:
    """Why a commit was not taken. Which topic is refused only a commit of its own shows."""
    if error.code() != KafkaError.TOPIC_AUTHORIZATION_FAILED:
        return error.str()
    topics = sorted({topic for topic, _ in offsets})
    own = {topic: {tp: offset for tp, offset in offsets.items() if tp[0] == topic} for topic in topics}
    refused = [topic for topic in topics if not all(commit_now(kafka, own[topic])[0].values())]
    return missing_right(error, None, ", ".join(refused)) or error.str()


def commit_now(kafka: Any, offsets: Mapping[TP, Committed]) -> tuple[dict[TP, bool], KafkaError | None]:
    """Commit and wait for the answer: what the broker took, and an error of what it did not take."""
    try:
        answer = kafka.commit(offsets=as_partitions(offsets), asynchronous=False)
    except KafkaException as failure:
        return dict.fromkeys(offsets, False), failure.args[0]
    return commit_results(offsets, None, answer), next((p.error for p in answer if p.error is not None), None)


def as_partitions(offsets: Mapping[TP, Committed]) -> list[TopicPartition]:
    return [TopicPartition(*tp, offset, metadata) for tp, (offset, metadata) in offsets.items()]


def commit_results(
    offsets: Mapping[TP, Committed], error: KafkaError | None, answer: Sequence[TopicPartition] | None
) -> dict[TP, bool]:
    """What the broker surely took of a commit. librdkafka gives one partition's error to all partitions of a commit."""
    if error is not None:
        return dict.fromkeys(offsets, False)
    taken = {(p.topic, p.partition) for p in answer or () if p.error is None}
    return {tp: tp in taken for tp in offsets}
