"""The shell around the work of a member of a consumer group: records come in, offsets go out. Decides nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from penstock.common.background import BackgroundTasks
from penstock.common.group_consumer import GroupConsumer, Listener, Read
from penstock.common.reader import Headers
from penstock.common.starting import Starting
from penstock.common.tasks import set_within
from penstock.gateway.held_offsets import HeldOffsets
from penstock.schemas.topics import TP

BATCH = 100
"""Records of a batch at most."""


class Handler(Protocol):
    """Whose work it is. Called on the event loop."""

    @property
    def offsets(self) -> HeldOffsets[Any]: ...
    def assigned(self, partitions: list[TP]) -> None: ...
    async def revoked(self, partitions: list[TP]) -> None: ...
    async def take(self, batch: Sequence[Read]) -> None:
        """The next records. No others come before it ends."""
        ...

    def passed(self, tp: TP, position: int) -> None:
        """All before it was taken, or is not wanted."""
        ...

    def tend(self) -> float:
        """Begin what is due; the seconds until it must be asked again at the latest."""
        ...

    def full(self, arriving: int, held: set[str]) -> set[str]:
        """Topics of which no more is to be read while so many records wait to be taken. `held`: those of now."""
        ...


class GroupWork:
    """`start`; then `cancel` and `leave`. All on one event loop."""

    def __init__(
        self,
        join: Callable[[Listener], GroupConsumer],
        handler: Handler,
        wants: Callable[[Headers], bool] | None = None,
    ) -> None:
        self._handler = handler
        self._arriving: asyncio.Queue[tuple[Callable[[], Coroutine[Any, Any, None]], bool]] = asyncio.Queue()
        self._background = BackgroundTasks()
        self.woken = asyncio.Event()
        """Set when something may be due."""
        self._held: set[str] = set()
        self.over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why it cannot be continued. A new process begins where this one has committed."""
        self.reason: str | None = Starting("the broker was not asked yet")
        """Why not all work is done now; None when it is."""
        self._consumer = join(
            Listener(
                on_batch=lambda batch: self.arrives(lambda: handler.take(batch)),
                on_assigned=handler.assigned,
                on_revoked=handler.revoked,
                on_failure=self._fail,
                wants=wants,
                on_passed=lambda offsets: self.arrives(lambda: self._passed(offsets), wakes=False),
            )
        )

    @property
    def waits_for(self) -> str | None:
        return self.reason or self._consumer.waits_for

    def start(self) -> None:
        self._background.start(self._arrive(), "arriving records")
        self._background.start(self._tend(), "work of a group")
        self._consumer.start()
        self.reason = None

    async def cancel(self) -> None:
        """Take and begin nothing more."""
        await self._background.cancel()

    async def leave(self) -> None:
        """Commit what is settled and leave the group: from then on others have the partitions."""
        self.commit()
        await self._consumer.stop()

    def commit(self) -> None:
        """Commit what may be, soon."""
        if due := self._handler.offsets.commits():
            self._consumer.commit(due)

    def arrives(self, work: Callable[[], Coroutine[Any, Any, None]], *, wakes: bool = True) -> None:
        """Do it behind all that was read until now. What `wakes` is followed by due work and a commit at once."""
        self._arriving.put_nowait((work, wakes))
        self._look()

    async def _arrive(self) -> None:
        while True:
            work, wakes = await self._arriving.get()
            await work()
            if wakes:
                self.woken.set()

    async def _passed(self, offsets: Mapping[TP, int]) -> None:
        for tp, offset in offsets.items():
            self._handler.passed(tp, offset)

    async def _tend(self) -> None:
        while True:
            self.woken.clear()
            seconds = self._handler.tend()
            self.commit()
            self._look()
            await set_within(self.woken, seconds)

    def _look(self) -> None:
        held = self._handler.full(BATCH * self._arriving.qsize(), self._held)
        if held != self._held:
            self._held = held
            self._consumer.hold(held)

    def _fail(self, reason: str) -> None:
        if not self.over.done():
            self.over.set_result(reason)
