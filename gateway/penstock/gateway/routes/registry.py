"""The read side of a Confluent schema registry over the package's own schemas, so that stock Avro clients decode.

Subjects are the full names of records. `<topic>-value`, which serializers use by default, is the record of that topic.
Writing is refused; registering what is there answers its id.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.responses import JSONResponse, PlainTextResponse

from penstock.gateway.edge.validation import invalid_from_validation
from penstock.gateway.routes.multipart import BodyRoute
from penstock.schemas.codec import NO_HEADER_IDS, SCHEMA_IDS, released_schema
from penstock.schemas.registry import MEDIA_TYPE
from penstock.schemas.topics import record_of_topic

COMPATIBILITY = "FULL_TRANSITIVE"


@dataclass(frozen=True, kw_only=True, slots=True)
class Released:
    """One version of one record's schema."""

    subject: str
    schema_id: int
    version: int
    text: str


class RegistryError(Exception):
    """An error in the registry's own shape, which its clients parse: code 404xx, 422xx."""

    def __init__(self, error_code: int, message: str) -> None:
        super().__init__(message)
        self.error_code = error_code


class RegistryRoute(BodyRoute):
    """A route with the registry's own codes of errors. The edge gives its shape to what it refuses itself."""

    def get_route_handler(self) -> Callable[[Request], Awaitable[Response]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except RegistryError as error:
                refusal = error
            except RecursionError:
                refusal = RegistryError(42201, "Invalid schema: it is nested too deeply")
            except RequestValidationError as error:
                told = invalid_from_validation(error)
                if told.param == "schema_id":
                    refusal = RegistryError(40403, f"Schema not found: {told.message}")
                else:
                    refusal = RegistryError(42201, f"Invalid schema: {told.message}")
            body = {"error_code": refusal.error_code, "message": str(refusal)}
            return JSONResponse(body, int(str(refusal.error_code)[:3]), media_type=MEDIA_TYPE)

        return handle


class RegistryResponse(JSONResponse):
    media_type = MEDIA_TYPE


class SchemaBody(BaseModel):
    """What a client sends to look a schema up; all other fields are allowed and mean nothing here."""

    text: str = Field(alias="schema")


router = APIRouter(
    prefix="/registry", tags=["registry"], route_class=RegistryRoute, default_response_class=RegistryResponse
)


@cache
def releases() -> dict[str, tuple[Released, ...]]:
    """All released schemas by subject, oldest first."""
    found: dict[str, tuple[Released, ...]] = {}
    for ids in SCHEMA_IDS.values():
        versions: list[Released] = []
        for schema_id in ids:
            released = released_schema(schema_id)
            assert released is not None
            _, version, text = released
            schema: dict[str, Any] = json.loads(text)
            subject = f"{schema['namespace']}.{schema['name']}"
            compact = json.dumps(schema, separators=(",", ":"), ensure_ascii=False)
            versions.append(Released(subject=subject, schema_id=schema_id, version=version, text=compact))
        found[versions[0].subject] = tuple(versions)
    return found


@router.get("/schemas/types")
def get_types() -> list[str]:
    return ["AVRO"]


@router.get("/schemas/ids/{schema_id}")
def get_schema(schema_id: int) -> dict[str, Any]:
    return {"schema": _by_id(schema_id).text}


@router.get("/schemas/ids/{schema_id}/schema")
def get_schema_text(schema_id: int) -> Response:
    return PlainTextResponse(_by_id(schema_id).text, media_type=MEDIA_TYPE)


@router.get("/schemas/ids/{schema_id}/subjects")
def get_schema_subjects(schema_id: int) -> list[str]:
    return [_by_id(schema_id).subject]


@router.get("/schemas/ids/{schema_id}/versions")
def get_schema_versions(schema_id: int) -> list[dict[str, Any]]:
    released = _by_id(schema_id)
    return [{"subject": released.subject, "version": released.version}]


@router.get("/schemas/guids/{guid}")
def get_schema_by_guid(guid: str) -> dict[str, Any]:
    """Serializers that write the GUID of a schema into a header ask here. No schema has one."""
    raise RegistryError(40403, f"Schema {guid[:100]} not found: schemas have ids and no GUIDs here. {NO_HEADER_IDS}")


@router.get("/subjects")
def get_subjects() -> list[str]:
    return sorted(releases())


@router.get("/subjects/{subject}/versions")
def get_versions(subject: str) -> list[int]:
    return [released.version for released in _subject(subject)]


@router.get("/subjects/{subject}/versions/{version}")
def get_version(subject: str, version: str) -> dict[str, Any]:
    return _described(_version(subject, version))


@router.get("/subjects/{subject}/versions/{version}/schema")
def get_version_text(subject: str, version: str) -> Response:
    return PlainTextResponse(_version(subject, version).text, media_type=MEDIA_TYPE)


@router.post("/subjects/{subject}")
def look_up(subject: str, body: SchemaBody) -> dict[str, Any]:
    """The version of a subject that equals the schema sent."""
    return _described(_same_schema(subject, body.text))


@router.post("/subjects/{subject}/versions")
def register(subject: str, body: SchemaBody) -> dict[str, Any]:
    """The id of a schema that is here already; anything new is refused: the package is what defines the schemas."""
    try:
        return {"id": _same_schema(subject, body.text).schema_id}
    except RegistryError as error:
        raise RegistryError(42205, f"Subject {subject} is in read-only mode: {error} {_advice(subject)}") from None


@router.get("/config")
@router.get("/config/{subject}")
def get_config(subject: str | None = None) -> dict[str, str]:
    if subject is not None:
        _subject(subject)
    return {"compatibilityLevel": COMPATIBILITY}


@router.get("/mode")
@router.get("/mode/{subject}")
def get_mode(subject: str | None = None) -> dict[str, str]:
    if subject is not None:
        _subject(subject)
    return {"mode": "READONLY"}


def _by_id(schema_id: int) -> Released:
    for versions in releases().values():
        for released in versions:
            if released.schema_id == schema_id:
                return released
    raise RegistryError(40403, f"Schema {schema_id} not found")


def _subject(subject: str) -> tuple[Released, ...]:
    """The versions of a record, under the name that the client used."""
    record = _record_subject(subject)
    versions = releases().get(record)
    if versions is None:
        raise RegistryError(40401, f"Subject '{subject}' not found.")
    return versions if record == subject else tuple(replace(one, subject=subject) for one in versions)


def _record_subject(subject: str) -> str:
    record = record_of_topic(subject.removesuffix("-value")) if subject.endswith("-value") else None
    return subject if record is None else f"penstock.v1.{record}"


def _advice(subject: str) -> str:
    record = _record_subject(subject)
    if record not in releases():
        return "GET /registry/subjects lists the subjects; on topics of Penstock <topic>-value is one too."
    return f"Its records have the schema of GET /registry/subjects/{record}/versions/latest: serialize with that one."


def _version(subject: str, version: str) -> Released:
    versions = _subject(subject)
    if version in ("latest", "-1"):
        return versions[-1]
    if not version.isdigit() or int(version) < 1:
        raise RegistryError(
            42202, f"The specified version '{version}' is not a valid version id: 1 to 2147483647 or 'latest'"
        )
    for released in versions:
        if released.version == int(version):
            return released
    raise RegistryError(40402, f"Version {version} not found.")


def _same_schema(subject: str, text: str) -> Released:
    versions = _subject(subject)
    try:
        asked = json.loads(text)
        for released, canonical in zip(versions, _canonical_releases()[_record_subject(subject)], strict=True):
            if _is_same(asked, canonical):
                return released
    except (ValueError, RecursionError):
        raise RegistryError(42201, "Invalid schema") from None
    raise RegistryError(40403, "Schema not found")


@cache
def _canonical_releases() -> dict[str, tuple[Any, ...]]:
    return {
        subject: tuple(_canonical(json.loads(released.text)) for released in versions)
        for subject, versions in releases().items()
    }


# What says how bytes are read. The rest is for people and for one language's objects (`avro.java.string`).
_MEANS = frozenset(
    {"type", "name", "namespace", "fields", "symbols", "items", "values", "size", "default", "logicalType"}
)
_MAX_DEPTH = 64


def _canonical(schema: Any) -> Any:
    """The schema with what it means alone, and with full names, as clients may send either. Raises ValueError."""
    schema = _unwrapped(schema)
    if isinstance(schema, dict):
        # A default is a value, not a schema: its keys are its own.
        kept = cast("dict[str, Any]", schema)
        return {key: value if key == "default" else _canonical(value) for key, value in kept.items()}
    if isinstance(schema, list):
        return [_canonical(item) for item in cast("list[Any]", schema)]
    return schema


def _is_same(given: Any, canonical: Any, depth: int = 0) -> bool:
    """Whether `given` has this canonical form. Raises ValueError.

    It ends at the first difference: anybody may ask, and what is sent costs no more than its parsing.
    """
    if depth > _MAX_DEPTH:
        raise ValueError("the schema is nested too deeply")
    given = _unwrapped(given)
    if isinstance(given, dict) and isinstance(canonical, dict):
        left, right = cast("dict[str, Any]", given), cast("dict[str, Any]", canonical)
        return left.keys() == right.keys() and all(
            value == right[key] if key == "default" else _is_same(value, right[key], depth + 1)
            for key, value in left.items()
        )
    if isinstance(given, list) and isinstance(canonical, list):
        items, others = cast("list[Any]", given), cast("list[Any]", canonical)
        return len(items) == len(others) and all(
            _is_same(item, other, depth + 1) for item, other in zip(items, others, strict=True)
        )
    return given == canonical


def _unwrapped(schema: Any) -> Any:
    """One level of a schema: what it means, under its full name; `{"type": x}` is x. Raises ValueError."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, dict):
            return schema
        kept = {key: value for key, value in cast("dict[str, Any]", schema).items() if key in _MEANS}
        if kept.keys() != {"type"}:
            name, namespace = kept.get("name"), kept.pop("namespace", None)
            if namespace is not None and isinstance(name, str):
                kept["name"] = name if "." in name else f"{namespace}.{name}"
            return kept
        schema = kept["type"]
    raise ValueError("the schema is nested too deeply")


def _described(released: Released) -> dict[str, Any]:
    return {
        "subject": released.subject,
        "id": released.schema_id,
        "version": released.version,
        "schemaType": "AVRO",
        "schema": released.text,
    }
