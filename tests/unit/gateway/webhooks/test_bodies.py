"""The body of a webhook is valid JSON, as a GET of the request is."""

from __future__ import annotations

import json

import pytest

from kit.gateway_records import CODEC, outcome
from penstock.gateway.webhooks.bodies import webhook_body
from penstock.schemas.records import Place


@pytest.mark.parametrize(
    ("number", "note", "part"),
    [
        (float("nan"), "é", b'"embeddings":[[null]]'),
        (float("inf"), "é", b'"embeddings":[[null]]'),
        (1.0, "\ud800", b"\\ud800"),
    ],
)
def test_what_json_lacks_does_not_fail_the_body(number: float, note: str, part: bytes) -> None:
    embedding = {"embeddings": [[number]], "dimensions": 1}
    event = outcome(task="embedding", embedding=embedding, metadata={"note": note})
    text = webhook_body(Place(topic="inference.result", partition=0, offset=1), event, None, CODEC)
    assert part in text
    json.loads(text, parse_constant=lambda name: pytest.fail(name))
