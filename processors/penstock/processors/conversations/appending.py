"""Appends records of one conversation in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from penstock.common.transport import AsyncTransport, Delivery
from penstock.schemas.errors import PenstockError


async def append_in_order(
    transport: AsyncTransport, topic: str, partition: int, records: Sequence[tuple[bytes, bytes | None]]
) -> list[int]:
    """Append (key, value) pairs, however long the broker takes; their offsets. Raises PenstockError.

    Given up, the records could still be appended, and then once more.
    """
    loop = asyncio.get_running_loop()
    outcomes: list[asyncio.Future[Delivery]] = []
    refused: PenstockError | None = None
    for key, value in records:
        outcome: asyncio.Future[Delivery] = loop.create_future()
        try:
            transport.produce_nowait(topic, value, key=key, partition=partition, callback=_telling(outcome))
        except PenstockError as error:
            refused = error
            break
        outcomes.append(outcome)
    # Those that were sent before one was refused are waited for: who tries again must find them in the log.
    deliveries = [await outcome for outcome in outcomes]
    for error in (refused, *(delivery.error for delivery in deliveries)):
        if error is not None:
            raise error
    return [delivery.offset for delivery in deliveries]


def _telling(outcome: asyncio.Future[Delivery]) -> Callable[[Delivery], None]:
    def tell(delivery: Delivery) -> None:
        if not outcome.done():  # who waited may have been cancelled
            outcome.set_result(delivery)

    return tell
