"""The workers' group of restored topics: it must have no members, and its generation must be above all epochs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

from confluent_kafka import Consumer, KafkaException, TopicPartition
from pydantic import BaseModel

from penstock.cli.failures import CliFailure
from penstock.common import admin
from penstock.common.admin_clients import answer_of, asked
from penstock.common.configuration import ProcessSettings
from penstock.common.group_names import group_name
from penstock.common.kafka_errors import client_logger, from_kafka
from penstock.common.settings import KafkaSettings
from penstock.processors.kafka.batches import Committed
from penstock.processors.kafka.offsets import commit_now, group_identity
from penstock.schemas.topics import TP

GROUP = "penstock-worker"
STEP_S = 30.0
"""The longest wait for an assignment; the broker delays the first by `group.initial.rebalance.delay.ms`."""
STOP_WORKERS = "stop all workers, then run it again"


class _WorkerGroupName(BaseModel, extra="ignore"):
    group_id: str | None = None


class WorkerGroupSettings(ProcessSettings):
    """Of a worker's settings its group alone."""

    worker: _WorkerGroupName = _WorkerGroupName()


class WorkerGroup:
    """All methods block. They raise CliFailure, BrokerUnavailable and Forbidden."""

    def __init__(self, kafka: KafkaSettings, configured: str | None, topics: Mapping[str, int]) -> None:
        """`topics`: the request topics, with their partitions."""
        self._kafka, self._topics = kafka, topics
        self.name = group_name(kafka, configured, GROUP, list(topics))
        if members := self._members():
            raise CliFailure(f"the group {self.name} has {members} members: {STOP_WORKERS}")

    def _members(self) -> int:
        return asked(self._kafka, lambda client, wait_s: len(self._described(client, wait_s).members), 10.0)

    def _described(self, client: Any, wait_s: float) -> Any:
        found = client.describe_consumer_groups([self.name], request_timeout=wait_s)[self.name]
        return answer_of(found, f"describe the group {self.name}", wait_s, group=self.name)

    def committed(self, tps: Sequence[TP]) -> dict[TP, Committed]:
        """The committed offset and metadata of each partition that has one."""
        consumer = self._consumer()
        try:
            found = consumer.committed([TopicPartition(*tp) for tp in tps], 10.0)
        except KafkaException as error:
            raise from_kafka(error, f"read the offsets of {self.name}", group=self.name) from error
        finally:
            consumer.close()
        return {(one.topic, one.partition): (one.offset, one.metadata or "") for one in found if one.offset >= 0}

    def commit(self, offsets: Mapping[TP, Committed], above: int) -> int:
        """Join until the generation is above this one, commit as a member, and leave; the generation.

        An empty group without offsets is deleted by its coordinator within minutes, and its generation with it.
        """
        consumer = self._consumer()
        try:
            generation = self._raise_generation(consumer, above)
            _, error = commit_now(consumer, offsets)
        except KafkaException as failure:
            raise from_kafka(failure, f"join the group {self.name}", group=self.name) from failure
        finally:
            consumer.close()
        if error is not None:
            raise CliFailure(f"the offsets of {self.name} were not committed ({error.str()}): {STOP_WORKERS}")
        return generation

    def _raise_generation(self, consumer: Consumer, above: int) -> int:
        """Join again, with other topics each time: 20 ms for each."""
        first = dict(list(self._topics.items())[:1])
        subscriptions, assigned = cycle([self._topics, first]), list[list[TopicPartition]]()
        while (generation := group_identity(consumer)[0]) <= above:
            give_up, joins, topics = time.monotonic() + STEP_S, len(assigned), next(subscriptions)
            consumer.subscribe(list(topics), on_assign=lambda _, found: assigned.append(found))
            while len(assigned) == joins:
                consumer.poll(0.02)
                if time.monotonic() > give_up:
                    raise CliFailure(f"the group {self.name} cannot be joined: {STOP_WORKERS}")
            # Not known by what was assigned: of few partitions one of two members may get all.
            if self._members() > 1:
                raise CliFailure(f"a worker has joined the group {self.name}: {STOP_WORKERS}")
        return generation

    def _consumer(self) -> Consumer:
        admin.check_group(self._kafka, self.name)
        config = {
            "group.id": self.name,
            "partition.assignment.strategy": "range",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
        }
        return Consumer({**self._kafka.librdkafka(), **config}, logger=client_logger)
