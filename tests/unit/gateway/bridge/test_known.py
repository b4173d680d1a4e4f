"""What a bridge knows of requests that were sent, by it and by others, without a broker."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from penstock.common.outgoing import request_record
from penstock.common.reader import RawMessage
from penstock.common.settings import KafkaSettings
from penstock.gateway.bridge.known import KNOWN_MS, Known, Sent, SentRequests, content_header, content_of, pools_of
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import InvalidRequest
from penstock.schemas.records import InferenceRequest, ModelInfo
from penstock.schemas.requests import parse_request
from penstock.schemas.topics import TopicNames

KEY = ("team", "r1")
CODEC = default_codec()


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
    """A message for a model of a pool was refused when another process took it over: its request names the pool."""
    request = made()
    assert content_of(request) == content_of(dataclasses.replace(request, pool="big"))
    assert content_of(request) != content_of(made(payload={"prompt": "another"}))


def test_request_topics_are_told_with_their_pools() -> None:
    names = TopicNames("p-")
    others = [names.result, names.control, "inference.request.low", "p-inference.image.requests"]
    found = pools_of(names, dict.fromkeys([*names.request_topics(), *names.request_topics("a.b"), *others], 4))
    assert found == {**dict.fromkeys(names.request_topics()), **dict.fromkeys(names.request_topics("a.b"), "a.b")}


# -- from records


def made(**fields: Any) -> InferenceRequest:
    body = {"task": "text_generation", "payload": {"prompt": "p"}, **fields}
    return parse_request(body, tenant="team", request_id="r1", now_ms=1)


class Reading(Known):
    """Is told of records as its reader's thread would tell it."""

    def __init__(self) -> None:
        super().__init__(KafkaSettings(), CODEC)
        self._topics = pools_of(TopicNames(), dict.fromkeys([*TopicNames().request_topics(), *POOLED], 4))

    def read(self, request: InferenceRequest, *, by_bridge: bool = True) -> None:
        out = request_record(request, TopicNames(), CODEC, source="test")
        headers = [*out.headers, *([content_header(request)] if by_bridge else [])]
        self._on_batch([RawMessage(out.topic, 0, 0, 77, out.key, out.value, tuple(headers))])

    def tell(self, model: ModelInfo) -> None:
        self._on_batch([RawMessage(TopicNames().model, 0, 0, 1, model.model.encode(), CODEC.encode(model))])


POOLED = TopicNames().request_topics("big")


def test_what_a_bridge_sent_is_found_with_its_content_and_pool() -> None:
    known = Reading()
    known.read(made(pool="big"))
    assert known.sent.find(KEY) == Sent(content=content_of(made()), pool="big", at_ms=77)


def test_what_others_sent_is_passed_over() -> None:
    known = Reading()
    known.read(made(), by_bridge=False)
    assert len(known.sent) == 0


def test_what_does_not_decode_does_not_end_the_reading() -> None:
    known = Reading()
    headers = (("ce_id", b"\xff"), ("penstock-content", b"\xff"))
    topics = (TopicNames().request("text_generation", 8), TopicNames().model)
    known._on_batch([RawMessage(topic, 0, 0, 1, b"k", b"\x00odd", headers) for topic in topics])
    assert known.models() == []


def test_a_request_goes_to_its_models_pool() -> None:
    known = Reading()
    of = {"engine": "noop", "state": "ready", "worker_id": "w", "updated_at": 1}
    known.tell(ModelInfo(model="m", tasks=["text_generation"], pool="big", **of))
    assert known.routed(made(model="m")).pool == "big"
    assert known.routed(made(model="m", pool="other")).pool == "other"
    assert known.routed(made(model="unknown")).pool is None


def test_a_turn_goes_to_its_conversations_pool_and_to_no_other() -> None:
    known = Reading()
    turn = {"conversation_id": "c", "payload": {"messages": [{"role": "user", "content": "p"}]}}
    known.read(made(**turn, pool="big"), by_bridge=False)
    assert known.routed(made(**turn)).pool == "big"
    with pytest.raises(InvalidRequest, match="the conversation c is in the pool big"):
        known.routed(made(**turn, pool="small"))
