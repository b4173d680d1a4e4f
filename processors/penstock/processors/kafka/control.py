"""What `inference.control` says: cancels, new priorities and deleted conversations, remembered within the horizon, and
erasures to be done.

The book is pure and bounded; the follower connects it to the topic, which a worker replays before it admits work.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Sequence

from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.processors.kafka.record_follower import RecordFollower
from penstock.schemas.codec import Codec
from penstock.schemas.records import ControlCommand

Subject = tuple[str, str]
"""(tenant, request_id), or (tenant, conversation_id) for a deleted conversation."""


class ControlBook:
    """Remembers commands by their subject. A command of a foreign tenant has another subject, so it never matches."""

    def __init__(self, *, horizon_s: float, remembered: int) -> None:
        self._horizon_ms = int(horizon_s * 1000)
        self._remembered = remembered
        self._books: dict[str, OrderedDict[Subject, ControlCommand]] = {
            kind: OrderedDict() for kind in ("cancel", "reprioritize", "erase", "delete_conversation")
        }
        self._to_erase: OrderedDict[Subject, ControlCommand] = OrderedDict()

    def apply(self, command: ControlCommand, now_ms: int) -> bool:
        """Remember it. False when it is older than the horizon, says nothing, or is of a kind that is not known."""
        book = self._books.get(command.kind)
        if book is None or now_ms - command.created_at > self._horizon_ms:
            return False
        if command.kind == "reprioritize" and command.priority is None:
            return False
        if command.kind == "delete_conversation":
            return command.conversation_id is not None and self._delete(command, command.conversation_id)
        subject = (command.tenant, command.request_id)
        if command.kind == "erase":  # its time is the broker's, as that of the record which it is compared with
            self._remember(self._to_erase, subject, command)
        elif command.created_at > now_ms:  # a clock that is ahead must not make it outlive the others
            command = dataclasses.replace(command, created_at=now_ms)
        self._remember(book, subject, command)
        return True

    def _delete(self, command: ControlCommand, conversation_id: str) -> bool:
        """Its time is the broker's, as that of the turns which it is compared with: it stays as it is."""
        book, subject = self._books["delete_conversation"], (command.tenant, conversation_id)
        known = book.get(subject)
        if known is None or known.created_at < command.created_at:
            self._remember(book, subject, command)
        return True

    def _remember(self, book: OrderedDict[Subject, ControlCommand], subject: Subject, command: ControlCommand) -> None:
        book[subject] = command
        book.move_to_end(subject)
        while len(book) > self._remembered:
            book.popitem(last=False)

    def cancelled(self, tenant: str, request_id: str) -> ControlCommand | None:
        return self._books["cancel"].get((tenant, request_id))

    def priority(self, tenant: str, request_id: str) -> int | None:
        command = self._books["reprioritize"].get((tenant, request_id))
        return None if command is None else command.priority

    def deleted_at(self, tenant: str, conversation_id: str) -> int | None:
        """Milliseconds since the epoch: turns of the conversation that were appended up to then end as cancelled."""
        command = self._books["delete_conversation"].get((tenant, conversation_id))
        return None if command is None else command.created_at

    def erasure(self, tenant: str, request_id: str, append_time_ms: int) -> ControlCommand | None:
        """That of a request whose record was appended then. A later one of the same id is another request."""
        command = self._books["erase"].get((tenant, request_id))
        return None if command is None or command.created_at < append_time_ms else command

    def erasures(self) -> list[ControlCommand]:
        """Erasures not yet done here, oldest first."""
        return list(self._to_erase.values())

    def erasure_done(self, command: ControlCommand) -> None:
        self._to_erase.pop((command.tenant, command.request_id), None)

    def prune(self, now_ms: int) -> None:
        """Forget what is older than the horizon. The books are in the order of arrival, so only heads are looked at."""
        for book in (*self._books.values(), self._to_erase):
            while book:
                subject, command = next(iter(book.items()))
                if now_ms - command.created_at <= self._horizon_ms:
                    break
                del book[subject]

    def __len__(self) -> int:
        return sum(map(len, self._books.values()))


class ControlFollower(RecordFollower[ControlCommand]):
    """Follows the control topic from its start; `on_commands` runs on the event loop, in log order.

    Commands may be applied twice, so those that were done before a fault of another do no harm. They are events, no
    state: when the topic is made again, a request that was cancelled stays so.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        codec: Codec,
        loop: asyncio.AbstractEventLoop,
        on_commands: Callable[[Sequence[ControlCommand]], None],
    ) -> None:
        def read(message: RawMessage) -> ControlCommand | None:
            if message.value is None:
                return None
            command = codec.decode(message.value, ControlCommand)
            if command.kind in ("delete_conversation", "erase"):  # they are compared with append times of requests
                return dataclasses.replace(command, created_at=message.timestamp_ms)
            return command

        super().__init__(settings, settings.names.control, read, loop, on_commands, name="control")
