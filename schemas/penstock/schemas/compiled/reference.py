"""The same by fastavro and dictionaries: the tests hold the generated code against it, and it does what that cannot."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import fastavro
from fastavro.types import Schema

from penstock.schemas.errors import BadAvro
from penstock.schemas.records import Record

HEADER_SIZE = 5
"""Magic and schema id, before the body."""


def _plain(schema: Any) -> Any:
    """The schema without logical types: times stay numbers on both sides, and nothing is converted per message."""
    if isinstance(schema, dict):
        entries = cast("dict[str, Any]", schema)
        return {key: _plain(value) for key, value in entries.items() if key not in ("logicalType", "doc")}
    if isinstance(schema, list):
        return [_plain(item) for item in cast("list[Any]", schema)]
    return schema


@cache
def _parsed(text: str) -> Schema:
    named: dict[str, Any] = {}
    return fastavro.parse_schema(_plain(json.loads(text)), named)


def make_encoder(text: str, kind: type[Record], header: bytes) -> Callable[[Any], bytes]:
    """What turns a record into bytes. It raises what fastavro runs into."""
    schema = _parsed(text)

    def encode(record: Record) -> bytes:
        out = io.BytesIO()
        out.write(header)
        fastavro.schemaless_writer(out, schema, record.to_dict())
        return out.getvalue()

    return encode


def make_decoder(writer: str, reader: str, kind: type[Record]) -> Callable[[bytes], Any]:
    """What turns a message into a record. It raises what fastavro runs into."""
    written, wanted = _parsed(writer), _parsed(reader)
    resolved = None if written == wanted else wanted

    def decode(data: bytes) -> Record:
        body = io.BytesIO(data)
        body.seek(HEADER_SIZE)
        values = fastavro.schemaless_reader(body, written, resolved)
        if body.tell() != len(data):
            raise BadAvro(f"{len(data) - body.tell()} bytes follow the {kind.__name__}")
        return kind.from_dict(cast("dict[str, Any]", values))

    return decode
