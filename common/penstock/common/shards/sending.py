"""Writes records of one conversation to the shared topic and waits for them. Blocks."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from penstock.common.shards.addresses import Address
from penstock.common.transport import Delivery, Transport
from penstock.schemas.errors import BrokerUnavailable


def send_and_wait(
    transport: Transport,
    topic: str,
    address: Address,
    records: Sequence[tuple[bytes, bytes | None]],
    timeout_s: float,
) -> list[int]:
    """Append (key, value) pairs in order; their offsets. Raises BrokerUnavailable, TooLarge, Overloaded."""
    deliveries: list[Delivery] = []
    done = threading.Event()

    def note(delivery: Delivery) -> None:
        deliveries.append(delivery)
        if len(deliveries) == len(records):
            done.set()

    for key, value in records:
        transport.send(topic, value, key=address.key(key), partition=address.partition, on_delivery=note)
    if records and not done.wait(timeout_s):
        raise BrokerUnavailable(f"{topic}: no acknowledgement within {timeout_s:.0f} s", retry_after_s=1)
    for delivery in deliveries:
        if delivery.error is not None:
            raise delivery.error
    return sorted(delivery.offset for delivery in deliveries)
