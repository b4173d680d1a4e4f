"""A reader of the row's topics: notes results and statuses as they come, to the ends that they have at the end."""

from __future__ import annotations

import base64
import threading
import time

from confluent_kafka import Consumer, KafkaException, Message, TopicPartition

from penstock.cli.faults.histories import History
from penstock.common.kafka_errors import client_logger
from penstock.common.settings import KafkaSettings
from penstock.schemas.codec import default_codec
from penstock.schemas.records import ArtifactRef, ResultEvent, StatusEvent, WorkerState

_A_TIME = 2_000


class TopicReader:
    """Reads on a thread of its own from the topics' beginnings until `finish`."""

    def __init__(self, kafka: KafkaSettings, history: History) -> None:
        self._history, self._kafka = history, kafka
        self._codec = default_codec()
        self._consumer = Consumer(
            {**kafka.librdkafka(), "group.id": "none", "enable.auto.commit": False}, logger=client_logger
        )
        self.artifacts: dict[str, tuple[str, ArtifactRef]] = {}
        """By request: the tenant, and the output that lies in the store."""
        self.worker: WorkerState | None = None
        """What a worker has said last of itself."""
        self._read_to: dict[tuple[str, int], int] = {}
        known = self._consumer.list_topics(timeout=20).topics
        topics = (kafka.names.result, kafka.names.status, kafka.names.worker)
        self._places = [(topic, number) for topic in topics for number in known[topic].partitions]
        self._consumer.assign([TopicPartition(*place, 0) for place in self._places])
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self, within_s: float) -> None:
        """Note what the topics hold now, and end. Raises TimeoutError."""
        give_up = time.monotonic() + within_s
        left = self._ends()
        while left := {place: end for place, end in left.items() if self._read_to.get(place, 0) < end}:
            if time.monotonic() > give_up:
                raise TimeoutError(f"records that were not read: {left}")
            time.sleep(0.05)
        self.stop()

    def stop(self) -> None:
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        self._consumer.close()

    def _ends(self) -> dict[tuple[str, int], int]:
        """Of the results and statuses, by another consumer: the one that reads on its thread answers nobody else."""
        config = {**self._kafka.librdkafka(), "group.id": "none", "enable.auto.commit": False}
        asking = Consumer(config, logger=client_logger)
        try:
            places = [place for place in self._places if place[0] != self._kafka.names.worker]
            return {place: asking.get_watermark_offsets(TopicPartition(*place), timeout=20)[1] for place in places}
        finally:
            asking.close()

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                messages = self._consumer.consume(_A_TIME, 0.1)
            except KafkaException:
                continue  # the broker is away: that may be the row's fault
            for message in messages:
                if message.error() is None:
                    self._note(message)
                    self._read_to[message.topic() or "", message.partition() or 0] = (message.offset() or 0) + 1

    def _note(self, message: Message) -> None:
        value, place = message.value() or b"", {"partition": message.partition(), "offset": message.offset()}
        if message.topic() == self._kafka.names.result:
            event = self._codec.decode(value, ResultEvent)
            self._history.note("record", event.request_id, **place, value=base64.b64encode(value).decode())
            if event.is_terminal:
                self._history.named["terminal"].add(event.request_id)
            if event.output_artifact is not None:
                self.artifacts[event.request_id] = event.tenant, event.output_artifact
        elif message.topic() == self._kafka.names.worker:
            self.worker = self._codec.decode(value, WorkerState) if value else None
        else:
            status = self._codec.decode(value, StatusEvent)
            facts = {"status": status.status, "epoch": status.epoch, "attempt": status.attempt}
            self._history.note("status", status.request_id, **place, **facts)
