"""The body of a webhook is valid JSON, as a GET of the request is."""

from __future__ import annotations

import json

import pytest

from kit.gateway_records import CODEC, outcome
from penstock.gateway.webhooks.bodies import webhook_body
from penstock.schemas.records import Place


def body(number: float, note: str = "é") -> bytes:
    embedding = {"embeddings": [[number]], "dimensions": 1}
    event = outcome(task="embedding", embedding=embedding, metadata={"note": note})
    return webhook_body(Place(topic="inference.result", partition=0, offset=1), event, None, CODEC)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_json_lacks_are_null(number: float) -> None:
    text = body(number)
    assert b"NaN" not in text
    assert b"Infinity" not in text
    assert b'"embeddings":[[null]]' in text
    json.loads(text)


def test_half_of_a_surrogate_pair_does_not_fail_the_body() -> None:
    assert b"\\ud800" in body(1.0, "\ud800")
