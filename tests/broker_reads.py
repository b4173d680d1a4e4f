"""What tests read of a broker again and again while they wait, by clients that stay connected.

A client that is made for each look costs 60 ms, in which what is waited for stands already.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

TP = tuple[str, int]
T = TypeVar("T")

OF_A_KEPT_CLIENT_S = 5.0
"""One that has not answered by then is replaced: after a broker's restart it can be refused for minutes."""


class BrokerReads:
    """`close` lets the clients go; they come anew with the next look."""

    def __init__(self, bootstrap: str) -> None:
        self._config = {
            "bootstrap.servers": bootstrap,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 200,
        }
        self._consumers: dict[str, Consumer] = {}
        self._admin: AdminClient | None = None
        self._one_at_a_time = threading.RLock()

    def close(self) -> None:
        with self._one_at_a_time:
            for consumer in self._consumers.values():
                consumer.close()
            self._consumers.clear()
            self._admin = None

    def records(self, topic: str, deadline_s: float) -> list[Message]:
        """All records of a topic, from its start to the end it has now."""
        return self._ask(lambda left_s: self._records(topic, left_s), deadline_s)

    def topics(self, deadline_s: float = 60) -> list[str]:
        """The names of all topics."""
        return self._ask(lambda left_s: sorted(self._consumer("reader").list_topics(timeout=left_s).topics), deadline_s)

    def committed(self, group: str, topics: Iterable[str], deadline_s: float = 60) -> dict[TP, int]:
        """The offsets that the group has committed."""
        wanted = list(topics)
        return self._ask(lambda left_s: self._committed(group, wanted, left_s), deadline_s)

    def ends(self, topics: Iterable[str], deadline_s: float = 60) -> dict[TP, int]:
        """The offsets behind the last records."""
        wanted = list(topics)
        return self._ask(lambda left_s: self._ends(wanted, left_s), deadline_s)

    def _ask(self, ask: Callable[[float], T], deadline_s: float) -> T:
        """The answer; asked again, by new clients, while a leader or a coordinator starts, moves or stands still."""
        give_up = time.monotonic() + deadline_s
        while True:
            left_s = give_up - time.monotonic()
            try:
                with self._one_at_a_time:
                    return ask(min(left_s, OF_A_KEPT_CLIENT_S) if self._consumers or self._admin else left_s)
            except (KafkaException, TimeoutError) as error:
                if time.monotonic() > give_up:
                    raise AssertionError(f"no answer of the broker within {deadline_s} s: {error}") from error
                self.close()
                time.sleep(0.2)

    def _consumer(self, group: str) -> Consumer:
        if group not in self._consumers:
            # No request more than it takes, and no wait at the end of a log.
            reading = {"auto.offset.reset": "earliest", "enable.partition.eof": True, "fetch.wait.max.ms": 10}
            self._consumers[group] = Consumer(
                {**self._config, **reading, "group.id": group, "enable.auto.commit": False}
            )
        return self._consumers[group]

    def _records(self, topic: str, within_s: float) -> list[Message]:
        give_up = time.monotonic() + within_s
        consumer = self._consumer("reader")
        unread = set(_partitions(consumer, topic, within_s))
        consumer.assign([TopicPartition(*place, 0) for place in unread])
        messages: list[Message] = []
        try:
            while unread:
                if time.monotonic() > give_up:
                    raise TimeoutError(f"{topic} was not read to its end: {unread} left")
                message = consumer.poll(0.1)
                if message is None:
                    continue
                if (error := message.error()) is None:
                    messages.append(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    unread.discard((message.topic() or "", message.partition() or 0))
            return messages
        finally:
            consumer.unassign()

    def _committed(self, group: str, topics: list[str], within_s: float) -> dict[TP, int]:
        # By a consumer: see `support.committed_offsets`.
        consumer = self._consumer(group)
        places = [TopicPartition(*place) for topic in topics for place in _partitions(consumer, topic, within_s)]
        found = consumer.committed(places, within_s)
        return {(one.topic, one.partition): one.offset for one in found if one.offset >= 0}

    def _ends(self, topics: list[str], within_s: float) -> dict[TP, int]:
        if self._admin is None:
            self._admin = AdminClient(self._config)
        partitions = [place for topic in topics for place in _partitions(self._admin, topic, within_s)]
        places: list[Any] = [TopicPartition(*place) for place in partitions]
        answers = self._admin.list_offsets(dict.fromkeys(places, OffsetSpec.latest()), request_timeout=within_s)
        return {(place.topic, place.partition): answer.result(within_s).offset for place, answer in answers.items()}


def _partitions(client: Consumer | AdminClient, topic: str, within_s: float) -> list[TP]:
    """None of a topic that does not exist."""
    return [(topic, number) for number in sorted(client.list_topics(topic, timeout=within_s).topics[topic].partitions)]
