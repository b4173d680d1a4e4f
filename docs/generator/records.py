"""records.md, from the .avsc files of the package."""

from __future__ import annotations

import json
from typing import Any

from generator.markdown import code, document, link, literal, table
from penstock.schemas.bodies import json_schema, request_type
from penstock.schemas.codec import SCHEMA_IDS, schema_text
from penstock.schemas.refusals import described
from penstock.schemas.tasks import BUILT_TASKS

SOURCE = "schemas/penstock/schemas/avro"
INTRO = f"""\
Every value on a topic is one of these records, in Avro, namespace `penstock.v1`. The source of truth for every language
is the `.avsc` files in [`{SOURCE}`](../../{SOURCE}); `penstock schemas show RECORD`
prints one.

On the wire a value is the Confluent format: a zero byte, the schema's id in four bytes (big-endian), the Avro body.
The ids below are Penstock's own and always resolve from the package; a gateway serves them as a registry, see
[HTTP](http.md#schema-registry). Subjects are the records' full names, as `penstock.v1.ResultEvent`. On request topics
a JSON object is read as the [JSON form](topics.md#requests-as-json) of a request instead.

A field without a default must be written. A time is `timestamp-millis`: milliseconds since the epoch, in a long. A
symbol of an enum that a reader does not know is read as `UNKNOWN`.

Where a field of a request has bounds, its row has them as a refusal says them.
[HTTP](http.md#post-v1requests) has those of lists and texts."""
BODIES = {
    "TextGenerationPayload": "TextPayload",
    "OutputSpec": "Output",
    "Requirements": "RequirementsBody",
    "ContextLimits": "Context",
}
"""Parts of requests, and what their bodies are called where that is another name."""

Json = dict[str, Any]


def page() -> str:
    schemas = {name: json.loads(schema_text(name)) for name in SCHEMA_IDS}
    named: dict[str, Json] = {}
    for schema in schemas.values():
        for field in schema["fields"]:
            collect(field["type"], named)
    parts = [INTRO, "Records: " + ", ".join(link(name) for name in schemas)]
    parts += [record(schema, f"Id {ids_of(name)}.") for name, schema in schemas.items()]
    parts.append("## Parts\n\nRecords and enums within the records above.")
    parts += [
        enum(schema) if schema["type"] == "enum" else record(schema, "", level=3) for _, schema in sorted(named.items())
    ]
    return document("Records", *parts)


def ids_of(name: str) -> str:
    return ", ".join(
        f"`0x{number:08X}` (version {version})" for version, number in enumerate(SCHEMA_IDS[name], start=1)
    )


def collect(kind: Any, named: dict[str, Json]) -> None:
    """Put every record and enum that is defined within a type under its name. The same name means the same thing."""
    if isinstance(kind, list):
        for one in kind:
            collect(one, named)
    elif isinstance(kind, dict):
        if kind["type"] in ("record", "enum"):
            assert named.setdefault(kind["name"], kind) == kind, f"{kind['name']} is defined in two ways"
        for inner in (kind.get("items"), kind.get("values"), *(field["type"] for field in kind.get("fields", []))):
            collect(inner, named)


def record(schema: Json, note: str, *, level: int = 2) -> str:
    bounds = bounds_of(schema["name"])
    rows = [
        [
            code(f["name"]),
            type_text(f["type"]),
            default_text(f),
            f"{f.get('doc', '')} {bounds.pop(f['name'], '')}".strip(),
        ]
        for f in schema["fields"]
    ]
    rows += [[code(name), "in JSON, an argument", "", text] for name, text in bounds.items()]
    head = f"{'#' * level} {schema['name']}\n\n{schema['doc']} {note}".rstrip()
    return f"{head}\n\n{table(['field', 'type', 'default', 'meaning'], rows)}"


def bounds_of(name: str) -> dict[str, str]:
    """The bounds of the fields of a request or of one of its parts, as sentences."""
    found: dict[str, str] = {}
    for task in BUILT_TASKS:
        root = json_schema(request_type(task))
        body = root if name == "InferenceRequest" else root["$defs"].get(BODIES.get(name, name), {})
        for field, schema in body.get("properties", {}).items():
            forms = [
                form for form in schema.get("anyOf", [schema]) if "$ref" not in form and form.get("type") != "null"
            ]
            text = " or ".join(map(described, forms))
            if any(map(str.isdigit, text)):
                found[field] = f"{text[0].upper()}{text[1:]}."
    return found


def enum(schema: Json) -> str:
    symbols = ", ".join(code(symbol) for symbol in schema["symbols"])
    return f"### {schema['name']}\n\n{schema['doc']}\n\n{symbols}"


def type_text(kind: Any) -> str:
    """A type in words; records and enums as links to their tables."""
    match kind:
        case list():
            others = [type_text(one) for one in kind if one != "null"]
            return " or ".join([*others, *(["null"] if "null" in kind else [])])
        case {"type": "array"}:
            return f"list of {type_text(kind['items'])}"
        case {"type": "map"}:
            return f"map of {type_text(kind['values'])}"
        case {"type": "record" | "enum"}:
            return link(kind["name"])
        case {"logicalType": "timestamp-millis"}:
            return "time"
        case dict():
            return type_text(kind["type"])
        case _:
            name = str(kind).rpartition(".")[2]
            return link(name) if name[0].isupper() else name


def default_text(field: Json) -> str:
    return literal(field["default"]) if "default" in field else ""
