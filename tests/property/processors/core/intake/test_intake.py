"""Intake for any record: what comes out is Taken or Poison, nothing is raised, and what is taken can be worked on."""

from __future__ import annotations

import json
import uuid
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from avro_values import records_of
from kit.examples import examples
from kit.records import outcome as ended
from penstock.processors.core.intake.intake import Intake, Poison, Taken
from penstock.schemas.codec import default_codec
from penstock.schemas.costs import drawing_cost
from penstock.schemas.ids import NAMESPACE, derived_request_id, idempotent_request_id
from penstock.schemas.origins import origin_header
from penstock.schemas.records import InferenceRequest, Origin, ResultEvent
from penstock.schemas.requests import LIMITS
from penstock.schemas.topics import HEADER_ATTEMPT, HEADER_ORIGIN, TopicNames

CODEC = default_codec()
NAMES = TopicNames()
INTAKE = Intake(CODEC, NAMES, dict.fromkeys(NAMES.request_topics(), 4))
TOPICS = st.sampled_from([*NAMES.request_topics(), "another"])

TEXT = st.text(max_size=8)
NUMBERS = st.integers() | st.floats() | st.sampled_from((10**30, -(2**63), 2**64))
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXT | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
GOOD: dict[str, st.SearchStrategy[Any]] = {
    "task": st.sampled_from(("text_generation", "embedding", "image_generation")),
    "payload": st.sampled_from(
        ({"prompt": "hello"}, {"messages": [{"role": "user", "content": "ü"}], "max_tokens": 3}, {"input": ["a", "b"]})
    ),
    "conversation_id": st.sampled_from(("c1", 7)),
    "tenant": st.sampled_from(("acme", "A", "")),
    "request_id": st.sampled_from(("r1", "", "\ud800", 5)),
    "priority": st.integers(-1, 12),
    "ttl_ms": st.integers(-1, 10),
    "deadline": NUMBERS | st.just("2025-10-09T09:00:00Z"),
}
BODIES = st.fixed_dictionaries({}, optional={name: good | JSON for name, good in GOOD.items()})
FIELDS = st.sampled_from((*GOOD, "extra", "metadata", "context", "stream", "model", "nobody's"))


def joined(pairs: list[tuple[str, Any]]) -> bytes:
    """A JSON object in which a name may stand twice, with NaN and Infinity as Python writes them."""
    return ("{" + ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in pairs) + "}").encode()


VALUES = st.one_of(
    st.none(),
    st.binary(max_size=40),
    BODIES.map(lambda body: json.dumps(body).encode()),
    st.lists(st.tuples(FIELDS, JSON), max_size=6).map(joined),
    st.binary(max_size=60).map(lambda rest: b"{" + rest),
    st.binary(max_size=60).map(lambda rest: b"\0\x50\x4e\0\0" + rest),
    records_of(InferenceRequest).map(CODEC.encode),
    records_of(ResultEvent).map(CODEC.encode),
)
HEADERS = st.lists(
    st.tuples(
        st.sampled_from((HEADER_ATTEMPT, HEADER_ORIGIN, "traceparent", "")) | st.text(max_size=5),
        st.none()
        | st.binary(max_size=30)
        | st.sampled_from((b"2", b"-1", b"9" * 400, b"t/0/1/2", b"x" * 2_000 + b"/0/1/2", b"t/0/1/-1", b"\xff/0/1/2")),
    ),
    max_size=4,
)


@settings(max_examples=examples(600), deadline=None)
@given(
    topic=TOPICS,
    partition=st.integers(0, 2**31 - 1),
    offset=st.integers(0, 2**63 - 1),
    append_ms=st.just(-1) | st.integers(0, 2**62),
    headers=HEADERS,
    value=VALUES,
    key=st.none() | st.binary(max_size=9),
)
@example(topic="t", partition=0, offset=0, append_ms=-1, headers=[("a", None)], value=None, key=None)
def test_any_record_is_taken_or_poison(
    topic: str, partition: int, offset: int, append_ms: int, headers: Any, value: bytes | None, key: bytes | None
) -> None:
    read = INTAKE.read(topic, partition, offset, append_ms, headers, value, key)
    if isinstance(read, Poison):
        assert read.reason.code != "internal", "a fault of ours"
        named, tenant = read.request_id, read.tenant
    else:
        assert isinstance(read, Taken)
        named, tenant = read.request.request_id, read.request.tenant
        assert read.cost >= 1
        assert read.klass in ("high", "medium", "low")
        assert read.size_bytes == len(value or b"") + len(key or b"") + sum(len(n) + len(v or b"") for n, v in headers)
    assert 1 <= read.attempt <= 1_000
    place = {"origin": read.origin, "attempt": read.attempt}
    outcome = ended(request_id=named or "unknown", tenant=tenant or "default", task="UNKNOWN", **place)
    assert len(CODEC.encode(outcome)) < 2_000, "its outcome can be written"


@settings(max_examples=examples(100), deadline=None)
@given(value=VALUES)
def test_a_record_put_on_another_partition_keeps_its_identity(value: bytes | None) -> None:
    first = INTAKE.read(NAMES.request("embedding", 1), 3, 9, 5, (), value)
    header = origin_header(first.origin)
    again = INTAKE.read("another", 1, 2, 3, [header], value)
    assert again.origin == Origin(topic=first.origin.topic, partition=3, offset=9, append_time_ms=5)


@given(topic=st.text(max_size=9), numbers=st.tuples(st.integers(0), st.integers(0), st.integers(-1)))
def test_a_derived_id_is_the_uuid_of_its_name(topic: str, numbers: tuple[int, int, int]) -> None:
    name = "\n".join(("record", topic, *map(str, numbers)))
    assert derived_request_id(topic, *numbers) == str(uuid.uuid5(NAMESPACE, name))
    assert idempotent_request_id("one", topic) == str(uuid.uuid5(NAMESPACE, f"idempotency\none\n{topic}"))


def test_costs() -> None:
    def cost(task: str, payload: dict[str, Any]) -> int:
        value = json.dumps({"task": task, "payload": payload}).encode()
        read = INTAKE.read(NAMES.request(task, 5), 0, 0, 0, (), value)
        assert isinstance(read, Taken)
        return read.cost

    assert cost("text_generation", {"prompt": "x" * 9, "max_tokens": 7}) == 3 + 7
    assert cost("text_generation", {"prompt": "", "max_tokens": 1}) == 1
    assert cost("text_generation", {"messages": [{"role": "user", "content": "üüü"}]}) == 2 + 256
    assert cost("embedding", {"input": ["a", "b" * 8]}) == 3
    assert cost("image_generation", {"prompt": "x"}) == drawing_cost({})
    assert LIMITS.max_tokens >= 256
