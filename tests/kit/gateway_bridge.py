"""A bridge without a broker: what it knows is read from a fake reader, and a fake client takes what it sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from kit.gateway_readers import fake_readers
from kit.records import CODEC, model_info, outcome
from penstock.common.outgoing import request_record
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.gateway.bridge import known as known_module
from penstock.gateway.bridge.known import Known, content_header, content_of
from penstock.gateway.bridge.requests import Requests
from penstock.gateway.limits.allowances import Allowances
from penstock.producers import AsyncClient, Event, Result, Status, Submitted
from penstock.producers.core import Before
from penstock.schemas.errors import PenstockError
from penstock.schemas.records import InferenceRequest, ModelInfo, ResultEvent
from penstock.schemas.requests import parse_request
from penstock.schemas.topics import TopicNames

NAMES = TopicNames()
SENT_MS = 1 << 50
MODEL = model_info("m", updated_at=SENT_MS)
RUNNING = Status(status="running", attempt=1, model="m", ttl_ms=9)


def made(request_id: str = "r1", **fields: Any) -> InferenceRequest:
    """The request of a message of the tenant `team`."""
    body = {"task": "text_generation", "payload": {"prompt": "p"}, **fields}
    return parse_request(body, tenant="team", request_id=request_id, now_ms=1)


class KnownTopics:
    """What a bridge knows (`known`), and the reader through which it learns it. The pool `big` has request topics."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        topics = dict.fromkeys([*NAMES.request_topics(), *NAMES.request_topics("big"), NAMES.model], 4)
        self._readers = fake_readers(monkeypatch, known_module, topics)
        self.known = Known(KafkaSettings(), CODEC)

    async def start(self, *models: ModelInfo) -> KnownTopics:
        await self.known.start()
        (self.reader,) = self._readers
        self.reader.read([self.of_model(model) for model in models])
        return self

    def of_model(self, model: ModelInfo) -> RawMessage:
        return RawMessage(NAMES.model, 0, 0, 1, model.model.encode(), CODEC.encode(model))

    def read(self, request: InferenceRequest, *, by_bridge: bool = True) -> None:
        """A record of the request is read, which a bridge has sent or another producer."""
        out = request_record(request, NAMES, CODEC, source="test")
        headers = [*out.headers, *([content_header(request.tenant, content_of(request))] if by_bridge else [])]
        self.reader.read([RawMessage(out.topic, 0, 0, 77, out.key, out.value, tuple(headers))])


class FakeClient:
    """Accepts what is sent once `go` is set. Requests end with their `outcomes`, or complete."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.followed: list[tuple[object, int | None]] = []
        self.outcomes: dict[str, ResultEvent] = {}
        self.failure: PenstockError | None = None
        self.go = asyncio.Event()
        self.go.set()

    async def send(self, request: InferenceRequest, **_: Any) -> Submitted:
        await self.go.wait()
        if self.failure is not None:
            raise self.failure
        self.sent.append(request.request_id)
        sent: dict[str, Any] = {
            "request_id": request.request_id,
            "tenant": "team",
            "before": Before(result=0, status=0),
        }
        return Submitted(**sent, topic="t", partition=0, offset=1, append_time_ms=SENT_MS)

    async def follow(self, what: Submitted | str, *, since_ms: int | None = None) -> AsyncGenerator[Event]:
        self.followed.append((what, since_ms))
        request_id = what if isinstance(what, str) else what.request_id
        yield RUNNING
        yield Result(self.outcomes.get(request_id) or outcome(request_id, tenant="team"))

    async def flush(self) -> int:
        return 0


def requests_of(client: Any, known: Known, allowances: Allowances) -> Requests:
    return Requests({"team": cast("AsyncClient", client)}, known, allowances, lambda store, prefix: None)
