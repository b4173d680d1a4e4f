"""What a bridge knows from the topics: which requests bridges have sent, which models and pools there are, and which
limits of tenants operators have ordered.

One reader follows the request topics, `inference.model` and `inference.worker`. Before the messages of a newly assigned
partition are looked at, it reads to the current ends: what another bridge sent for them is known then, and is not sent
again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from penstock.common import admin
from penstock.common.arrivals import Arrivals
from penstock.common.background import BackgroundTasks
from penstock.common.clock import now_ms
from penstock.common.model_entry import ModelEntry
from penstock.common.model_pools import pool_of
from penstock.common.reader import PartitionReader, RawMessage
from penstock.common.settings import KafkaSettings
from penstock.common.shards.heads import HeadsFollower
from penstock.gateway.access.key_follower import KeyFollower
from penstock.gateway.edge.key_book import KeyBook
from penstock.gateway.health_server import Degraded
from penstock.gateway.limits.tenants import by_tenant
from penstock.gateway.service.dependencies import Dependencies, Problem
from penstock.gateway.view.fleet import Fleet, KnownModels
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable, DecodeError, InternalError, InvalidRequest, PenstockError
from penstock.schemas.records import InferenceRequest
from penstock.schemas.requests import content_hash
from penstock.schemas.topics import HORIZON_MS, TP, TopicNames, is_of_gateway, request_key

logger = logging.getLogger(__name__)

HEADER_CONTENT = "penstock-content"
"""Header of the requests that bridges send, by which they know them again: tenant, slash, `content_of`."""
KNOWN_MS = 2 * HORIZON_MS
"""So long a request that was sent is known, as in a gateway's view."""
MOST_CONVERSATIONS = 100_000
LISTED_S = 10.0
READ_S = 60.0
AGAIN_S = 1.0
FORGET_S = 60.0
PROBE_S = 30.0
"""Between two looks whether the topic of limits can be read."""

Key = tuple[str, str]
"""(tenant, request id)"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """A request that a bridge has sent, or is sending. `at_ms`: its append time, or when it was claimed."""

    content: str
    pool: str | None
    at_ms: int
    on_topic: bool = True


def content_of(request: InferenceRequest) -> str:
    """Hash of what a message asks for. The pool is left out: it may follow from the model, and change with it."""
    return content_hash(dataclasses.replace(request, pool=None))


class SentRequests:
    """Requests by (tenant, id), the first record of each. Thread-safe; forgets what is older than `KNOWN_MS`."""

    def __init__(self) -> None:
        self._sent: dict[Key, Sent] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._sent)

    def find(self, key: Key) -> Sent | None:
        return self._sent.get(key)

    def claim(self, key: Key, claim: Sent) -> None:
        """It is being sent here: another message with the same id follows this one."""
        with self._lock:
            while self._sent and self._sent[first := next(iter(self._sent))].at_ms < claim.at_ms - KNOWN_MS:
                del self._sent[first]
            self._sent[key] = claim

    def release(self, key: Key, claim: Sent) -> None:
        """It was not sent, as far as is known here. What a reader has seen since stays."""
        with self._lock:
            if self._sent.get(key) is claim:
                del self._sent[key]

    def on_record(self, key: Key, sent: Sent) -> None:
        with self._lock:
            known = self._sent.get(key)
            if known is None or not known.on_topic or sent.at_ms < known.at_ms:
                self._sent[key] = sent


class Known:
    """On the event loop, but for what its reader's thread does. `start` comes first, then `look_again`."""

    def __init__(
        self,
        kafka: KafkaSettings,
        codec: Codec,
        worker_late_s: float,
        on_limits: Callable[[str, Mapping[str, Any] | None], None] = lambda tenant, limits: None,
    ) -> None:
        """`worker_late_s`: so long after its last report a worker counts as alive. `on_limits`: see `KeyBook`."""
        self._kafka, self._late_ms = kafka, int(worker_late_s * 1000)
        self._codec = codec
        self._reader: PartitionReader | None = None
        self._topics: dict[str, str | None] = {}
        """The request topics that are read, with their pools."""
        self._fleet = Fleet(codec)
        self._reports = Arrivals()
        self._conversations: dict[bytes, str] = {}
        """The pools of conversations that are not in the common one, by their keys."""
        self._listed: tuple[float, dict[str, set[str]]] = (float("-inf"), {})
        self._listing: asyncio.Task[None] | None = None
        """One for all who ask: beginning to follow a shared topic takes long."""
        self._heads: HeadsFollower | None = None
        """Of conversations that share a topic, once somebody asked for them."""
        self._tasks = BackgroundTasks()
        self._looking: asyncio.Task[None] | None = None
        self._keys = KeyBook(unread="the limits of tenants are not read yet")
        self._keys.on_limits = on_limits
        self._key_follower: KeyFollower | None = None
        self._limits = Dependencies({"key_topic": self._look_at_limits}, PROBE_S)
        self.sent = SentRequests()

    def declare(self, entries: Iterable[ModelEntry]) -> None:
        self._fleet.declare(entries)

    async def start(self) -> None:
        """Begin to read, two horizons back. Raises BrokerUnavailable, NotFound.

        Without the limits that operators have ordered nothing begins. An older installation has no topic of them.
        """
        problem = await self._look_at_limits()
        if self._keys.unread is not None:
            raise BrokerUnavailable(self._keys.unread if problem is None else problem.cause or problem.text)
        self._reader = await asyncio.to_thread(self._begin)
        self._tasks.start(self._limits.run(), "limits")

    async def stop(self) -> None:
        await self._tasks.cancel()
        if self._key_follower is not None:
            await self._key_follower.stop()
        if self._reader is not None:
            await asyncio.to_thread(self._reader.stop)
        if self._listing is not None:  # its thread may be making the follower
            await asyncio.wait([self._listing])
        if self._heads is not None:
            await asyncio.to_thread(self._heads.close)

    def check(self) -> None:
        """Raises InternalError when reading has ended."""
        if self._reader is not None and self._reader.failure is not None:
            raise InternalError(f"the request topics are not read any more: {self._reader.failure}")

    async def _look_at_limits(self) -> Problem | None:
        if self._key_follower is None:
            self._key_follower = KeyFollower(self._kafka, self._codec, self._keys)
        return await self._key_follower.look()

    # -- what is known

    @property
    def lacks(self) -> Degraded | None:
        """Why the limits that operators order do not arrive."""
        problem = self._limits.results()[0].problem
        if problem is None:
            return None
        cause = problem.cause or problem.text
        return Degraded(f"limits that operators order do not arrive, those of before hold: {cause}")

    def models(self) -> KnownModels:
        """The models that workers report."""
        return self._fleet.known(now_ms(), self._late_ms)

    def routed(self, request: InferenceRequest) -> InferenceRequest:
        """The request with the pool it goes to: its own, else its conversation's, else that of the model it names.

        Raises InvalidRequest for a conversation that is in another pool: its turns would run in no order.
        """
        home = None if request.conversation_id is None else self._conversations.get(request_key(request))
        if home is not None and request.pool not in (None, home):
            raise InvalidRequest(f"the conversation {request.conversation_id} is in the pool {home}", param="pool")
        if home is None and request.pool is None and request.model is not None:
            home = pool_of(self.models().models, request.task, request.model)
        return request if home is None else dataclasses.replace(request, pool=home)

    async def conversations(self, tenant: str) -> set[str]:
        """The tenant's conversations that exist; the same set until they are listed again, some seconds later.

        Raises BrokerUnavailable, also while a topic that they share is read for the first time.
        """
        if time.monotonic() - self._listed[0] > LISTED_S:
            if self._listing is None or self._listing.done():
                self._listing = asyncio.get_running_loop().create_task(self._list(), name="conversations")
            listing = self._listing
            await asyncio.wait([listing])
            listing.result()
        return self._listed[1].setdefault(tenant, set())

    # -- being up to date

    def look_again(self) -> None:
        """Others may have sent something: `up_to_date` waits for all that is on the topics now."""
        self._looking = self._tasks.start(self._read_to_ends(), "known")

    async def up_to_date(self) -> None:
        """Wait for what `look_again` asked for last. Raises BrokerUnavailable when reading has ended."""
        while (looking := self._looking) is not None:
            await asyncio.wait([looking])
            if looking is self._looking:
                if looking.cancelled() or looking.exception() is not None:
                    raise BrokerUnavailable("the request topics are not read any more", retry_after_s=1)
                return

    async def _read_to_ends(self) -> None:
        began = time.monotonic()
        while True:
            try:
                await asyncio.to_thread(self._catch_up)
            except PenstockError as error:
                self.check()
                logger.warning("known.behind sent=%d error=%s", len(self.sent), error)
                await asyncio.sleep(AGAIN_S)
            else:
                logger.info("known.up_to_date sent=%d seconds=%.1f", len(self.sent), time.monotonic() - began)
                return

    async def _list(self) -> None:
        found = await asyncio.to_thread(self._list_conversations)
        self._listed = (time.monotonic(), found)

    # -- on other threads

    def _list_conversations(self) -> dict[str, set[str]]:
        names = self._kafka.names
        counts = admin.partition_counts(self._kafka)
        if names.conversation_log not in counts:
            return by_tenant(pair for topic in counts if (pair := names.parse_conversation(topic)) is not None)
        if self._heads is None:
            self._heads = HeadsFollower(self._kafka)
        return by_tenant(self._heads.conversations())

    def _begin(self) -> PartitionReader:
        counts = self._request_topics()
        requests = _partitions(counts)
        begin = admin.offsets_at(self._kafka, requests, now_ms() - KNOWN_MS)
        begin |= admin.begin_offsets(self._kafka, self._fleet_partitions)
        reports = (self._kafka.names.worker, 0)
        self._reports.begin(admin.end_offsets(self._kafka, [reports])[reports])
        reader = PartitionReader(self._kafka, begin, self._on_batch, name="penstock-known")
        reader.start()
        return reader

    def _catch_up(self) -> None:
        reader = self._reader
        assert reader is not None
        there = {*_partitions(self._request_topics()), *self._fleet_partitions}
        read = reader.positions().keys()
        for gone in read - there:  # of a pool that was taken away
            reader.call(partial(reader.drop, gone))
        reader.add_partitions(admin.begin_offsets(self._kafka, there - read))
        reader.wait_until_caught_up(READ_S, partitions=there)

    @property
    def _fleet_partitions(self) -> list[TP]:
        return [(self._kafka.names.model, 0), (self._kafka.names.worker, 0)]

    def _request_topics(self) -> dict[str, int]:
        counts = admin.partition_counts(self._kafka)
        self._topics = pools_of(self._kafka.names, counts)
        return {topic: counts[topic] for topic in self._topics}

    def _on_batch(self, batch: Sequence[RawMessage]) -> None:
        for record in batch:
            try:
                if record.topic == self._kafka.names.model:
                    self._fleet.on_model(record)
                elif record.topic == self._kafka.names.worker:
                    if not is_of_gateway(record.key):
                        self._fleet.on_worker(record, self._reports.heard_ms(record, now_ms()))
                else:
                    self._on_request(record)
            except DecodeError as error:
                logger.info("known.undecodable topic=%s offset=%d code=%s", record.topic, record.offset, error.code)
        if any(record.topic == self._kafka.names.worker for record in batch):
            self._fleet.forget_stale_workers(FORGET_S)

    def _on_request(self, record: RawMessage) -> None:
        headers = dict(record.headers)
        pool = self._topics.get(record.topic)
        if pool is not None and record.key is not None and record.key != headers.get("ce_id"):
            self._conversations.setdefault(record.key, pool)
            if len(self._conversations) > MOST_CONVERSATIONS:
                del self._conversations[next(iter(self._conversations))]
        request_id, content = headers.get("ce_id"), headers.get(HEADER_CONTENT)
        if request_id is None or content is None:
            return
        tenant, _, digest = content.decode(errors="replace").partition("/")
        sent = Sent(content=digest, pool=pool, at_ms=record.timestamp_ms)
        self.sent.on_record((tenant, request_id.decode(errors="replace")), sent)


def content_header(tenant: str, content: str) -> tuple[str, bytes]:
    """What marks the record of a bridge's request, by `content_of` its message."""
    return HEADER_CONTENT, f"{tenant}/{content}".encode()


def pools_of(names: TopicNames, topics: Mapping[str, int]) -> dict[str, str | None]:
    """The request topics among these, each with its pool; None is the common one."""
    common = names.request_topics()
    pools: dict[str, str | None] = {}
    for topic in filter(names.is_request_topic, topics):
        base = next((one for one in common if topic == one or topic.startswith(f"{one}.")), None)
        if base is not None:
            pools[topic] = topic.removeprefix(base)[1:] or None
    return pools


def _partitions(counts: Mapping[str, int]) -> list[TP]:
    return [(topic, number) for topic, count in counts.items() for number in range(count)]
