"""What models and workers last said of themselves."""

from __future__ import annotations

import time

from penstock.common.reader import RawMessage
from penstock.schemas.codec import Codec
from penstock.schemas.desired import model_key
from penstock.schemas.records import ModelInfo, WorkerState


class Fleet:
    """Fed with the records of the model and worker topics. `models` are by (id, pool or "")."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.models: dict[tuple[str, str], ModelInfo] = {}
        self.workers: dict[str, WorkerState] = {}

    def on_model(self, message: RawMessage) -> None:
        if message.value is None:
            self.models = {k: m for k, m in self.models.items() if model_key(m.model, m.pool).encode() != message.key}
            return
        model = self._codec.decode(message.value, ModelInfo)
        self.models[(model.model, model.pool or "")] = model

    def on_worker(self, message: RawMessage) -> None:
        if message.value is None:
            self.workers.pop((message.key or b"").decode(errors="replace"), None)
            return
        state = self._codec.decode(message.value, WorkerState)
        self.workers[state.worker_id] = state

    def forget_stale_workers(self, older_than_s: float) -> None:
        limit = (time.time() - older_than_s) * 1000
        self.workers = {name: state for name, state in self.workers.items() if state.updated_at >= limit}
