"""What `inference.control` says: cancels and new priorities remembered within the horizon, erasures to be done.

The book is pure and bounded; the follower connects it to the topic, which a worker replays before it admits work.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

from penstock.producers.reader import PartitionReader, RawMessage
from penstock.producers.settings import KafkaSettings
from penstock.schemas.codec import Codec
from penstock.schemas.errors import DecodeError, RegistryUnavailable
from penstock.schemas.records import ControlCommand

logger = logging.getLogger(__name__)

REGISTRY_RETRY_S = 1.0
SLICE = 50
"""Commands that run on the event loop in one go, so that a replay of thousands does not hold it up."""

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
        self._books = {"cancel": self._cancels, "reprioritize": self._priorities, "erase": self._erasures}

    def apply(self, command: ControlCommand, now_ms: int) -> bool:
        """Remember it. False when it is older than the horizon, says nothing, or is of a kind that is not known."""
        book = self._books.get(command.kind)
        if book is None or now_ms - command.created_at > self._horizon_ms:
            return False
        if command.kind == "reprioritize" and command.priority is None:
            return False
        if command.created_at > now_ms:  # a clock that is ahead must not make it outlive the others
            command = dataclasses.replace(command, created_at=now_ms)
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
        for book in self._books.values():
            while book:
                subject, command = next(iter(book.items()))
                if now_ms - command.created_at <= self._horizon_ms:
                    break
                del book[subject]

    def __len__(self) -> int:
        return len(self._cancels) + len(self._priorities) + len(self._erasures)


class ControlFollower:
    """Follows the control topic from its start; `on_commands` runs on the event loop, in log order.

    The commands come in small slices, and reading waits until the loop has done with one before it brings the next.
    What does not decode and what cannot be done is passed over with a log line: no command may end the worker.
    """

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
        self._stopping = threading.Event()
        self._reader = PartitionReader(settings, [settings.names.control], "beginning", self._on_batch)

    async def start(self, deadline_s: float) -> None:
        """Read to the end that the topic has now, so that an earlier cancel is known before its request is admitted."""
        await asyncio.to_thread(self._reader.start)
        await asyncio.to_thread(self._reader.wait_until_caught_up, deadline_s)

    @property
    def alive(self) -> bool:
        return self._reader.failure is None

    async def stop(self) -> None:
        self._stopping.set()
        await asyncio.to_thread(self._reader.stop)

    # -- on the reader's thread

    def _on_batch(self, messages: Sequence[RawMessage]) -> None:
        commands = [command for message in messages if (command := self._read(message)) is not None]
        for begin in range(0, len(commands), SLICE):
            if not self._hand_over(commands[begin : begin + SLICE]):
                return

    def _read(self, message: RawMessage) -> ControlCommand | None:
        """The command; None for a tombstone and for what cannot be read.

        A registry that is away is waited for: a command that is passed over is a cancel that is not heard.
        """
        if message.value is None:
            return None
        while not self._stopping.is_set():
            try:
                return self._codec.decode(message.value, ControlCommand)
            except RegistryUnavailable as error:
                logger.warning("control.waits_for_registry error=%s", error)
                self._stopping.wait(REGISTRY_RETRY_S)
            except DecodeError as error:
                logger.warning("control.undecodable offset=%d error=%s", message.offset, error.code)
                return None
            except Exception:
                logger.exception("control.unreadable offset=%d", message.offset)
                return None
        return None

    def _hand_over(self, commands: list[ControlCommand]) -> bool:
        """False when the worker stops and nobody listens any more."""
        done = threading.Event()
        try:
            self._loop.call_soon_threadsafe(self._run_slice, commands, done)
        except RuntimeError:
            logger.debug("control.loop_closed")
            return False
        while not done.wait(0.2):
            if self._stopping.is_set():
                return False
        return True

    # -- on the event loop

    def _run_slice(self, commands: list[ControlCommand], done: threading.Event) -> None:
        try:
            self._on_commands(commands)
        except Exception:
            logger.exception("control.failed commands=%d; each is tried by itself", len(commands))
            self._run_one_by_one(commands)
        finally:
            done.set()

    def _run_one_by_one(self, commands: list[ControlCommand]) -> None:
        """Commands may be applied twice, so those that were done before the fault do no harm."""
        for command in commands:
            try:
                self._on_commands([command])
            except Exception:
                logger.exception("control.passed_over kind=%s request=%s", command.kind, command.request_id)
