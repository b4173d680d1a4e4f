"""A reader of the row's topics: notes results and statuses as they come, to the ends that they have at the end."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from penstock.cli.faults.histories import History
from penstock.common.reader import PartitionReader, RawMessage
from penstock.common.settings import KafkaSettings
from penstock.schemas.codec import default_codec
from penstock.schemas.records import ArtifactRef, ResultEvent, StatusEvent, WorkerState
from penstock.schemas.topics import is_of_gateway

ASK_S = 20.0


class TopicReader:
    """Reads on a thread of its own from the topics' beginnings until `finish`."""

    def __init__(self, kafka: KafkaSettings, history: History) -> None:
        self._history, self._names = history, kafka.names
        self._codec = default_codec()
        self.artifacts: dict[str, tuple[str, ArtifactRef]] = {}
        """By request: the tenant, and the output that lies in the store."""
        self.worker: WorkerState | None = None
        """What a worker has said last of itself."""
        topics = [self._names.result, self._names.status, self._names.worker]
        self._reader = PartitionReader(kafka, topics, self._on_batch, name="faults-reader")
        self._reader.start(ASK_S)

    def finish(self, within_s: float) -> None:
        """Note what the results and statuses hold now, and end. Raises BrokerUnavailable, InternalError."""
        places = [tp for tp in self._reader.positions() if tp[0] != self._names.worker]
        self._reader.wait_until_caught_up(within_s, partitions=places)
        self.stop()

    def stop(self) -> None:
        self._reader.stop()

    def _on_batch(self, messages: Sequence[RawMessage]) -> None:
        for message in messages:
            self._note(message)

    def _note(self, message: RawMessage) -> None:
        value, place = message.value or b"", {"partition": message.partition, "offset": message.offset}
        if message.topic == self._names.result:
            event = self._codec.decode(value, ResultEvent)
            self._history.note("record", event.request_id, **place, value=base64.b64encode(value).decode())
            if event.is_terminal:
                self._history.named["terminal"].add(event.request_id)
            if event.output_artifact is not None:
                self.artifacts[event.request_id] = event.tenant, event.output_artifact
        elif message.topic == self._names.worker:
            if is_of_gateway(message.key):
                return
            self.worker = self._codec.decode(value, WorkerState) if value else None
        else:
            status = self._codec.decode(value, StatusEvent)
            facts = {"status": status.status, "epoch": status.epoch, "attempt": status.attempt}
            self._history.note("status", status.request_id, **place, **facts)
