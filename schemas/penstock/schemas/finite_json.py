"""JSON that is to be written again. One reader for all that comes from outside, bodies and JSON text within them.

Python reads more than JSON has, and more than can be written: NaN and infinities, numbers that no float can hold, lone
surrogates, values too deep to be walked through. All of these are refused here, each with its place. In what an
assistant said before they are replaced: the caller cannot change that.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from typing import Any, cast

from penstock.schemas.errors import InvalidRequest
from penstock.schemas.texts import encodable

MAX_LEVELS = 200
"""Lists and objects within each other. Python's writer fails at some hundreds more."""
SHOWN_CHARS = 100
"""A caller's own name goes into an error record: it must be text there, and not the whole body again."""
_SURROGATE = re.compile("[\ud800-\udfff]")
_PAIR = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}")


class Flaw(ValueError):
    """Text that is JSON, of which a part cannot be written again. `value` is all of it, None if it is too deep."""

    def __init__(self, value: Any, place: str, problem: str) -> None:
        super().__init__(f"{place} {problem}" if place else problem)
        self.value = value
        self.place = place
        self.problem = problem

    def refusal(self, where: str, field: str = "") -> InvalidRequest:
        """`where`: what the whole is called; `field`: that in which it stands."""
        place = f"{field}{'.' if field and self.place[:1] not in ('', '[') else ''}{self.place}"
        return InvalidRequest(f"{place or where} {self.problem}", param=place or None)


def loads_finite(text: str | bytes) -> Any:
    """As json.loads. Raises Flaw, with its place, and ValueError for what is no JSON. A BOM is passed over."""
    encoded = isinstance(text, bytes) or text.isascii()
    if isinstance(text, bytes):
        text = text.removeprefix(codecs.BOM_UTF8).decode()
    try:
        value = STRICT.decode(text)
        if encoded and not _may_be_flawed(text):
            return value
    except (ValueError, RecursionError):
        value = _read_all(text)
    if (flaw := flaw_of(value)) is not None:
        raise flaw
    return value


def loads_any(text: str | bytes) -> Any:
    """The same with the parts that are refused there, to look at the others; None for what is too deep."""
    try:
        return loads_finite(text)
    except Flaw as flaw:
        return flaw.value


def read_body(content: str | bytes, where: str = "the body", *, whole: str | None = None, history: bool = True) -> Any:
    """The JSON of a caller. Raises InvalidRequest, with the place of what is wrong; `whole`: where all of it is.

    `history`: what messages of assistants hold is repaired.
    """
    try:
        return loads_finite(content)
    except Flaw as flaw:
        if not history or flaw.problem == _TOO_DEEP:
            raise flaw.refusal(where) from None
        return checked_value(flaw.value, where)
    except ValueError as error:
        raise InvalidRequest(f"{where} is not valid JSON", param=whole) from error


def checked_value(value: Any, where: str, field: str = "") -> Any:
    """A value that was read as JSON, what messages of assistants hold repaired. Raises InvalidRequest."""
    flaw = flaw_of(value)
    if flaw is not None and flaw.problem != _TOO_DEEP:
        value = _with_repaired_history(value)
        flaw = flaw_of(value)
    if flaw is not None:
        raise flaw.refusal(where, field)
    return value


def object_of(text: str) -> dict[str, Any]:
    """The arguments of a call that was made before: `{}` where they are no JSON object, as of a call that was cut.

    Lone surrogates in them become U+FFFD, what is no number null.
    """
    try:
        value = repaired(_read_all(text))
    except (ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) and flaw_of(value) is None else {}


def repaired(value: Any) -> Any:
    """The same with U+FFFD for lone surrogates and null for what is no number. Raises RecursionError."""
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, dict):
        return {encodable(name): repaired(item) for name, item in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [repaired(item) for item in cast("list[Any]", value)]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flaw_of(value: Any) -> Flaw | None:
    """The first part of a value that cannot be written as JSON. Not by recursion."""
    left: list[tuple[str, Any, int]] = [("", value, 0)]
    while left:
        place, one, level = left.pop()
        if isinstance(one, str):
            if not one.isascii() and _SURROGATE.search(one):
                return Flaw(value, place, _NO_TEXT)
        elif isinstance(one, float):
            if not math.isfinite(one):
                return Flaw(value, place, _NO_NUMBER)
        elif isinstance(one, dict | list) and level == MAX_LEVELS:
            return Flaw(value, "", _TOO_DEEP)
        elif isinstance(one, dict):
            named = cast("dict[str, Any]", one)
            for name in named:
                if not name.isascii() and _SURROGATE.search(name):
                    return Flaw(value, below(place, shown_name(name)), _NO_TEXT)
            left += [(below(place, shown_name(name)), item, level + 1) for name, item in reversed(named.items())]
        elif isinstance(one, list):
            items = cast("list[Any]", one)
            left += [(f"{place}[{n}]", items[n], level + 1) for n in range(len(items) - 1, -1, -1)]
    return None


def below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def shown_name(name: str) -> str:
    """A name as it may stand in an error."""
    return name[:SHOWN_CHARS].encode(errors="backslashreplace").decode()


_NO_TEXT = "holds a lone surrogate, which is no text"
_NO_NUMBER = "is NaN, infinite, or more than a number can be"
_TOO_DEEP = f"has more than {MAX_LEVELS} levels of lists and objects"


def _with_repaired_history(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_repaired_history(item) for item in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    named = cast("dict[str, Any]", value)
    if named.get("role") == "assistant" or named.get("type") in ("function_call", "reasoning"):
        return repaired(named)
    return {name: _with_repaired_history(item) for name, item in named.items()}


def _may_be_flawed(text: str) -> bool:
    """Whether a text that was read is to be looked at: most are not."""
    if text.count("[") + text.count("{") > MAX_LEVELS:
        return True
    if "\\u" not in text:
        return False
    if "\\ud" in text or "\\uD" in text:  # as escapes stand for emoji too
        text = _PAIR.sub(" ", text)
    return "\\ud" in text or "\\uD" in text


def _read_all(text: str) -> Any:
    """As json.loads; a number that cannot be read is infinite. Raises ValueError, Flaw for what is too deep."""
    try:
        return LENIENT.decode(text)
    except RecursionError:
        raise Flaw(None, "", _TOO_DEEP) from None


def _no_constant(name: str) -> float:
    raise ValueError(f"JSON has no {name}")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is more than a float can hold")
    return value


def _integer(text: str) -> int | float:
    try:
        return int(text)
    except ValueError:  # of thousands of digits
        return math.inf


STRICT = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
"""Raises ValueError for NaN, infinities and numbers that no float can hold."""
LENIENT = json.JSONDecoder(parse_int=_integer)
