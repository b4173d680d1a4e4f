"""`penstock topics reconcile`: what restored topics need before the first worker starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from confluent_kafka import Message

from penstock.cli.config import load
from penstock.cli.failures import CliFailure
from penstock.cli.restored.group import WorkerGroup, WorkerGroupSettings
from penstock.cli.restored.outcomes import Outcomes
from penstock.cli.restored.requests import PartitionPlan, RequestLogs
from penstock.cli.restored.usage import Place as UsagePlace
from penstock.cli.restored.usage import moved
from penstock.cli.restored.webhooks import WaitingWebhooks
from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.common.deliveries import delivery_key
from penstock.common.outgoing import Outgoing, facts_record, usage_record
from penstock.common.reader import RawMessage, newest_values, raw_message, read_ranges
from penstock.common.settings import KafkaSettings
from penstock.common.shards.addresses import is_shared, topic_id_of
from penstock.common.transport import Transport
from penstock.processors.core.intake.intake import Intake
from penstock.schemas.codec import Codec
from penstock.schemas.errors import DecodeError
from penstock.schemas.origins import origin_header
from penstock.schemas.records import (
    ConversationFacts,
    Origin,
    Place,
    Record,
    ResultEvent,
    StatusEvent,
    UsageTotal,
    WebhookDelivery,
)
from penstock.schemas.topics import HEADER_ORIGIN, TP, TopicNames


def without_ids(
    facts: Iterable[ConversationFacts], topic_ids: Mapping[str, str], names: TopicNames
) -> list[ConversationFacts]:
    """The facts to write again, without the id: those of another cluster whose topic is there. Pure.

    In another cluster every topic has another id, and gateways ignore facts of another topic. `topic_ids`: of the
    topics of conversations, by name.
    """
    here = set(topic_ids.values())
    return [
        replace(one, topic_id=None)
        for one in facts
        if one.topic_id is not None and topic_id_of(one.topic_id) not in here and _topic_of(one, names) in topic_ids
    ]


def _topic_of(facts: ConversationFacts, names: TopicNames) -> str:
    if is_shared(facts.topic_id):
        return names.conversation_log
    return names.conversation(facts.tenant, facts.conversation_id)


READ_S = 12 * 3600.0
ANSWER_S = 60.0
SPARE_GENERATIONS = 10
"""Conversations may have been copied later than results, and name epochs that these do not."""
BATCH = 1_000
R = TypeVar("R", bound=Record)
_OF_RESULTS = ("request_id", "tenant", "kind", "attempt", "epoch", "task", "created_at", "worker_id", "origin")


class Restored:
    """The topics of an installation. All methods block."""

    def __init__(self, kafka: KafkaSettings, codec: Codec) -> None:
        self._kafka, self._codec = kafka, codec
        self._places: dict[int, list[UsagePlace]] = {}
        """Of outcomes, by partition of the result topic."""
        self._webhooks = WaitingWebhooks([])
        counts = admin.known_topics(kafka)
        self.requests = {topic: count for topic, count in counts.items() if kafka.names.is_request_topic(topic)}
        if not self.requests:
            raise CliFailure("there are no request topics: restore them first")

    def outcomes(self) -> Outcomes:
        """Read the result topic, then the status topic."""
        found, names = Outcomes(), self._kafka.names
        self._webhooks = WaitingWebhooks(self._newest(names.delivery, WebhookDelivery))
        result_head = self._codec.head(ResultEvent, *_OF_RESULTS)
        status_head = self._codec.head(StatusEvent, "request_id", "tenant", "epoch", "origin")

        def on_result(message: Message) -> None:
            *values, origin, _ = result_head(message.value() or b"")
            fields: dict[str, Any] = dict(zip(_OF_RESULTS, values, strict=False))
            found.on_result(event := ResultEvent(**fields, origin=Origin(**origin)))
            if event.is_terminal:
                place = message.offset() or 0, message.timestamp()[1]
                self._places.setdefault(message.partition() or 0, []).append(place)
                here = Place(topic=names.result, partition=message.partition() or 0, offset=place[0])
                self._webhooks.on_outcome(event, here)

        def on_status(message: Message) -> None:
            request_id, tenant, epoch, origin, _ = status_head(message.value() or b"")
            found.on_status((tenant, request_id), Origin(**origin), epoch)

        self._each(self._whole(names.result), on_result)
        self._each(self._whole(names.status), on_status)
        return found

    def plans(self, outcomes: Outcomes, group: WorkerGroup) -> list[PartitionPlan]:
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

    def _newest(self, topic: str, kind: type[R]) -> list[R]:
        """The newest record of each key of a compacted topic."""
        found: list[R] = []
        for value in newest_values(self._kafka, self._whole(topic), time.monotonic() + READ_S):
            with suppress(DecodeError):  # no record of ours: all readers pass over it
                found.append(self._codec.decode(value, kind))
        return found

    def foreign_usage(self) -> list[UsageTotal]:
        """Totals of usage that name offsets of another result topic, with those of this one. After `outcomes`."""
        names = self._kafka.names
        topic_id = admin.topic_id(self._kafka, names.result) or "none"
        return moved(self._newest(names.usage, UsageTotal), topic_id, self._places, now_ms())

    def moved_webhooks(self) -> list[WebhookDelivery]:
        """Webhooks that wait, whose outcome is at another place, with that place. After `outcomes`."""
        return self._webhooks.moved()

    def foreign_facts(self) -> list[ConversationFacts]:
        """The facts of conversations that name topics of another cluster."""
        names = self._kafka.names
        topics = [*admin.conversation_topics(self._kafka), names.conversation_log]
        found = self._newest(names.conversation_facts, ConversationFacts)
        return without_ids(found, admin.topic_ids(self._kafka, topics), names)

    def write(
        self, facts: Iterable[ConversationFacts], totals: Iterable[UsageTotal], webhooks: Iterable[WebhookDelivery]
    ) -> None:
        """Replace them."""
        transport, names = Transport(self._kafka), self._kafka.names
        records: list[Outgoing] = [facts_record(one, names, self._codec) for one in facts]
        records += [usage_record(one, names, self._codec) for one in totals]
        try:
            for record in records:
                transport.send(record.topic, record.value, key=record.key, headers=record.headers)
            for one in webhooks:
                key, partition = delivery_key(one.tenant, one.request_id), one.place.partition
                transport.send(names.delivery, self._codec.encode(one), key=key, partition=partition)
            _flush(transport, f"{names.conversation_facts}, {names.usage} or {names.delivery}")
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
    totals, webhooks = restored.foreign_usage(), restored.moved_webhooks()
    plans = restored.plans(outcomes, group)
    report: dict[str, object] = {
        "group": group.name,
        "highest_epoch": outcomes.highest_epoch,
        "unfinished": sum(plan.unfinished for plan in plans),
        "presumed_ended": sum(plan.presumed_ended for plan in plans),
        "appended_again": sum(len(plan.again) for plan in plans),
        "conversation_facts": len(facts),
        "usage_totals": len(totals),
        "webhooks": len(webhooks),
    }
    if not dry_run:
        restored.write(facts, totals, webhooks)
        for plan in plans:
            restored.append_again(plan)
        above = outcomes.highest_epoch + SPARE_GENERATIONS
        report["generation"] = group.commit({plan.tp: plan.commit for plan in plans}, above)
    return report
