"""Decoders by fastavro and dictionaries, for schemas of writers that the generated code does not support.

The tests hold the generated decoders against them, too.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

from penstock.schemas.compiled.decoder import HEADER_SIZE
from penstock.schemas.errors import BadAvro
from penstock.schemas.records import Record


def make_decoder(writer: str, reader: str, kind: type[Record]) -> Callable[[bytes], Any]:
    """What turns a message into a record. It raises what fastavro runs into."""
    # Imported on use: it takes longer than all else of this package, and few processes ever need it.
    from fastavro import schemaless_reader

    written, wanted = _parsed(writer), _parsed(reader)
    resolved = None if written == wanted else wanted

    def decode(data: bytes) -> Record:
        body = io.BytesIO(data)
        body.seek(HEADER_SIZE)
        values = schemaless_reader(body, written, resolved)
        if body.tell() != len(data):
            raise BadAvro(f"{len(data) - body.tell()} bytes follow the {kind.__name__}")
        return kind.from_dict(cast("dict[str, Any]", values))

    return decode


@lru_cache(16)
def _parsed(text: str) -> Any:
    from fastavro import parse_schema

    return parse_schema(json.loads(text, object_hook=_plain), {})


def _plain(part: dict[str, Any]) -> dict[str, Any]:
    """A part of a schema without its logical type: times stay numbers, and nothing is converted per message."""
    return {name: value for name, value in part.items() if name not in ("logicalType", "doc")}
