"""Models that no worker has reported, with the facts that their entries have."""

from __future__ import annotations

import json

from penstock.common.model_entry import ModelEntry
from penstock.schemas.records import ModelInfo


def declared_model(entry: ModelEntry, at_ms: int, reason: str | None = None) -> ModelInfo:
    """The facts of the entry as of this time, and why no worker has the model."""
    return ModelInfo(
        model=entry.id,
        tasks=entry.tasks,
        aliases=entry.aliases,
        pool=entry.pool,
        engine=entry.engine,
        defaults={name: json.dumps(value) for name, value in entry.payload_defaults().items()},
        state="absent",
        updated_at=at_ms,
        worker_id="",
        priority=entry.priority,
        pinned=entry.pinned,
        max_batch_size=entry.max_batch_size,
        reason=reason,
        revision=entry.revision,
    )
