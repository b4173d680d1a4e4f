"""Calls of tools in a text that comes in pieces: text goes on at once, and so do the arguments of a call. Pure.

A call has begun once its name and the brace of its arguments are there. From then on it is a call, and its arguments
are sent as the model writes them: they are no JSON when the model fails at that, and end early when its length is
reached. What cannot be read as the beginning of a call of the request's tools is text, as the model wrote it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Iterator
from typing import Any

from penstock.processors.engines.guidance.dialects import Dialect
from penstock.processors.engines.stops import begun_at_end
from penstock.schemas.finite_json import STRICT, loads_finite, repaired

Json = dict[str, Any]

_BEGUN = re.compile(r'\s*\[?\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
"""A call as most models write it, up to its arguments."""
_NAMED = re.compile(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(?=\{)")
"""A name before its arguments, as newer models of Mistral write it."""
_BETWEEN = re.compile(r"[\s;,\]}]*")
"""What may be behind a call's arguments, before the next call."""
_BARE = ""


class CallReader:
    """Feed it text, then `flush`; `calls` has what was asked for, in OpenAI's form.

    `take_pieces` gives what is new of them. `forced`: the text is between the dialect's prefix and suffix. Not
    `parallel`: the first call is all. Not `bare`: without the dialect's marker nothing is a call.
    """

    def __init__(
        self,
        dialect: Dialect,
        names: Collection[str],
        answer_id: str,
        *,
        forced: bool = False,
        parallel: bool = True,
        bare: bool = True,
    ) -> None:
        self._dialect = dialect
        self._names = names
        self._answer_id = answer_id
        self._forced = forced
        self._parallel = parallel
        self._bare = bare
        self._text = dialect.prefix if forced else ""
        """What is not decided yet."""
        self._region: str | None = None
        """The marker behind which calls are expected; "" for calls without one; None in text."""
        self._in_region = 0
        """Calls that were found since it began."""
        self._scanner: ArgumentsScanner | None = None
        """Of the call that is under way."""
        self._wanted = True
        """Whether that call counts."""
        self._shown = False
        self._behind_call = False
        self.calls: list[Json] = []
        self._pieces: list[Json] = []

    def feed(self, text: str) -> str:
        """The part that is text for the reader, as far as it is known."""
        self._text += text
        shown = self._read()
        self._shown = self._shown or bool(shown.strip())
        return "" if self._forced else shown

    def flush(self) -> str:
        """The rest, when nothing follows."""
        shown = self._read()
        rest, self._text = self._text, ""
        if self._scanner is not None:  # cut inside its arguments
            return shown
        if self._region is not None:
            rest = self._end_of_region(rest)
        if self._forced:
            return "" if self.calls else rest.removeprefix(self._dialect.prefix)
        return shown + rest

    @property
    def made_chars(self) -> list[int]:
        """Characters of the arguments of each call so far."""
        return [len(call["function"]["arguments"]) for call in self.calls]

    def take_pieces(self) -> list[Json]:
        """What is new of the calls: {index, id, name, arguments, offset}, id and name with a call's first piece."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def _read(self) -> str:
        """Take what is decided off the front of the text."""
        shown = ""
        while self._text:
            if self._scanner is not None:
                self._read_arguments(self._scanner)
            elif self._region is not None:
                given_back = self._read_region(self._region)
                if given_back is None:
                    break
                shown += given_back
            elif self._behind_call:  # white space between calls is no text
                self._text = self._text.lstrip()
                self._behind_call = not self._text
            elif self._may_be_bare(self._text):
                if self._dialect.marker.startswith(self._text.lstrip()):  # "[" may be that of the marker
                    break
                self._begin_region(_BARE)
            else:
                before = self._read_text()
                shown += before
                if self._region is None:
                    break
        return shown

    def _read_text(self) -> str:
        """Text up to where a region begins, or to what may become one."""
        marker = self._dialect.marker
        if not marker:
            text, self._text = self._text, ""
            return text
        before, found, after = self._text.partition(marker)
        if found:
            self._text = after
            self._begin_region(marker)
            return before
        keep = begun_at_end(self._text, marker)
        before, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
        return before

    def _begin_region(self, marker: str) -> None:
        self._region, self._in_region = marker, 0

    def _read_region(self, marker: str) -> str | None:
        """What turned out to be text; None when more must come before anything is known."""
        end = self._dialect.end if marker else ""
        if self._in_region:
            self._text = _BETWEEN.sub("", self._text, count=1)
        if (begun := self._begun(marker)) is not None:
            name, place = begun
            self._text = self._text[place:]
            self._begin_call(name)
            return ""
        inside, found, behind = self._text.partition(end) if end else (self._text, "", "")
        if not found:
            return None
        self._text = behind
        return self._end_of_region(inside, found)

    def _begun(self, marker: str) -> tuple[str, int] | None:
        """The name of a call that begins the text, and where its arguments begin."""
        for pattern in (_BEGUN, _NAMED) if marker else (_BEGUN,):
            found = pattern.match(self._text)
            if found is not None and found[1] in self._names:
                return found[1], found.end()
        return None

    def _end_of_region(self, inside: str, end: str = "") -> str:
        """What could not be read while it came: calls in another order of words, or none. Gives back what is text."""
        marker, found = self._region or "", self._in_region
        self._region = None
        whole = self._parsed(inside)
        for name, arguments in whole:
            self._add_whole(name, arguments)
        self._behind_call = bool(found or whole)
        if whole or (found and (end or not inside.strip())):
            return ""
        return inside if found else marker + inside + end

    def _read_arguments(self, scanner: ArgumentsScanner) -> None:
        taken = scanner.feed(self._text)
        if self._wanted and taken:
            self._add_arguments(self._text[:taken])
        self._text = self._text[taken:]
        if scanner.over:
            self._scanner = None

    def _begin_call(self, name: str) -> None:
        self._in_region += 1
        self._scanner = ArgumentsScanner()
        self._wanted = self._parallel or not self.calls
        if self._wanted:
            call_id = self._new_id()
            self.calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}})
            index = len(self.calls) - 1
            self._pieces.append({"index": index, "id": call_id, "name": name, "arguments": "", "offset": 0})

    def _add_arguments(self, text: str) -> None:
        function, index = self.calls[-1]["function"], len(self.calls) - 1
        offset = len(function["arguments"])
        function["arguments"] += text
        if offset or not self._pieces or self._pieces[-1]["index"] != index:
            self._pieces.append({"index": index, "id": None, "name": None, "arguments": text, "offset": offset})
        else:
            self._pieces[-1]["arguments"] += text

    def _add_whole(self, name: str, arguments: str) -> None:
        self._begin_call(name)
        if self._wanted:
            self._add_arguments(arguments)
        self._scanner = None

    def _may_be_bare(self, text: str) -> bool:
        """Whether nothing was shown and the text begins as JSON: what it is must show."""
        text = text.lstrip()
        marked = bool(self._dialect.marker) and text.startswith(self._dialect.marker)
        return self._bare and not self._shown and not marked and text[:1] in ("{", "[")

    def _new_id(self) -> str:
        """The same for an answer that is begun again. Templates of Mistral take nothing but nine letters and digits."""
        digest = hashlib.blake2s(f"{self._answer_id}/{len(self.calls)}".encode()).hexdigest()
        return digest[:9] if self._dialect.name == "mistral" else f"call_{digest[:24]}"

    def _parsed(self, text: str) -> list[tuple[str, str]]:
        """(name, arguments) of each call; empty when it is anything else."""
        try:
            return [self._call(value) for value in _values(text)]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return []

    def _call(self, value: Json) -> tuple[str, str]:
        name = value["name"]
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):
            arguments = loads_finite(arguments)
        if name not in self._names or not isinstance(arguments, dict):
            raise ValueError(name)
        return name, json.dumps(repaired(arguments), ensure_ascii=False)


def _values(text: str) -> Iterator[Json]:
    """The JSON objects of a text: alone, in a list, or one after another with `;` or `,` between."""
    place = 0
    while (place := _skip(text, place)) < len(text):
        if (named := _NAMED.match(text, place)) is not None:
            arguments, place = STRICT.raw_decode(text, named.end())
            yield {"name": named[1], "arguments": arguments}
            continue
        value, place = STRICT.raw_decode(text, place)
        yield from value if isinstance(value, list) else [value]


def _skip(text: str, place: int) -> int:
    while place < len(text) and (text[place].isspace() or text[place] in ";,"):
        place += 1
    return place


_OPENING, _CLOSING = frozenset("{["), frozenset("}]")


class ArgumentsScanner:
    """Feed it a JSON object in pieces, from its first brace on. `over` when nothing more belongs to it."""

    def __init__(self) -> None:
        self.over = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int:
        """How many of these characters belong to the object.

        A line break inside a string is not allowed in JSON: whatever wrote it has forgotten to close the string.
        """
        for place, char in enumerate(text):
            if self._in_string:
                if char < " ":
                    self.over = True
                    return place
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in _OPENING:
                self._depth += 1
            elif char in _CLOSING:
                self._depth -= 1
                if self._depth == 0:
                    self.over = True
                    return place + 1
        return len(text)
