"""The pool of a request that names a model and no pool: the model's own, as workers tell it on `inference.model`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from penstock.common.reader import read_to_end
from penstock.common.settings import KafkaSettings
from penstock.schemas.codec import Codec
from penstock.schemas.errors import PenstockError
from penstock.schemas.records import ModelInfo

logger = logging.getLogger(__name__)

KNOWN_FOR_S = 60.0


def pool_of(models: Iterable[ModelInfo], task: str, name: str) -> str | None:
    """None where the common pool serves the model (id or alias), or nobody does; else its pool, the first by name."""
    pools = {one.pool for one in models if task in one.tasks and (name == one.model or name in one.aliases)}
    return None if None in pools else min((pool for pool in pools if pool is not None), default=None)


class ModelPools:
    """The models' pools, read again when what is known is a minute old. Thread-safe; a call may wait for Kafka."""

    def __init__(self, settings: KafkaSettings, codec: Codec, timeout_s: float) -> None:
        self._settings, self._codec, self._timeout_s = settings, codec, timeout_s
        self._lock = threading.Lock()
        self._read_at = float("-inf")
        self._models: list[ModelInfo] = []

    def of(self, task: str, model: str) -> str | None:
        """As `pool_of`. While Kafka does not say, what was known holds: the common pool's workers move on what is not
        theirs."""
        with self._lock:
            if time.monotonic() - self._read_at > KNOWN_FOR_S:
                try:
                    self._models = self._read()
                except PenstockError as error:
                    logger.info("pools.unknown error=%s", error.code)
                self._read_at = time.monotonic()
            return pool_of(self._models, task, model)

    def _read(self) -> list[ModelInfo]:
        latest: dict[bytes, bytes | None] = {}
        for message in read_to_end(
            self._settings, self._settings.names.model, 0, partition=0, deadline_s=self._timeout_s
        ):
            latest[message.key or b""] = message.value
        models: list[ModelInfo] = []
        for value in latest.values():
            if value is not None:
                try:
                    models.append(self._codec.decode(value, ModelInfo))
                except PenstockError as error:
                    logger.info("pools.undecodable error=%s", error.code)
        return models
