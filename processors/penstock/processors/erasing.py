"""Erasures: an erased request's turns are tombstoned by the worker that owns the partition it came from."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from penstock.common.background import BackgroundTasks
from penstock.processors.conversations.turns import ConversationTurns
from penstock.processors.kafka.control import ControlBook
from penstock.schemas.records import ControlCommand

logger = logging.getLogger(__name__)

ERASE_RETRY_S = 5.0


class Erasing:
    """`owns` says whether a partition is this worker's."""

    def __init__(self, turns: ConversationTurns, book: ControlBook, owns: Callable[[str, int], bool]) -> None:
        self._turns = turns
        self._book = book
        self._owns = owns
        self._tasks = BackgroundTasks()
        self._under_way: dict[tuple[str, str], ControlCommand | None] = {}
        """By request; a command if what this worker held of it ended meanwhile, and has to be erased once more."""

    def erase(self, command: ControlCommand, *, held: bool = False) -> None:
        """Erase what this worker held, or if the request's first partition is ours; else its owner does.

        It is tried again until it succeeds.
        """
        origin = command.origin
        if origin is None or command.conversation_id is None:
            self._book.erasure_done(command)
            return
        subject = (command.tenant, command.request_id)

        def ours() -> bool:
            return held or self._owns(origin.topic, origin.partition)

        def over(_: object) -> None:
            if (again := self._under_way.pop(subject, None)) is not None:
                self.erase(again, held=True)

        if subject in self._under_way:
            self._under_way[subject] = command if held else self._under_way[subject]
        elif ours():
            self._under_way[subject] = None
            erasing = self._erase(command, command.conversation_id, ours)
            self._tasks.start(erasing, f"erase {command.request_id}").add_done_callback(over)

    async def close(self) -> None:
        """Give up what is under way: the next owner of the partition erases."""
        self._under_way.clear()
        await self._tasks.cancel()

    async def _erase(self, command: ControlCommand, conversation_id: str, ours: Callable[[], bool]) -> None:
        while ours():
            try:
                count = await self._turns.erase(command.tenant, conversation_id, command.request_id)
            except Exception as error:
                logger.warning("erase.failed request_id=%s error=%r: tried again", command.request_id, error)
                await asyncio.sleep(ERASE_RETRY_S)
            else:
                self._book.erasure_done(command)
                logger.info("erase.done request_id=%s records=%d", command.request_id, count)
                return
