"""Checks the lines of an input file before any of them runs, and parts it. Pure.

As OpenAI does: what is wrong with the form of a line fails the batch, with the line's number. What is wrong with a body
fails that line alone, when it runs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from penstock.gateway.routes.line_reader import Line
from penstock.schemas.finite_json import loads_any

Json = dict[str, Any]

MAX_LINES = 50_000
MAX_CUSTOM_ID = 512
PART_LINES = 500
PART_BYTES = 4 * 2**20
MOST_ERRORS = 100
"""The most errors that are reported for one file."""


@dataclass(frozen=True, slots=True)
class Part:
    """Lines that are kept together: the number of the first one, and their bytes in the file."""

    number: int
    start: int
    end: int


class LineError(Exception):
    """What is wrong with a line, in OpenAI's form."""

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


def parse_line(content: bytes | None, endpoint: str) -> Json:
    """The object of a line, whose `custom_id` is a text and whose `body` is an object. Raises LineError."""
    if content is None:
        raise LineError("line_too_large", "This line is longer than a request may be.")
    try:
        found = loads_any(content)  # what is wrong with its body fails the line alone, when it runs
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise LineError("invalid_json_line", "This line is not parseable as a JSON object.")
    line = cast("Json", found)
    for name in line.keys() - {"custom_id", "method", "url", "body"}:
        raise LineError("unsupported_parameter", f"A line has no {name[:100]}.", name[:100])
    custom_id: Any = line.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_CUSTOM_ID or not is_encodable(custom_id):
        text = f"custom_id must be a Unicode text of 1 to {MAX_CUSTOM_ID} characters."
        raise LineError("missing_required_parameter" if custom_id is None else "invalid_custom_id", text, "custom_id")
    if line.get("method") != "POST":
        raise LineError("invalid_method", "The method of a line must be POST.", "method")
    if line.get("url") != endpoint:
        raise LineError("mismatched_endpoint", f"The url of this line is not {endpoint}, the batch's endpoint.", "url")
    if not isinstance(line.get("body"), dict):
        raise LineError("missing_required_parameter", "body must be an object: the request.", "body")
    return line


def is_encodable(text: str) -> bool:
    """Whether it is Unicode: JSON's escapes can carry half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Checking:
    """One file on its way through: lines in; parts and errors are there at the end."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._custom_ids: set[bytes] = set()
        """Their digests: names may be long."""
        self.parts: list[Part] = []
        self.errors: list[Json] = []
        self.total = 0
        self._in_part = 0

    def add(self, lines: Iterable[Line], until: int) -> None:
        """The next lines. `until`: how many bytes of the file have been read."""
        for line in lines:
            self.total += 1
            if self.total > MAX_LINES:
                continue
            self._to_part(line)
            try:
                self._check(line)
            except LineError as error:
                self._refuse(error.code, error.message, error.param, line.number)
        if self.parts:
            last = self.parts[-1]
            self.parts[-1] = Part(last.number, last.start, until)

    def close(self) -> None:
        """All lines have come."""
        if not self.total:
            self._refuse("empty_file", "The input file has no requests.")
        if self.total > MAX_LINES:
            self._refuse("too_many_tasks", f"The input file has {self.total} requests; {MAX_LINES} may be in a batch.")

    def _check(self, line: Line) -> None:
        custom_id: str = parse_line(line.content, self._endpoint)["custom_id"]
        digest = hashlib.blake2b(custom_id.encode(), digest_size=16).digest()
        if digest in self._custom_ids:
            raise LineError("duplicate_custom_id", "An earlier line has the same custom_id.", "custom_id")
        self._custom_ids.add(digest)

    def _to_part(self, line: Line) -> None:
        last = self.parts[-1] if self.parts else None
        if last is None or self._in_part >= PART_LINES or line.start - last.start >= PART_BYTES:
            if last is not None:
                self.parts[-1] = Part(last.number, last.start, line.start)
            self.parts.append(Part(line.number, line.start, line.start))
            self._in_part = 0
        self._in_part += 1

    def _refuse(self, code: str, message: str, param: str | None = None, line: int | None = None) -> None:
        if len(self.errors) < MOST_ERRORS:
            self.errors.append({"code": code, "message": message, "param": param, "line": line})
