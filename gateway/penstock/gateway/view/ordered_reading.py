"""On a reader's thread: while a view catches up, what is read goes to it in the order of times; then as it comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from penstock.common.reader import PartitionReader, RawMessage, Select
from penstock.common.settings import KafkaSettings
from penstock.gateway.view.time_order import TimeOrder
from penstock.schemas.topics import TP

DELIVERED_AT_ONCE = 500
CROWDED = 50_000
"""While so many requests are live and outcomes are behind, a view that catches up reads outcomes alone."""


class OrderedReading:
    """Reads partitions from `begin`, those in `ends` in order until these offsets. See `TimeOrder`.

    `deliver` runs on the reader's thread. `is_crowded` is asked there too.
    """

    def __init__(
        self,
        settings: KafkaSettings,
        begin: Mapping[TP, int],
        ends: Mapping[TP, int],
        deliver: Callable[[Sequence[RawMessage]], None],
        *,
        is_crowded: Callable[[], bool],
        select: Select,
    ) -> None:
        self._order: TimeOrder | None = TimeOrder(begin, ends, settings.names.result, time.monotonic())
        self._deliver = deliver
        self._is_crowded = is_crowded
        self.reader = PartitionReader(
            settings,
            begin,
            self._on_batch,
            reports_ends=False,
            select=select,
            on_idle=self._on_idle,
            name="gateway-follower",
        )

    def finish(self) -> None:
        """The view stands at the ends, of which some have no record before them."""

        def pass_all_on() -> None:
            if self._order is not None:
                self._order.finish()
                self._pass_on(self._order)

        self.reader.call(pass_all_on)

    def _on_batch(self, batch: Sequence[RawMessage]) -> None:
        if self._order is None:
            self._deliver(batch)
            return
        self._order.add(batch, time.monotonic())
        self._pass_on(self._order)

    def _on_idle(self) -> None:
        if self._order is not None:
            self._pass_on(self._order)

    def _pass_on(self, order: TimeOrder) -> None:
        order.look_for_silence(time.monotonic())
        taken = order.take(crowded=self._is_crowded())
        for at in range(0, len(taken), DELIVERED_AT_ONCE):
            self._deliver(taken[at : at + DELIVERED_AT_ONCE])
        if taken:
            order.was_held_up(time.monotonic())  # delivering waits for the view
        self.reader.pause(order.to_pause())
        self.reader.resume(order.to_resume())
        if order.done:
            self._order = None
