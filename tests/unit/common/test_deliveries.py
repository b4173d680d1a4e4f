"""Reading all deliveries of a partition holds webhooks, not records."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.common import deliveries
from penstock.common.settings import KafkaSettings
from penstock.schemas.codec import default_codec
from penstock.schemas.records import DeliveryAttempt, Place, WebhookDelivery
from penstock.schemas.topics import TopicNames, topic_specs


def test_records_are_folded_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(topic="inference.result", partition=0, offset=1)
    attempt = DeliveryAttempt(attempt=1, at=1, duration_ms=1, status_code=500)
    waits = WebhookDelivery(
        webhook_id="m", request_id="r", tenant="t", type="request.completed", url="http://h/", state="waiting",
        place=place, created_at=1, updated_at=1, attempts=[attempt],
    )  # fmt: skip
    log = [waits, replace(waits, state="delivered"), replace(waits, request_id="s")]
    kept: list[bool] = []

    def read(*_: Any, keep: Any) -> list[Any]:
        for one in log:
            key, value = deliveries.delivery_key(one.tenant, one.request_id), default_codec().encode(one)
            kept.append(keep(SimpleNamespace(key=lambda key=key: key, value=lambda value=value: value)))
        return []

    offsets = SimpleNamespace(begin_offsets=lambda _, tps, __: dict.fromkeys(tps, 0))
    offsets.end_offsets = lambda _, tps, __: dict.fromkeys(tps, 3)
    monkeypatch.setattr(deliveries, "admin", offsets)
    monkeypatch.setattr(deliveries, "read_ranges", read)
    ended, open_one = deliveries.read_deliveries(KafkaSettings(), default_codec(), [0], 1.0)
    assert kept == [False] * 3
    assert (ended.state, ended.url, ended.attempts, ended.place) == ("delivered", "", [], waits.place)
    assert open_one == log[2]


@pytest.mark.parametrize(("topic", "least_min", "most_min"), [("delivery", 60, 720), ("worker", 5, 15)])
def test_topics_that_are_read_from_their_start_are_compacted_soon(topic: str, least_min: int, most_min: int) -> None:
    name = getattr(TopicNames(), topic)
    (spec,) = [one for one in topic_specs(TopicNames()) if one.name == name]
    assert least_min <= int(spec.config["segment.ms"]) / 60_000 <= most_min
