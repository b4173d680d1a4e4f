"""What operators ordered, read from Kafka itself: it needs no gateway and no key."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.common.desired import Desired, read_desired
from penstock.common.settings import KafkaSettings
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import PenstockError

LOOK_S = 3.0


def read_orders(settings: KafkaSettings, deadline_s: float = LOOK_S) -> Mapping[str, Desired] | None:
    """Desired state by its key; None where it cannot be read now, as without a broker or without its topic."""
    try:
        return read_desired(settings, default_codec(), deadline_s)
    except PenstockError:
        return None
