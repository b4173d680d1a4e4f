"""What a receiver is sent is JSON, as a GET of the request is."""

from __future__ import annotations

import json

import pytest

from penstock.gateway.webhooks.bodies import webhook_body
from penstock.schemas.codec import default_codec
from penstock.schemas.records import Origin, Place, ResultEvent

ORIGIN = Origin(topic="inference.request.medium", partition=0, offset=1, append_time_ms=1)


def body(number: float, note: str = "é") -> bytes:
    event = ResultEvent(
        request_id="r",
        tenant="t",
        kind="terminal",
        origin=ORIGIN,
        attempt=1,
        epoch=1,
        task="embedding",
        created_at=1,
        worker_id="w",
        status="completed",
        embedding={"embeddings": [[number]], "dimensions": 1},
        metadata={"note": note},
    )
    return webhook_body(Place(topic="inference.result", partition=0, offset=1), event, None, default_codec())


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_json_cannot_say_is_null(number: float) -> None:
    text = body(number)
    assert b"NaN" not in text
    assert b"Infinity" not in text
    assert b'"embeddings":[[null]]' in text
    json.loads(text)


def test_half_of_a_surrogate_pair_fails_nobody() -> None:
    assert b"\\ud800" in body(1.0, "\ud800")
