"""What operators want of models and classes, read from `inference.desired`."""

from __future__ import annotations

import logging

from penstock.common.reader import read_to_end
from penstock.common.settings import KafkaSettings
from penstock.schemas.codec import Codec
from penstock.schemas.desired import key_of
from penstock.schemas.errors import DecodeError
from penstock.schemas.records import DesiredState

logger = logging.getLogger(__name__)

Wishes = dict[str, DesiredState]
"""By key, as `desired_key` has it."""


def read_wishes(settings: KafkaSettings, codec: Codec, deadline_s: float = 10.0) -> Wishes:
    """All that is wanted now. For a thread. Raises NotFound when the topic does not exist, BrokerUnavailable."""
    wishes: Wishes = {}
    for message in read_to_end(settings, settings.names.desired, deadline_s=deadline_s):
        if message.value is None:
            wishes.pop((message.key or b"").decode(errors="replace"), None)
            continue
        try:
            wish = codec.decode(message.value, DesiredState)
        except DecodeError as error:
            logger.warning("desired.undecodable offset=%d error=%s", message.offset, error.code)
            continue
        wishes[key_of(wish)] = wish
    return wishes
