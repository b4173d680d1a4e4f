"""Topics that were deleted under a running gateway: what it says of them, and what it goes on doing."""

from __future__ import annotations

from typing import Any

from penstock.common import admin
from support import create_topics, wait_until

CREATE = "`penstock topics create`"


def test_readiness_names_the_missing_topic_and_the_command_that_creates_it(own_place: Any) -> None:
    gateway = own_place.gateway(rediscover_s=0.1)
    topic = own_place.kafka.names.request_topics()[0]
    admin.delete_topic(own_place.kafka, topic)

    def reason() -> str:
        return str(gateway.get("/readyz").json()["reason"])

    wait_until(lambda: topic in reason(), describe=reason)
    answer = gateway.get("/readyz")
    assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
    assert CREATE in reason()
    create_topics(own_place.bootstrap, own_place.prefix, partitions=2)
    wait_until(lambda: gateway.get("/readyz").status_code == 200, describe=reason)
