"""Requests without end, by the stock OpenAI client and as Avro straight onto Kafka, and what became of each."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import openai
from confluent_kafka import KafkaError, Message, Producer
from openai.types.chat import ChatCompletionChunk

from penstock.common.kafka_errors import client_logger
from penstock.schemas.codec import default_codec
from penstock.schemas.records import InferenceRequest
from support import wait_until
from system import Process, System

logger = logging.getLogger(__name__)
STREAMS = 4
AVRO_PAUSE_S = 0.1


def stock_client(gateway: Process) -> openai.OpenAI:
    """With its own defaults: it tries twice again, and waits for ten minutes."""
    return openai.OpenAI(base_url=gateway.url + "/v1", api_key="unused")


class Chat:
    """A chat of the stock client, streamed, as far as it was read."""

    def __init__(self, client: openai.OpenAI) -> None:
        messages: Any = [{"role": "user", "content": "hi"}]
        began = time.monotonic()
        self._stream = client.chat.completions.create(model="noop", messages=messages, stream=True)
        self._heard_at = time.monotonic()
        self.longest_wait_s = self._heard_at - began
        self.id = self._stream.response.headers["x-request-id"]
        self._pieces: list[str] = []

    def __enter__(self) -> Chat:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    def read(self, chunks: int) -> None:
        for _ in range(chunks):
            self._heard(next(self._stream))

    def rest(self) -> str:
        """Read to the end, and return the whole text."""
        for chunk in self._stream:
            self._heard(chunk)
        return "".join(self._pieces)

    def _heard(self, chunk: ChatCompletionChunk) -> None:
        now = time.monotonic()
        self.longest_wait_s, self._heard_at = max(self.longest_wait_s, now - self._heard_at), now
        self._pieces.append(chunk.choices[0].delta.content or "")


@dataclass
class Load:
    """`texts`: what the client read of each stream that ended. `acknowledged`: ids that were accepted, by any way."""

    system: System
    texts: dict[str, str] = field(default_factory=dict[str, str])
    acknowledged: set[str] = field(default_factory=set[str])
    refused: list[Exception] = field(default_factory=list[Exception])
    waits_s: list[float] = field(default_factory=list[float])
    """The longest silence of each stream: before its first chunk, or between two."""

    def __post_init__(self) -> None:
        self._ending = threading.Event()
        work: list[Callable[[], None]] = [self._chat] * STREAMS + [self._produce]
        self._threads = [threading.Thread(target=one, daemon=True) for one in work]

    def start(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def wait_more(self, streams: int = 4, records: int = 10, deadline_s: float = 60) -> None:
        """Until so many more streams were read to their ends, and so many more requests were accepted."""
        texts, accepted = len(self.texts) + streams, len(self.acknowledged) + records
        wait_until(
            lambda: len(self.texts) >= texts and len(self.acknowledged) >= accepted,
            deadline_s,
            lambda: f"{len(self.texts)} of {texts} streams, {self.refused}\n{self.system.logs(20)}",
        )

    def stop(self) -> None:
        self._ending.set()
        for thread in self._threads:
            thread.join(120)
        assert not any(thread.is_alive() for thread in self._threads)

    def _chat(self) -> None:
        client = stock_client(self.system.processes[1])
        while not self._ending.is_set():
            try:
                with Chat(client) as chat:
                    self.acknowledged.add(chat.id)
                    self.texts[chat.id] = chat.rest()
                    self.waits_s.append(chat.longest_wait_s)
            except openai.OpenAIError as error:
                self.refused.append(error)

    def _produce(self) -> None:
        """As a service without gateway does, with a stock producer that waits as long as Kafka's own default."""
        producer = Producer(
            {"bootstrap.servers": self.system.bootstrap, "partitioner": "murmur2_random", "enable.idempotence": True},
            logger=client_logger,
        )
        number = 0
        while not self._ending.is_set():
            number += 1
            request = InferenceRequest(
                request_id=f"avro-{id(self)}-{number}",
                task="text_generation",
                text_generation={"prompt": "hi", "max_tokens": 3},
                created_at=round(time.time() * 1000),
            )
            topic = self.system.names.request(request.task, request.priority)
            producer.produce(
                topic,
                default_codec().encode(request),
                request.request_id,
                on_delivery=self._reported(request.request_id),
            )
            producer.poll(AVRO_PAUSE_S)
        assert producer.flush(60) == 0

    def _reported(self, request_id: str) -> Callable[[KafkaError | None, Message], None]:
        def report(error: KafkaError | None, message: Message) -> None:
            if error is None:
                self.acknowledged.add(request_id)
            else:
                self.refused.append(RuntimeError(str(error)))

        return report

    def figures(self) -> tuple[int, int, int, float]:
        return len(self.texts), len(self.acknowledged), len(self.refused), max(self.waits_s)

    def check(self) -> None:
        """Each accepted request has its one outcome, each stream is its text, and all is committed."""
        self.system.wait_drained()
        outcomes = self.system.outcomes()
        states = {one: outcomes[one].status for one in self.acknowledged if one in outcomes}
        assert states == dict.fromkeys(self.acknowledged, "completed")
        for one, text in self.texts.items():
            assert (outcomes[one].text_generation or {})["text"] == text
        assert len({*self.texts.values()}) == 1, "the engine has one script"


@contextmanager
def loaded(system: System) -> Generator[Load]:
    """Load from before the block to after it; both must be served. Its outcomes are checked."""
    load = Load(system).start()
    try:
        load.wait_more()
        yield load
        load.wait_more()
    finally:
        load.stop()
    logger.info("load.ended streams=%d accepted=%d refused=%d longest_wait_s=%.1f", *load.figures())
    load.check()
