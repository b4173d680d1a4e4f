"""Decoders generated from Avro schemas: from bytes straight into the record objects.

For each pair of (writer's schema, reader's schema) one Python function is written as source text and compiled, when the
first record of that writer comes; there is no build step. All records within the record are read in that one function,
so that it calls nothing for a value that fits into one byte, and a run of nulls is compared at once.

It supports what our records have: every primitive, enums with a default, records, lists, maps and unions of null and
one more type. Fields that the reader does not know are skipped, also if they have other unions or fixed types. Fields
that the writer lacks get their default if it is null, a number, text, a boolean or an empty list or map. A reader may
have a long where the writer had an int, and an optional where the writer had the value itself. All else raises
Unsupported when the decoder is made.

For malformed bytes a decoder raises IndexError, UnicodeDecodeError, struct.error or BadAvro; the codec makes BadAvro of
all of them. A length that lies takes no memory: a slice ends with the data, and each item of a list has a byte or more.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Sequence, Set
from keyword import iskeyword
from typing import Any

from penstock.schemas.compiled.source import Source
from penstock.schemas.compiled.tree import Unsupported, optional
from penstock.schemas.compiled.varints import read_block, read_int, read_length, read_long
from penstock.schemas.errors import BadAvro
from penstock.schemas.records import Record, fields_of

HEADER_SIZE = 5
"""Magic and schema id, before the body."""
MANY_NULLS = 8
"""A dictionary with so many optional fields begins as a copy with nulls."""


def refuse(reason: str) -> Any:
    raise BadAvro(reason)


_CONSTANTS: dict[str, Any] = {
    "new": object.__new__,
    "refuse": refuse,
    "read_block": read_block,
    "read_int": read_int,
    "read_length": read_length,
    "read_long": read_long,
    "unpack_from": struct.unpack_from,
}


def compile_decoder(
    writer: Any, reader: Any, kind: type[Record], without: Collection[str] = ()
) -> Callable[[bytes], Any]:
    """What reads a whole message into a record. The schemas are trees. Raises Unsupported.

    The optional fields `without` are passed over: they are None in the record, whatever the message says. `field.inner`
    is one of a record within.
    """
    source = Source("def decode(d):", _CONSTANTS)
    source.line(f"p = {HEADER_SIZE}")
    _Decoder(source, without).value(writer, reader, "found", kind)
    source.line(f"if p != len(d): refuse('the {kind.__name__} has ' + str(p) + ' bytes, there are ' + str(len(d)))")
    source.line("return found")
    return source.compiled("decode", f"decoder of {kind.__name__}")


def compile_head(writer: Any, reader: Any, names: Sequence[str]) -> Callable[[bytes], tuple[Any, ...]]:
    """What reads some fields of a record and stops behind the last of them: a tuple in the order of `names`, and where
    it stopped.

    It costs least for fields that are first. What follows them in the message is not looked at. Raises Unsupported.
    """
    source = Source("def head(d):", _CONSTANTS)
    source.line(f"p = {HEADER_SIZE}")
    decoder = _Decoder(source)
    wanted = {field["name"]: field for field in reader["fields"]}
    places = {name: source.fresh("v") for name in names}
    left = set(names)
    for field in writer["fields"]:
        if not left:
            break
        name = field["name"]
        target = places[name] if name in left else None
        decoder.value(field["type"], wanted[name]["type"] if target else None, target)
        left.discard(name)
    for name in left:
        source.line(f"{places[name]} = {_default(wanted[name])}")
    source.line("if p > len(d): refuse('the record ends within its first fields')")
    source.line(f"return ({', '.join(places[name] for name in names)}, p)")
    return source.compiled("head", f"head of {reader['name']}")


class _Decoder:
    """Writes the lines that read values at `d[p]`. A target is what a value is assigned to; None skips it."""

    def __init__(self, source: Source, without: Collection[str] = ()) -> None:
        self._s = source
        self._without = without
        """Fields that are skipped, of the record that is written next."""

    def value(self, writer: Any, reader: Any, target: str | None, kind: type[Record] | None = None) -> None:
        if target is None:
            self._skip(writer)
        elif isinstance(writer, list):
            self._optional(writer, reader, target, kind)
        elif isinstance(reader, list):
            wanted = optional(reader)
            if wanted is None:
                raise Unsupported("a union of more than null and one type")
            self.value(writer, wanted[0], target, kind)
        elif isinstance(writer, str):
            if writer != reader and (writer, reader) != ("int", "long"):
                raise Unsupported(f"{writer} read as {reader}")
            self._primitive(writer, target)
        elif not isinstance(reader, dict) or writer["type"] != reader["type"]:
            raise Unsupported(f"{writer['type']} read as another type")
        elif writer["type"] == "record":
            self._record(writer, reader, target, kind)
        elif writer["type"] == "enum":
            self._enum(writer, reader, target)
        elif writer["type"] == "array":
            self._array(writer["items"], reader["items"], target, kind)
        elif writer["type"] == "map":
            self._map(writer["values"], reader["values"], target)
        else:
            raise Unsupported(str(writer["type"]))

    # --- single values

    def _primitive(self, kind: str, target: str) -> None:
        line = self._s.line
        if kind in ("int", "long"):
            self._byte()
            line(f"if b & 128: {target}, p = read_{kind}(d, p, b)")
            line(f"else: {target} = (b >> 1) ^ -(b & 1)")
        elif kind in ("string", "bytes"):
            self._length()
            line(f"{target} = d[p:n]{'.decode()' if kind == 'string' else ''}")
            line("p = n")
        elif kind == "boolean":
            self._byte()
            line("if b > 1: refuse('neither true nor false')")
            line(f"{target} = b == 1")
        elif kind in ("float", "double"):
            code, size = ("<f", 4) if kind == "float" else ("<d", 8)
            line(f"{target}, = unpack_from({code!r}, d, p)")
            line(f"p += {size}")
        else:
            raise Unsupported(kind)

    def _byte(self) -> None:
        self._s.line("b = d[p]; p += 1")

    def _length(self) -> None:
        """`n` is where the text or the bytes end. That may lie behind the data: the end of the message is checked."""
        self._byte()
        self._s.line("if b & 129: n, p = read_length(d, p, b); n += p")
        self._s.line("else: n = p + (b >> 1)")

    def _enum(self, writer: Any, reader: Any, target: str) -> None:
        if writer["name"] != reader["name"]:
            raise Unsupported("another enum")
        known, default = reader["symbols"], reader["default"]
        symbols = [symbol if symbol in known else default for symbol in writer["symbols"]]
        if None in symbols:
            raise Unsupported("an enum without a default")
        table = self._s.constant(tuple(symbols))
        self._byte()
        self._s.line("if b & 128: b, p = read_length(d, p, b); b <<= 1")
        self._s.line("if b & 1: refuse('a negative number of a symbol')")
        self._s.line(f"{target} = {table}[b >> 1]")

    def _optional(self, writer: Any, reader: Any, target: str, kind: type[Record] | None) -> None:
        written, wanted = optional(writer), optional(reader)
        if written is None or wanted is None:
            raise Unsupported("a union of more than null and one type")
        inner, at = written
        self._byte()
        with self._s.block(f"if b == {2 * at}:"):
            self.value(inner, wanted[0], target, kind)
        self._s.line(f"elif b == {2 * (1 - at)}: {target} = None")
        self._s.line("else: refuse('no branch of the union')")

    # --- records

    def _record(self, writer: Any, reader: Any, target: str, kind: type[Record] | None) -> None:
        if writer["name"] != reader["name"]:
            raise Unsupported("another record")
        wanted = {field["name"]: field for field in reader["fields"]}
        if any("aliases" in field for field in reader["fields"]):
            raise Unsupported("aliases")
        place = self._s.fresh("r")
        names = fields_of(kind) if kind is not None else wanted
        if set(names) != set(wanted):
            raise Unsupported("a schema whose fields are not those of the record")
        without, self._without = self._without, ()
        skipped = [name for name in wanted if name in without]
        nulls = {name for name, field in wanted.items() if kind is None and optional(field["type"])}
        if len(nulls) < MANY_NULLS:
            nulls = set[str]()
        if kind is not None:
            targets = {name: f"{place}.{identifier(name)}" for name in wanted}
            self._s.line(f"{place} = new({self._s.constant(kind)})")
        elif nulls:  # most of them stay as they are
            targets = {name: f"{place}[{name!r}]" for name in wanted}
            self._s.line(f"{place} = {self._s.constant(dict.fromkeys(wanted))}.copy()")
        else:
            targets = {name: self._s.fresh("v") for name in wanted}
        read = {name: target for name, target in targets.items() if name not in skipped}
        self._fields(writer["fields"], wanted, read, kind, nulls, without)
        for name in skipped:
            self._s.line(f"{targets[name]} = None")
        for name in read.keys() - {field["name"] for field in writer["fields"]}:
            self._s.line(f"{targets[name]} = {_default(wanted[name])}")
        if kind is None and not nulls:
            place = "{" + ", ".join(f"{name!r}: {local}" for name, local in targets.items()) + "}"
        self._s.line(f"{target} = {place}")

    def _fields(
        self,
        fields: Sequence[Any],
        wanted: dict[str, Any],
        targets: dict[str, str],
        kind: type[Record] | None,
        nulls: Set[str],
        without: Collection[str],
    ) -> None:
        """`nulls` are the fields whose targets are null already."""

        def one(field: Any) -> None:
            name = field["name"]
            self._without = [path.removeprefix(f"{name}.") for path in without if path.startswith(f"{name}.")]
            target = targets.get(name)
            inner = None if kind is None else kind.nested_kind(name)
            self.value(field["type"], wanted[name]["type"] if target else None, target, inner)
            self._without = ()

        def run(some: Sequence[Any]) -> None:
            """Optional fields in a row: most are null, so they are compared at once, then by halves."""
            if len(some) < 3:
                for field in some:
                    one(field)
                return
            names = [field["name"] for field in some if field["name"] not in nulls]
            assigned = "".join(f"{target} = " for name in names if (target := targets.get(name)))
            with self._s.block(f"if d[p:p + {len(some)}] == {bytes(len(some))!r}:"):
                if assigned:
                    self._s.line(f"{assigned}None")
                self._s.line(f"p += {len(some)}")
            with self._s.block("else:"):
                run(some[: len(some) // 2])
                run(some[len(some) // 2 :])

        pending: list[Any] = []
        for field in fields:
            found = optional(field["type"])
            if found is not None and found[1] == 1:
                if field["name"] in wanted and optional(wanted[field["name"]]["type"]) is None:
                    raise Unsupported("an optional read as a value")
                pending.append(field)
                continue
            run(pending)
            pending = []
            one(field)
        run(pending)

    # --- lists and maps

    def _array(self, writer: Any, reader: Any, target: str, kind: type[Record] | None) -> None:
        line, place, count = self._s.line, self._s.fresh("a"), self._s.fresh("c")
        line(f"{place} = []")
        line(f"{count}, p = read_block(d, p)")
        with self._s.block(f"while {count}:"):
            if isinstance(writer, str) and writer == reader and writer in ("float", "double"):
                code, size = ("f", 4) if writer == "float" else ("d", 8)
                line(f"if {count} * {size} > len(d) - p: refuse('a list longer than the message')")
                line(f"{place} += unpack_from('<' + str({count}) + {code!r}, d, p); p += {count} * {size}")
            else:
                item = self._s.fresh("i")
                with self._s.block(f"for _ in range({count}):"):
                    self.value(writer, reader, item, kind)
                    line(f"{place}.append({item})")
            line(f"{count}, p = read_block(d, p)")
        line(f"{target} = {place}")

    def _map(self, writer: Any, reader: Any, target: str) -> None:
        line, place, count = self._s.line, self._s.fresh("m"), self._s.fresh("c")
        key, item = self._s.fresh("k"), self._s.fresh("i")
        line(f"{place} = {{}}")
        line(f"{count}, p = read_block(d, p)")
        with self._s.block(f"while {count}:"):
            with self._s.block(f"for _ in range({count}):"):
                self._primitive("string", key)
                self.value(writer, reader, item)
                line(f"{place}[{key}] = {item}")
            line(f"{count}, p = read_block(d, p)")
        line(f"{target} = {place}")

    # --- what the reader does not know

    def _skip(self, writer: Any) -> None:
        if isinstance(writer, list):
            self._length()
            branch = self._s.fresh("u")
            self._s.line(f"{branch} = n - p")
            for number, schema in enumerate(writer):
                with self._s.block(f"{'el' if number else ''}if {branch} == {number}:"):
                    self._s.line("pass")
                    self._skip(schema)
            self._s.line("else: refuse('no branch of the union')")
        elif isinstance(writer, str):
            self._skip_primitive(writer)
        elif writer["type"] == "record":
            self._fields(writer["fields"], {}, {}, None, set(), ())
        elif writer["type"] == "fixed":
            self._s.line(f"p += {int(writer['size'])}")
        elif writer["type"] == "enum":
            self._skip_primitive("long")
        else:
            count = self._s.fresh("c")
            items = writer["items"] if writer["type"] == "array" else writer["values"]
            self._s.line(f"{count}, p = read_block(d, p)")
            with self._s.block(f"while {count}:"):
                if writer["type"] == "array" and items in ("float", "double"):
                    self._s.line(f"p += {count} * {4 if items == 'float' else 8}")
                    self._s.line("if p > len(d): refuse('a list longer than the message')")
                    self._s.line(f"{count}, p = read_block(d, p)")
                    return
                with self._s.block(f"for _ in range({count}):"):
                    self._s.line("if p >= len(d): refuse('a list longer than the message')")
                    if writer["type"] == "map":
                        self._skip_primitive("string")
                    self._skip(items)
                self._s.line(f"{count}, p = read_block(d, p)")

    def _skip_primitive(self, kind: str) -> None:
        if kind in ("string", "bytes"):
            self._length()
            self._s.line("p = n")
        elif kind in ("int", "long"):
            self._byte()
            self._s.line("if b & 128: _, p = read_long(d, p, b)")
        else:
            self._s.line(f"p += { ({'null': 0, 'boolean': 1, 'float': 4, 'double': 8}[kind]) }")


def identifier(name: str) -> str:
    if not name.isidentifier() or iskeyword(name):
        raise Unsupported("a field whose name Python does not allow")
    return name


def _default(field: Any) -> str:
    """The expression of a reader's default; lists and maps are new ones each time."""
    if "default" not in field:
        raise Unsupported("a field without a default that the writer lacks")
    default: Any = field["default"]
    schema = field["type"][0] if isinstance(field["type"], list) else field["type"]
    fits = (
        (default is None and schema == "null")
        or (isinstance(default, bool) and schema == "boolean")
        or (isinstance(default, int) and not isinstance(default, bool) and schema in ("int", "long"))
        or (isinstance(default, float) and schema in ("float", "double"))
        or (
            isinstance(default, str)
            and (schema == "string" or (isinstance(schema, dict) and default in schema.get("symbols", ())))
        )
        or (default == [] and isinstance(schema, dict) and schema["type"] == "array")
        or (default == {} and isinstance(schema, dict) and schema["type"] == "map")
    )
    if not fits:
        raise Unsupported("a default that is neither simple nor empty")
    return repr(default)
