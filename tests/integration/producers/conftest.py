"""A stand-in worker: reads the request topics and writes what a test's script says, as a real worker would."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import pytest

from penstock.common.reader import PartitionReader, RawMessage
from penstock.common.settings import KafkaSettings
from penstock.common.transport import Transport
from penstock.schemas.codec import default_codec
from penstock.schemas.records import STATUS_RANKS, InferenceRequest, Origin, ResultEvent, StatusEvent


class Worker:
    """Answers every request by `script(worker, request, origin)`, on its reader's thread."""

    def __init__(self, settings: KafkaSettings) -> None:
        self.settings = settings
        self.transport = Transport(settings)
        self.script: Callable[[Worker, InferenceRequest, Origin], None] = echo
        self.seen: list[InferenceRequest] = []
        self._reader = PartitionReader(settings, settings.names.request_topics(), self._on_batch)

    def start(self) -> None:
        self._reader.start()

    def stop(self) -> None:
        self._reader.stop()
        self.transport.close()

    def status(self, request: InferenceRequest, origin: Origin, status: str, *, attempt: int = 1) -> None:
        event = StatusEvent(
            request_id=request.request_id,
            tenant=request.tenant,
            status=status,
            done=STATUS_RANKS[status] == 100,
            rank=STATUS_RANKS[status],
            attempt=attempt,
            epoch=1,
            origin=origin,
            worker_id="fake",
            created_at=0,
        )
        value = default_codec().encode(event)
        self.transport.send(self.settings.names.status, value, key=request.request_id.encode())

    def chunk(self, request: InferenceRequest, origin: Origin, text: str, at: int, *, attempt: int = 1) -> None:
        self.result(_event(request, origin, kind="chunk", text=text, text_offset=at, attempt=attempt))

    def outcome(
        self, request: InferenceRequest, origin: Origin, text: str, *, status: str = "completed", **more: object
    ) -> None:
        output = {"text": text} if status == "completed" else None
        self.result(_event(request, origin, kind="terminal", status=status, text_generation=output, **more))

    def result(self, event: ResultEvent) -> None:
        value = default_codec().encode(event)
        self.transport.send(self.settings.names.result, value, key=event.request_id.encode())

    def _on_batch(self, messages: Sequence[RawMessage]) -> None:
        for message in messages:
            request = default_codec().decode(message.value or b"", InferenceRequest)
            self.seen.append(request)
            origin = Origin(
                topic=message.topic,
                partition=message.partition,
                offset=message.offset,
                append_time_ms=message.timestamp_ms,
            )
            self.script(self, request, origin)


def _event(request: InferenceRequest, origin: Origin, **values: object) -> ResultEvent:
    empty = ResultEvent(
        request_id=request.request_id,
        tenant=request.tenant,
        kind="chunk",
        origin=origin,
        attempt=1,
        epoch=1,
        task=request.task,
        created_at=0,
        worker_id="fake",
        metadata=request.metadata,
    )
    return dataclasses.replace(empty, **values)  # type: ignore[arg-type]


def echo(worker: Worker, request: InferenceRequest, origin: Origin) -> None:
    """queued, running, the prompt in chunks of three characters, the outcome."""
    text = str(request.payload["prompt"])
    worker.status(request, origin, "queued")
    worker.status(request, origin, "running")
    for at in range(0, len(text), 3):
        worker.chunk(request, origin, text[at : at + 3], at)
    worker.outcome(request, origin, text)
    worker.status(request, origin, "completed")


@pytest.fixture
def settings(kafka: object, kafka_prefix: str, create_topics: Callable[..., None]) -> KafkaSettings:
    """This test's own topics."""
    create_topics()
    return KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, topic_prefix=kafka_prefix)  # type: ignore[attr-defined]


@pytest.fixture
def worker(settings: KafkaSettings) -> Iterator[Worker]:
    """A worker that echoes; give it another script before submitting."""
    made = Worker(settings)
    made.start()
    yield made
    made.stop()
