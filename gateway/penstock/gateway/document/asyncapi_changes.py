"""What in a newer AsyncAPI document breaks clients that were made from an older one. Pure.

What Penstock receives must not get narrower, and what it sends must not get wider: types, required fields, symbols and
bounds, of JSON Schema and of Avro. That old and new Avro decode each other is held by `penstock schemas check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import gt, lt, ne
from typing import Any, cast

Json = dict[str, Any]
_ORDERED: dict[str, Callable[[Any, Any], bool]] = {
    **dict.fromkeys(("minimum", "exclusiveMinimum", "minLength", "minItems", "minProperties", "uniqueItems"), gt),
    **dict.fromkeys(("maximum", "exclusiveMaximum", "maxLength", "maxItems", "maxProperties"), lt),
}
"""By keyword, whether the first bound is narrower than the second. Any other bound is narrower once it differs."""
_NO_BOUNDS = {
    *("$ref", "type", "anyOf", "properties", "required", "additionalProperties", "items", "values", "enum", "const"),
    *("fields", "symbols", "name", "namespace", "logicalType", "schema", "schemaFormat"),
    *("title", "description", "default", "examples", "deprecated", "doc", "aliases", "order"),
}
"""Keywords that are compared by themselves, or say nothing about values. All others of a schema are bounds."""
_WIDER = {"integer": "number"}


def is_new_contract(old: Json, new: Json) -> bool:
    """Whether the first number of the version was raised: clients expect then that it breaks them."""
    first, second = (int(one["info"]["version"].partition(".")[0]) for one in (old, new))
    return second > first


def breaking_changes(old: Json, new: Json) -> list[str]:
    """A line for each change that breaks a client of the older document, with its place."""
    return [
        *_of_parts(old, new, "servers", ("host", "protocol", "security")),
        *_of_parts(old, new, "channels", ("address", "messages", "parameters", "servers")),
        *_of_parts(old, new, "operations", ("action", "channel", "messages", "reply.channel", "reply.messages")),
        *_of_parts(old["components"], new["components"], "securitySchemes", ("type", "scheme", "in", "name", "flows")),
        *_of_messages(old, new),
    ]


def _of_parts(old: Json, new: Json, kind: str, facts: tuple[str, ...]) -> Iterator[str]:
    """Named parts that are gone, and of the others the facts that changed, lost an element or are limited now."""
    for name, part in old.get(kind, {}).items():
        place, later = f"{kind[:-1]} {name}", new.get(kind, {}).get(name)
        if later is None:
            yield f"{place} is gone"
            continue
        for fact in facts:
            before, after = _elements(_fact(part, fact)), _elements(_fact(later, fact))
            if isinstance(before, str) or isinstance(after, str):
                if before != after:
                    yield f"{place}: {fact} is {after or 'gone'}, was {before or 'not there'}"
            elif not before and after and fact in _LIMITS:
                yield f"{place}: its {fact} is limited to {', '.join(after)} now"
            else:
                yield from (f"{place}: {one} is gone from its {fact}" for one in before if one not in after)


_LIMITS = ("security", "servers")
"""Without an element of these anything is taken."""


def _fact(part: Json, path: str) -> Any:
    for name in path.split("."):
        part = part.get(name, {})
    return part


def _elements(value: Any) -> str | list[str]:
    """A text, the name in a reference, or the names in a list or object."""
    if isinstance(value, str):
        return value
    if "$ref" in value:
        return value["$ref"].rpartition("/")[2]
    return [cast("str", _elements(one)) for one in value]


def _of_messages(old: Json, new: Json) -> Iterator[str]:
    received = {
        name
        for operation in old["operations"].values()
        if operation["action"] == "receive"
        for name in _elements(operation["messages"])
    }
    later = new["components"]["messages"]
    for name, message in old["components"]["messages"].items():
        if name not in later:
            continue  # the channel lost it: that is a line already
        for part, of_message in _PARTS.items():
            before, after = of_message(message), of_message(later[name])
            comparison = _Comparison(old=_Schemas(old), new=_Schemas(new), incoming=name in received)
            yield from comparison.changes(f"message {name}: {part}", before, after)


def _of_kafka(message: Json) -> Json:
    return message.get("bindings", {}).get("kafka", {})


def _encoding(message: Json) -> Json:
    """How the schema of a record is found, as a form whose values are fixed."""
    facts = {name: {"const": one} for name, one in _of_kafka(message).items() if name.startswith("schema")}
    return {"properties": facts, "required": [*facts]}


_PARTS: dict[str, Callable[[Json], Any]] = {
    "content type": lambda message: {"const": message.get("contentType")},
    "binding": _encoding,
    "key": lambda message: _of_kafka(message).get("key", {}),
    "header": lambda message: message.get("headers", {}),
    "field": lambda message: message["payload"],
}


_ANYTHING: Json = {}


@dataclass(frozen=True, slots=True)
class _Schemas:
    """The schemas of one document, with the Avro types that were defined so far."""

    document: Json
    named: dict[str, Json] = field(default_factory=dict[str, Json])

    def forms(self, schema: Any) -> dict[str, Json]:
        """The forms that a value may have, by their types; records and enums of Avro by their names."""
        match schema:
            case True:
                return {"anything": _ANYTHING}
            case False:
                return {}
            case str():
                return {schema: self.named.get(schema, _ANYTHING)}
            case list() | {"anyOf": [*_]}:
                several = cast("list[Any]", schema if isinstance(schema, list) else schema["anyOf"])
                return {kind: form for one in several for kind, form in self.forms(one).items()}
            case {"schemaFormat": _}:
                return self.forms(schema["schema"])
            case {"$ref": str(reference)}:
                return self.forms(self.document["components"]["schemas"][reference.rpartition("/")[2]])
            case {"type": "record" | "enum", "name": str(name)}:
                self.named[name] = self.named[f"{schema.get('namespace', 'penstock.v1')}.{name}"] = schema
                return {name: schema}
            case {"type": [*_]}:
                return {str(kind): schema for kind in schema["type"]}
            case {"type": "object"}:
                consts = [str(one["const"]) for one in schema.get("properties", {}).values() if "const" in one]
                return {" ".join(["object", *consts]): schema}
            case _:
                return {schema.get("logicalType") or schema.get("type", "anything"): schema}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Comparison:
    """Of one part of a message. `incoming`: Penstock receives it."""

    old: _Schemas
    new: _Schemas
    incoming: bool
    seen: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])

    def changes(self, place: str, before: Any, after: Any) -> Iterator[str]:
        """Between two schemas of a value."""
        old, new = self.old.forms(before), self.new.forms(after)
        narrower, wider = (old, new) if self.incoming else (new, old)
        word = "is no longer taken as" if self.incoming else "can now be"
        for kind, form in narrower.items():
            match = kind if kind in wider else _WIDER.get(kind)
            if match in wider:
                pair = (form, wider[match]) if self.incoming else (wider[match], form)
                if (ids := (id(pair[0]), id(pair[1]))) not in self.seen:
                    self.seen.add(ids)
                    yield from self._of_form(place, *pair)
            elif "anything" not in wider:
                yield f"{place} {word} {kind}"

    def _of_form(self, place: str, old: Json, new: Json) -> Iterator[str]:
        yield from self._of_fields(place, old, new)
        yield from self._of_symbols(place, old, new)
        for inner, mark in (("items", "[]"), ("values", "[]"), ("additionalProperties", ".*")):
            before, after = old.get(inner, True), new.get(inner, True)
            if self.incoming or before is not False:  # clients ignore fields that they do not know
                yield from self.changes(place + mark, before, after)
        bounded, free = (new, old) if self.incoming else (old, new)
        for bound, limit in bounded.items():
            if bound not in _NO_BOUNDS and (bound not in free or _ORDERED.get(bound, ne)(limit, free[bound])):
                yield f"{place}: {bound} is {new.get(bound, 'not there')}, was {old.get(bound, 'not there')}"

    def _of_fields(self, place: str, old: Json, new: Json) -> Iterator[str]:
        before, after = _fields(old), _fields(new)
        joint = " " if place.endswith((": header", ": field")) else "."
        for name, schema in before.items():
            if name in after:
                yield from self.changes(f"{place}{joint}{name}", schema, after[name])
            else:
                yield f"{place}{joint}{name} is gone"
        required, later = _required(old), _required(new)
        if self.incoming:
            yield from (f"{place}{joint}{name} is required now" for name in later if name not in required)
        elif "properties" in old:
            yield from (f"{place}{joint}{name} can now be absent" for name in required if name not in later)

    def _of_symbols(self, place: str, old: Json, new: Json) -> Iterator[str]:
        before, after = _symbols(old), _symbols(new)
        if after is not None and (self.incoming or "symbols" in old):
            if before is None:
                yield f"{place} takes only {', '.join(map(str, after))} now"
            else:
                yield from (f"{place}: {one} is gone" for one in before if one not in after)
        elif before is not None and not self.incoming:
            added = ["any other value"] if after is None else [one for one in after if one not in before]
            yield from (f"{place} can now be {one}" for one in added)


def _fields(form: Json) -> Json:
    if "fields" in form:
        return {one["name"]: one["type"] for one in form["fields"]}
    return form.get("properties", {})


def _required(form: Json) -> list[str]:
    if "fields" in form:
        return [one["name"] for one in form["fields"] if "default" not in one]
    return form.get("required", [])


def _symbols(form: Json) -> list[Any] | None:
    """The values that a form is limited to."""
    return [form["const"]] if "const" in form else form.get("enum", form.get("symbols"))
