"""Records of `inference.desired`: the desired state of models and classes, and reading all of it at once."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from penstock.common.reader import RawMessage, read_to_end
from penstock.common.settings import KafkaSettings
from penstock.schemas.codec import Codec
from penstock.schemas.desired import key_of
from penstock.schemas.errors import DecodeError
from penstock.schemas.records import DesiredState

logger = logging.getLogger(__name__)


WITHDRAWN = -1


@dataclass(frozen=True, slots=True)
class DesiredRecord:
    """One record of the topic. `state` is None for a tombstone: the model or class is as configured again.

    `revision` is the record's offset: the topic has one partition, so a later order has a greater revision. `WITHDRAWN`
    where the topic was made again and has no record of it.
    """

    key: str
    state: DesiredState | None
    revision: int


def read_record(message: RawMessage, codec: Codec) -> DesiredRecord | None:
    """The record of a message; None for a tombstone without a key. Raises DecodeError, RegistryUnavailable."""
    if message.value is None:
        return (
            None if message.key is None else DesiredRecord(message.key.decode(errors="replace"), None, message.offset)
        )
    state = codec.decode(message.value, DesiredState)
    return DesiredRecord(key_of(state), state, message.offset)


@dataclass(frozen=True, slots=True)
class Desired:
    """The newest desired state of a model or class, and the revision of its record."""

    state: DesiredState
    revision: int


def read_desired(settings: KafkaSettings, codec: Codec, deadline_s: float = 10.0) -> dict[str, Desired]:
    """All desired state that is on the topic now, by key as `desired_key` has it. For a thread.

    Raises NotFound when the topic does not exist, BrokerUnavailable.
    """
    desired: dict[str, Desired] = {}
    for message in read_to_end(settings, settings.names.desired, deadline_s=deadline_s):
        try:
            record = read_record(message, codec)
        except DecodeError as error:
            logger.warning("desired.undecodable offset=%d error=%s", message.offset, error.code)
            continue
        if record is None:
            continue
        if record.state is None:
            desired.pop(record.key, None)
        else:
            desired[record.key] = Desired(record.state, record.revision)
    return desired
