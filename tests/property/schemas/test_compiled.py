"""The generated encoders and decoders against fastavro: the same bytes, the same records, and no more than that."""

from __future__ import annotations

import contextlib
import io
import json
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import fastavro
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from avro_values import records_of, values_of
from kit.examples import examples
from kit.records import outcome
from penstock.schemas.codec import SCHEMA_IDS, Codec, default_codec, released_schema, schema_text
from penstock.schemas.compiled import fallback
from penstock.schemas.compiled.decoder import compile_decoder
from penstock.schemas.compiled.encoder import compile_encoder
from penstock.schemas.compiled.tree import UnsafeSchema, Unsupported, schema_tree
from penstock.schemas.compiled.varints import int_bytes, long_bytes, read_int, read_long
from penstock.schemas.errors import BadAvro, UnknownSchema, WrongMagic
from penstock.schemas.records import RECORDS, InferenceRequest, ModelInfo, Record, ResultEvent, WorkerState, fields_of

CODEC = default_codec()
HEADER = b"\0\0\0\0\7"
SLOW = settings(
    max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def current(kind: type[Record]) -> str:
    return schema_text(kind.__name__)


ENCODERS = {kind: compile_encoder(schema_tree(current(kind)), kind, HEADER) for kind in RECORDS}
DECODERS = {kind: compile_decoder(schema_tree(current(kind)), schema_tree(current(kind)), kind) for kind in RECORDS}
REFERENCE_DECODERS = {kind: fallback.make_decoder(current(kind), current(kind), kind) for kind in RECORDS}
STRATEGIES = {kind: records_of(kind) for kind in RECORDS}
RELEASES = [(kind, schema_id) for kind in RECORDS for schema_id in SCHEMA_IDS[kind.__name__]]
"""Of a record they differ by a few fields each: together they get as many examples as two records."""
NAMED = pytest.mark.parametrize("kind", RECORDS, ids=lambda kind: kind.__name__)
STATE: dict[str, Any] = {"worker_id": "w", "state": "ready", "started_at": 1, "updated_at": 2, "assigned": ["t/0"]}
VECTORS = {"embeddings": [[0.5, 0.25]], "dimensions": 2}
WITH_LISTS: dict[type[Record], Record] = {
    ResultEvent: outcome(token_ids=[1, 2], embedding=VECTORS, metadata={"a": "b"}),
    WorkerState: WorkerState.from_dict(
        {**STATE, "queued": {"high": 1}, "models": [{"model": "m", "state": "ready", "memory_bytes": None}]}
    ),
}


class Release(NamedTuple):
    """A released schema: whatever fits it, and what reads it as the current record."""

    text: str
    values: st.SearchStrategy[Any]
    decoder: Callable[[bytes], Record]
    reference: Callable[[bytes], Record]


@cache  # to make the strategy and both decoders anew takes longer than an example
def released(kind: type[Record], schema_id: int) -> Release:
    release = released_schema(schema_id)
    text = release[2]
    decoder = compile_decoder(schema_tree(text), schema_tree(current(kind)), kind)
    return Release(text, values_of(json.loads(text), {}), decoder, fallback.make_decoder(text, current(kind), kind))


def written(text: str, values: Any) -> bytes:
    """What fastavro writes, behind a header."""
    out = io.BytesIO(HEADER)
    out.seek(len(HEADER))
    fastavro.schemaless_writer(out, parsed(text), values)
    return out.getvalue()


@cache
def parsed(text: str) -> Any:
    return fastavro.parse_schema(json.loads(text), {})


@NAMED
@SLOW
@given(data=st.data())
def test_the_same_bytes_and_the_same_record(kind: type[Record], data: st.DataObject) -> None:
    record = data.draw(STRATEGIES[kind])
    encoded = ENCODERS[kind](record)
    assert encoded == written(current(kind), record.to_dict())
    decoded = DECODERS[kind](encoded)
    assert decoded == REFERENCE_DECODERS[kind](encoded) == record


@pytest.mark.parametrize(("kind", "schema_id"), RELEASES, ids=lambda value: getattr(value, "__name__", value))
@settings(SLOW, max_examples=examples(20))
@given(data=st.data())
def test_every_release_is_read_as_the_current_one(kind: type[Record], schema_id: int, data: st.DataObject) -> None:
    release = released(kind, schema_id)
    encoded = written(release.text, data.draw(release.values))
    decoded = release.decoder(encoded)
    assert decoded == release.reference(encoded)
    header = b"\0" + schema_id.to_bytes(4, "big")
    assert CODEC.decode_any(header + encoded[5:]) == decoded


NEW_TYPES: list[Any] = [
    "string",
    "double",
    "boolean",
    "float",
    "bytes",
    ["null", "string", "long"],
    ["string", "null"],
    {"type": "fixed", "name": "Digest", "size": 3},
    {"type": "enum", "name": "Colour", "symbols": ["red", "green"]},
    {"type": "array", "items": ["null", "double"]},
    {"type": "array", "items": {"type": "map", "values": "long"}},
    {"type": "map", "values": {"type": "record", "name": "Other", "fields": [{"name": "a", "type": "int"}]}},
    {"type": "long", "logicalType": "timestamp-millis", "avro.java.string": "String"},
]


@st.composite
def foreign(draw: st.DrawFn, kind: type[Record]) -> str:
    """A schema of another release: fields with defaults are missing, unknown ones and new symbols are there."""
    schema = json.loads(current(kind))
    text = json.dumps(schema)
    defined_elsewhere = [name for name in ("ImageInput", "ImagesOutput", "TextOutput") if f'"{name}"' in text]
    fields = [
        field
        for field in schema["fields"]
        if "default" not in field
        or any(f'"name": "{name}"' in json.dumps(field) for name in defined_elsewhere)
        or draw(st.booleans())
    ]
    for number, added in enumerate(draw(st.lists(st.sampled_from(NEW_TYPES), max_size=4, unique_by=json.dumps))):
        fields.insert(
            draw(st.integers(0, len(fields))), {"name": f"new_{number}", "type": json.loads(json.dumps(added))}
        )
    for field in fields:
        if isinstance(field["type"], dict) and field["type"].get("type") == "enum" and draw(st.booleans()):
            field["type"]["symbols"] = ["of_tomorrow", *field["type"]["symbols"]]
    schema["fields"] = fields
    return json.dumps(schema)


@NAMED
@SLOW
@given(data=st.data())
def test_other_releases_are_read_alike(kind: type[Record], data: st.DataObject) -> None:
    text = data.draw(foreign(kind))
    encoded = written(text, data.draw(values_of(json.loads(text), {})))
    decoder = compile_decoder(schema_tree(text), schema_tree(current(kind)), kind)
    assert decoder(encoded) == fallback.make_decoder(text, current(kind), kind)(encoded)
    codec = fixed(text)
    for end in range(5, len(encoded), 1 + len(encoded) // 50):
        with pytest.raises(BadAvro):
            codec.decode_any(encoded[:end])


def fixed(text: str) -> Codec:
    """A codec whose registry has one schema."""
    return Codec(lambda _: text)


FIXED = {kind: fixed(current(kind)) for kind in RECORDS}


@NAMED
@settings(SLOW, max_examples=examples(120))
@given(data=st.data())
def test_malformed_bytes_are_bad_avro_or_read_alike(kind: type[Record], data: st.DataObject) -> None:
    encoded = bytearray(ENCODERS[kind](data.draw(STRATEGIES[kind])))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(5, len(encoded)))
        length = data.draw(st.integers(0, 2))
        encoded[at : at + length] = data.draw(st.binary(max_size=3) | st.sampled_from((b"\x01", b"\xff" * 9, b"\x80")))
    message = HEADER + bytes(encoded[5:])
    try:
        expected: Any = REFERENCE_DECODERS[kind](message)
    except Exception:
        expected = None
    try:
        decoded = FIXED[kind].decode_any(message)
    except BadAvro:
        if expected is not None:  # fastavro lets things pass that nobody writes
            try:
                again = ENCODERS[kind](expected)
            except (BadAvro, ValueError, TypeError):
                return
            assert again != message
        return
    assert repr(decoded) == repr(expected)


@pytest.mark.parametrize("size", [0, 3, 40, 2**20, 2**31 - 1, 2**40, 2**62, 2**63 - 1, -1, -7, -(2**63)])
@NAMED
def test_a_length_that_lies_takes_no_memory(kind: type[Record], size: int) -> None:
    """Wherever a number can stand there is one that lies."""
    lie, codec = long_bytes(size), FIXED[kind]
    sample = ENCODERS[kind](WITH_LISTS[kind]) if kind in WITH_LISTS else HEADER + bytes(60)
    with contextlib.suppress(BadAvro):
        codec.decode_any(sample)  # the first one compiles the decoder, which takes some megabytes once
    tracemalloc.start()
    try:
        for at in range(5, len(sample)):
            with contextlib.suppress(BadAvro):
                codec.decode_any(sample[:at] + lie + sample[at + 1 :] + bytes(20))
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_lists_in_blocks_with_their_sizes_are_read() -> None:
    """Java's blocking encoder writes a negative count and the block's size, and a list may have many blocks."""
    info = ModelInfo(model="m", tasks=["a", "b", "c"], engine="e", state="ready", updated_at=1, worker_id="w")
    plain = ENCODERS[ModelInfo](info)
    blocks = b"\x03\x08\x02a\x02b" + b"\x02\x02c" + b"\x00"
    changed = plain.replace(b"\x06\x02a\x02b\x02c\x00", blocks)
    assert changed != plain
    assert DECODERS[ModelInfo](changed) == REFERENCE_DECODERS[ModelInfo](changed) == info


ODD = (
    st.just("\ud800")
    | st.sampled_from((2**31, 2**63, -(2**63) - 1, 2**70, -1, 0, 1.5, float("nan"), True, None, b"x", "x", object()))
    | st.sampled_from(([], {}, ["a"], [1], [None], ["\udfff"], {"a": 1}, {"a": "\ud800"}, {1: "a"}, "text_generation"))
)


@NAMED
@settings(SLOW, max_examples=examples(120))
@given(data=st.data())
def test_what_does_not_fit_is_bad_avro(kind: type[Record], data: st.DataObject) -> None:
    values = data.draw(STRATEGIES[kind]).to_dict()
    holder = values
    inner = [value for value in values.values() if isinstance(value, dict) and value]
    if inner and data.draw(st.booleans()):
        holder = data.draw(st.sampled_from(inner))
    holder[data.draw(st.sampled_from(sorted(holder)))] = data.draw(ODD)
    try:
        record = kind.from_dict(values)
    except (TypeError, AttributeError, ValueError):
        return
    try:
        encoded = CODEC.encode(record)
    except BadAvro:
        return
    assert repr(DECODERS[kind](encoded)) == repr(REFERENCE_DECODERS[kind](encoded)), "as text: no NaN equals another"
    try:
        expected = written(current(kind), record.to_dict())
    except (TypeError, ValueError):  # fastavro takes no boolean for an optional number
        return
    assert encoded[5:] == expected[5:]


@given(number=st.integers(-(2**63), 2**63 - 1) | st.integers(-(2**31), 2**31 - 1), tail=st.binary(max_size=9))
def test_numbers_come_back(number: int, tail: bytes) -> None:
    encoded = long_bytes(number)
    data = encoded + tail
    if len(encoded) > 1:
        assert read_long(data, 1, data[0]) == (number, len(encoded))
    if -(2**31) <= number < 2**31:
        assert int_bytes(number) == encoded
        if len(encoded) > 1:
            assert read_int(data, 1, data[0]) == (number, len(encoded))
        return
    with pytest.raises(BadAvro):
        int_bytes(number)
    with pytest.raises(BadAvro):
        read_int(data, 1, data[0])


def schema_with(**field: Any) -> str:
    schema = json.loads(schema_text("InferenceRequest"))
    schema["fields"].insert(0, {"name": "new", **field})
    return json.dumps(schema)


EMPTY = {"type": "record", "name": "Empty", "fields": []}
ENDLESS = {
    "itself": {"type": "record", "name": "Node", "fields": [{"name": "next", "type": ["null", "Node"]}]},
    "nulls": {"type": "array", "items": "null"},
    "empty-records": {"type": "array", "items": EMPTY},
    "empty-fixed": {"type": "array", "items": {"type": "fixed", "name": "None", "size": 0}},
    "negative-fixed": {"type": "fixed", "name": "Less", "size": -5},
}


@pytest.mark.parametrize("added", ENDLESS.values(), ids=ENDLESS)
def test_a_schema_by_which_a_few_bytes_cost_anything_is_not_read(added: Any) -> None:
    with pytest.raises(UnsafeSchema):
        schema_tree(schema_with(type=added))
    codec = fixed(schema_with(type=added))
    for _ in range(3):
        with pytest.raises(UnknownSchema):
            codec.decode_any(HEADER + b"\2" * 100_000)
    with pytest.raises(UnknownSchema):
        fixed("[" * 100_000).decode_any(HEADER)


def test_a_schema_that_grows_without_end_costs_no_memory() -> None:
    kinds: list[Any] = ["long"]
    for number in range(40):
        fields = [
            {"name": f"f{at}", "type": kinds[-1] if at == 0 else f"K{number - 1}"} for at in range(8 if number else 1)
        ]
        kinds.append({"type": "record", "name": f"K{number}", "fields": fields})
    text = schema_with(type=kinds[-1])
    with pytest.raises(Unsupported):
        compile_decoder(schema_tree(text), schema_tree(schema_text("InferenceRequest")), InferenceRequest)
    with pytest.raises(BadAvro):
        fixed(text).decode_any(HEADER + bytes(10))


def schema_of_others(name: str, changed: Any) -> str:
    """The schema of requests as somebody else may register it: one field has another type."""
    schema = json.loads(schema_text("InferenceRequest"))
    payload = next(field for field in schema["fields"] if field["name"] == "text_generation")["type"][1]
    next(field for field in schema["fields"] + payload["fields"] if field["name"] == name)["type"] = changed
    return json.dumps(schema)


OTHER_TYPES = {
    "max_attempts": ["int", "string"], "request_id": "bytes", "tenant": ["null", "string"],
    "temperature": ["null", "float"],
}  # fmt: skip


@pytest.mark.parametrize(("name", "changed"), OTHER_TYPES.items())
def test_a_request_by_a_schema_that_is_not_generated_is_read_by_fastavro(name: str, changed: Any) -> None:
    text = schema_of_others(name, changed)
    with pytest.raises(Unsupported):
        compile_decoder(schema_tree(text), schema_tree(schema_text("InferenceRequest")), InferenceRequest)
    request = InferenceRequest(
        request_id="r", task="text_generation", created_at=1, text_generation={"prompt": "p", "temperature": 0.5}
    )
    values = {**request.to_dict(), **({"request_id": b"r"} if name == "request_id" else {})}
    encoded, expected = written(text, values), CODEC.decode(CODEC.encode(request), InferenceRequest)
    codec = fixed(text)
    assert codec.decode(encoded, InferenceRequest) == expected
    assert codec.decoder(InferenceRequest, without=("model",))(encoded) == expected
    *head, length = codec.head(InferenceRequest, "request_id", "text_generation", "max_attempts")(encoded)
    assert head == ["r", expected.text_generation, 0]
    assert length <= len(encoded)
    for end in range(5, len(encoded)):
        with pytest.raises(BadAvro):
            codec.decode(encoded[:end], InferenceRequest)


def test_what_penstock_itself_writes_is_read_without_fastavro() -> None:
    """Of every released schema, whether whole, in part or by its head."""
    program = """
import sys
from contextlib import suppress
from penstock.schemas.codec import SCHEMA_IDS, Codec
from penstock.schemas.errors import BadAvro
from penstock.schemas.records import RECORDS, fields_of
codec = Codec()
for kind in RECORDS:
    readers = [codec.decode_any, codec.decoder(kind), codec.head(kind, *fields_of(kind))]
    for schema_id in SCHEMA_IDS[kind.__name__]:
        for read in readers:  # there is no body, but the reader is made before that is seen
            with suppress(BadAvro):
                read(b"\\0" + schema_id.to_bytes(4, "big"))
print("fastavro" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


@NAMED
@SLOW
@given(data=st.data())
def test_a_head_is_the_same_fields_of_the_record(kind: type[Record], data: st.DataObject) -> None:
    record = data.draw(STRATEGIES[kind])
    names = data.draw(st.lists(st.sampled_from(list(fields_of(kind))), min_size=1, max_size=4, unique=True))
    names = [name for name in names if kind.nested_kind(name) is None]
    encoded, head = CODEC.encode(record), CODEC.head(kind, *names)
    *found, length = head(encoded)
    assert found == [getattr(CODEC.decode_any(encoded), name) for name in names]
    assert head(encoded[:length]) == (*found, length)


@SLOW
@given(record=STRATEGIES[ResultEvent], other=STRATEGIES[ResultEvent])
def test_what_begins_alike_has_the_same_head(record: ResultEvent, other: ResultEvent) -> None:
    names = ("request_id", "tenant", "kind", "origin", "attempt", "epoch")
    head = CODEC.head(ResultEvent, *names)
    alike = replace(other, **{name: getattr(record, name) for name in names})
    *_, length = head(CODEC.encode(record))
    beginning = CODEC.encode(record)[:length]
    assert CODEC.encode(alike).startswith(beginning)
    for one in (record, other, alike):
        encoded = CODEC.encode(one)
        assert encoded.startswith(beginning) == (head(encoded)[:-1] == head(CODEC.encode(record))[:-1])


@SLOW
@given(record=STRATEGIES[ResultEvent])
def test_what_is_passed_over_is_none_and_all_else_is_as_it_was(record: Any) -> None:
    encoded = CODEC.encode(record)
    whole = CODEC.decode(encoded, ResultEvent)
    without = ("embedding", "text", "text_generation.logprobs", "text_generation.choices")
    text = None if whole.text_generation is None else {**whole.text_generation, "logprobs": None, "choices": None}
    expected = replace(whole, embedding=None, text=None, text_generation=text)
    assert CODEC.decoder(ResultEvent, without=without)(encoded) == expected


def test_special_decoders_refuse_as_the_codec_does() -> None:
    model = CODEC.encode(ModelInfo(model="m", tasks=[], engine="e", state="ready", updated_at=1, worker_id="w"))
    for read in (CODEC.head(ResultEvent, "request_id"), CODEC.decoder(ResultEvent, without=("embedding",))):
        for _ in range(2):
            with pytest.raises(BadAvro, match="wrong record"):
                read(model)
        with pytest.raises(WrongMagic):
            read(b"{}")
        with pytest.raises(UnknownSchema):
            read(b"\0\0\0\0\7rest")
        with pytest.raises(BadAvro):
            read(CODEC.encode(outcome())[:6])


def test_a_list_that_lies_about_its_length_is_not_passed_over() -> None:
    encoded = CODEC.encode(outcome(embedding={"embeddings": [[0.5] * 4], "dimensions": 4}))
    at = encoded.index(b"\x08" + struct.pack("<f", 0.5))
    with pytest.raises(BadAvro):
        CODEC.decoder(ResultEvent, without=("embedding",))(encoded[:at] + b"\xfe\x7f" + encoded[at + 1 :])
