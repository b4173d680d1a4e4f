"""Records to bytes and back: magic 0, a 4-byte schema id, the Avro body. Schemas are parsed once, never per message."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import fastavro
from fastavro.types import Schema

from penstock.schemas.errors import BadAvro, UnknownSchema, WrongMagic
from penstock.schemas.records import RECORDS, Record

FIRST_ID = 0x504E0000
"""Penstock's own schema ids lie from here on ("PN"): record number × 256 + version - 1, append-only."""

_FOLDER = Path(__file__).with_name("avro")
_HEADER = struct.Struct(">BI")
R = TypeVar("R", bound=Record)


def _versions(name: str) -> list[Path]:
    return sorted((_FOLDER / "versions" / name).glob("v*.avsc"), key=lambda path: int(path.stem[1:]))


def _all_ids() -> dict[str, tuple[int, ...]]:
    return {
        kind.__name__: tuple(FIRST_ID + number * 256 + at for at in range(max(1, len(_versions(kind.__name__)))))
        for number, kind in enumerate(RECORDS)
    }


SCHEMA_IDS: dict[str, tuple[int, ...]] = _all_ids()
"""For each record the ids of its released versions, oldest first; the last one is written."""


def schema_text(name: str) -> str:
    """The record's current schema as its .avsc has it."""
    return (_FOLDER / f"{name}.avsc").read_text()


def released_schema(schema_id: int) -> tuple[str, int, str] | None:
    """(record name, version from 1, schema text) of one of our own ids, else None."""
    for name, ids in SCHEMA_IDS.items():
        if schema_id in ids:
            version = ids.index(schema_id) + 1
            versions = _versions(name)
            return name, version, versions[version - 1].read_text() if versions else schema_text(name)
    return None


def _plain(schema: Any) -> Any:
    """The schema without logical types: times stay numbers on both sides, and nothing is converted per message."""
    if isinstance(schema, dict):
        found = cast("dict[str, Any]", schema)
        return {key: _plain(value) for key, value in found.items() if key not in ("logicalType", "doc")}
    if isinstance(schema, list):
        return [_plain(item) for item in cast("list[Any]", schema)]
    return schema


@cache
def _parsed(text: str) -> Schema:
    named: dict[str, Any] = {}
    return fastavro.parse_schema(_plain(json.loads(text)), named)


@cache
def _current(name: str) -> Schema:
    return _parsed(schema_text(name))


class SchemaResolver(Protocol):
    """Finds schemas that the package does not carry, e.g. in a registry."""

    def schema_for(self, schema_id: int) -> str:
        """The schema's text. Raises UnknownSchema, or RegistryUnavailable when nobody could be asked."""
        ...


class Codec:
    """Encodes with the package's ids (or `writer_ids`), decodes those and what `resolver` finds."""

    def __init__(self, resolver: SchemaResolver | None = None, writer_ids: Mapping[str, int] | None = None) -> None:
        self._resolver = resolver
        self._writers: dict[type[Record], tuple[bytes, Schema]] = {}
        for kind in RECORDS:
            name = kind.__name__
            written_id = (writer_ids or {}).get(name, SCHEMA_IDS[name][-1])
            self._writers[kind] = (_HEADER.pack(0, written_id), _current(name))
        # id → (schema it was written with, record type, schema to read it as or None when they are the same)
        self._readers: dict[int, tuple[Schema, type[Record], Schema | None]] = {}

    def encode(self, record: Record) -> bytes:
        """Raises BadAvro when a value does not fit its field."""
        header, schema = self._writers[type(record)]
        out = io.BytesIO()
        out.write(header)
        try:
            fastavro.schemaless_writer(out, schema, record.to_dict())
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, struct.error) as error:
            # The reason would quote the value, which may be a prompt.
            raise BadAvro(f"{type(record).__name__} does not fit its schema ({type(error).__name__})") from error
        return out.getvalue()

    def decode(self, data: bytes, record_type: type[R]) -> R:
        """The record. Raises WrongMagic, UnknownSchema, BadAvro, or RegistryUnavailable (not poison)."""
        record = self.decode_any(data)
        if not isinstance(record, record_type):
            raise BadAvro(f"wrong record: {type(record).__name__} where {record_type.__name__} is read")
        return record

    def decode_any(self, data: bytes) -> Record:
        """Whatever record the bytes say they are. Raises as `decode`."""
        if len(data) < 5 or data[0] != 0:
            raise WrongMagic("not in the Confluent wire format: no magic byte 0 with a schema id")
        schema_id = int.from_bytes(data[1:5], "big")
        writer, kind, reader = self._readers.get(schema_id) or self._find(schema_id)
        body = io.BytesIO(data)
        body.seek(5)
        try:
            values = fastavro.schemaless_reader(body, writer, reader)
            if body.tell() != len(data):
                raise BadAvro(f"{len(data) - body.tell()} bytes follow the {kind.__name__}")
            return kind.from_dict(cast("dict[str, Any]", values))
        except BadAvro:
            raise
        except Exception as error:  # fastavro raises whatever its parsing runs into
            raise BadAvro(f"not a {kind.__name__}: {type(error).__name__} {error}"[:300]) from error

    def _find(self, schema_id: int) -> tuple[Schema, type[Record], Schema | None]:
        released = released_schema(schema_id)
        if released is not None:
            text = released[2]
        elif self._resolver is not None:
            text = self._resolver.schema_for(schema_id)
        else:
            raise UnknownSchema(f"schema id {schema_id} (0x{schema_id:08X}) is not one of ours")
        try:
            schema = _parsed(text)
        except Exception as error:  # a registry may hold anything; fastavro raises whatever its parsing runs into
            raise UnknownSchema(f"schema id {schema_id} is of no Avro schema: {type(error).__name__}") from error
        name = str(schema.get("name", "")).rsplit(".", 1)[-1] if isinstance(schema, dict) else ""
        kind = next((kind for kind in RECORDS if kind.__name__ == name), None)
        if kind is None:
            raise UnknownSchema(f"schema id {schema_id} is of {name or 'no record'}, which is not one of ours")
        current = _current(name)
        found = self._readers[schema_id] = (schema, kind, None if schema == current else current)
        return found


@cache
def default_codec() -> Codec:
    """The codec that needs no registry."""
    return Codec()
