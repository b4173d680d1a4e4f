"""Encoders generated from Avro schemas: from the record objects straight to bytes.

For each record one Python function is written as source text and compiled, when the first record of its kind is
encoded; there is no build step. It makes each field's bytes as local values and joins them once. Records within the
record are objects where the record class says so (`nested_kind`), else dictionaries (payloads and outputs): what is
missing there is written as the schema's default, and entries that the schema does not know are not written.

It supports what our records have: every primitive, enums, records, lists, maps and unions of null and one more type.
All else raises Unsupported when the encoder is made.

A value that does not fit raises TypeError, ValueError (text with lone surrogates), KeyError, AttributeError,
OverflowError, struct.error or BadAvro; the codec makes one of them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from penstock.schemas.compiled.decoder import identifier
from penstock.schemas.compiled.source import Source
from penstock.schemas.compiled.tree import Unsupported, optional
from penstock.schemas.compiled.varints import NUMBERS, SMALL, binary, int_bytes, items_of, long_bytes
from penstock.schemas.records import Record, fields_of

_CONSTANTS: dict[str, Any] = {
    "BOOLEANS": {False: b"\0", True: b"\1"},
    "NUMBERS": NUMBERS,
    "binary": binary,
    "int_bytes": int_bytes,
    "items_of": items_of,
    "join": b"".join,
    "long_bytes": long_bytes,
    "pack": struct.pack,
}


OFTEN = 4


def compile_encoder(schema: Any, kind: type[Record], header: bytes) -> Callable[[Any], bytes]:
    """What writes a record behind a header. The schema is a tree. Raises Unsupported."""
    source = Source("def encode(r):", _CONSTANTS)
    parts = _Encoder(source).record(schema, "r", kind)
    source.line(f"return {_joined([header, *parts])}")
    return source.compiled("encode", f"encoder of {kind.__name__}")


Part = str | bytes
"""An expression of bytes, or bytes that are always the same."""


def _joined(parts: list[Part]) -> str:
    """One expression of all parts; constants that stand side by side are one."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, bytes) and found and isinstance(last := found[-1], bytes):
            found[-1] = last + part
        else:
            found.append(part)
    texts = [repr(part) if isinstance(part, bytes) else part for part in found]
    return texts[0] if len(texts) == 1 else f"join(({', '.join(texts)}))"


def _runs(fields: Sequence[Any]) -> list[list[Any]]:
    """The fields one by one, but those together that are in a row, are null by default and seldom set.

    The first four optional ones of a long row are taken for those that are often set.
    """
    rows: list[list[Any]] = []
    before = False
    for field in fields:
        found = optional(field["type"])
        is_null = found is not None and found[1] == 1 and field.get("default", field) is None
        if is_null and before:
            rows[-1].append(field)
        else:
            rows.append([field])
        before = is_null
    runs: list[list[Any]] = []
    for row in rows:
        often = OFTEN if len(row) >= 2 * OFTEN else 0
        runs += [*([field] for field in row[:often]), row[often:]]
    return runs


class _Encoder:
    """Writes the lines that make bytes of values; each method gives the parts in their order."""

    def __init__(self, source: Source) -> None:
        self._s = source

    def value(self, schema: Any, place: str, kind: type[Record] | None = None) -> list[Part]:
        """`place` is a local name or cheap to read twice."""
        if isinstance(schema, list):
            return [self._optional(schema, place, kind)]
        if isinstance(schema, str):
            return self._primitive(schema, place)
        match schema["type"]:
            case "record":
                return self.record(schema, place, kind)
            case "enum":
                table = {symbol: NUMBERS[number] for number, symbol in enumerate(schema["symbols"][:SMALL])}
                return [f"{self._s.constant(table)}[{place}]"]
            case "array":
                return [self._array(schema["items"], place, kind)]
            case "map":
                return [self._map(schema["values"], place)]
            case other:
                raise Unsupported(str(other))

    def _primitive(self, kind: str, place: str) -> list[Part]:
        if kind in ("int", "long"):
            return [f"(NUMBERS[{place}] if 0 <= {place} < {SMALL} else {kind}_bytes({place}))"]
        if kind == "string":
            text = self._s.fresh("s")
            self._s.line(f"{text} = {place}.encode()")
            return [*self._length(text), text]
        if kind == "bytes":
            text = self._s.fresh("s")
            self._s.line(f"{text} = binary({place})")
            return [*self._length(text), text]
        if kind == "boolean":
            return [f"BOOLEANS[{place}]"]
        if kind in ("float", "double"):
            return [f"pack({'<f' if kind == 'float' else '<d'!r}, {place})"]
        raise Unsupported(kind)

    def _length(self, of: str) -> list[Part]:
        count = self._s.fresh("n")
        self._s.line(f"{count} = len({of})")
        return [f"(NUMBERS[{count}] if {count} < {SMALL} else long_bytes({count}))"]

    def _optional(self, schema: Any, place: str, kind: type[Record] | None) -> Part:
        found = optional(schema)
        if found is None:
            raise Unsupported("a union of more than null and one type")
        inner, at = found
        result = self._s.fresh("o")
        self._s.line(f"if {place} is None: {result} = {NUMBERS[1 - at]!r}")
        with self._s.block("else:"):
            parts = self.value(inner, place, kind)
            self._s.line(f"{result} = {_joined([NUMBERS[at], *parts])}")
        return result

    def record(self, schema: Any, place: str, kind: type[Record] | None) -> list[Part]:
        parts: list[Part] = []
        if kind is not None and set(fields_of(kind)) != {field["name"] for field in schema["fields"]}:
            raise Unsupported("a schema whose fields are not those of the record")
        getter = self._s.fresh("g")
        if kind is None:
            self._s.line(f"{getter} = {place}.get")
        for some in _runs(schema["fields"] if kind is None else []):
            if len(some) == 1:
                parts += self._entries(some, getter)
                continue
            # Most of them are not there: that is seen at once.
            result = self._s.fresh("o")
            with self._s.block(f"if {self._none_of(some, schema['fields'], place)}:"):
                self._s.line(f"{result} = {bytes(len(some))!r}")
            with self._s.block("else:"):
                inner = self._entries(some, getter)
                self._s.line(f"{result} = {_joined(inner)}")
            parts.append(result)
        if kind is not None:
            for field in schema["fields"]:
                name, local = field["name"], self._s.fresh("v")
                self._s.line(f"{local} = {place}.{identifier(name)}")
                parts += self.value(field["type"], local, kind.nested_kind(name))
        return parts

    def _none_of(self, some: Sequence[Any], fields: Sequence[Any], place: str) -> str:
        """The expression of whether a dictionary has none of some entries."""
        needed = [field for field in fields if "default" not in field]
        if len(some) + len(needed) == len(fields):  # where an entry that is needed is missing, its own line fails
            return f"len({place}) == {len(needed)}"
        return f"{self._s.constant(frozenset(field['name'] for field in some))}.isdisjoint({place})"

    def _entries(self, fields: Sequence[Any], getter: str) -> list[Part]:
        parts: list[Part] = []
        for field in fields:
            local = self._s.fresh("v")
            default = f", {field['default']!r}" if field.get("default") is not None else ""
            self._s.line(f"{local} = {getter}({field['name']!r}{default})")
            parts += self.value(field["type"], local)
        return parts

    def _array(self, schema: Any, place: str, kind: type[Record] | None) -> Part:
        result, item = self._s.fresh("o"), self._s.fresh("v")
        self._s.line(f"if type({place}) is not list: {place} = items_of({place})")
        self._s.line(f"if not len({place}): {result} = b'\\0'")
        with self._s.block("else:"):
            count = self._length(place)
            if schema in ("float", "double"):
                code = "f" if schema == "float" else "d"
                packed = f"pack('<' + str(len({place})) + {code!r}, *{place})"
                self._s.line(f"{result} = {_joined([*count, packed, NUMBERS[0]])}")
            else:
                self._s.line(f"{result} = [{count[0]}]")
                with self._s.block(f"for {item} in {place}:"):
                    parts = self.value(schema, item, kind)
                    self._s.line(f"{result}.append({_joined(parts)})")
                self._s.line(f"{result}.append(b'\\0'); {result} = join({result})")
        return result

    def _map(self, schema: Any, place: str) -> Part:
        result, key, item = self._s.fresh("o"), self._s.fresh("k"), self._s.fresh("v")
        self._s.line(f"if not len({place}): {result} = b'\\0'")
        with self._s.block("else:"):
            count = self._length(place)
            self._s.line(f"{result} = [{count[0]}]")
            with self._s.block(f"for {key}, {item} in {place}.items():"):
                parts = [*self._primitive("string", key), *self.value(schema, item)]
                self._s.line(f"{result}.append({_joined(parts)})")
            self._s.line(f"{result}.append(b'\\0'); {result} = join({result})")
        return result
