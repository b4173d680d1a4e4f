"""Calls of tools in a text that comes in pieces: what is text goes on at once, what is a call is kept. Pure.

What cannot be read as calls of tools that the request has is text, as the model wrote it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from penstock.processors.engines.dialects import Dialect
from penstock.schemas.finite_json import loads_finite

Json = dict[str, Any]

_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")
"""A name before its arguments, as newer models of Mistral write it."""


class CallReader:
    """Feed it text, then `flush`; `calls` has what was asked for, in OpenAI's form.

    `forced`: the text stands between the dialect's prefix and suffix. Not `parallel`: the first call is all.
    """

    def __init__(
        self, dialect: Dialect, names: Collection[str], run_id: str, *, forced: bool = False, parallel: bool = True
    ) -> None:
        self._dialect = dialect
        self._names = names
        self._run_id = run_id
        self._forced = forced
        self._parallel = parallel
        self._text = ""
        self._shown = False
        self._behind_call = False
        self.calls: list[Json] = []

    def feed(self, text: str) -> str:
        """The part that is text for the reader, as far as it is known."""
        self._text += text
        if self._forced:
            return ""
        shown = self._read()
        self._shown = self._shown or bool(shown.strip())
        return shown

    def flush(self) -> str:
        """The rest, when nothing follows."""
        if self._forced:
            found = self._parsed(self._inside(self._dialect.prefix + self._text), cut=True)
            self._add(found)
            return "" if found else self._text
        shown = self._read()
        rest, self._text = self._text, ""
        if self._may_be_bare(rest) and (found := self._parsed(rest)):
            self._add(found)
            return shown
        marker = self._dialect.marker
        if marker and rest.startswith(marker) and (found := self._parsed(rest.removeprefix(marker))):
            self._add(found)
            return shown
        return shown + rest

    def _read(self) -> str:
        """Take what is decided off the front of the text."""
        dialect, shown = self._dialect, ""
        while self._text:
            if self._behind_call:  # white space between calls is no text
                self._text = self._text.lstrip()
                self._behind_call = not self._text
                continue
            if self._may_be_bare(self._text):
                break
            if not dialect.marker:
                shown, self._text = shown + self._text, ""
                break
            before, marker, after = self._text.partition(dialect.marker)
            if not marker:
                keep = _begun_marker(self._text, dialect.marker)
                shown += self._text[: len(self._text) - keep]
                self._text = self._text[len(self._text) - keep :]
                break
            inside, end, behind = after.partition(dialect.end) if dialect.end else (after, "", "")
            shown += before
            self._text = marker + after
            if not end:
                break
            found = self._parsed(inside)
            self._add(found)
            if not found:
                shown += marker + inside + end
            self._text = behind
            self._behind_call = bool(found)
        return shown

    def _may_be_bare(self, text: str) -> bool:
        """Whether nothing was shown and the text begins as JSON: what it is is known at its end."""
        return not self._shown and text.lstrip()[:1] in ("{", "[") and not text.lstrip().startswith("[TOOL_CALLS]")

    def _inside(self, text: str) -> str:
        """Forced calls without what stands around them: objects one after another."""
        text = text.replace(self._dialect.prefix, "", 1)
        return text.replace(self._dialect.separator, ", ") if self._dialect.separator else text

    def _add(self, found: list[tuple[str, str]]) -> None:
        for name, arguments in found:
            if self._parallel or not self.calls:
                function = {"name": name, "arguments": arguments}
                self.calls.append({"id": self._new_id(), "type": "function", "function": function})

    def _new_id(self) -> str:
        """The same for the same run: templates of Mistral take nothing but nine letters and digits."""
        digest = hashlib.blake2s(f"{self._run_id}/{len(self.calls)}".encode()).hexdigest()
        return digest[:9] if self._dialect.name == "mistral" else f"call_{digest[:24]}"

    def _parsed(self, text: str, *, cut: bool = False) -> list[tuple[str, str]]:
        """(name, arguments) of each call; empty when it is anything else. `cut`: what the end lacks is left out."""
        found: list[tuple[str, str]] = []
        try:
            found.extend(self._call(value) for value in _values(text))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return found if cut else []
        return found

    def _call(self, value: Json) -> tuple[str, str]:
        name = value["name"]
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = loads_finite(arguments)
        if name not in self._names or not isinstance(arguments, dict):
            raise ValueError(name)
        return name, json.dumps(arguments, ensure_ascii=False)


def _values(text: str) -> Iterator[Json]:
    """The JSON objects of a text: alone, in a list, or one after another with `;` or `,` between."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    place = 0
    while (place := _skip(text, place)) < len(text):
        if (named := _NAMED.match(text, place)) is not None:
            arguments, place = decoder.raw_decode(text, named.end())
            yield {"name": named[1], "arguments": arguments}
            continue
        value, place = decoder.raw_decode(text, place)
        yield from value if isinstance(value, list) else [value]


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def _skip(text: str, place: int) -> int:
    while place < len(text) and (text[place].isspace() or text[place] in ";,"):
        place += 1
    return place


def _begun_marker(text: str, marker: str) -> int:
    """How many characters at the end of the text may be the beginning of the marker."""
    for count in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:count]):
            return count
    return 0
