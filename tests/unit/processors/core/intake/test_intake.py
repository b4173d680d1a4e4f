"""Intake: Avro and JSON requests, poison with its reason, origins, attempts, classes, conversations at home."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from kit.records import CODEC, status
from penstock.processors.core.intake.intake import CLOCKS_DIFFER_MS, Intake, Poison, Taken
from penstock.schemas.codec import SCHEMA_IDS
from penstock.schemas.ids import derived_request_id
from penstock.schemas.labels import Labels, labels_of
from penstock.schemas.origins import origin_header
from penstock.schemas.records import InferenceRequest, Origin
from penstock.schemas.topics import HEADER_ATTEMPT, TopicNames, partition_for

NAMES = TopicNames()
PARTITIONS = dict.fromkeys(NAMES.request_topics(), 4)
TOPIC = NAMES.request("text_generation", 9)
APPEND_MS = 1_700_000_000_123
SCHEMA_HEADER = [("__value_schema_id", b"\x01" + bytes(16))]


def intake() -> Intake:
    return Intake(CODEC, NAMES, PARTITIONS)


def read(value: bytes | None, *, partition: int = 0, headers: Any = (), topic: str = TOPIC) -> Taken | Poison:
    return intake().read(topic, partition, 7, APPEND_MS, headers, value)


def poison(value: bytes | None, **options: Any) -> Poison:
    found = read(value, **options)
    assert isinstance(found, Poison)
    return found


def taken(value: bytes | None, **options: Any) -> Taken:
    found = read(value, **options)
    assert isinstance(found, Taken)
    return found


def request(**fields: Any) -> InferenceRequest:
    fields = {"text_generation": {"messages": [{"role": "user", "content": "hello"}]}, **fields}
    return InferenceRequest(request_id="r1", task="text_generation", created_at=0, **fields)


def test_avro_and_json_are_read() -> None:
    avro = taken(CODEC.encode(request(ttl_ms=500)))
    assert avro.request.request_id == "r1"
    assert avro.deadline_ms == APPEND_MS + 500
    assert avro.klass == "low"
    json_form = taken(b'{"task": "text_generation", "payload": {"prompt": "hello"}, "priority": 2}')
    assert json_form.request.payload["prompt"] == "hello"
    assert json_form.request.request_id == derived_request_id(TOPIC, 0, 7, APPEND_MS)
    assert json_form.klass == "low", "the topic decides the class of text"
    vectors = b'{"task": "embedding", "payload": {"input": "x"}, "priority": 1}'
    assert taken(vectors, topic=NAMES.request("embedding", 1)).klass == "high", "the record decides that of embeddings"


@pytest.mark.parametrize(
    ("value", "code"),
    [
        (b"\x01\x02\xff", "wrong_magic"),
        (b"", "wrong_magic"),
        (None, "wrong_magic"),
        (b"\x00\x50\x4e\xff\xffabc", "unknown_schema"),
        (b"\x00\x50\x4e\x00\x00\x02", "bad_avro"),
        (CODEC.encode(status()), "bad_avro"),
        (b'{"task": "text_generation", "payload": ', "bad_json"),
        (b'{"task": ' + b"[" * 100_000, "bad_json"),
        (b'{"task": "embedding", "user_id": ' + b"9" * 5_000 + b"}", "invalid"),
        (b'{"a":' * 100_000, "bad_json"),
        (b'{"request_id": "r", "x": ' + b"[" * 100_000, "bad_json"),
        (b'{"payload": {"prompt": "x"}}', "invalid"),
        (b'{"task": "text_generation", "payload": {"prompt": "' + b"x" * 1_000_000 + b'"}}', "too_large"),
    ],
)
def test_poison_names_its_reason(value: bytes | None, code: str) -> None:
    assert poison(value).reason.code == code


@pytest.mark.parametrize(
    ("value", "whose"),
    [
        (CODEC.encode(request(tenant="acme"))[5:], ("r1", "acme")),
        (b"\x02\xff", (None, None)),
    ],
)
def test_a_schema_id_in_a_header_is_named_and_who_waits_hears_of_it(
    value: bytes | None, whose: tuple[str | None, str | None]
) -> None:
    found = poison(value, headers=SCHEMA_HEADER)
    assert (found.reason.code, found.request_id, found.tenant) == ("wrong_magic", *whose)
    assert "__value_schema_id" in found.reason.message
    assert "schema.id.serializer" in found.reason.message


def test_what_names_its_schema_in_the_value_or_needs_none_is_read_beside_such_a_header() -> None:
    assert taken(CODEC.encode(request()), headers=SCHEMA_HEADER).request.request_id == "r1"
    assert taken(b'{"task": "embedding", "payload": {"input": "x"}}', headers=SCHEMA_HEADER).error is None


@pytest.mark.parametrize(("url", "known"), [("http://x", "http://x"), ("ftp://x", None), (5, None)])
def test_an_invalid_request_says_whose_it_is_and_who_is_to_be_called_back(url: object, known: str | None) -> None:
    body = {"request_id": "mine", "tenant": "acme", "task": "text_generation", "payload": {"prompt": 5}}
    found = poison(json.dumps({**body, "callback_url": url}).encode())
    assert (found.request_id, found.tenant, found.callback_url) == ("mine", "acme", known)


@pytest.mark.parametrize(
    ("schema_id", "request_id", "tenant", "code", "known"),
    [
        (SCHEMA_IDS["InferenceRequest"][-1] + 1, "mine", "acme", "unknown_schema", ("mine", "acme")),
        (SCHEMA_IDS["InferenceRequest"][0], "mine", "acme", "bad_avro", ("mine", "acme")),
        (SCHEMA_IDS["InferenceRequest"][-1] + 1, "\n", "acme", "unknown_schema", (None, "acme")),
        (SCHEMA_IDS["StatusEvent"][-1] + 1, "mine", "acme", "unknown_schema", (None, None)),
        (7, "mine", "acme", "unknown_schema", (None, None)),
    ],
    ids=["a newer version", "a body that is no request", "an id that is none", "another record", "a foreign schema"],
)
def test_a_request_that_only_begins_as_one_says_whose_it_is(
    schema_id: int, request_id: str, tenant: str, code: str, known: tuple[str | None, str | None]
) -> None:
    """All versions of a request begin alike, with its id and tenant."""
    whole = CODEC.encode(replace(request(tenant=tenant), request_id=request_id))
    found = poison(b"\0" + schema_id.to_bytes(4, "big") + whole[5:-3])
    assert (found.reason.code, (found.request_id, found.tenant)) == (code, known)


def test_what_is_not_built_fails_at_once() -> None:
    body = {"request_id": "mine", "task": "text_generation", "payload": {"prompt": "x"}, "audio": "yes"}
    found = taken(json.dumps({**body, "callback_url": "http://x"}).encode())
    assert found.error is not None
    assert (found.request.request_id, found.request.callback_url) == ("mine", "http://x")


def test_headers_give_attempt_and_origin() -> None:
    first = Origin(topic="a/b", partition=3, offset=99, append_time_ms=5)
    found = taken(CODEC.encode(request()), headers=[(HEADER_ATTEMPT, b"2"), origin_header(first)])
    assert (found.attempt, found.origin) == (2, first)


@pytest.mark.parametrize(("task", "line"), [("text_generation", "acme.c1"), ("summarization", None)])
def test_a_conversation_belongs_on_the_partition_of_its_key(task: str, line: str | None) -> None:
    """A summary goes there too, and holds up no turn."""
    home = partition_for(b"acme.c1", 4)
    fields: dict[str, Any] = {} if task == "text_generation" else {"text_generation": None, "summarization": {}}
    asked = replace(request(tenant="acme", conversation_id="c1", **fields), task=task)
    assert taken(CODEC.encode(asked), partition=home).belongs_on is None
    away = taken(CODEC.encode(asked), partition=(home + 1) % 4)
    assert (away.belongs_on, away.conversation, away.error) == (home, line, None)


@pytest.mark.parametrize("request_id", ["\ud800", "x" * 900_000, "", 7.5, None, "a b", "a\nb"])
@pytest.mark.parametrize("spoil", [{"payload": {"prompt": 5}}, {"unknown": 1}], ids=["invalid", "unsupported"])
def test_an_id_that_cannot_be_published_is_replaced(request_id: Any, spoil: dict[str, Any]) -> None:
    body = {"request_id": request_id, "tenant": "\udfff", "task": "text_generation", "payload": {"prompt": "x"}}
    found = read(json.dumps({**body, **spoil}).encode())
    named = found if isinstance(found, Poison) else found.request
    assert (named.request_id, named.tenant) == (derived_request_id(TOPIC, 0, 7, APPEND_MS), "default")


@pytest.mark.parametrize("payload", [{"prompt": "x"}, {"prompt": 5}], ids=["valid", "invalid"])
def test_a_json_record_without_an_id_keeps_it_when_it_is_appended_again(payload: dict[str, Any]) -> None:
    value = json.dumps({"task": "text_generation", "payload": payload}).encode()
    found = read(value, headers=[origin_header(Origin(topic="t", partition=2, offset=3, append_time_ms=4))])
    named = found if isinstance(found, Poison) else found.request
    assert named.request_id == derived_request_id("t", 2, 3, 4)


NAMED = {"userId": "u", "session_id": "s", "correlationId": "k", "prompt": "x"}


@pytest.mark.parametrize(
    "spoil", [{"type": "dance"}, {"requestId": 5}, {"unknown": 1}, {"temperature": 9, "task": "text_generation"}]
)
def test_what_is_no_request_keeps_its_labels(spoil: dict[str, Any]) -> None:
    found = read(json.dumps({**NAMED, **spoil}).encode())
    labels = found.labels if isinstance(found, Poison) else labels_of(found.request)
    assert labels == Labels("u", "s", "k")


@pytest.mark.parametrize("odd", ["\ud800", "x" * 201, "", 7.5, None, ["k"]])
def test_labels_that_cannot_be_published_are_left_out(odd: Any) -> None:
    found = poison(json.dumps({**NAMED, "userId": odd, "correlationId": odd, "payload": 5}).encode())
    assert found.labels == Labels(None, "s", None)
    long = request(user_id="x" * 100_000, text_generation={"prompt": "x"}, metadata={"correlation_id": "y" * 10_000})
    assert labels_of(long) == Labels()


def test_an_avro_record_with_an_unusable_id_has_none() -> None:
    spoiled = InferenceRequest(
        request_id="x" * 100_000, tenant="A", task="text_generation", created_at=0, text_generation={"prompt": "x"}
    )
    found = poison(CODEC.encode(spoiled))
    assert (found.request_id, found.tenant) == (None, "default")


@pytest.mark.parametrize("attempt", [b"", b"9" * 30, b"-1", b"0", b"many"])
@pytest.mark.parametrize(
    "origin", [b"t/0/" + b"9" * 30 + b"/0", b"t/4294967296/0/0", b"\xff\xfe", b"", b"?"], ids=range(5)
)
def test_headers_that_make_no_sense_are_not_believed(attempt: bytes, origin: bytes) -> None:
    headers = [(HEADER_ATTEMPT, attempt), ("penstock-origin", origin)]
    found = taken(CODEC.encode(request()), headers=headers)
    assert found.attempt == 1
    assert (found.origin.topic, found.origin.offset) == (TOPIC, 7)


def test_a_fault_of_ours_is_poison_and_not_the_end_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("a secret prompt")

    monkeypatch.setattr("penstock.processors.core.intake.intake.validate_request", broken)
    found = poison(CODEC.encode(request()))
    assert found.reason.code == "internal"
    assert "secret" not in str(found.reason)
    assert isinstance(found.fault, KeyError)


@pytest.mark.parametrize(
    ("task", "payload", "cost"),
    [
        ("text_generation", {"prompt": "abcdefgh", "max_tokens": 10}, 12),
        ("text_generation", {"prompt": "abcdefgh", "max_tokens": 10, "n": 3}, 32),
        ("text_generation", {"prompt_token_ids": [1, 2, 3], "max_tokens": 10}, 13),
        ("text_generation", {"messages": [{"role": "user", "content": "abcd"}], "max_tokens": 1}, 2),
        ("embedding", {"input_token_ids": [[1, 2, 3], [4]]}, 4),
    ],
)
def test_what_a_request_costs_its_tenant(task: str, payload: dict[str, Any], cost: int) -> None:
    assert taken(json.dumps({"task": task, "payload": payload}).encode(), topic=NAMES.request(task, 5)).cost == cost


# -- partitions that are added while workers run

LINE = next(line for line in map(str, range(1000)) if partition_for(line.encode(), 8) >= 4)
OLD, NEW = partition_for(LINE.encode(), 4), partition_for(LINE.encode(), 8)
TURN = CODEC.encode(request(conversation_id=LINE))
EIGHT = dict.fromkeys(PARTITIONS, 8)


def belongs_on(of: Intake, partition: int, append_ms: int = APPEND_MS, *, moved: bool = False) -> int | None:
    first = Origin(topic=TOPIC, partition=NEW, offset=3, append_time_ms=APPEND_MS - 1)
    headers = [origin_header(first)] if moved else []
    found = of.read(TOPIC, partition, 7, append_ms, headers, TURN)
    assert isinstance(found, Taken)
    return found.belongs_on


def test_partitions_that_are_added_are_learned() -> None:
    of = intake()
    assert belongs_on(of, OLD) is None
    assert belongs_on(of, NEW) is None, "who put it on a partition that is not known yet knew where it belongs"
    assert of.learn_partitions({}, APPEND_MS) == {}
    assert belongs_on(of, OLD) is None, "a topic that the broker does not name keeps its count"
    assert belongs_on(of, (OLD + 1) % 4) == OLD
    assert of.learn_partitions(EIGHT, APPEND_MS) == PARTITIONS
    assert of.learn_partitions(EIGHT, APPEND_MS) == {}
    assert belongs_on(of, OLD) == NEW
    assert belongs_on(of, NEW) is None


def test_a_record_that_was_moved_is_moved_again_by_counts_that_are_surely_newer() -> None:
    of = intake()
    assert belongs_on(of, OLD, moved=True) is None
    assert belongs_on(of, (OLD + 1) % 4, moved=True) is None, "where this worker's counts may be older than its mover's"
    of.learn_partitions(EIGHT, APPEND_MS + CLOCKS_DIFFER_MS)
    assert belongs_on(of, OLD, moved=True) is None
    of.learn_partitions(EIGHT, APPEND_MS + CLOCKS_DIFFER_MS + 1)
    assert belongs_on(of, OLD, moved=True) == NEW


@pytest.mark.parametrize("start", range(8))
@pytest.mark.parametrize("learned_ms", [0, 1, 10_000])
def test_a_record_comes_to_rest_between_workers_that_know_different_counts(start: int, learned_ms: int) -> None:
    """One has known of eight partitions since `learned_ms` after the record came, the other knows of four."""
    knows, behind = intake(), intake()
    knows.learn_partitions(EIGHT, APPEND_MS + learned_ms)
    place, moved, hops = start, False, 0
    while (to := belongs_on(behind if hops % 2 else knows, place, APPEND_MS + hops, moved=moved)) is not None:
        place, moved, hops = to, True, hops + 1
        assert hops <= 2
    assert place in (OLD, NEW)
