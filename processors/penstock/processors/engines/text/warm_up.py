"""The warm-up of a text engine: prompts through prefill and decode at the largest batch that its options allow."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.processors.core.fleet.ledger import OutOfMemory
from penstock.processors.engines.batching.sampling import Sampling
from penstock.schemas.errors import EngineFailed
from penstock.schemas.texts import shortened

if TYPE_CHECKING:
    from penstock.processors.engines.batching.continuous import BatchingLoop
    from penstock.processors.engines.text.batch import TextBatch

NEW_TOKENS = 4
LONG_ENOUGH_S = 5.0
"""A batch that takes longer is the last one: a large model on a slow machine is not held up by its warm-up."""
ROUND_S = 120.0
SAMPLING = Sampling(temperature=1.0, top_k=50, top_p=0.9)
"""What takes most memory of a step."""


def warm_up(loop: BatchingLoop, batch: TextBatch, *, window: int, cache: int, block: int, vocabulary: int) -> None:
    """`window`, `cache`, `block` and `vocabulary` are in tokens. When memory runs out, batches are smaller from then
    on.

    Raises OutOfMemory when they cannot be smaller, EngineFailed when the loop does not run.
    """
    numbers = itertools.count(1)
    for runs, length in _rounds(batch, window=window, cache=cache, block=block):
        began = time.monotonic()
        for number in itertools.islice(numbers, runs):
            ids = [(number + at) % vocabulary for at in range(length)]  # others begin otherwise: no prefix is shared
            loop.add(f"warm-up {number}", ids, NEW_TOKENS, SAMPLING, [-1])
        outputs = loop.wait_for_outputs(runs, ROUND_S)
        if loop.dead:
            if not loop.out_of_memory:
                raise EngineFailed(shortened(f"the batching loop does not run: {loop.reason}", 500))
            if not batch.shrink(runs):
                raise OutOfMemory("memory ran out in the smallest batch that the engine makes")
        elif len(outputs) < runs or time.monotonic() - began > LONG_ENOUGH_S:
            return


def _rounds(batch: TextBatch, *, window: int, cache: int, block: int) -> Iterator[tuple[int, int]]:
    """(runs, tokens of the prompt of each): the largest step, then the most runs; a small one of each before.

    After one that failed it goes on with what the batch may be by then, so that in the end the largest has run.
    """
    for share in (8, 1):
        while True:
            length = max(1, min(window - NEW_TOKENS, batch.tokens // share))
            yield 1, length
            if length <= batch.tokens:
                break
    for share in (8, 1):
        while True:
            runs = max(1, batch.slots // share)
            length = max(1, min(window - NEW_TOKENS, batch.tokens // runs))
            fit = max(1, (cache // block - 1) // -(-(length + NEW_TOKENS) // block))
            yield min(runs, fit), length
            if runs <= batch.slots:
                break
