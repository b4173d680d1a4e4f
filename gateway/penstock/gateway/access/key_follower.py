"""Follows `inference.key` into the book of keys, from its beginning, on a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from penstock.common import admin
from penstock.common.kafka_errors import missing_topic
from penstock.common.reader import PartitionReader, RawMessage
from penstock.common.settings import KafkaSettings
from penstock.common.threads import in_daemon_thread
from penstock.gateway.edge.key_book import REVOKED, KeyBook
from penstock.gateway.service.dependencies import Problem
from penstock.schemas.codec import Codec
from penstock.schemas.errors import BrokerUnavailable, DecodeError, InternalError, PenstockError, RegistryUnavailable
from penstock.schemas.records import KeyState

logger = logging.getLogger(__name__)

READ_S = 5.0
REGISTRY_S = 1.0
"""How long records behind one of an unknown schema wait for the registry."""
Change = tuple[str, KeyState | None]


@dataclass(slots=True, eq=False)
class Reading:
    """One reading of the topic from its beginning."""

    topic_id: str
    book: KeyBook
    """Of its own until it is caught up."""
    reader: PartitionReader | None = None
    """None until it is made."""
    gap: str | None = None
    """Why it left records out. Another reading is needed."""
    stopped: bool = False

    @property
    def is_good(self) -> bool:
        return self.reader is not None and self.reader.failure is None and self.gap is None


class KeyFollower:
    """The book changes on the event loop: a call that has waited for `catch_up` finds there what it waited for.

    A topic that is missing when the gateway starts has no keys. One that goes later leaves the keys that it had. While
    the topic is read again, what was read before stays in force, except keys that are revoked.
    """

    def __init__(self, kafka: KafkaSettings, codec: Codec, book: KeyBook) -> None:
        self._kafka, self._codec, self._book = kafka, codec, book
        self._topic = kafka.names.key
        self._loop = asyncio.get_running_loop()
        self._reading: Reading | None = None
        self._why_none = "they are not read yet"

    async def look(self) -> Problem | None:
        """A probe: reads the topic from its beginning if it must, and waits until all of it is read."""
        try:
            await self._look()
        except PenstockError as error:
            self._why_none = error.message
            return Problem("keys and limits made while gateways run cannot be read or changed", error.message)
        return None

    async def _look(self) -> None:
        topic_id = await in_daemon_thread(admin.topic_id, self._kafka, self._topic, READ_S)
        if topic_id is None:
            if self._reading is None:
                self._book.unread = None
            raise missing_topic(self._topic)
        if self._reading is None or self._reading.topic_id != topic_id or not self._reading.is_good:
            await self.stop()
            await self._begin(topic_id)
        await self.catch_up()

    async def catch_up(self) -> None:
        """Wait until the book has all that is on the topic now. Raises BrokerUnavailable."""
        reading = self._reading
        if reading is None or reading.reader is None:
            raise BrokerUnavailable(f"the keys of {self._topic} are not read: {self._why_none}", retry_after_s=1)
        try:
            await in_daemon_thread(reading.reader.wait_until_caught_up, READ_S)
        except InternalError as error:
            raise BrokerUnavailable(error.message, retry_after_s=1) from error
        # Without the right to read, no record that was written since comes, and nothing else shows that.
        if why := reading.gap or reading.reader.rights.reason:
            raise BrokerUnavailable(why, retry_after_s=1)
        if reading.stopped:
            raise BrokerUnavailable(f"the keys of {self._topic} are being read again", retry_after_s=1)
        if reading.book is not self._book:
            self._book.replace(reading.book)
            reading.book = self._book

    async def _begin(self, topic_id: str) -> None:
        tp = (self._topic, 0)
        begin = await in_daemon_thread(admin.begin_offsets, self._kafka, [tp], READ_S)
        reading = Reading(topic_id, KeyBook())
        reader = PartitionReader(self._kafka, begin, partial(self._on_batch, reading), name="penstock-keys")
        reading.reader, self._reading = reader, reading
        try:
            await in_daemon_thread(reader.start)
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """What is read of the topic stays in the book."""
        reading, self._reading = self._reading, None
        if reading is not None and reading.reader is not None:
            reading.stopped = True
            await in_daemon_thread(reading.reader.stop)

    def _on_batch(self, reading: Reading, messages: Sequence[RawMessage]) -> None:
        """On the reader's thread."""
        changes = [change for message in messages if (change := self._read(reading, message)) is not None]
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._apply, reading, changes)

    def _apply(self, reading: Reading, changes: Sequence[Change]) -> None:
        if reading.stopped:
            return
        for key, state in changes:
            reading.book.apply(key, state)
            if reading.book is not self._book and state is not None and key.startswith(f"{REVOKED}/"):
                self._book.apply(key, state)

    def _read(self, reading: Reading, message: RawMessage) -> Change | None:
        """None: the record is left out."""
        key = (message.key or b"").decode("utf-8", "replace")
        if message.value is None:
            return key, None
        if key.startswith(f"{REVOKED}/"):  # its key says it all: it waits for no registry
            return key, KeyState(kind=REVOKED, id=key.partition("/")[2], updated_at=message.timestamp_ms)
        if reading.gap is not None or reading.stopped:
            return None
        try:
            return key, self._decoded(reading, message.value)
        except RegistryUnavailable as error:
            reading.gap = error.message
            return None
        except DecodeError as error:  # it counts as none: what the key was allowed before may be too much
            logger.warning("keys.undecodable offset=%d error=%s", message.offset, error.code)
            return key, None

    def _decoded(self, reading: Reading, value: bytes) -> KeyState:
        """Raises DecodeError, RegistryUnavailable."""
        give_up = time.monotonic() + REGISTRY_S
        while True:
            try:
                return self._codec.decode(value, KeyState)
            except RegistryUnavailable:  # it is asked in the background
                if reading.stopped or time.monotonic() > give_up:
                    raise
                time.sleep(0.05)
