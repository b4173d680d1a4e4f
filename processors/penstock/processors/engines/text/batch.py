"""Which runs are in the batching loop, and which wait because memory has not sufficed for more at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from penstock.processors.engines.batching.limit import BatchLimit
from penstock.processors.engines.process.loading import batch_tokens, text_slots

if TYPE_CHECKING:
    from penstock.processors.engines.batching.continuous import BatchingLoop

LEAST_TOKENS = 32
"""Of a step: smaller ones would only be slow."""


class TextBatch:
    """`put` gives a run to the loop; False when the loop is dead."""

    def __init__(self, loop: BatchingLoop, options: Mapping[str, Any], put: Callable[[str], bool]) -> None:
        self._loop = loop
        self._put = put
        self._slots = BatchLimit(text_slots(options))
        self._tokens = BatchLimit(batch_tokens(options), LEAST_TOKENS)
        self._in_loop: dict[str, None] = {}
        self._waiting: deque[str] = deque()
        self.ran_out = False
        """Memory ran out, and the worker does not know yet."""
        self.changed = False
        """The limit has changed, and the worker does not know yet."""

    @property
    def slots(self) -> int:
        """Runs at once."""
        return self._slots.size

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self._tokens.size

    def add(self, run_id: str) -> None:
        self._waiting.append(run_id)

    def fill(self) -> bool:
        """Give the loop what there is room for; False when it is dead."""
        while self._waiting and len(self._in_loop) < self._slots.size:
            run_id = self._waiting.popleft()
            self._in_loop[run_id] = None
            if not self._put(run_id):
                return False
        return True

    def remove(self, run_id: str) -> bool:
        """It is over, or of no interest any more; whether it was in the loop."""
        if run_id in self._in_loop:
            del self._in_loop[run_id]
            return True
        if run_id in self._waiting:
            self._waiting.remove(run_id)
        return False

    def went_well(self) -> None:
        """A run has ended as it should."""
        if self._slots.went_well():
            self.changed = True
        if self._tokens.went_well():
            self._loop.set_batch_tokens(self._tokens.size)

    def begin_anew(self) -> list[str]:
        """The loop has died out of memory: smaller batches from now on. Those that nothing smaller helps; they are out.

        The others are first among those that wait.
        """
        lost = list(self._in_loop)
        self._in_loop.clear()
        hopeless = [] if self.shrink(len(lost)) else lost
        if not hopeless:
            self._waiting.extendleft(reversed(lost))
        return hopeless

    def shrink(self, runs: int) -> bool:
        """A batch of so many runs was too large: the loop begins again with smaller ones, if there are any."""
        self.ran_out = True
        fewer = runs > 1 and self._slots.halve(runs)
        smaller = self._tokens.halve() or fewer
        self._loop.begin_anew(self._tokens.size)
        return smaller
