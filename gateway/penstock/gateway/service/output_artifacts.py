"""The artifacts of a request's outcome: a large output, and the images of an output."""

from __future__ import annotations

from typing import Any

from penstock.schemas.records import ResultEvent


def artifact_ids_of(event: ResultEvent | None) -> frozenset[str]:
    """The ids that an outcome names; none for one that is not there."""
    if event is None:
        return frozenset()
    images: list[dict[str, Any]] = (event.output or {}).get("images") or []
    ids = {str(image["artifact_id"]) for image in images if image.get("artifact_id")}
    if event.output_artifact is not None:
        ids.add(event.output_artifact.artifact_id)
    return frozenset(ids)
