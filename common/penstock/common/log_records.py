"""Single records read again by their places. On one event loop; a broker that is away is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.common.reader import RawMessage
from penstock.common.refetch import Refetcher
from penstock.common.settings import KafkaSettings
from penstock.schemas.errors import Overloaded
from penstock.schemas.topics import TP


class LogRecords:
    """`most`: records that may be waited for at once. The thread that reads begins with the first that is asked for."""

    def __init__(self, kafka: KafkaSettings, most: int | None = None) -> None:
        self._kafka = kafka
        self._most = most
        self._wanted: dict[tuple[TP, int], asyncio.Future[RawMessage | None]] = {}
        self._refetcher: Refetcher | None = None
        self.fetched = 0

    async def stop(self) -> None:
        if self._refetcher is not None:
            await self._refetcher.stop()

    async def read(self, tp: TP, offset: int) -> RawMessage | None:
        """None when it is not on its topic any more. Raises Overloaded."""
        wanted = self._wanted.get((tp, offset))
        if wanted is None:
            if self._most is not None and len(self._wanted) >= self._most:
                raise Overloaded("as many records as may be are asked for; try again", retry_after_s=1)
            wanted = self._wanted[tp, offset] = asyncio.get_running_loop().create_future()
            try:
                self._started().request(tp, (offset,))
            except BaseException:
                del self._wanted[tp, offset]  # the next reader asks again
                raise
        return await asyncio.shield(wanted)

    def _started(self) -> Refetcher:
        if self._refetcher is None:
            self._refetcher = Refetcher(self._kafka, asyncio.get_running_loop(), self._on_fetched, self._on_gone)
            self._refetcher.start()
        return self._refetcher

    def _on_fetched(self, tp: TP, messages: Sequence[RawMessage]) -> None:
        self.fetched += len(messages)
        for message in messages:
            self._tell(tp, message.offset, message)

    def _on_gone(self, tp: TP, offsets: Sequence[int]) -> None:
        for offset in offsets:
            self._tell(tp, offset, None)

    def _tell(self, tp: TP, offset: int, message: RawMessage | None) -> None:
        wanted = self._wanted.pop((tp, offset), None)
        if wanted is not None and not wanted.done():
            wanted.set_result(message)
