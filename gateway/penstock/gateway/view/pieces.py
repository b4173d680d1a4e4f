"""Batches of records cut into pieces that are folded at once, so that others on the loop have their turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.common.reader import RawMessage

FOLDED_AT_ONCE = 100
BYTES_AT_ONCE = 256 * 1024
"""Records, and bytes of their values, that are folded before others on the loop have their turn."""


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
