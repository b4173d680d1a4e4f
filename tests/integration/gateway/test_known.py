"""What a bridge knows from the topics, on a real broker: pools that come and go."""

from __future__ import annotations

import asyncio
from typing import Any

from confluent_kafka.admin import AdminClient

from penstock.gateway.bridge.known import Known, content_header, content_of
from penstock.schemas.codec import default_codec
from penstock.schemas.requests import parse_request
from penstock.schemas.topics import request_key
from support import create_topics

DEADLINE_S = 40


async def test_pools_that_come_are_read_and_those_that_go_are_not_waited_for(own_place: Any) -> None:
    known = Known(own_place.kafka, default_codec())
    await known.start()
    try:
        await up_to_date(known)
        await asyncio.to_thread(create_topics, own_place.bootstrap, own_place.prefix, partitions=2, pool="big")
        body = {"task": "text_generation", "pool": "big", "payload": {"prompt": "p"}}
        request = parse_request(body, tenant="team", request_id="r1", now_ms=1)
        names = own_place.scribe.names
        headers = [("ce_id", b"r1"), content_header(request)]
        topic = names.request(request.task, request.priority, "big")
        await asyncio.to_thread(own_place.scribe.put, topic, request, request_key(request), headers=headers)
        await up_to_date(known)
        found = known.sent.find(("team", "r1"))
        assert found is not None
        assert (found.pool, found.content) == ("big", content_of(request))

        admin = AdminClient({"bootstrap.servers": own_place.bootstrap})
        for deleted in admin.delete_topics(names.request_topics("big")).values():
            await asyncio.to_thread(deleted.result, 20)
        await up_to_date(known)
        known.check()
    finally:
        await known.stop()


async def up_to_date(known: Known) -> None:
    known.look_again()
    await asyncio.wait_for(known.up_to_date(), DEADLINE_S)
