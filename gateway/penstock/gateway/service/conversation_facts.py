"""What callers set of conversations beside their messages: title, metadata and the policy of summaries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.common import admin
from penstock.common.kafka_errors import missing_topic, unavailable
from penstock.common.outgoing import Outgoing, facts_record
from penstock.common.settings import KafkaSettings
from penstock.common.transport import AsyncTransport
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
        kafka: KafkaSettings,
        codec: Codec,
        threads: Threads,
    ) -> None:
        self._transport = transport
        self._view = view
        self._follower = follower
        self._kafka = kafka
        self._codec = codec
        self._threads = threads
        self._place = (kafka.names.conversation_facts, 0)
        self._one_at_a_time = asyncio.Lock()

    @property
    def changing(self) -> asyncio.Lock:
        """To be held from reading to writing."""
        return self._one_at_a_time

    async def of(self, tenant: str, conversation_id: str, topic_id: str | None) -> ConversationFacts:
        """As any gateway wrote them last; empty where nobody set any. Raises BrokerUnavailable."""
        if self._follower.known_topic(self._place[0]):
            ends = await self._threads.ends.run(admin.end_offsets, self._kafka, [self._place])
            await self._reach(ends[self._place])
        found = (await self.of_many(tenant, [conversation_id])).get(conversation_id)
        if found is None or (found.topic_id or topic_id) != topic_id:
            return ConversationFacts(tenant=tenant, conversation_id=conversation_id, updated_at=0, topic_id=topic_id)
        return found

    async def of_many(self, tenant: str, conversation_ids: Sequence[str]) -> dict[str, ConversationFacts]:
        """Those of a tenant's conversations, as far as the view has read. For conversations that have some."""
        keys = {conversation_key(tenant, one): one for one in conversation_ids}
        records = await self._threads.lists.run(self._view.facts_of_conversations, list(keys))
        found: dict[str, ConversationFacts] = {}
        for key, record in records.items():
            try:
                found[keys[key]] = self._codec.decode(record, ConversationFacts)
            except DecodeError:
                continue  # nobody of ours wrote it
        return found

    async def put(self, facts: ConversationFacts) -> None:
        """Raises BrokerUnavailable, also while the topic is missing."""
        topic = self._place[0]
        if not self._follower.known_topic(topic) and not await self._follower.add_topic_now(topic):
            raise unavailable(missing_topic(self._place[0]))
        await self._write(facts_record(facts, self._kafka.names, self._codec, source=SOURCE))

    async def take_away(self, tenant: str, conversation_id: str) -> None:
        """Of a conversation that is deleted. Raises BrokerUnavailable."""
        if conversation_id in await self.of_many(tenant, [conversation_id]):
            key = conversation_key(tenant, conversation_id).encode()
            await self._write(Outgoing(topic=self._place[0], key=key, value=b"", headers=[]))

    async def _write(self, record: Outgoing) -> None:
        delivery = await self._transport.produce(
            record.topic, record.value or None, key=record.key, headers=record.headers, partition=0
        )
        await self._reach(delivery.offset + 1)

    async def _reach(self, end: int) -> None:
        if not await self._follower.reached({self._place: end}, FOLLOWED_S):
            raise BrokerUnavailable("the gateway is behind the topics; try again", retry_after_s=1)
