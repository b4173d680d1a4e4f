"""The topics, and what stands on them: results with a callback, deliveries, dead letters."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

from penstock.common.deliveries import fold_delivery
from penstock.common.group_consumer import Read
from penstock.common.reader import RawMessage
from penstock.schemas.codec import default_codec
from penstock.schemas.fold import ResultFold
from penstock.schemas.records import DeadLetter, InferenceRequest, Origin, ResultEvent, WebhookDelivery
from penstock.schemas.topics import HEADER_CALLBACK, TP, TopicNames
from simulation.webhooks.checks import Checks
from simulation.webhooks.plan import Plan, Request
from simulation.world import WALL_EPOCH_MS

CODEC = default_codec()
NAMES = TopicNames()
Key = tuple[str, str]
ODD_MS = 10**17
"""A time that no calendar has."""


@dataclass(slots=True)
class Outcome:
    """The one outcome of a request, as readers of the whole log see it."""

    request: Request
    tp: TP
    first_offset: int
    offset: int | None = None
    at_s: float = 0.0


class Topics:
    """What is appended stays; times come from the loop."""

    def __init__(self, plan: Plan, checks: Checks) -> None:
        self.results: dict[TP, list[Read]] = {(NAMES.result, number): [] for number in range(plan.partitions)}
        self.deliveries: dict[int, list[tuple[bytes, bytes]]] = {number: [] for number in range(plan.partitions)}
        self.letters: dict[Key, DeadLetter] = {}
        self.outcomes: dict[Key, Outcome] = {}
        self.erased: list[tuple[Key, int]] = []
        self.committed: dict[TP, int] = dict.fromkeys(self.results, 0)
        self._folds: dict[Key, ResultFold] = {}
        self._checks = checks
        self._plan = plan

    @staticmethod
    def now_ms() -> int:
        return WALL_EPOCH_MS + int(asyncio.get_running_loop().time() * 1000)

    def append_result(self, request: Request, event: ResultEvent) -> None:
        """Of a request with a callback."""
        tp = (NAMES.result, request.partition)
        log, key = self.results[tp], (request.tenant, request.request_id)
        outcome = self.outcomes.setdefault(key, Outcome(request, tp, len(log)))
        fold = self._folds.setdefault(key, ResultFold(event.request_id, event.tenant))
        fold.apply(event, len(log))
        if fold.terminal is event:
            outcome.offset, outcome.at_s = len(log), asyncio.get_running_loop().time()
        headers = ((HEADER_CALLBACK, request.url.encode()),)
        log.append(Read(tp, len(log), event.request_id.encode(), CODEC.encode(event), self.now_ms(), headers))

    def append_other(self, rng: Random) -> None:
        """A record that concerns nobody here."""
        log = self.results[rng.choice(list(self.results))]
        tp = next(tp for tp, one in self.results.items() if one is log)
        log.append(Read(tp, len(log), b"x", b"", self.now_ms()))

    def append(self, topic: str, partition: int | None, key: bytes | None, value: bytes, by: str) -> None:
        """What a sender writes."""
        if topic == NAMES.dlq:
            letter = CODEC.decode(value, DeadLetter)
            self.letters[letter.tenant or "", letter.request_id or ""] = letter
            return
        assert partition is not None
        assert key is not None
        self.deliveries[partition].append((key, value))
        self._checks.kept(CODEC.decode(value, WebhookDelivery), by)

    def load(self, partitions: list[int]) -> list[WebhookDelivery]:
        found: dict[bytes, WebhookDelivery] = {}
        for number in partitions:
            for key, value in self.deliveries[number]:
                fold_delivery(found, key, value, CODEC)
        return list(found.values())

    def newest(self) -> dict[Key, WebhookDelivery]:
        return {(one.tenant, one.request_id): one for one in self.load(list(self.deliveries))}

    def read(self, tp: TP, offset: int) -> RawMessage | None:
        """A record by its place; of a request None, if retention took it."""
        if tp in self.results:
            read = self.results[tp][offset]
            return RawMessage(*tp, offset, read.timestamp_ms, read.key, read.value, read.headers)
        request = self._plan.requests[offset]
        if request.record_is_gone:
            return None
        record = InferenceRequest(
            request_id=request.request_id, tenant=request.tenant, task="text_generation", created_at=WALL_EPOCH_MS
        )
        return RawMessage(*tp, offset, WALL_EPOCH_MS, b"", CODEC.encode(record))


def event_of(request: Request, kind: str, epoch: int, attempt: int, now_ms: int, status: str | None) -> ResultEvent:
    """A chunk, or a terminal event."""
    return ResultEvent(
        request_id=request.request_id,
        tenant=request.tenant,
        kind=kind,
        origin=Origin(topic=NAMES.text_topics()[0], partition=0, offset=request.number, append_time_ms=WALL_EPOCH_MS),
        attempt=attempt,
        epoch=epoch,
        task="text_generation",
        created_at=ODD_MS if request.is_odd else now_ms,
        worker_id="w",
        status=status,
        metadata={"place": f"{epoch}.{attempt}"},
    )
