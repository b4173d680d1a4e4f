"""Outputs that are too large for Kafka are kept as artifacts under their tenant; the event refers to them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.processors.core.work import Work
from penstock.producers.artifacts import ArtifactStore
from penstock.producers.artifacts.configured import open_store
from penstock.producers.configuration import ArtifactsSection
from penstock.schemas.ids import output_artifact_id
from penstock.schemas.records import ArtifactRef

INLINE_BYTES = 256 * 1024
"""The largest output that travels inside its event."""
_FLOAT_BYTES = 4
_NESTED = frozenset({"tool_calls", "logprobs", "choices"})


def size_of(output: Mapping[str, Any]) -> int:
    """About how many bytes the output takes in an event."""
    vectors: list[list[float]] = output.get("embeddings") or []
    text: str = output.get("text") or ""
    size = sum(map(len, vectors)) * _FLOAT_BYTES + (len(text) if text.isascii() else len(text.encode()))
    for name in _NESTED & output.keys():
        size += len(json.dumps(output[name]))
    return size


class Outputs:
    """Where large outputs go. The store is opened when the first one comes."""

    def __init__(self, location: str | Path, section: ArtifactsSection | None = None) -> None:
        """`location`: as this process sees it; the rest of `[artifacts]` stands in `section`."""
        self._location = location
        self._section = section or ArtifactsSection()
        self._store: ArtifactStore | None = None

    async def keep(self, work: Work, output: Mapping[str, Any]) -> ArtifactRef:
        """The output as a JSON artifact. Raises PenstockError, and what the store raises."""
        return await asyncio.to_thread(self._keep, work, output)

    def store(self) -> ArtifactStore:
        """The store, opened on first use. Blocks; raises as `open_store`."""
        self._store = self._store or open_store(self._section, str(self._location))
        return self._store

    def _keep(self, work: Work, output: Mapping[str, Any]) -> ArtifactRef:
        request = work.request
        artifact = self.store().put(
            request.tenant,
            json.dumps(output, ensure_ascii=False, separators=(",", ":")).encode(),
            media_type="application/json",
            artifact_id=output_artifact_id(request.tenant, request.request_id, work.epoch, work.attempt),
            request_id=request.request_id,
        )
        return ArtifactRef(
            artifact_id=artifact.artifact_id,
            uri=artifact.uri,
            media_type=artifact.media_type,
            size_bytes=artifact.size_bytes,
            sha256=artifact.sha256,
        )
