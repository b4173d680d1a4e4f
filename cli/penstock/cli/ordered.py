"""What Kafka itself knows of models, the orders and what workers reported: it needs no gateway and no key."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

from penstock.common.desired import Desired, read_desired
from penstock.common.model_entry import ModelEntry
from penstock.common.reader import read_to_end
from penstock.common.settings import KafkaSettings
from penstock.common.transport import Transport
from penstock.schemas.codec import default_codec
from penstock.schemas.desired import MODEL, desired_key
from penstock.schemas.errors import DecodeError, PenstockError
from penstock.schemas.records import ModelInfo
from penstock.schemas.times import rfc3339

LOOK_S = 3.0


def read_orders(settings: KafkaSettings) -> Mapping[str, Desired] | None:
    """Desired state by its key; None where it cannot be read now, as without a broker or without its topic."""
    try:
        return read_desired(settings, default_codec(), LOOK_S)
    except PenstockError:
        return None


def removed_lines(entries: Sequence[ModelEntry], orders: Mapping[str, Desired], pool: str | None) -> list[str]:
    """A line for each of these models that an order has removed, with the command that adds it again."""
    ordered = ((entry, orders.get(desired_key(MODEL, entry.id, pool))) for entry in entries)
    return [
        f"{entry.id} is not served, it was removed by an order at {rfc3339(order.state.created_at)}:"
        f" `penstock models add {entry.id} --source {shlex.quote(entry.source)} --engine {entry.engine}"
        f"{''.join(f' --task {task}' for task in entry.tasks)}` adds it again"
        for entry, order in ordered
        if order is not None and order.state.removed
    ]


def withdraw_unserved(settings: KafkaSettings, pool: str | None, served: Collection[str]) -> list[str]:
    """Withdraw the records of the pool's models that its workers reported and that are not served any more.

    Returns their names. A record would make a gateway report its model as one without a worker. Raises PenstockError.
    """
    topic, codec = settings.names.model, default_codec()
    records = {record.key: record.value for record in read_to_end(settings, topic)}
    gone: dict[bytes | None, str] = {}
    for key, value in records.items():
        with suppress(DecodeError):  # a gateway does not read it either
            info = codec.decode(value or b"", ModelInfo)
            if info.pool == pool and info.model not in served:
                gone[key] = info.model
    if gone:
        transport = Transport(settings)
        for key in gone:
            transport.send(topic, None, key=key)
        transport.close()
    return sorted(gone.values())
