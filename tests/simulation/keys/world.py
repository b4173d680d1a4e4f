"""The topics of requests and claims, and gateways with the product's own submitter and claims."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from random import Random
from typing import Any

from kit.submitting import SubmitterParts
from penstock.common.settings import KafkaSettings
from penstock.common.transport import Delivery
from penstock.gateway.limits.callers import Caller
from penstock.gateway.service.submitting import Accepted
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.records import InferenceRequest, KeyClaim
from penstock.schemas.requests import content_hash
from penstock.schemas.topics import TP, partition_for
from simulation.truth import Violation

CODEC, NAMES = default_codec(), KafkaSettings().names
PARTITIONS = 3
Key = tuple[str, str]


class Topics:
    """`away`: the part of produces that are not acknowledged."""

    def __init__(self, rng: Random, away: float) -> None:
        self.rng, self.away = rng, away
        self.logs: dict[TP, list[tuple[bytes, int]]] = defaultdict(list)
        """Values with their append times."""
        self.contents: dict[Key, str] = {}
        """What stands on the request topics under each id."""
        self.violation: Violation | None = None

    async def produce(self, topic: str, value: bytes, *, key: bytes, **_: Any) -> Delivery:
        """What a gateway sent that is killed meanwhile, or hears of no acknowledgement, stands there or not."""
        await asyncio.sleep(self.rng.uniform(0.0, 0.02))
        unanswered = self.rng.random() < self.away
        tp, offset = (topic, partition_for(key, PARTITIONS)), -1
        append_time_ms = 1 + round(asyncio.get_running_loop().time() * 1000)
        if not unanswered or self.rng.random() < 0.5:
            offset = len(self.logs[tp])
            self.logs[tp].append((value, append_time_ms))
            if topic != NAMES.idempotency:
                self._check(CODEC.decode(value, InferenceRequest))
        await asyncio.sleep(self.rng.uniform(0.0, 0.02))
        if unanswered:
            raise BrokerUnavailable("no acknowledgement came")
        return Delivery(topic=topic, partition=tp[1], offset=offset, timestamp_ms=append_time_ms)

    def _check(self, request: InferenceRequest) -> None:
        content = content_hash(request)
        if self.contents.setdefault((request.tenant, request.request_id), content) != content:
            self.broken(f"two_bodies: {request.request_id} stands on the topics with two bodies")

    def broken(self, what: str) -> None:
        self.violation = self.violation or Violation(what)
        raise self.violation


class Gateway(SubmitterParts):
    """One life of a gateway: it reads each partition by itself, as late as may be."""

    def __init__(self, topics: Topics) -> None:
        super().__init__()
        self._topics = topics
        self._read: dict[TP, int] = defaultdict(int)

    async def submit(self, request: InferenceRequest, key: str) -> Accepted:
        checked = await self.submitter.check(Caller(tenant=request.tenant), request)
        return await self.submitter.submit(checked, idempotency_key=key)

    async def claim_key(self, key: str, content: int) -> None:
        await self.submitter.claim_key("t", "conversation", key, content)

    async def produce(self, topic: str, value: bytes, **options: Any) -> Delivery:
        return await self._topics.produce(topic, value, **options)

    # -- following

    async def follow(self) -> None:
        """Read on for ever."""
        rng = self._topics.rng
        while True:
            await asyncio.sleep(rng.uniform(0.0, 0.02))
            if behind := [tp for tp, log in self._topics.logs.items() if self._read[tp] < len(log)]:
                self._read_one(rng.choice(behind))

    def _read_one(self, tp: TP) -> None:
        value, append_time_ms = self._topics.logs[tp][self._read[tp]]
        self._read[tp] += 1
        if tp[0] == NAMES.idempotency:
            self.claims.take(CODEC.decode(value, KeyClaim), append_time_ms)
        else:
            self.accepted(CODEC.decode(value, InferenceRequest), None)

    async def reached(self, ends: Mapping[TP, int], deadline_s: float) -> bool:
        give_up = asyncio.get_running_loop().time() + deadline_s
        while any(self._read[tp] < end for tp, end in ends.items()):
            if asyncio.get_running_loop().time() > give_up:
                return False
            await asyncio.sleep(0.005)
        return True

    async def catch_up(self) -> None:
        await asyncio.sleep(self._topics.rng.uniform(0.0, 0.01))
        ends = {tp: len(log) for tp, log in self._topics.logs.items() if tp[0] != NAMES.idempotency}
        if not await self.reached(ends, 2.0):
            raise BrokerUnavailable("behind")
