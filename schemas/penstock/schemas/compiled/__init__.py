"""Encoders and decoders that are generated from Avro schemas, six to seventeen times as fast as fastavro.

At the first record of a schema `make_encoder` or `make_decoder` writes the source of one Python function for it and
compiles it; there is no build step and nothing on disk. A process compiles each function once, however many codecs and
readers use it. `encoder` and `decoder` say what they support. That is every schema of ours, and most of those that
others register for their requests. The rest of these is decoded by fastavro (`fallback`). The property tests hold the
generated code against fastavro for every released schema.
docs/decisions/0047-the-codec-is-generated.md says why.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from penstock.schemas.compiled import fallback
from penstock.schemas.compiled.decoder import compile_decoder, compile_head
from penstock.schemas.compiled.encoder import compile_encoder
from penstock.schemas.compiled.tree import Unsupported, schema_tree
from penstock.schemas.records import Record

Encoder = Callable[[Any], bytes]
Decoder = Callable[[bytes], Any]

KEPT = 256
"""How many functions are kept, and how many trees. A registry may hold any number of schemas."""

_tree = lru_cache(KEPT)(schema_tree)


def schema_name(text: str) -> str:
    """The name of a record's schema without its namespace; empty for what is no record. Raises as `schema_tree`."""
    tree = _tree(text)
    return tree["name"] if isinstance(tree, dict) and tree["type"] == "record" else ""


@lru_cache(KEPT)
def make_encoder(text: str, kind: type[Record], header: bytes) -> Encoder:
    """What turns a record into `header` and its Avro body."""
    return compile_encoder(_tree(text), kind, header)


@lru_cache(KEPT)
def make_decoder(writer: str, reader: str, kind: type[Record], without: tuple[str, ...] = ()) -> Decoder:
    """What turns a message that was written by one schema into a record of another.

    The optional fields `without` may be passed over: then they are None in the record.
    Raises UnsafeSchema (see `tree`) or whatever the parsing of a bad schema runs into.
    """
    written, wanted = _tree(writer), _tree(reader)
    try:
        return compile_decoder(written, wanted, kind, without)
    except (Unsupported, SyntaxError):  # Python refuses source that is nested too deep
        return fallback.make_decoder(writer, reader, kind)


@lru_cache(KEPT)
def make_head(
    writer: str, reader: str, kind: type[Record], names: tuple[str, ...]
) -> Callable[[bytes], tuple[Any, ...]]:
    """What reads only these fields of a message, as a tuple, and nothing behind them. Raises as `make_decoder`.

    The last item is the number of bytes up to the end of the last field: the whole message where fastavro reads it.
    """
    written, wanted = _tree(writer), _tree(reader)
    try:
        return compile_head(written, wanted, names)
    except (Unsupported, SyntaxError):
        whole = fallback.make_decoder(writer, reader, kind)

        def head(data: bytes) -> tuple[Any, ...]:
            record = whole(data)
            return (*(getattr(record, name) for name in names), len(data))

        return head
