"""The erasures that are followed: for an erased request no call is made."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from penstock.common.reader import PartitionReader, RawMessage
from penstock.common.settings import KafkaSettings
from penstock.schemas.codec import Codec
from penstock.schemas.errors import DecodeError, RegistryUnavailable
from penstock.schemas.records import ControlCommand

logger = logging.getLogger(__name__)

READ_S = 60.0
AGAIN_S = 1.0


class Erasures:
    """Follows `inference.control`: `on_erased` gets each erased request and the time, on the event loop."""

    def __init__(self, kafka: KafkaSettings, codec: Codec, on_erased: Callable[[tuple[str, str], int], None]) -> None:
        self._kafka = kafka
        self._codec = codec
        self._on_erased = on_erased
        self._loop = asyncio.get_running_loop()
        self._reader: PartitionReader | None = None
        self._stopping = threading.Event()
        self.waits_for: str | None = None
        """Why the next record cannot be decoded yet."""

    @property
    def failure(self) -> BaseException | None:
        """Why they are not followed any more."""
        return None if self._reader is None else self._reader.failure

    def start(self) -> None:
        """Blocks until all that stands there was read. May be called again after BrokerUnavailable or NotFound."""
        self.stop()
        self._stopping.clear()
        topic = self._kafka.names.control
        self._reader = PartitionReader(self._kafka, [topic], self._on_batch, name="penstock-erasures")
        self._reader.start()
        self._reader.wait_until_caught_up(READ_S)

    def stop(self) -> None:
        self._stopping.set()
        if self._reader is not None:
            self._reader.stop()

    def _on_batch(self, batch: Sequence[RawMessage]) -> None:
        for message in batch:
            command = self._command(message)
            if command is not None and command.kind == "erase":
                self._loop.call_soon_threadsafe(
                    self._on_erased, (command.tenant, command.request_id), message.timestamp_ms
                )

    def _command(self, message: RawMessage) -> ControlCommand | None:
        """None for what is no command of ours. While the schema registry is away the reader waits."""
        try:
            while not self._stopping.is_set():
                try:
                    return self._codec.decode(message.value or b"", ControlCommand)
                except RegistryUnavailable as error:
                    if self.waits_for is None:
                        logger.warning("webhooks.erasures_wait error=%s", error)
                    self.waits_for = str(error)
                    self._stopping.wait(AGAIN_S)
        except DecodeError:
            pass
        finally:
            self.waits_for = None
        return None
