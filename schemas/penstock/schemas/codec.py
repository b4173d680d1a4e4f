"""Records to bytes and back: magic 0, a 4-byte schema id, the Avro body.

Encoders and decoders are generated from the schemas at their first use (`penstock.schemas.compiled`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from penstock.schemas.compiled import Decoder, Encoder, make_decoder, make_encoder, make_head, schema_name
from penstock.schemas.compiled.decoder import HEADER_SIZE
from penstock.schemas.errors import BadAvro, UnknownSchema, WrongMagic
from penstock.schemas.records import RECORDS, ControlCommand, DesiredState, Record, fields_of

FIRST_ID = 0x504E0000
"""Penstock's own schema ids lie from here on ("PN"): record number × 256 + version - 1, append-only."""

MAX_REFUSALS = 1_000
"""Of so many ids whose schema is none of ours the codec remembers that."""

HEADER_SCHEMA_ID = "__value_schema_id"
"""Where Confluent's serializers may write the schema's GUID, in place of the id before the body."""
NO_HEADER_IDS = (
    "Serialize with the schema id in the first five bytes of the value (schema.id.serializer: the one with the prefix)."
)

GROW_AT_THEIR_END: tuple[type[Record], ...] = (ControlCommand, DesiredState)
"""Their new fields stand last, and those that there are do not change (a test holds it)."""

_FOLDER = Path(__file__).with_name("avro")
_HEADER = struct.Struct(">BI")
R = TypeVar("R", bound=Record)
T = TypeVar("T")


def _versions(name: str) -> list[Path]:
    return sorted((_FOLDER / "versions" / name).glob("v*.avsc"), key=lambda path: int(path.stem[1:]))


def _all_ids() -> dict[str, tuple[int, ...]]:
    return {
        kind.__name__: tuple(FIRST_ID + number * 256 + at for at in range(max(1, len(_versions(kind.__name__)))))
        for number, kind in enumerate(RECORDS)
    }


SCHEMA_IDS: dict[str, tuple[int, ...]] = _all_ids()
"""For each record the ids of its released versions, oldest first; the last one is written."""
RELEASED = sum(map(len, SCHEMA_IDS.values()))
"""The number of released schemas. A copy of a log that was made with fewer may lack records: it could not read them."""


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


def head_of_any_version(data: bytes, kind: type[Record], *names: str) -> tuple[Any, ...] | None:
    """Fields at the beginning of a record that cannot be read as a whole; None where its id is not of this record.

    A version that this release does not know begins with the same fields (a test holds which), and its id says of which
    record it is: each record has 256 ids.
    """
    first, text = SCHEMA_IDS[kind.__name__][0], schema_text(kind.__name__)
    if data[:1] != b"\0" or not first <= int.from_bytes(data[1:HEADER_SIZE], "big") < first + 256:
        return None
    try:
        return make_head(text, text, kind, names)(data)[:-1]
    except Exception:  # a decoder raises whatever its parsing runs into
        return None


class Codec:
    """Encodes with the package's ids (or `writer_ids`), decodes those and the ones that `find_schema` knows.

    `find_schema` returns the text of a schema that the package does not carry. It raises UnknownSchema, or
    RegistryUnavailable when nobody could be asked.
    """

    def __init__(
        self, find_schema: Callable[[int], str] | None = None, writer_ids: Mapping[str, int] | None = None
    ) -> None:
        self._find_schema = find_schema
        self._writer_ids = {name: (writer_ids or {}).get(name, ids[-1]) for name, ids in SCHEMA_IDS.items()}
        self._encoders: dict[type[Record], Encoder] = {}
        # By the five bytes before the body: magic and schema id.
        self._decoders: dict[bytes, Decoder] = {}
        self._refusals: dict[int, str] = {}

    def encode(self, record: Record) -> bytes:
        """Raises BadAvro when a value does not fit its field."""
        encoder = self._encoders.get(type(record)) or self._new_encoder(type(record))
        try:
            return encoder(record)
        except (TypeError, ValueError, KeyError, AttributeError, OverflowError, struct.error, BadAvro) as error:
            # The reason would quote the value, which may be a prompt.
            raise BadAvro(f"{type(record).__name__} does not fit its schema ({type(error).__name__})") from error

    def decode(self, data: bytes, record_type: type[R]) -> R:
        """The record. Raises WrongMagic, UnknownSchema, BadAvro, or RegistryUnavailable (not poison)."""
        record = self.decode_any(data)
        if not isinstance(record, record_type):
            raise BadAvro(f"wrong record: {type(record).__name__} where {record_type.__name__} is read")
        return record

    def decoder(self, record_type: type[R], *, without: Sequence[str] = ()) -> Callable[[bytes], R]:
        """A `decode` that passes over the optional fields `without`: they are None in what it gives.

        `field.inner` is a field of a record within.
        """
        current = schema_text(record_type.__name__)
        return self._reading(record_type, lambda text: make_decoder(text, current, record_type, tuple(without)))

    def head(self, record_type: type[Record], *names: str) -> Callable[[bytes], tuple[Any, ...]]:
        """What reads only these fields of a record. It raises as `decode`, but looks at nothing behind the last.

        The last item of the tuple is a number of bytes: two messages that begin with the same ones agree in the fields.
        """
        current = schema_text(record_type.__name__)
        return self._reading(record_type, lambda text: make_head(text, current, record_type, names))

    def _reading(self, kind: type[Record], make: Callable[[str], Callable[[bytes], T]]) -> Callable[[bytes], T]:
        made: dict[bytes, Callable[[bytes], T]] = {}

        def read(data: bytes) -> T:
            reader = made.get(data[:HEADER_SIZE]) or new_reader(data)
            try:
                return reader(data)
            except BadAvro:
                raise
            except Exception as error:  # a decoder raises whatever its parsing runs into
                raise BadAvro(f"not readable by its schema: {type(error).__name__} {error}"[:300]) from error

        def new_reader(data: bytes) -> Callable[[bytes], T]:
            schema_id, text = self._schema_of(data)
            name = schema_name(text)
            reader = make(text) if name == kind.__name__ else wrong_record(name)
            made[schema_id.to_bytes(HEADER_SIZE, "big")] = reader
            return reader

        def wrong_record(name: str) -> Callable[[bytes], T]:
            def refuse(_: bytes) -> T:
                raise BadAvro(f"wrong record: {name} where {kind.__name__} is read")

            return refuse

        # What is mostly read is made now: compiling takes its time, and the first record may come to an event loop.
        new_reader(_HEADER.pack(0, SCHEMA_IDS[kind.__name__][-1]))
        return read

    def decode_any(self, data: bytes) -> Record:
        """Whatever record the bytes say they are. Raises as `decode`."""
        decoder = self._decoders.get(data[:HEADER_SIZE]) or self._new_decoder(data)
        try:
            return decoder(data)
        except BadAvro:
            raise
        except Exception as error:  # a decoder raises whatever its parsing runs into
            raise BadAvro(f"not readable by its schema: {type(error).__name__} {error}"[:300]) from error

    def _new_encoder(self, kind: type[Record]) -> Encoder:
        encoder = make_encoder(schema_text(kind.__name__), kind, _HEADER.pack(0, self._writer_ids[kind.__name__]))
        self._encoders[kind] = encoder
        return encoder

    def _new_decoder(self, data: bytes) -> Decoder:
        try:
            self._schema_of(data)
        except UnknownSchema:
            for kind in GROW_AT_THEIR_END:
                names = tuple(fields_of(kind))
                if (found := head_of_any_version(data, kind, *names)) is not None:
                    record = kind.from_dict(dict(zip(names, found, strict=True)))
                    return lambda _: record
            raise
        return self._decoders[bytes(data[:HEADER_SIZE])]

    def _schema_of(self, data: bytes) -> tuple[int, str]:
        """(id, text) of the schema, of which `_decoders` holds a decoder then. Raises as `decode`."""
        if len(data) < HEADER_SIZE or data[0] != 0:
            raise WrongMagic("not in the Confluent wire format: no magic byte 0 with a schema id")
        schema_id = int.from_bytes(data[1:HEADER_SIZE], "big")
        released = released_schema(schema_id)
        if released is not None:
            text = released[2]
        elif self._find_schema is not None:
            text = self._find_schema(schema_id)
        else:
            raise UnknownSchema(f"schema id {schema_id} (0x{schema_id:08X}) is not one of ours")
        if (refusal := self._refusals.get(schema_id)) is not None:
            raise UnknownSchema(refusal)
        header = bytes(data[:HEADER_SIZE])
        if header not in self._decoders:
            try:
                self._decoders[header] = self._decoder_of(schema_id, text)
            except UnknownSchema as error:
                if (
                    len(self._refusals) < MAX_REFUSALS
                ):  # an id never changes its schema, and each parsing takes its time
                    self._refusals[schema_id] = str(error)
                raise
        return schema_id, text

    def _decoder_of(self, schema_id: int, text: str) -> Decoder:
        try:
            name = schema_name(text)
            kind = next((kind for kind in RECORDS if kind.__name__ == name), None)
            if kind is not None:
                return make_decoder(text, schema_text(name), kind)
        except Exception as error:  # a registry may hold anything; the parsing raises whatever it runs into
            raise UnknownSchema(f"schema id {schema_id} is of no Avro schema: {type(error).__name__}") from error
        raise UnknownSchema(f"schema id {schema_id} is of {name or 'no record'}, which is not one of ours")


@cache
def default_codec() -> Codec:
    """The codec that needs no registry."""
    return Codec()
