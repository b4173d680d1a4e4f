"""Conversations are made, forked and deleted here: records in their topics, in an order that a kill may cut anywhere.

A fork: the record `forked` in the topic that holds the message, the fork's own topic, its first record `fork`. Then the
conversation is looked at again: whoever deletes it writes so first, and looks for forks afterwards, so one of the two
sees the other.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from penstock.common import forks
from penstock.common.artifacts import ArtifactStore
from penstock.common.clock import now_ms
from penstock.common.forks import ForkRecord, fork_id_of
from penstock.common.transport import Delivery
from penstock.gateway.conversations.layout import Target
from penstock.gateway.conversations.lineage import Holder, Lineage
from penstock.gateway.conversations.pages import Conversations
from penstock.gateway.conversations.tails import TopicEnd
from penstock.gateway.threads import Threads
from penstock.schemas.codec import Codec
from penstock.schemas.errors import Conflict, InsufficientCapacity, NotFound, PenstockError
from penstock.schemas.records import ConversationFork
from penstock.schemas.topics import TopicNames

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
Busy = Callable[[str, str], Awaitable[bool]]
"""Whether turns of a conversation, by tenant and id, wait or run."""


async def do_nothing() -> None:
    """No claim."""


class Producer(Protocol):
    """`AsyncTransport`, as far as it is needed here."""

    async def produce(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        timestamp_ms: int | None = None,
    ) -> Delivery: ...


class Topics(Protocol):
    """A `Layout`, as far as it is needed here."""

    @property
    def is_shared(self) -> bool: ...
    def target(self, topic: str, key: bytes) -> Target: ...
    def create(self, topic: str) -> None: ...
    def remove(self, topic: str, place: TopicEnd | None = None) -> bool: ...


@dataclass(eq=False)
class Forking:
    """All methods raise BrokerUnavailable, and can then be called again: they go on where they stopped."""

    _transport: Producer
    _topics: Topics
    _conversations: Conversations
    _names: TopicNames
    _codec: Codec
    _artifacts: ArtifactStore
    _threads: Threads

    async def create(self, tenant: str, conversation_id: str) -> None:
        """Make the conversation, empty, unless it is there. Raises InsufficientCapacity."""
        await self._create_topic(tenant, conversation_id)
        if conversation_id in await self._run(tenant, self._conversations.deleted, [conversation_id]):
            begin = forks.begin_record(tenant, conversation_id, uuid.uuid4().hex, now_ms())
            await self._append(tenant, conversation_id, begin)

    async def exists(self, tenant: str, conversation_id: str) -> bool:
        """Whether there is such a conversation. Of a deleted one what nobody needs any more is removed."""
        lineage = await self._lineage(tenant, conversation_id)
        if lineage is not None and lineage.is_deleted:
            await self.let_go(tenant, conversation_id)
            return False
        return lineage is not None

    # -- forks

    async def fork(
        self,
        tenant: str,
        parent_id: str,
        through: int,
        conversation_id: str,
        claimed: Callable[[], Awaitable[None]] = do_nothing,
    ) -> ConversationFork:
        """Make a conversation that goes on from the message at an offset of another; what it was made of.

        `claimed` is called when nothing that was asked for stands in the way, and may refuse it.

        Repeated, it is the same fork. Raises NotFound (param `through` where only the message is missing), Conflict
        when the id is taken or there are too many forks of forks, InsufficientCapacity.
        """
        try:
            return await self._fork(tenant, parent_id, through, conversation_id, claimed)
        except Conflict as error:
            if error.param != "id":
                raise
            # Another call may have made the same fork at the same moment.
            return await self._fork(tenant, parent_id, through, conversation_id, claimed)

    async def _fork(
        self, tenant: str, parent_id: str, through: int, conversation_id: str, claimed: Callable[[], Awaitable[None]]
    ) -> ConversationFork:
        holder = await self._holder(tenant, parent_id, through)
        if holder.ancestors > forks.MOST_ANCESTORS:
            raise Conflict(f"a fork goes on from at most {forks.MOST_ANCESTORS} conversations, one from another")
        made_of = ConversationFork(conversation_id=holder.conversation_id, through=through, topic_id=holder.topic_id)
        begun = await self._begun_as(tenant, conversation_id, made_of)
        await claimed()
        fork_id = begun or uuid.uuid4().hex
        fork = ConversationFork(conversation_id=conversation_id, through=through)
        forked = forks.forked_record(tenant, holder.conversation_id, fork_id, fork, now_ms())
        await self._append(tenant, holder.conversation_id, forked)
        try:
            if begun is None:
                await self._begin_fork(tenant, conversation_id, fork_id, made_of)
            if (await self._holder(tenant, parent_id, through)).topic_id != holder.topic_id:
                raise NotFound(f"conversation {parent_id} was deleted", param="conversation_id")
        except (Conflict, InsufficientCapacity, NotFound):
            if begun is None:
                await self._take_back(tenant, conversation_id, fork_id, made_of)
            raise
        return made_of

    async def _begun_as(self, tenant: str, conversation_id: str, made_of: ConversationFork) -> str | None:
        """The id of the fork, if an earlier call has made it; None: there is no such conversation, or it is empty."""
        lineage = await self._lineage(tenant, conversation_id)
        if lineage is None or lineage.is_empty:
            return None
        if lineage.parent == made_of and not lineage.is_deleted and lineage.begin == lineage.base:
            return fork_id_of(lineage.fork_key or "")
        if lineage.is_deleted:
            raise Conflict(f"conversation {conversation_id} is deleted, and others go on from it: use another id")
        raise Conflict(f"there is a conversation {conversation_id} already", param="id")

    async def _begin_fork(self, tenant: str, conversation_id: str, fork_id: str, made_of: ConversationFork) -> None:
        if not self._topics.is_shared:  # there the first record makes the conversation
            await self._create_topic(tenant, conversation_id)
        first = forks.fork_record(tenant, conversation_id, fork_id, made_of, now_ms())
        appended = await self._run(tenant, self._conversations.fork_key, conversation_id) is None
        if appended:
            await self._append(tenant, conversation_id, first)
        if await self._run(tenant, self._conversations.fork_key, conversation_id) != first.key:
            if appended:
                await self._erase(tenant, conversation_id, [first.key])
            raise Conflict(f"conversation {conversation_id} was begun by another call", param="id")

    async def _take_back(self, tenant: str, conversation_id: str, fork_id: str, made_of: ConversationFork) -> None:
        """What was made of a fork that cannot be. It stands in nobody's way if that fails."""
        try:
            if await self._run(tenant, self._conversations.fork_key, conversation_id) == f"fork/{fork_id}":
                await self._remove_topic(tenant, conversation_id)
            await self._let_go_of(tenant, made_of, fork_id)
        except PenstockError as error:
            logger.warning("conversation.fork_left_over error=%s", error.code)

    # -- deletions

    async def delete(self, tenant: str, conversation_id: str) -> None:
        """From now on it has no messages. Its topic goes, unless forks go on from it.

        With the last fork of a deleted conversation that one's topic goes too.
        """
        if await self.end(tenant, conversation_id):
            await self.let_go(tenant, conversation_id)
            return
        marks = await self._marks(tenant, conversation_id)
        if await self._lineage(tenant, conversation_id) is None:  # else a turn has begun it, and made marks perhaps
            await self._release_artifacts(tenant, conversation_id, marks)

    async def end(self, tenant: str, conversation_id: str, still: Callable[[], Awaitable[bool]] | None = None) -> bool:
        """Append the record that ends it: from now on it has no messages. `let_go` does the rest.

        `still` is asked right before, and holds for the records that stood there when this was called: if another one
        comes first, nothing is ended. False then, when it says no, and when there is no such conversation.
        """
        lineage = await self._lineage(tenant, conversation_id)
        if lineage is None or lineage.is_deleted:
            return lineage is not None
        if still is not None and not await still():
            return False
        only_behind = None if still is None else lineage.base + lineage.end - 1
        made = forks.deleted_record(
            tenant, conversation_id, uuid.uuid4().hex, lineage.base, now_ms(), only_behind=only_behind
        )
        offset = await self._append(tenant, conversation_id, made)
        if still is None or offset == lineage.end or await self._has_ended(tenant, conversation_id, lineage):
            return True
        await self._erase(tenant, conversation_id, [made.key])
        return False

    async def _has_ended(self, tenant: str, conversation_id: str, before: Lineage) -> bool:
        """Whether it was ended since. In the shared topic offsets do not tell whether another record came first."""
        now = await self._lineage(tenant, conversation_id)
        return now is None or now.topic_id != before.topic_id or now.begin > before.begin

    async def let_go(self, tenant: str, conversation_id: str, busy: Busy | None = None) -> None:
        """Remove what a deletion ended and no fork goes on from.

        Its own topic goes last: a call that is repeated after a kill finds what is left to do. While a conversation is
        `busy` its topic stays, without what was deleted: a turn may be about to begin it anew in there.
        """
        lineage = await self._lineage(tenant, conversation_id)
        if lineage is None or lineage.begin == lineage.base:
            return
        for key, fork in lineage.forks.items():
            if (fork.through < lineage.begin or lineage.is_deleted) and await self._lives(tenant, key, fork):
                return
        if lineage.parent is not None:
            await self._let_go_of(tenant, lineage.parent, fork_id_of(lineage.fork_key or ""), busy)
        if not lineage.is_deleted or (busy is not None and await busy(tenant, conversation_id)):
            await self._erase(tenant, conversation_id, [*lineage.void, *lineage.keys_before_deletion])
            return
        # Before it goes: afterwards a turn may begin it anew, and hold images of its own.
        marks = await self._marks(tenant, conversation_id)
        if await self._remove_topic(tenant, conversation_id, TopicEnd(lineage.topic_id, lineage.end)):
            await self._release_artifacts(tenant, conversation_id, marks)
        else:  # something was appended: a turn has begun it anew, or another gateway is at it
            await self.let_go(tenant, conversation_id, busy)

    async def _let_go_of(self, tenant: str, parent: ConversationFork, fork_id: str, busy: Busy | None = None) -> None:
        """A fork of `parent` is gone. That does not renew it: the tombstone has the time of its newest record."""
        lineage = await self._lineage(tenant, parent.conversation_id)
        key = f"forked/{fork_id}"
        if lineage is not None and (lineage.topic_id == parent.topic_id or key in lineage.forks):
            newest_ms = await self._run(tenant, self._conversations.newest_ms, parent.conversation_id)
            await self._erase(tenant, parent.conversation_id, [*lineage.void, key], newest_ms)
            await self.let_go(tenant, parent.conversation_id, busy)

    async def _lives(self, tenant: str, key: str, fork: ConversationFork) -> bool:
        """Whether the fork that a record `forked` names was made, and its topic is there."""
        begun = await self._run(tenant, self._conversations.fork_key, fork.conversation_id)
        return begun is not None and fork_id_of(begun) == fork_id_of(key)

    async def _marks(self, tenant: str, conversation_id: str) -> Mapping[str, int]:
        """See `Holds.marks_of`. None while the store is away: the sweeper comes after."""
        try:
            return await self._threads.artifacts.run_for(
                tenant, self._artifacts.holds.marks_of, tenant, conversation_id
            )
        except PenstockError as error:
            logger.warning("conversation.artifacts_still_held error=%s", error.code)
            return {}

    async def _release_artifacts(self, tenant: str, conversation_id: str, marks: Mapping[str, int]) -> None:
        """What its turns referred to is held no more, what they made goes. The conversation is gone in any case: the
        sweeper comes after."""
        gone = self._artifacts.conversation_gone
        try:
            await self._threads.artifacts.run_for(tenant, gone, tenant, conversation_id, marks)
        except PenstockError as error:
            logger.warning("conversation.artifacts_still_held error=%s", error.code)

    # -- topics and records

    async def _holder(self, tenant: str, conversation_id: str, offset: int) -> Holder:
        return await self._run(tenant, self._conversations.holder, conversation_id, offset)

    async def _lineage(self, tenant: str, conversation_id: str) -> Lineage | None:
        try:
            return await self._run(tenant, self._conversations.lineage, conversation_id)
        except NotFound:
            return None

    async def _append(self, tenant: str, conversation_id: str, record: ForkRecord) -> int:
        """Kafka's offset of it. Raises NotFound without the topic."""
        return await self._write(tenant, conversation_id, record.key, self._codec.encode(record.message))

    async def _erase(self, tenant: str, conversation_id: str, keys: list[str], time_ms: int | None = None) -> None:
        """Write tombstones, in order, of this time or of now."""
        for key in keys:
            await self._write(tenant, conversation_id, key, None, time_ms)

    async def _write(
        self, tenant: str, conversation_id: str, key: str, value: bytes | None, time_ms: int | None = None
    ) -> int:
        target = self._topics.target(self._topic(tenant, conversation_id), key.encode())
        delivery = await self._transport.produce(
            target.topic, value, key=target.key, partition=target.partition, timestamp_ms=time_ms
        )
        return delivery.offset

    async def _create_topic(self, tenant: str, conversation_id: str) -> None:
        topic = self._topic(tenant, conversation_id)
        await self._threads.conversations.run_for(tenant, self._topics.create, topic)

    async def _remove_topic(self, tenant: str, conversation_id: str, place: TopicEnd | None = None) -> bool:
        topic = self._topic(tenant, conversation_id)
        return await self._threads.conversations.run_for(tenant, self._topics.remove, topic, place)

    def _topic(self, tenant: str, conversation_id: str) -> str:
        return self._names.conversation(tenant, conversation_id)

    async def _run(self, tenant: str, work: Callable[Concatenate[str, P], T], *args: P.args, **options: P.kwargs) -> T:
        return await self._threads.conversations.run_for(tenant, work, tenant, *args, **options)
