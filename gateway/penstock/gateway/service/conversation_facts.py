"""What callers set of conversations beside their messages: title, metadata and the policy of summaries."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from weakref import WeakValueDictionary

from penstock.common import admin
from penstock.common.clock import now_ms
from penstock.common.kafka_errors import missing_topic, unavailable
from penstock.common.outgoing import Outgoing, facts_record
from penstock.common.settings import KafkaSettings
from penstock.common.transport import AsyncTransport
from penstock.gateway.conversations.layout import Layout
from penstock.gateway.service.submitting import SOURCE
from penstock.gateway.threads import Threads
from penstock.gateway.view.follower import Follower
from penstock.gateway.view.view import View
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable, DecodeError
from penstock.schemas.records import ConversationFacts
from penstock.schemas.topics import conversation_key

FOLLOWED_S = 2.0
"""So long a call waits for the view to have read what stood on the topic."""


class FactsOfConversations:
    """Read from the view, written to the topic. Of two gateways that change one at a moment the later record counts."""

    def __init__(
        self,
        transport: AsyncTransport,
        view: View,
        follower: Follower,
        layout: Layout,
        kafka: KafkaSettings,
        codec: Codec,
        threads: Threads,
    ) -> None:
        self._transport = transport
        self._view = view
        self._follower = follower
        self._layout = layout
        self._kafka = kafka
        self._codec = codec
        self._threads = threads
        self._place = (kafka.names.conversation_facts, 0)
        self._order: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def changing(self, tenant: str, conversation_id: str) -> asyncio.Lock:
        """To be held from reading a conversation's facts to writing them."""
        key = conversation_key(tenant, conversation_id)
        lock = self._order.get(key)
        if lock is None:
            lock = self._order[key] = asyncio.Lock()
        return lock

    async def of(self, tenant: str, conversation_id: str, topic_id: str, *, newest: bool = True) -> ConversationFacts:
        """Those of the topic with this Kafka id; empty where nobody set any.

        As any gateway wrote them last; without `newest` as the view has them where it cannot tell. Raises
        BrokerUnavailable with `newest`.
        """
        try:
            await self._catch_up()
        except BrokerUnavailable:
            if newest:
                raise
        found = (await self.of_many(tenant, {conversation_id: topic_id})).get(conversation_id)
        if found is None:
            return ConversationFacts(tenant=tenant, conversation_id=conversation_id, updated_at=0, topic_id=topic_id)
        return found

    async def of_many(self, tenant: str, topic_ids: Mapping[str, str]) -> dict[str, ConversationFacts]:
        """By id those of a tenant's conversations, of the topics with these Kafka ids, as far as the view has read."""
        found = await self._kept(tenant, list(topic_ids))
        return {name: one for name, one in found.items() if one.topic_id in (None, topic_ids[name])}

    async def of_some(self, tenant: str, conversation_ids: Sequence[str]) -> dict[str, ConversationFacts]:
        """As `of_many`, for conversations of which nobody knows the topics' ids. Raises BrokerUnavailable."""
        found = await self._kept(tenant, conversation_ids)
        topics = {self._kafka.names.conversation(tenant, one): one for one in found}
        topic_ids = await self._threads.conversations.run_for(tenant, self._layout.topic_ids, list(topics))
        there = {topics[topic]: topic_id for topic, topic_id in topic_ids.items()}
        return {name: one for name, one in found.items() if name in there and one.topic_id in (None, there[name])}

    async def _kept(self, tenant: str, conversation_ids: Sequence[str]) -> dict[str, ConversationFacts]:
        """Whatever stands in the view."""
        keys = {conversation_key(tenant, one): one for one in conversation_ids}
        unwritten = self._view.unwritten_facts(list(keys))
        written = await self._threads.lists.run(self._view.written_facts, list(keys))
        found: dict[str, ConversationFacts] = {}
        for key, record in {**written, **unwritten}.items():
            if record is not None:
                with suppress(DecodeError):  # then nobody of ours wrote it
                    found[keys[key]] = self._codec.decode(record, ConversationFacts)
        return found

    async def begin_clock(self, tenant: str, conversation_id: str, topic_id: str) -> None:
        """Empty facts of now, unless there are some: the age of a conversation without records counts from them.

        Raises BrokerUnavailable.
        """
        async with self.changing(tenant, conversation_id):
            facts = await self.of(tenant, conversation_id, topic_id)
            if not facts.updated_at:
                await self.put(replace(facts, updated_at=now_ms()))

    async def put(self, facts: ConversationFacts) -> None:
        """Raises BrokerUnavailable, also while the topic is missing."""
        topic = self._place[0]
        if not self._follower.known_topic(topic) and not await self._follower.add_topic_now(topic):
            raise unavailable(missing_topic(self._place[0]))
        await self._write(facts_record(facts, self._kafka.names, self._codec, source=SOURCE))

    async def take_away(self, tenant: str, conversation_id: str) -> None:
        """Those of a conversation that is deleted, from any gateway. Raises BrokerUnavailable."""
        await self._catch_up()
        if await self._kept(tenant, [conversation_id]):
            key = conversation_key(tenant, conversation_id).encode()
            await self._write(Outgoing(topic=self._place[0], key=key, value=b"", headers=[]))

    async def _catch_up(self) -> None:
        """Until the view has all that stands on the topic."""
        if self._follower.known_topic(self._place[0]):
            ends = await self._threads.ends.run(admin.end_offsets, self._kafka, [self._place])
            await self._reach(ends[self._place])

    async def _write(self, record: Outgoing) -> None:
        delivery = await self._transport.produce(
            record.topic, record.value or None, key=record.key, headers=record.headers, partition=0
        )
        await self._reach(delivery.offset + 1)

    async def _reach(self, end: int) -> None:
        if not await self._follower.reached({self._place: end}, FOLLOWED_S):
            raise BrokerUnavailable("the gateway is behind the topics; try again", retry_after_s=1)
