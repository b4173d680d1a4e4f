"""What `inference.desired` says: what operators want of the models and classes of this worker's pool.

The follower connects the topic, which a worker replays before it admits work, to whatever obeys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.processors.kafka.record_follower import RecordFollower
from penstock.schemas.codec import Codec
from penstock.schemas.desired import key_of
from penstock.schemas.records import DesiredState


@dataclass(frozen=True, slots=True)
class Wished:
    """A record of the topic. `wish` is None when nothing is wanted any more: all is as configured."""

    key: str
    wish: DesiredState | None


class DesiredFollower(RecordFollower[Wished]):
    """Follows the topic from its start; `on_wishes` runs on the event loop, in log order."""

    def __init__(
        self,
        settings: KafkaSettings,
        codec: Codec,
        loop: asyncio.AbstractEventLoop,
        on_wishes: Callable[[Sequence[Wished]], None],
    ) -> None:
        def read(message: RawMessage) -> Wished | None:
            if message.value is None:
                return None if message.key is None else Wished(message.key.decode(errors="replace"), None)
            wish = codec.decode(message.value, DesiredState)
            return Wished(key_of(wish), wish)

        super().__init__(settings, settings.names.desired, read, loop, on_wishes, name="desired")

    def key_of(self, record: Wished) -> str:
        return record.key

    def withdrawals(self, keys: Sequence[str]) -> list[Wished]:
        return [Wished(key, None) for key in keys]
