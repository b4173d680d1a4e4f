"""Schemas change only by release, and every release reads every other; newer symbols read as UNKNOWN."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import fastavro
import pytest

from penstock.schemas import codec
from penstock.schemas.codec import FIRST_ID, GROW_AT_THEIR_END, SCHEMA_IDS, Codec, released_schema, schema_text
from penstock.schemas.errors import UnknownSchema
from penstock.schemas.evolution import check_all, check_compatibility
from penstock.schemas.records import (
    RECORDS,
    ControlCommand,
    DesiredState,
    InferenceRequest,
    Origin,
    Record,
    StatusEvent,
)

ORIGIN = Origin(topic="t", partition=0, offset=1, append_time_ms=2)
NAMES = [kind.__name__ for kind in RECORDS]


def test_all_releases_are_compatible_and_the_current_schema_is_the_latest() -> None:
    assert check_all() == {name: [] for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_releases_of_a_record_read_each_other(name: str) -> None:
    texts = [found[2] for schema_id in SCHEMA_IDS[name] if (found := released_schema(schema_id)) is not None]
    assert len(texts) == len(SCHEMA_IDS[name])
    for old in texts:
        for new in texts:
            assert check_compatibility(old, new) == []


def plain_type(kind: Any) -> Any:
    """An enum may gain symbols behind the others: they change no place."""
    return kind["name"] if isinstance(kind, dict) and "symbols" in kind else kind


@pytest.mark.parametrize(
    ("kind", "last"), [(InferenceRequest, "tenant"), *((kind, None) for kind in GROW_AT_THEIR_END)], ids=str
)
def test_versions_begin_with_the_fields_of_earlier_ones(kind: type[Record], last: str | None) -> None:
    """All their fields, or those up to `last`: they are read of versions that are not known yet."""
    today = [(one["name"], plain_type(one["type"])) for one in json.loads(schema_text(kind.__name__))["fields"]]
    wanted = len(today) if last is None else 1 + [name for name, _ in today].index(last)
    for schema_id in SCHEMA_IDS[kind.__name__]:
        found = released_schema(schema_id)
        fields = [(one["name"], plain_type(one["type"])) for one in json.loads(found[2])["fields"]][:wanted]
        assert fields == today[: len(fields)]


@pytest.mark.parametrize(
    "record",
    [
        ControlCommand(kind="cancel", request_id="r", tenant="t", created_at=1, origin=ORIGIN, task="embedding"),
        DesiredState(kind="model", name="m", action="pause", created_at=1, paused=True),
    ],
    ids=lambda record: type(record).__name__,
)
def test_commands_and_orders_of_newer_releases_are_read(record: Record) -> None:
    """Without a registry, as Avro's resolution reads them: what is new in them stands last, and is passed over."""
    body, newer = Codec().encode(record)[5:], SCHEMA_IDS[type(record).__name__][-1] + 1
    value = b"\0" + newer.to_bytes(4, "big") + body + b"\x02\x06new"
    assert Codec().decode(value, type(record)) == record
    with pytest.raises(UnknownSchema):
        Codec().decode(value[:8], type(record))


def test_ids_are_append_only() -> None:
    for number, name in enumerate(NAMES):
        assert SCHEMA_IDS[name] == tuple(FIRST_ID + number * 256 + at for at in range(len(SCHEMA_IDS[name])))
    assert released_schema(FIRST_ID - 1) is None
    assert released_schema(SCHEMA_IDS[NAMES[0]][-1] + 1) is None
    found = released_schema(FIRST_ID)
    assert found[:2] == ("InferenceRequest", 1)


def changed(name: str, change: Any) -> str:
    schema = json.loads(schema_text(name))
    change(schema)
    return json.dumps(schema)


def field(schema: Any, *names: str) -> Any:
    return next(item for item in schema["fields"] if item["name"] in names)


def with_default(schema: Any) -> None:
    schema["fields"].append({"name": "new", "type": "string", "default": ""})


def new_symbol(schema: Any) -> None:
    field(schema, "status", "task")["type"]["symbols"].append("newer")


CHANGES: dict[str, tuple[Any, bool]] = {
    "with default": (with_default, True),
    "new symbol": (new_symbol, True),
    "without default": (lambda schema: schema["fields"].append({"name": "new", "type": "string"}), False),
    "another type": (lambda schema: field(schema, "created_at").update(type="string"), False),
    "removed without default": (lambda schema: schema["fields"].remove(field(schema, "request_id")), False),
}


@pytest.mark.parametrize(("change", "allowed"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("name", ["InferenceRequest", "StatusEvent"])
def test_what_a_release_may_change(name: str, change: Any, allowed: bool) -> None:
    current, other = schema_text(name), changed(name, change)
    assert (check_compatibility(current, other) == []) == allowed
    assert (check_compatibility(other, current) == []) == allowed


def test_a_change_without_a_release_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(codec._FOLDER, tmp_path / "avro"))
    (folder / "StatusEvent.avsc").write_text(changed("StatusEvent", with_default))
    monkeypatch.setattr(codec, "_FOLDER", folder)
    problems = check_all()
    assert {name for name, found in problems.items() if found} == {"StatusEvent"}
    assert f"versions/StatusEvent/v{len(SCHEMA_IDS['StatusEvent']) + 1}.avsc" in problems["StatusEvent"][0]


def encoded(text: str, values: dict[str, Any]) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(text), {}), values)
    return b"\0" + (77).to_bytes(4, "big") + out.getvalue()


def test_a_newer_enum_symbol_decodes_to_unknown() -> None:
    def newer(schema: Any) -> None:
        new_symbol(schema)
        with_default(schema)

    text = changed("InferenceRequest", newer)
    values = InferenceRequest(request_id="r", task="embedding", created_at=1).to_dict()
    codec_ = Codec(lambda _: text)
    request = codec_.decode(encoded(text, {**values, "task": "newer", "new": "x"}), InferenceRequest)
    assert request == InferenceRequest(request_id="r", task="UNKNOWN", created_at=1)
    assert codec_.decode(encoded(text, {**values, "new": "x"}), InferenceRequest).task == "embedding"

    text = changed("StatusEvent", newer)
    origin = {"topic": "t", "partition": 0, "offset": 0, "append_time_ms": 1}
    status = {"request_id": "r", "tenant": "d", "status": "newer", "done": False, "rank": 45, "attempt": 1}
    status |= {"epoch": 1, "origin": origin, "worker_id": "w", "created_at": 1, "new": "x"}
    event = Codec(lambda _: text).decode(encoded(text, status), StatusEvent)
    assert (event.status, event.rank) == ("UNKNOWN", 45)
