"""Messages of queues in, answers out."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kit.records import request
from penstock.gateway.bridge.settings import BridgeSettings
from penstock.gateway.queues.formats import BadMessage, answered, read_llmd, read_penstock, refused, request_key
from penstock.gateway.queues.settings import QueueSection
from penstock.schemas.codec import default_codec
from penstock.schemas.errors import BadJson, DecodeError, Expired, InvalidRequest, PenstockError
from penstock.schemas.records import InferenceRequest

BODY = {"model": "m", "prompt": "hi", "max_tokens": 3}
QUEUE = QueueSection(topic="jobs", tenant="team")


def message(**values: Any) -> bytes:
    return json.dumps({"id": "1", "deadline": "1764045130", "payload": BODY, **values}).encode()


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        ({"payload": {"messages": []}}, "kind", "chat"),
        ({"payload": {"prompt": ""}}, "kind", "completion"),
        ({"payload": {"input": ""}}, "kind", "embedding"),
        ({"deadline": 1764045130}, "deadline_s", 1764045130),
        ({"deadline": "1764045130"}, "deadline_s", 1764045130),
        ({"deadline": 1764045130.9}, "deadline_s", 1764045130),
        ({"deadline": None}, "deadline_s", None),
        ({"deadline": ""}, "deadline_s", None),
        ({"deadline": 1764045130000}, "deadline_s", 1764045130),
        ({"deadline": "2025-11-25T04:32:10Z"}, "deadline_s", 1764045130),
        ({"deadline": "9" * 30}, "deadline_s", 10**11),
    ],
)
def test_what_a_message_says(change: Any, field: str, value: Any) -> None:
    assert getattr(read_llmd(message(**change)), field) == value


@pytest.mark.parametrize(
    ("payload", "form"),
    [(BODY, "object"), (json.dumps(BODY), "text"), (base64.b64encode(json.dumps(BODY).encode()).decode(), "base64")],
)
def test_a_payload_in_any_form_is_answered_in_the_same(payload: Any, form: str) -> None:
    found = read_llmd(message(payload=payload))
    assert (found.id, found.kind, found.form, found.body) == ("1", "completion", form, BODY)
    answer = json.loads(answered("1", found.form, {"a": "é"}))
    back = answer["payload"]
    if form == "base64":
        back = base64.b64decode(back).decode()
    assert (answer["id"], json.loads(back) if form != "object" else back) == ("1", {"a": "é"})
    assert json.loads(refused("1", Expired("deadline exceeded"))) == {"id": "1", "error": "deadline exceeded"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"payload": None}, "payload must be a JSON object"),
        ({"payload": "no base64"}, "payload must be a JSON object"),
        ({"payload": {"messages": [], "prompt": ""}}, "one of messages, prompt and input"),
        ({"payload": {}}, "one of messages, prompt and input"),
        ({"payload": {"prompt": "x", "stream": True}}, "stream is not supported"),
        ({"deadline": "soon"}, "Unix seconds"),
        ({"deadline": True}, "Unix seconds"),
        ({"deadline": 1e400}, "Unix seconds"),
        ({"payload": {"prompt": "x", "user": 1e400}}, "payload.user is NaN, infinite"),
        ({"payload": '{"prompt": "x", "user": {"a": NaN}}'}, "payload.user.a is NaN, infinite"),
        ({"payload": base64.b64encode(b'{"prompt": "\\ud83d"}').decode()}, "payload.prompt holds a lone surrogate"),
    ],
)
def test_a_bad_message_with_an_id_is_answered(change: Any, says: str) -> None:
    with pytest.raises(BadMessage, match=says) as caught:
        read_llmd(message(**change))
    answer = json.loads(refused(caught.value.message_id, caught.value.error))
    assert (answer.keys(), answer["id"]) == ({"id", "error"}, "1")
    assert says in answer["error"]


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b"{", b"{}", b'{"id": 5}', b'{"id": ""}', b"[" * 100_000])
def test_a_message_without_an_id_goes_to_the_dead_letters(value: bytes) -> None:
    with pytest.raises(BadJson):
        read_llmd(value)


@given(st.binary(max_size=200))
def test_any_bytes_end_in_a_typed_error(value: bytes) -> None:
    for reading in (read_llmd, read):
        with pytest.raises((PenstockError, BadMessage)):
            reading(value)


def test_the_key_of_a_request_stands_for_the_message_and_the_try() -> None:
    other = QueueSection(topic="other")
    keys = {
        request_key(queue, one, tries) for queue in (QUEUE, other) for one in ("1", "2", "\ud800") for tries in (0, 1)
    }
    assert len(keys) == 12
    assert all(len(key) <= 255 for key in keys)
    assert request_key(QUEUE, "1", 0) == request_key(QUEUE, "1", 0)


def read(value: bytes) -> InferenceRequest:
    return read_penstock(value, QUEUE, default_codec(), ("jobs", 0, 1, 2))


@pytest.mark.parametrize(
    "value",
    [
        b'{"task": "text_generation", "payload": {"prompt": "x"}, "tenant": "someone-else"}',
        default_codec().encode(request(tenant="else")),
    ],
    ids=["JSON", "Avro"],
)
def test_a_request_in_our_own_format_belongs_to_the_tenant_of_its_queue(value: bytes) -> None:
    assert read(value).tenant == "team"
    assert read(value).request_id == read(value).request_id


@pytest.mark.parametrize(
    ("value", "error"), [(b'{"task": "text_generation"}', InvalidRequest), (b"\x00\x00\x00\x00\x01x", DecodeError)]
)
def test_a_request_in_our_own_format_is_checked(value: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        read(value)


@pytest.mark.parametrize(
    ("queues", "says"),
    [
        ([{"topic": "a"}, {"topic": "a"}], "two queues read the topic a"),
        ([{"topic": "a", "result_topic": "b"}, {"topic": "b"}], "would be requests"),
        ([{"topic": "a b"}], "name of a topic"),
        ([{"topic": "a", "tenant": "A"}], "tenant must match"),
    ],
)
def test_settings_that_cannot_work_are_refused(queues: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        BridgeSettings(queues=[QueueSection(**queue) for queue in queues])
