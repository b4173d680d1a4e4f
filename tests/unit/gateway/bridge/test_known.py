"""What a bridge knows of requests that were sent, by it and by others, without a broker."""

from __future__ import annotations

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


def test_a_claim_is_found_until_it_is_released_and_what_the_topic_has_for_longer() -> None:
    """The first record counts, in whichever order they are read: a worker that gets another pool's request publishes
    it there once more."""
    requests, claim = SentRequests(), sent(on_topic=False)
    for records, left in (((), None), ((7, 3, 9), sent(3))):
        requests.claim(KEY, claim)
        assert requests.find(KEY) is claim
        for at_ms in records:
            requests.on_record(KEY, sent(at_ms))
        requests.release(KEY, claim)
        assert requests.find(KEY) == left


def test_requests_are_forgotten_after_two_horizons() -> None:
    requests = SentRequests()
    requests.on_record(KEY, sent(10))
    requests.claim(("team", "r2"), sent(10 + KNOWN_MS))
    assert requests.find(KEY) is not None
    requests.claim(("team", "r3"), sent(11 + KNOWN_MS))
    assert requests.find(KEY) is None
    assert len(requests) == 2


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
    """The content is the same whichever pool its model is in."""
    topics.read(made("r2"), by_bridge=False)
    assert len(topics.known.sent) == 0
    topics.read(made(pool="big"))
    assert topics.known.sent.find(KEY) == Sent(content=content_of(made()), pool="big", at_ms=77)
    assert content_of(made()) == content_of(made(pool="big")) != content_of(made(payload={"prompt": "another"}))


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
