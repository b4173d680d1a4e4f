"""Odd records on the topics that a gateway follows: it goes on answering, running or started anew."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Producer

from odd_records import OddProducer, write_odd_records
from support import wait_until


def serve_one(gateway: Any, scribe: Any) -> None:
    """A request from its acceptance to its outcome, which a reader looks up at the end of the log."""
    request_id = gateway.submit()
    scribe.job(request_id).end("told")
    gateway.wait_for(request_id, "completed")

    def unknown() -> bool:
        """The look-up reads to the end of the log first; on a busy machine it may say once *come again*."""
        status = gateway.get("/v1/requests/nobody-knows-this").status_code
        assert status in (404, 503)
        return status == 404

    wait_until(unknown, 15, describe="404")
    assert gateway.get("/readyz").status_code == 200, gateway.get("/readyz").text


def test_a_header_name_that_is_not_utf8_does_not_end_a_gateway(own_place: Any) -> None:
    gateway, names = own_place.gateway(), own_place.scribe.names
    with OddProducer(own_place.bootstrap) as producer:
        producer.send(names.result, b"odd", headers=[(b"\xff", b"1")])
    serve_one(gateway, own_place.scribe)
    gateway.stop()
    serve_one(own_place.gateway("g2"), own_place.scribe)


def test_random_records_do_not_end_a_gateway(own_place: Any) -> None:
    gateway, names = own_place.gateway(), own_place.scribe.names
    topics = [names.result, names.status, *names.request_topics()]
    write_odd_records(own_place.bootstrap, [(topic, n) for topic in topics for n in range(2)], 50, seed=3)
    compacted = [(topic, 0) for topic in (names.control, names.model, names.worker)]
    write_odd_records(own_place.bootstrap, compacted, 50, seed=4, keyed=True)
    serve_one(gateway, own_place.scribe)
    gateway.stop()
    serve_one(own_place.gateway("g2"), own_place.scribe)


@pytest.mark.parametrize("ends", ["commit", "abort"])
def test_a_transactions_marker_at_the_end_does_not_keep_a_gateway_behind(own_place: Any, ends: str) -> None:
    gateway, names = own_place.gateway(), own_place.scribe.names
    producer = Producer({"bootstrap.servers": own_place.bootstrap, "transactional.id": own_place.prefix})
    producer.init_transactions(20)
    producer.begin_transaction()
    for topic in (*names.request_topics(), names.result, names.status):
        producer.produce(topic, b"in a transaction", partition=0)
    producer.flush(60)
    _ = producer.commit_transaction(20) if ends == "commit" else producer.abort_transaction(20)
    serve_one(gateway, own_place.scribe)
    gateway.stop()
    serve_one(own_place.gateway("g2"), own_place.scribe)
