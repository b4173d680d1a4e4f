"""What a bridge knows from the topics, on a real broker: pools and conversations that come and go."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from penstock.common.admin import create_conversation_topic, ensure_topics
from penstock.common.shards.addresses import address_of
from penstock.common.shards.partitioning import partitions_in_use
from penstock.gateway.bridge import known as known_module
from penstock.gateway.bridge.known import Known, content_header, content_of
from penstock.gateway.bridge.requests import Requests
from penstock.gateway.limits.allowances import Allowances
from penstock.gateway.limits.limits import Limits
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import TenantLimit
from penstock.schemas.records import InferenceRequest
from penstock.schemas.requests import parse_request
from penstock.schemas.topics import request_key, topic_specs
from support import create_topics

DEADLINE_S = 40
LATE_S = 8.0
MESSAGE = {"role": "user", "content": "hello"}


async def test_pools_that_come_are_read_and_those_that_go_are_not_waited_for(own_place: Any) -> None:
    known = Known(own_place.kafka, default_codec(), LATE_S)
    await known.start()
    try:
        await up_to_date(known)
        await asyncio.to_thread(create_topics, own_place.bootstrap, own_place.prefix, partitions=2, pool="big")
        body = {"task": "text_generation", "pool": "big", "payload": {"prompt": "p"}}
        request = parse_request(body, tenant="team", request_id="r1", now_ms=1)
        names = own_place.scribe.names
        headers = [("ce_id", b"r1"), content_header(request.tenant, content_of(request))]
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


async def test_conversations_that_share_a_topic_are_those_whose_heads_stand(
    own_place: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_module, "LISTED_S", -1.0)
    kafka, names = own_place.kafka, own_place.kafka.names
    specs = topic_specs(names, partitions=2, shared_conversations=True)
    await asyncio.to_thread(ensure_topics, kafka, [one for one in specs if one.name == names.conversation_log])

    async def write(tenant: str, conversation: str, key: bytes, value: bytes | None) -> None:
        address = address_of(names, names.conversation(tenant, conversation), 2)
        put = partial(own_place.scribe.put, partition=address.partition)
        await asyncio.to_thread(put, names.conversation_log, value, address.key(key))

    await write("default", "a", b"fork/1", b"head")
    known = Known(kafka, default_codec(), LATE_S)
    await known.start()
    try:
        for conversation in "bcd":
            await write("acme", conversation, b"fork/1", b"head")
            await write("acme", conversation, b"r1", b"text")
        await write("acme", "c", b"fork/1", None)
        await write("acme", "c", b"r2", b"behind the end")
        assert await asyncio.gather(*(known.conversations("acme") for _ in range(4))) == [{"b", "d"}] * 4
        assert await known.conversations("default") == {"a"}
        requests = Requests(
            {}, known, Allowances(by_tenant={"acme": Limits(conversations=2)}), lambda store, prefix: None, names
        )
        with pytest.raises(TenantLimit):
            await requests.accepted(turn("c"))
        with pytest.raises(KeyError, match="acme"):  # no limit stands in its way: it is sent, by a client that is none
            await requests.accepted(turn("d"))
        await write("acme", "c", b"fork/2", b"anew")
        await write("default", "a", b"fork/1", None)
        assert await known.conversations("acme") == {"b", "c", "d"}
        assert await known.conversations("default") == set()
    finally:
        await known.stop()
    assert not any(thread.name == "penstock-heads" for thread in threading.enumerate())


def turn(conversation: str) -> InferenceRequest:
    body = {"task": "text_generation", "conversation_id": conversation, "payload": {"messages": [MESSAGE]}}
    return parse_request(body, tenant="acme", request_id="r1", now_ms=1)


async def test_conversations_with_topics_are_those_topics(own_place: Any) -> None:
    if partitions_in_use(own_place.kafka) is not None:
        pytest.skip("all conversations share a topic here")
    known = Known(own_place.kafka, default_codec(), LATE_S)
    topic = own_place.kafka.names.conversation("acme", "a")
    await asyncio.to_thread(create_conversation_topic, own_place.kafka, topic)
    assert await known.conversations("acme") == {"a"}
    await known.stop()


async def up_to_date(known: Known) -> None:
    known.look_again()
    await asyncio.wait_for(known.up_to_date(), DEADLINE_S)
