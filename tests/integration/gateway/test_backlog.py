"""A backlog that services put straight on Kafka, many times what a gateway holds in memory: it stops nobody."""

from __future__ import annotations

import re
from typing import Any

from penstock.gateway.context import context_of_app
from penstock.schemas.codec import default_codec
from penstock.schemas.ids import new_request_id
from penstock.schemas.records import InferenceRequest
from support import wait_until

BACKLOG = 1_500
MAX_LIVE = 300
HELD = MAX_LIVE // 10


def inflight(gateway: Any) -> int:
    found = re.search(r"^penstock_inflight ([0-9.e+]+)", gateway.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return int(float(found[1]))


def put_backlog(scribe: Any) -> list[str]:
    """Low requests of which no gateway knows more than that they stand there."""
    ids = [new_request_id() for _ in range(BACKLOG)]
    topic = scribe.names.request("text_generation", 9)
    for request_id in ids:
        request = InferenceRequest(
            request_id=request_id, task="text_generation", text_generation={"prompt": "p"}, created_at=1, priority=9
        )
        scribe.transport.send(topic, default_codec().encode(request), key=request_id.encode())
    scribe.transport.flush(30)
    return ids


def test_a_backlog_stops_nobody_and_nothing_of_it_is_lost(own_place: Any) -> None:
    ids = put_backlog(own_place.scribe)
    gateway = own_place.gateway("g", max_live=MAX_LIVE)
    wait_until(lambda: inflight(gateway) == BACKLOG, 20, lambda: str(inflight(gateway)))
    service = context_of_app(gateway.app).connected
    assert service is not None
    known = service.lookups._view.known
    wait_until(lambda: known.held_live_count <= HELD, 20, lambda: f"{known.held_live_count} are in memory")

    urgent, same_class = gateway.submit(priority=1), gateway.submit(priority=9)
    assert gateway.get(f"/v1/requests/{ids[0]}").json()["status"] == "accepted"
    listed = gateway.get("/v1/requests?limit=100&order=asc").json()["data"]
    assert len(listed) == 100

    own_place.scribe.job(ids[1]).status("running").end("text")
    gateway.wait_for(ids[1], "completed")
    own_place.scribe.job(urgent).end("text")
    gateway.wait_for(urgent, "completed")
    assert inflight(gateway) == BACKLOG

    counts: list[int] = []
    more = True
    while more:
        body = {"class": "low", "priority": "medium", "limit": 600}
        moved = gateway.http.post("/v1/requests/reprioritize", json=body, timeout=60).json()
        counts, more = [*counts, moved["count"]], moved["has_more"]
    assert (sum(counts), len(counts)) == (BACKLOG, 3)
    assert gateway.get(f"/v1/requests/{ids[0]}").json()["priority"] == 5
    wait_until(lambda: known.held_live_count <= HELD, 20, lambda: f"{known.held_live_count} are in memory")

    cancelled = gateway.http.post("/v1/requests/cancel", json={"status": "accepted"}).json()
    assert cancelled["count"] == BACKLOG
    gateway.stop()
    again = own_place.gateway("g", max_live=MAX_LIVE)
    assert inflight(again) == BACKLOG
    assert again.get(f"/v1/requests/{same_class}").json()["status"] == "accepted"
