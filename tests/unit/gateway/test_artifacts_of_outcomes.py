"""Which artifacts an outcome names."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from penstock.gateway.view.outputs import artifact_ids_of
from penstock.schemas.records import ArtifactRef, Origin, ResultEvent

EVENT = ResultEvent(
    request_id="r",
    tenant="acme",
    kind="terminal",
    origin=Origin(topic="t", partition=0, offset=0, append_time_ms=1),
    attempt=1,
    epoch=1,
    task="image_generation",
    created_at=1,
    worker_id="w",
    status="completed",
)
LARGE = ArtifactRef(artifact_id="large", uri="u", media_type="application/json", size_bytes=1, sha256="s")


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, set()),
        ({"output_artifact": LARGE}, {"large"}),
        ({"image_generation": {"images": [{"artifact_id": "a"}, {"artifact_id": "b"}]}}, {"a", "b"}),
        ({"image_generation": {"images": [{"url": "https://elsewhere"}]}}, set()),
        ({"status": "failed"}, set()),
    ],
)
def test_an_outcome_names_its_images_and_its_large_output(values: dict[str, Any], expected: set[str]) -> None:
    assert artifact_ids_of(dataclasses.replace(EVENT, **values)) == expected
