"""What `inference.control` says: cancels and new priorities remembered within the horizon, erasures to be done.

The book is pure and bounded; `follow_control` connects it to the topic, which a worker replays before it admits work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

from penstock.producers.reader import PartitionReader, RawMessage
from penstock.producers.settings import KafkaSettings
from penstock.schemas.codec import Codec
from penstock.schemas.errors import DecodeError, RegistryUnavailable
from penstock.schemas.records import ControlCommand

logger = logging.getLogger(__name__)

REGISTRY_RETRY_S = 1.0

Subject = tuple[str, str]
"""(tenant, request_id)"""


class ControlBook:
    """Remembers commands by their subject. A command of a foreign tenant has another subject, so it never matches."""

    def __init__(self, *, horizon_s: float, remembered: int) -> None:
        self._horizon_ms = int(horizon_s * 1000)
        self._remembered = remembered
        self._cancels: OrderedDict[Subject, ControlCommand] = OrderedDict()
        self._priorities: OrderedDict[Subject, ControlCommand] = OrderedDict()
        self._erasures: OrderedDict[Subject, ControlCommand] = OrderedDict()

    def apply(self, command: ControlCommand, now_ms: int) -> bool:
        """Remember it. False when it is older than the horizon, or of a kind that is not known."""
        book = {"cancel": self._cancels, "reprioritize": self._priorities, "erase": self._erasures}.get(command.kind)
        if book is None or now_ms - command.created_at > self._horizon_ms:
            return False
        subject = (command.tenant, command.request_id)
        book[subject] = command
        book.move_to_end(subject)
        while len(book) > self._remembered:
            book.popitem(last=False)
        return True

    def cancelled(self, tenant: str, request_id: str) -> ControlCommand | None:
        return self._cancels.get((tenant, request_id))

    def priority(self, tenant: str, request_id: str) -> int | None:
        command = self._priorities.get((tenant, request_id))
        return None if command is None else command.priority

    def erasures(self) -> list[ControlCommand]:
        """Erasures not yet done here, oldest first."""
        return list(self._erasures.values())

    def erased(self, command: ControlCommand) -> None:
        self._erasures.pop((command.tenant, command.request_id), None)

    def prune(self, now_ms: int) -> None:
        """Forget what is older than the horizon. The books are in the order of arrival, so only heads are looked at."""
        for book in (self._cancels, self._priorities, self._erasures):
            while book:
                subject, command = next(iter(book.items()))
                if now_ms - command.created_at <= self._horizon_ms:
                    break
                del book[subject]

    def __len__(self) -> int:
        return len(self._cancels) + len(self._priorities) + len(self._erasures)


def read_commands(codec: Codec, messages: Sequence[RawMessage]) -> list[ControlCommand]:
    """The commands in raw messages; tombstones and what does not decode are passed over, the latter with a log line."""
    commands: list[ControlCommand] = []
    for message in messages:
        if message.value is None:
            continue
        try:
            commands.append(_decoded(codec, message.value))
        except DecodeError as error:
            logger.warning("control.undecodable offset=%d error=%s", message.offset, error.code)
    return commands


def _decoded(codec: Codec, value: bytes) -> ControlCommand:
    """Waits for a registry that is away: a command that is passed over is a cancel that is not heard."""
    while True:
        try:
            return codec.decode(value, ControlCommand)
        except RegistryUnavailable as error:
            logger.warning("control.waits_for_registry error=%s", error)
            time.sleep(REGISTRY_RETRY_S)


class ControlFollower:
    """Follows the control topic from its start; `on_commands` runs on the event loop, batch by batch, in log order."""

    def __init__(
        self,
        settings: KafkaSettings,
        codec: Codec,
        loop: asyncio.AbstractEventLoop,
        on_commands: Callable[[list[ControlCommand]], None],
    ) -> None:
        self._codec = codec
        self._loop = loop
        self._on_commands = on_commands
        self._reader = PartitionReader(settings, [settings.names.control], "beginning", self._on_batch)

    async def start(self, deadline_s: float) -> None:
        """Read to the end that the topic has now, so that an earlier cancel is known before its request is admitted."""
        await asyncio.to_thread(self._reader.start)
        await asyncio.to_thread(self._reader.wait_until_caught_up, deadline_s)
        await asyncio.sleep(0)  # the last batch was handed over with call_soon_threadsafe: let it run

    @property
    def alive(self) -> bool:
        return self._reader.failure is None

    async def stop(self) -> None:
        await asyncio.to_thread(self._reader.stop)

    def _on_batch(self, messages: Sequence[RawMessage]) -> None:
        commands = read_commands(self._codec, messages)
        if commands:
            self._loop.call_soon_threadsafe(self._on_commands, commands)
