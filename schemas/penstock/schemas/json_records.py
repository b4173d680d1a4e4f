"""JSON as producers write it onto topics: which records are JSON, and what one says that cannot be read whole. Pure."""

from __future__ import annotations

import base64
import binascii
import json
import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from typing import Any, Literal, cast

from penstock.schemas.finite_json import LENIENT, loads_any

PayloadForm = Literal["object", "text", "base64"]
_BRACE, _MAGIC = 0x7B, 0
_HEADER_SIZE = 5
"""Bytes of the magic and the schema id, which Confluent's serializer of JSON writes before its text too."""
_MOST_FIELDS = 500
"""Records have fewer; who reads more of one that cannot be read whole only loses time."""
_BLANKS = " \t\r\n"
_BLANK = re.compile(f"[{_BLANKS}]*")


def json_text(value: bytes | None) -> bytes | None:
    """The text of a record that is a JSON object, from its brace on; None for any other record.

    A byte order mark and blanks before the object are passed over. UTF-16 is read where a mark says so.
    """
    if not value or value[0] == _MAGIC:
        return None
    if value[0] == _BRACE:
        return value
    if value.startswith((BOM_UTF16_LE, BOM_UTF16_BE)):
        text = value.decode("utf-16", "replace").encode()
    else:
        text = value.removeprefix(BOM_UTF8)
    text = text.lstrip(_BLANKS.encode())
    return text if text.startswith(b"{") else None


def object_in(value: bytes) -> dict[str, Any] | None:
    """A JSON object; None for all else."""
    try:
        found = loads_any(json_text(value) or b"")
    except ValueError:
        return None
    return cast("dict[str, Any]", found) if isinstance(found, dict) else None


def written_object(given: object) -> tuple[dict[str, Any] | None, PayloadForm]:
    """An object that may be written as JSON text, or that in base64, and its form; None for all else."""
    if isinstance(given, dict):
        return cast("dict[str, Any]", given), "object"
    if not isinstance(given, str):
        return None, "object"
    if json_text(text := given.encode("utf-8", "surrogatepass")) is not None:
        return object_in(text), "text"
    try:
        return object_in(base64.b64decode(given, validate=True)), "base64"
    except (binascii.Error, ValueError):
        return None, "base64"


def legible_fields(value: bytes | None) -> dict[str, Any] | None:
    """The fields of a JSON object up to the first that cannot be read, and not very many; None for any other record.

    So the sender of an object that is cut off, or that holds what JSON has not, can be answered. An object that was
    written as a JSON string, or behind a schema id, is read too.
    """
    if value and value[0] == _MAGIC:
        value = value[_HEADER_SIZE:]
    if (text := json_text(value)) is None and (text := _within_text(value)) is None:
        return None
    return _fields(text.decode(errors="replace"))


def _within_text(value: bytes | None) -> bytes | None:
    try:
        inner: Any = json.loads(value or b"")
    except (ValueError, RecursionError):
        return None
    return json_text(inner.encode("utf-8", "replace")) if isinstance(inner, str) else None


def _fields(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def after(at: int, *wanted: str) -> int:
        """The place behind the next character that is no blank. Raises ValueError unless it is one of those wanted."""
        match = _BLANK.match(text, at)
        assert match is not None
        if text[match.end() : match.end() + 1] not in wanted:
            raise ValueError("no JSON object")
        return match.end() + 1

    try:
        at = after(0, "{")
        for _ in range(_MOST_FIELDS):
            name, at = LENIENT.raw_decode(text, after(at, '"') - 1)
            at = after(at, ":")
            match = _BLANK.match(text, at)
            value, at = LENIENT.raw_decode(text, at if match is None else match.end())
            # A number may be cut off and still be one: 12 of 123, or 1.5 of 1.5e3.
            if isinstance(value, str) or text[at : at + 1] in (",", "}", " ", "\t", "\r", "\n"):
                found[name] = value
            at = after(at, ",")
    except (ValueError, RecursionError):
        pass
    return found
