"""`penstock topics reconcile`: what restored topics need before the first worker starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from confluent_kafka import Message

from penstock.cli.config import load
from penstock.cli.failures import CliFailure
from penstock.cli.restored.facts import without_ids
from penstock.cli.restored.group import WorkerGroup, WorkerGroupSettings
from penstock.cli.restored.outcomes import Outcomes
from penstock.cli.restored.requests import PartitionPlan, RequestLogs
from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.common.outgoing import facts_record
from penstock.common.reader import RawMessage, raw_message, read_ranges
from penstock.common.settings import KafkaSettings
from penstock.common.transport import Transport
from penstock.processors.kafka.intake import Intake
from penstock.schemas.codec import Codec
from penstock.schemas.errors import DecodeError
from penstock.schemas.origins import origin_header
from penstock.schemas.records import ConversationFacts, Origin, ResultEvent, StatusEvent
from penstock.schemas.topics import HEADER_ORIGIN, TP

READ_S = 12 * 3600.0
ANSWER_S = 60.0
SPARE_GENERATIONS = 10
"""Conversations may have been copied later than results, and name epochs that these do not."""
BATCH = 1_000
_OF_RESULTS = ("request_id", "tenant", "kind", "attempt", "epoch", "task", "created_at", "worker_id", "origin")


class Restored:
    """The topics of an installation. All methods block."""

    def __init__(self, kafka: KafkaSettings, codec: Codec) -> None:
        self._kafka, self._codec = kafka, codec
        counts = admin.known_topics(kafka)
        self.requests = {topic: count for topic, count in counts.items() if kafka.names.is_request_topic(topic)}
        if not self.requests:
            raise CliFailure("there are no request topics: restore them first")

    def outcomes(self) -> Outcomes:
        """Read the result topic, then the status topic."""
        found, names = Outcomes(), self._kafka.names
        result_head = self._codec.head(ResultEvent, *_OF_RESULTS)
        status_head = self._codec.head(StatusEvent, "request_id", "tenant", "epoch", "origin")

        def on_result(message: Message) -> None:
            *values, origin, _ = result_head(message.value() or b"")
            fields: dict[str, Any] = dict(zip(_OF_RESULTS, values, strict=False))
            found.on_result(ResultEvent(**fields, origin=Origin(**origin)))

        def on_status(message: Message) -> None:
            request_id, tenant, epoch, origin, _ = status_head(message.value() or b"")
            found.on_status((tenant, request_id), Origin(**origin), epoch)

        self._each(self._whole(names.result), on_result)
        self._each(self._whole(names.status), on_status)
        return found

    def plans(self, outcomes: Outcomes, group: WorkerGroup) -> list[PartitionPlan]:
        """Read the request topics."""
        ranges = {tp: extent for topic in self.requests for tp, extent in self._whole(topic).items()}
        logs = RequestLogs(outcomes, group.committed(list(ranges)), now_ms())
        intake = Intake(self._codec, self._kafka.names, self.requests)

        def take(message: Message) -> None:
            raw = raw_message(message)
            tp = (raw.topic, raw.partition)
            read = intake.read(*tp, raw.offset, raw.timestamp_ms, raw.headers, raw.value, raw.key)
            logs.take(tp, raw.offset, read, is_moved=any(name == HEADER_ORIGIN for name, _ in raw.headers))

        self._each(ranges, take)
        return list(logs.plans({tp: end for tp, (_, end) in ranges.items()}))

    def foreign_facts(self) -> list[ConversationFacts]:
        """The facts of conversations that name topics of another cluster."""
        names = self._kafka.names
        newest: dict[bytes, ConversationFacts | None] = {}

        def take(message: Message) -> None:
            value = message.value()
            newest[message.key() or b""] = self._codec.decode(value, ConversationFacts) if value else None

        self._each(self._whole(names.conversation_facts), take)
        topics = [*admin.conversation_topics(self._kafka), names.conversation_log]
        return without_ids(filter(None, newest.values()), admin.topic_ids(self._kafka, topics), names)

    def write_facts(self, facts: Iterable[ConversationFacts]) -> None:
        """Replace them."""
        transport = Transport(self._kafka)
        try:
            for one in facts:
                record = facts_record(one, self._kafka.names, self._codec)
                transport.send(record.topic, record.value, key=record.key, headers=record.headers)
            _flush(transport, self._kafka.names.conversation_facts)
        finally:
            transport.close()

    def append_again(self, plan: PartitionPlan) -> None:
        """Append the plan's records at the end of their partition, each under its origin."""
        transport, offsets = Transport(self._kafka), list(plan.again)
        try:
            for first in range(0, len(offsets), BATCH):
                some = offsets[first : first + BATCH]
                nth = {offset: number for number, offset in enumerate(some)}
                ranges = {plan.tp: (min(some), max(some) + 1)}
                give_up = time.monotonic() + READ_S
                found = read_ranges(self._kafka, ranges, give_up, keep=lambda one, nth=nth: one.offset() in nth)
                for raw in sorted(found, key=lambda raw, nth=nth: nth[raw.offset]):
                    self._append(transport, raw, plan.again[raw.offset])
                _flush(transport, plan.tp[0])
        finally:
            transport.close()

    def _append(self, transport: Transport, raw: RawMessage, origin: Origin) -> None:
        headers = [*((name, value) for name, value in raw.headers if name != HEADER_ORIGIN), origin_header(origin)]
        transport.send(raw.topic, raw.value, key=raw.key, headers=headers, partition=raw.partition)

    def _whole(self, topic: str) -> dict[TP, tuple[int, int]]:
        tps = [(topic, number) for number in range(admin.partition_counts(self._kafka, [topic]).get(topic, 0))]
        firsts, ends = admin.begin_offsets(self._kafka, tps), admin.end_offsets(self._kafka, tps)
        return {tp: (firsts[tp], ends[tp]) for tp in tps}

    def _each(self, ranges: dict[TP, tuple[int, int]], take: Callable[[Message], None]) -> None:
        def seen(message: Message) -> bool:
            try:
                take(message)
            except DecodeError:
                pass  # no record of ours: all readers pass over it
            return False

        read_ranges(self._kafka, ranges, time.monotonic() + READ_S, keep=seen)


def _flush(transport: Transport, topic: str) -> None:
    if transport.flush(ANSWER_S):
        raise CliFailure(f"{topic} did not take all records: run it again")


def reconcile_topics(kafka: KafkaSettings, codec: Codec, *, dry_run: bool) -> dict[str, object]:
    """Bring the workers' group in line with the topics; what was found. Raises CliFailure, PenstockError."""
    restored = Restored(kafka, codec)
    group = WorkerGroup(kafka, load(WorkerGroupSettings).worker.group_id, restored.requests)
    outcomes, facts = restored.outcomes(), restored.foreign_facts()
    plans = restored.plans(outcomes, group)
    report: dict[str, object] = {
        "group": group.name,
        "highest_epoch": outcomes.highest_epoch,
        "unfinished": sum(plan.unfinished for plan in plans),
        "presumed_ended": sum(plan.presumed_ended for plan in plans),
        "appended_again": sum(len(plan.again) for plan in plans),
        "conversation_facts": len(facts),
    }
    if not dry_run:
        restored.write_facts(facts)
        for plan in plans:
            restored.append_again(plan)
        above = outcomes.highest_epoch + SPARE_GENERATIONS
        report["generation"] = group.commit({plan.tp: plan.commit for plan in plans}, above)
    return report
