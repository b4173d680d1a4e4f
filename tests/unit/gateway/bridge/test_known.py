"""What a bridge knows of requests that were sent, by it and by others, without a broker."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kit.gateway_bridge import NAMES, KnownTopics, made
from kit.gateway_records import model_info
from penstock.common.reader import RawMessage
from penstock.gateway.bridge.known import KNOWN_MS, Sent, SentRequests, content_of, pools_of
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.topics import TopicNames

KEY = ("team", "r1")


def sent(at_ms: int = 1, *, on_topic: bool = True) -> Sent:
    return Sent(content="c", pool=None, at_ms=at_ms, on_topic=on_topic)


def test_a_claim_is_found_until_it_is_released() -> None:
    requests, claim = SentRequests(), sent(on_topic=False)
    requests.claim(KEY, claim)
    assert requests.find(KEY) is claim
    requests.release(KEY, claim)
    assert requests.find(KEY) is None


def test_what_the_topic_has_stays_when_its_claim_is_released() -> None:
    """Nobody acknowledged the record, and the reader saw it all the same."""
    requests, claim = SentRequests(), sent(on_topic=False)
    requests.claim(KEY, claim)
    requests.on_record(KEY, sent(5))
    requests.release(KEY, claim)
    assert requests.find(KEY) == sent(5)


def test_the_first_record_counts_in_whichever_order_they_are_read() -> None:
    """A worker that gets another pool's request publishes it there once more."""
    requests = SentRequests()
    for at_ms in (7, 3, 9):
        requests.on_record(KEY, sent(at_ms))
    assert requests.find(KEY) == sent(3)


def test_requests_are_forgotten_after_two_horizons() -> None:
    requests = SentRequests()
    requests.on_record(KEY, sent(10))
    requests.claim(("team", "r2"), sent(10 + KNOWN_MS))
    assert requests.find(KEY) is not None
    requests.claim(("team", "r3"), sent(11 + KNOWN_MS))
    assert requests.find(KEY) is None
    assert len(requests) == 2


def test_the_content_is_the_same_whichever_pool_the_model_is_in() -> None:
    request = made()
    assert content_of(request) == content_of(dataclasses.replace(request, pool="big"))
    assert content_of(request) != content_of(made(payload={"prompt": "another"}))


def test_request_topics_are_told_with_their_pools() -> None:
    names = TopicNames("p-")
    others = [names.result, names.control, "inference.request.low", "p-inference.image.requests"]
    found = pools_of(names, dict.fromkeys([*names.request_topics(), *names.request_topics("a.b"), *others], 4))
    assert found == {**dict.fromkeys(names.request_topics()), **dict.fromkeys(names.request_topics("a.b"), "a.b")}


# -- from records


@pytest.fixture
async def topics(monkeypatch: pytest.MonkeyPatch) -> KnownTopics:
    found = await KnownTopics(monkeypatch).start(model_info(pool="big", updated_at=1))
    found.known.look_again()
    await found.known.up_to_date()
    return found


async def test_a_request_that_a_bridge_sent_is_found_with_its_content_and_pool(topics: KnownTopics) -> None:
    topics.read(made("r2"), by_bridge=False)
    assert len(topics.known.sent) == 0
    topics.read(made(pool="big"))
    assert topics.known.sent.find(KEY) == Sent(content=content_of(made()), pool="big", at_ms=77)


async def test_an_undecodable_record_does_not_end_the_reading(topics: KnownTopics) -> None:
    headers = (("ce_id", b"\xff"), ("penstock-content", b"\xff"))
    for topic in (NAMES.request("text_generation", 8), NAMES.model):
        topics.reader.read([RawMessage(topic, 0, 0, 1, b"k", b"\x00odd", headers)])
    assert topics.known.routed(made(model="m")).pool == "big"


@pytest.mark.parametrize(
    ("fields", "pool"), [({"model": "m"}, "big"), ({"model": "m", "pool": "other"}, "other"), ({"model": "none"}, None)]
)
async def test_a_request_goes_to_the_pool_of_its_model(topics: KnownTopics, fields: Any, pool: str | None) -> None:
    assert topics.known.routed(made(**fields)).pool == pool


async def test_a_turn_goes_to_the_pool_of_its_conversation_and_to_no_other(topics: KnownTopics) -> None:
    turn = {"conversation_id": "c", "payload": {"messages": [{"role": "user", "content": "p"}]}}
    topics.read(made(**turn, pool="big"), by_bridge=False)
    assert topics.known.routed(made(**turn)).pool == "big"
    with pytest.raises(InvalidRequest, match="the conversation c is in the pool big"):
        topics.known.routed(made(**turn, pool="small"))
