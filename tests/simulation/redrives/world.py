"""The topics of dead letters and requests, and gateways with the product's own redriving, index and submitter."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from kit.submitting import SubmitterParts
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.common.transport import Delivery
from penstock.gateway.dead_letters.follower import LetterFollower
from penstock.gateway.dead_letters.index import LetterIndex
from penstock.gateway.dead_letters.letters import HEADER_KIND, PURGED, LetterPlace
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.service.redriving import Redriving
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BrokerUnavailable
from penstock.schemas.records import DeadLetter, DeadLetterAction, InferenceRequest, Origin
from penstock.schemas.topics import HEADER_KEY_ID
from simulation.truth import Violation

CODEC, KAFKA = default_codec(), KafkaSettings()
Key = tuple[str, str]


class Topics:
    """What stands on them. `strict`: nobody asks at two gateways at once, so each request stands there once."""

    def __init__(self, rng: Random, *, strict: bool, away: float, fails: float) -> None:
        self._rng, self._strict = rng, strict
        self.away, self._fails = away, fails
        """The part of produces that are not acknowledged; that of requests that get another letter at once."""
        self.letters: dict[int, list[RawMessage]] = {0: [], 1: []}
        self.runnable: set[Key] = set()
        """(tenant, request id) of the letters that hold a request."""
        self.requests: list[InferenceRequest] = []
        self.run_as: dict[Key, set[str]] = defaultdict(set)
        self.purged: set[LetterPlace] = set()
        self.places: dict[Key, list[LetterPlace]] = defaultdict(list)
        self.violation: Violation | None = None

    def add_letter(self, number: int, *, readable: bool) -> None:
        request = InferenceRequest(
            request_id=f"r{number}", tenant="t", task="text_generation", model="m", created_at=1,
            text_generation={"prompt": "x"},
        )  # fmt: skip
        self._add_letter_of(request, number, readable=readable)

    def _add_letter_of(self, request: InferenceRequest, number: int, *, readable: bool) -> None:
        letter = DeadLetter(
            request_id=request.request_id,
            tenant="t",
            reason_code="engine_failed",
            reason="x",
            original=CODEC.encode(request) if readable else b"?",
            original_headers={HEADER_KEY_ID: b"first"},
            origin=Origin(topic="inference.request.medium", partition=0, offset=number, append_time_ms=1),
            worker_id="w",
            created_at=number,
        )
        key, log = ("t", request.request_id), self.letters[number % 2]
        self.places[key].append((number % 2, len(log)))
        if readable:
            self.runnable.add(key)
        self._append(number % 2, None, CODEC.encode(letter), ())

    def _append(self, partition: int, key: bytes | None, value: bytes, headers: Sequence[tuple[str, bytes]]) -> None:
        log = self.letters[partition]
        log.append(RawMessage(KAFKA.names.dlq, partition, len(log), 1, key, value, tuple(headers)))

    async def produce(
        self,
        topic: str,
        value: bytes,
        *,
        key: bytes | None,
        headers: list[tuple[str, bytes]],
        partition: int | None = None,
    ) -> Delivery:
        """Whoever is killed meanwhile may have sent it, or not; and so may who hears of no acknowledgement."""
        await asyncio.sleep(self._rng.uniform(0.0, 0.02))
        unanswered = self._rng.random() < self.away
        if not unanswered or self._rng.random() < 0.5:
            self._take(topic, key, value, headers, partition)
        await asyncio.sleep(self._rng.uniform(0.0, 0.02))
        if unanswered:
            raise BrokerUnavailable("no acknowledgement came")
        return Delivery(topic=topic, partition=0, offset=len(self.requests), timestamp_ms=5)

    def _take(
        self, topic: str, key_bytes: bytes | None, value: bytes, headers: list[tuple[str, bytes]], partition: int | None
    ) -> None:
        if topic == KAFKA.names.dlq:
            assert partition is not None
            self._append(partition, key_bytes, value, headers)
            if dict(headers)[HEADER_KIND] == PURGED.encode():
                self.purged.add((partition, CODEC.decode(value, DeadLetterAction).offset))
            return
        request = CODEC.decode(value, InferenceRequest)
        key = (request.tenant, request.redriven_from or "")
        if dict(headers).get(HEADER_KEY_ID) != b"first":
            self._broken(f"key: {key} is run again for another key than it came with")
        repeated = any(one.request_id == request.request_id for one in self.requests)
        if self._strict and repeated:
            self._broken(f"twice: {key} stands on its topic twice")
        self.requests.append(request)
        self.run_as[key].add(request.request_id)
        if len(self.run_as[key]) > 1:
            self._broken(f"twice: {key} is run again as {sorted(self.run_as[key])}")
        if self.purged.issuperset(self.places[key]):
            self._broken(f"purged: {key} is run again, and nothing is left of it")
        if not repeated and self._rng.random() < self._fails:
            self._add_letter_of(request, 1_000 + len(self.requests), readable=True)

    def count(self) -> int:
        """The letters that were written so far."""
        return sum(map(len, self.places.values()))

    def _broken(self, what: str) -> None:
        self.violation = self.violation or Violation(what)
        raise self.violation


class Letters(LetterFollower):
    """Reads the simulated topic; what it makes of it is the product's."""

    def __init__(self, topics: Topics, index: LetterIndex) -> None:
        super().__init__(KAFKA, CODEC, index)
        self._topics = topics

    def catch_up(self, within_s: float) -> None:
        known = self.index.positions()
        for number, log in self._topics.letters.items():
            self.index.take([self._record(message) for message in log[known.get(number, 0) :]])

    def read(self, places: Sequence[LetterPlace], within_s: float = 1.0) -> dict[LetterPlace, RawMessage]:
        return {place: self._topics.letters[place[0]][place[1]] for place in places}


class Gateway(SubmitterParts):
    """One life of a gateway: the index may be an earlier one's, and the rest is new."""

    def __init__(self, topics: Topics, index: LetterIndex, allowances: Allowances | None = None) -> None:
        super().__init__(allowances)
        self._topics = topics
        self._seen = 0
        this: Any = self
        threads: Any = SimpleNamespace(dead_letters=self)
        self.redriving = Redriving(Letters(topics, index), self.submitter, this, this, CODEC, KAFKA, threads)

    async def run(self, work: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(work, *args)

    async def produce(self, topic: str, value: bytes, **options: Any) -> Delivery:
        return await self._topics.produce(topic, value, **options)

    async def catch_up(self) -> None:
        await asyncio.sleep(0.01)
        for request in self._topics.requests[self._seen :]:
            self.accepted(request, None)
        self._seen = len(self._topics.requests)


def new_index() -> LetterIndex:
    return LetterIndex(Path(":memory:"), "topic")
