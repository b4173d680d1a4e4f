"""Records to bytes and back; whatever bytes come, only DecodeErrors are raised."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from avro_values import records_of
from kit.examples import examples
from penstock.schemas.codec import SCHEMA_IDS, default_codec
from penstock.schemas.errors import BadAvro, DecodeError, UnknownSchema, WrongMagic
from penstock.schemas.records import RECORDS, Record

CODEC = default_codec()
STRATEGIES = {kind: records_of(kind) for kind in RECORDS}
ANY_RECORD = st.one_of(list(STRATEGIES.values()))


@pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
@settings(max_examples=examples(40), deadline=None)
@given(data=st.data())
def test_round_trip(kind: type[Record], data: st.DataObject) -> None:
    record = data.draw(STRATEGIES[kind])
    encoded = CODEC.encode(record)
    assert encoded[:5] == b"\0" + SCHEMA_IDS[kind.__name__][-1].to_bytes(4, "big")
    assert CODEC.decode(encoded, kind) == record
    assert CODEC.decode_any(encoded) == record
    assert kind.from_dict(record.to_dict()) == record


@settings(max_examples=examples(60), deadline=None)
@given(record=ANY_RECORD, data=st.data())
def test_another_record_or_length_is_bad_avro(record: Record, data: st.DataObject) -> None:
    encoded = CODEC.encode(record)
    other = data.draw(st.sampled_from([kind for kind in RECORDS if kind is not type(record)]))
    with pytest.raises(BadAvro):
        CODEC.decode(encoded, other)
    with pytest.raises(BadAvro):
        CODEC.decode_any(encoded + data.draw(st.binary(min_size=1, max_size=4)))
    with pytest.raises(DecodeError):
        CODEC.decode_any(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


@given(data=st.binary(max_size=60))
def test_arbitrary_bytes(data: bytes) -> None:
    with pytest.raises((WrongMagic, UnknownSchema)):
        CODEC.decode_any(data)


@settings(max_examples=examples(200), deadline=None)
@given(kind=st.sampled_from(RECORDS), body=st.binary(max_size=120))
def test_arbitrary_bodies(kind: type[Record], body: bytes) -> None:
    try:
        record = CODEC.decode_any(b"\0" + SCHEMA_IDS[kind.__name__][-1].to_bytes(4, "big") + body)
    except DecodeError:
        return
    assert type(record) is kind


@pytest.mark.parametrize("name", ["created_at", "priority"])
def test_what_does_not_fit_is_bad_avro(name: str) -> None:
    kind = RECORDS[0]
    values: dict[str, Any] = {"request_id": "r", "task": "embedding", "created_at": 1}
    for wrong in (2**70, "x", None, object()):
        with pytest.raises(BadAvro):
            CODEC.encode(kind.from_dict({**values, name: wrong}))
