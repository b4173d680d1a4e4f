"""JSON as producers write it: every reader of request records takes it alike, and what is broken says whose it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kit.refusals import refused
from penstock.common.reader import RawMessage
from penstock.gateway.dead_letters.letters import request_of
from penstock.gateway.queues.formats import BadMessage, read_llmd, read_penstock, sender_of
from penstock.gateway.queues.settings import QueueSection
from penstock.gateway.view.request_records import read_request
from penstock.processors.core.intake.arrivals import Poison
from penstock.processors.core.intake.intake import Intake
from penstock.schemas.codec import default_codec
from penstock.schemas.json_records import json_text, legible_fields
from penstock.schemas.records import DeadLetter, InferenceRequest, Origin
from penstock.schemas.topics import TopicNames

TOPIC = "inference.request.medium"
AT = (TOPIC, 0, 7, 1_700_000_000_000)
ORIGIN = Origin(topic=TOPIC, partition=0, offset=7, append_time_ms=AT[3])
CODEC = default_codec()
BODY = {"request_id": "mine", "task": "text_generation", "payload": {"prompt": "hé"}}
TEXT = json.dumps(BODY, ensure_ascii=False)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
QUEUE = QueueSection.model_validate({"topic": "q", "format": "penstock"})
FORMS: dict[str, tuple[bytes, str]] = {
    "plain": (b"", "utf-8"),
    "line break": (b"\n", "utf-8"),
    "blanks": (b" \t\r\n", "utf-8"),
    "BOM": (b"\xef\xbb\xbf", "utf-8"),
    "BOM and blanks": (b"\xef\xbb\xbf \n", "utf-8"),
    "UTF-16 LE": (b"\xff\xfe", "utf-16-le"),
    "UTF-16 BE": (b"\xfe\xff", "utf-16-be"),
}


def in_form(name: str, text: str) -> bytes:
    before, encoding = FORMS[name]
    return before + text.encode(encoding)


def by_worker(value: bytes) -> Any:
    return Intake(CODEC, TopicNames(), {TOPIC: 1}).read(TOPIC, 0, 7, AT[3], (), value)


def in_view(value: bytes) -> Any:
    return read_request(
        RawMessage(topic=TOPIC, partition=0, offset=7, timestamp_ms=AT[3], key=None, value=value, headers=()), CODEC
    )


def in_letter(value: bytes) -> Any:
    letter = DeadLetter(
        request_id="mine", tenant="default", reason_code="x", reason="", error_chain=[], origin=ORIGIN, attempts=1,
        worker_id="w", original=value, original_headers={}, created_at=0,
    )  # fmt: skip
    return request_of(letter, CODEC)


READERS: dict[str, Callable[[bytes], Any]] = {
    "worker": lambda value: by_worker(value).request,
    "view": in_view,
    "letter": in_letter,
    "queue": lambda value: read_penstock(value, QUEUE, CODEC, AT),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("reader", READERS)
def test_all_readers_take_the_same_forms_of_json(reader: str, form: str) -> None:
    request: InferenceRequest = READERS[reader](in_form(form, TEXT))
    assert (request.request_id, request.payload["prompt"]) == ("mine", "hé")


@pytest.mark.parametrize("form", FORMS)
def test_a_message_of_a_queue_is_read_in_the_same_forms(form: str) -> None:
    text = json.dumps({"id": "m", "deadline": "1", "payload": "\ufeff\n" + json.dumps(CHAT)}, ensure_ascii=False)
    message = read_llmd(in_form(form, text))
    assert (message.id, message.form, message.body) == ("m", "text", CHAT)


AVRO = CODEC.encode(
    InferenceRequest(
        request_id="mine", tenant="acme", task="text_generation", created_at=0, text_generation={"prompt": "x" * 99}
    )
)


@pytest.mark.parametrize(
    ("value", "tenant"),
    [
        (TEXT.encode()[:-9], "default"),
        (b'{"tenant": "acme", "request_id": "mine", "payload": {"x": [}}', "acme"),
        (TEXT.encode() + b"}", "default"),
        (TEXT.encode() * 2, "default"),
        (b'{"requestId": "mine", "prompt": "' + b"\xff\xfe" + b"\x01", "default"),
        (b'\n{"request_id": "mine", "x": ' + b"[" * 100_000, "default"),
        (b'{"request_id": "mine", "x": ' + b"9" * 5_000 + b"}", "default"),
        (json.dumps(TEXT).encode(), "default"),
        (b"\x00\x00\x00\x00\x05" + TEXT.encode(), "default"),
        (AVRO[:-40], "acme"),
        (AVRO[:12], "default"),
    ],
    ids=range(11),
)
def test_what_cannot_be_read_fails_under_the_id_that_is_legible(value: bytes, tenant: str) -> None:
    found = by_worker(value)
    assert isinstance(found, Poison)
    assert (found.request_id, found.tenant) == ("mine", tenant)


def test_senders_of_queues_hear_of_what_is_cut_off() -> None:
    cut = TEXT.encode()[:-9]
    assert (sender_of(cut, AT) or ("",))[0] == "mine"
    with refused(BadMessage, message_id="m"):
        read_llmd(b'{"id": "m", "deadline": "1", "payload": {"prompt": ')


VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: st.lists(inner), max_leaves=4
)


@example({"n": 1.5e300}, 10, None)
@given(st.dictionaries(st.text(), VALUES), st.integers(0, 300), st.sampled_from([None, 1]))
def test_what_is_legible_is_what_stands_before_the_cut(fields: dict[str, Any], cut: int, indent: int | None) -> None:
    text = json.dumps(fields, indent=indent).encode()
    found = legible_fields(text[: cut + 1]) or {}
    assert repr(list(found.items())) == repr(list(fields.items())[: len(found)])
    assert repr(legible_fields(text)) == repr(fields)


def test_few_of_very_many_fields_are_read() -> None:
    text = '{"request_id": "mine"' + "".join(f', "again": {number}' for number in range(60_000))
    found = legible_fields(text.encode()) or {}
    assert (found["request_id"], found["again"] < 1_000) == ("mine", True)


@given(st.binary(max_size=60))
def test_any_bytes_are_taken(value: bytes) -> None:
    text = json_text(value)
    assert text is None or text.startswith(b"{")
    legible_fields(value)
