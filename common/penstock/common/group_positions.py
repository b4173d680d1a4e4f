"""A consumer group as the keeper of positions in partitions. It has no members.

A position is kept with the id of its topic: one of a conversation that was deleted and created again counts for
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock.common.kafka_errors import from_kafka
from penstock.schemas.errors import BrokerUnavailable, Conflict
from penstock.schemas.topics import TP

_MEMBERS = frozenset({KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION, KafkaError.REBALANCE_IN_PROGRESS})
COORDINATOR_S = 30.0
"""A broker that has just started makes the topic of positions when it is asked for the first one."""
AGAIN_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """A position that a group has committed for a partition, and the id that its topic had (empty: not known).

    `note`: what else its owner keeps with it, in words without blanks at its ends.
    """

    offset: int
    topic_id: str
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPositions:
    """`consumer` has the group's name as its `group.id`. All methods block.

    They raise BrokerUnavailable, Forbidden, and Conflict when the group has members.
    """

    group: str
    consumer: Consumer
    timeout_s: float

    def read(self, topics: Sequence[str]) -> dict[str, Kept]:
        """The positions that are kept for these topics of one partition."""
        found = self.read_partitions([(topic, 0) for topic in topics])
        return {topic: kept for (topic, _), kept in found.items()}

    def read_partitions(self, partitions: Sequence[TP]) -> dict[TP, Kept]:
        """The positions that are kept for these partitions."""
        if not partitions:
            return {}
        give_up = time.monotonic() + max(self.timeout_s, COORDINATOR_S)
        while True:
            try:
                found = self.consumer.committed([TopicPartition(*tp) for tp in partitions], self.timeout_s)
                break
            except KafkaException as error:
                failure = from_kafka(error, f"read the positions of {self.group}", group=self.group)
                if not isinstance(failure, BrokerUnavailable) or time.monotonic() > give_up:
                    raise failure from error
                time.sleep(AGAIN_S)
        return {(one.topic, one.partition): _kept(one) for one in found if one.error is None and one.offset >= 0}

    def keep(self, positions: Mapping[str, Kept]) -> None:
        """Commit these positions, by topic of one partition. Topics that are gone are passed over."""
        self.keep_partitions({(topic, 0): one for topic, one in positions.items()})

    def keep_partitions(self, positions: Mapping[TP, Kept]) -> None:
        """Commit these positions. Topics that are gone are passed over."""
        due = [TopicPartition(*tp, one.offset, f"{one.topic_id} {one.note}".rstrip()) for tp, one in positions.items()]
        try:
            for one in self.consumer.commit(offsets=due, asynchronous=False) or ():
                if one.error is not None and one.error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise KafkaException(one.error)
        except KafkaException as error:
            if error.args[0].code() in _MEMBERS:
                text = f"the group {self.group} has members: positions need a group of their own"
                raise Conflict(text, param="group") from error
            raise from_kafka(error, f"commit the positions of {self.group}", group=self.group) from error


def _kept(one: TopicPartition) -> Kept:
    topic_id, _, note = (one.metadata or "").partition(" ")
    return Kept(offset=one.offset, topic_id=topic_id, note=note)
