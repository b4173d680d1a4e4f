"""Batches of records cut into pieces that are folded at once, so that others on the loop have their turns."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from penstock.common.reader import RawMessage
from penstock.schemas.errors import RegistryUnavailable
from penstock.schemas.topics import TP

logger = logging.getLogger(__name__)

FOLDED_AT_ONCE = 100
BYTES_AT_ONCE = 256 * 1024
"""Records, and bytes of their values, that are folded before others on the loop have their turn."""
REGISTRY_RETRY_S = 0.1


class Folding:
    """Folds batches, and waits at a record whose schema the registry does not tell."""

    def __init__(self, apply: Callable[[Sequence[RawMessage]], None], offsets: Callable[[], Mapping[TP, int]]) -> None:
        """`apply` raises RegistryUnavailable at such a record; then `offsets` says how far it came."""
        self._apply, self._offsets = apply, offsets
        self.waits_for: str | None = None
        """Why the batch that is due cannot be decoded yet."""

    async def fold(self, batch: Sequence[RawMessage]) -> None:
        while True:
            try:
                self._apply(batch)
            except RegistryUnavailable as error:
                if self.waits_for is None:
                    logger.warning("follower.waits_for_registry error=%s", error)
                self.waits_for = str(error)
                offsets = self._offsets()
                batch = [m for m in batch if m.offset >= offsets.get((m.topic, m.partition), 0)]
                await asyncio.sleep(REGISTRY_RETRY_S)
            else:
                self.waits_for = None
                return


def folds(batch: Sequence[RawMessage], at_once: int = FOLDED_AT_ONCE) -> Iterator[Sequence[RawMessage]]:
    """The batch in pieces that are folded at once. A record that is larger than one may be is a piece of its own."""
    start = size = 0
    for at, message in enumerate(batch):
        length = len(message.value or b"")
        if at > start and (at - start == at_once or size + length > BYTES_AT_ONCE):
            yield batch[start:at]
            start, size = at, 0
        size += length
    if batch:
        yield batch[start:]
