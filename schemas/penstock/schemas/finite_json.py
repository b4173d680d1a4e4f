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
from collections.abc import Iterator, Sequence
from typing import Any, cast

from penstock.schemas.errors import InvalidRequest
from penstock.schemas.texts import encodable

MAX_LEVELS = 200
"""Lists and objects within each other. Python's writer fails at some hundreds more."""
PLACE_CHARS = 300
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
    if isinstance(text, bytes):
        text = text.removeprefix(codecs.BOM_UTF8).decode()
    try:
        value = STRICT.decode(text)
        if not _may_hold_surrogates(text):
            if text.count("[") + text.count("{") > MAX_LEVELS and _is_too_deep(value):
                raise Flaw(value, "", _TOO_DEEP)
            return value
    except Flaw:
        raise
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
        if _is_too_deep(value):  # repairing goes by recursion
            raise Flaw(None, "", _TOO_DEEP).refusal(where, field)
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
        value = _read_all(text)
        if isinstance(value, str):  # written as JSON twice
            value = _read_all(value)
    except ValueError:
        return {}
    if _is_too_deep(value):
        return {}
    value = repaired(value)
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
    """The first part of a value that cannot be written as JSON. Not by recursion; memory follows the depth alone."""
    ways: list[Iterator[tuple[str | int, Any]]] = [iter([("", value)])]
    place: list[str | int] = [""]
    """The names and indexes on the way, behind the value itself."""
    while ways:
        step = next(ways[-1], None)
        if step is None:
            ways.pop()
            place.pop()
            continue
        place[-1], one = step
        if isinstance(one, str):
            if not one.isascii() and _SURROGATE.search(one):
                return Flaw(value, place_of(place[1:]), _NO_TEXT)
        elif isinstance(one, float):
            if not math.isfinite(one):
                return Flaw(value, place_of(place[1:]), _NO_NUMBER)
        elif isinstance(one, dict | list):
            if len(ways) > MAX_LEVELS:
                return Flaw(value, "", _TOO_DEEP)
            if isinstance(one, dict):
                named = cast("dict[str, Any]", one)
                for name in named:
                    if not name.isascii() and _SURROGATE.search(name):
                        return Flaw(value, place_of([*place[1:], name]), _NO_TEXT)
                ways.append(iter(named.items()))
            else:
                ways.append(enumerate(cast("list[Any]", one)))
            place.append("")
    return None


def _is_too_deep(value: Any) -> bool:
    """Level by level: of very many values most hold no others."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_LEVELS):
        level = [
            item
            for one in level
            for item in (cast("dict[str, Any]", one).values() if isinstance(one, dict) else cast("list[Any]", one))
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def place_of(steps: Sequence[str | int]) -> str:
    """The place as an error may show it."""
    text = ""
    for step in steps:
        text = f"{text}[{step}]" if isinstance(step, int) else below(text, shown_name(step))
    return text if len(text) <= PLACE_CHARS else f"{text[:PLACE_CHARS]}…"


def below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def shown_name(name: str) -> str:
    """A name as it may be in an error."""
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


def _may_hold_surrogates(text: str) -> bool:
    """Whether escapes, or the text itself, may stand for lone surrogates: most texts are not to be looked at."""
    if not text.isascii() and _SURROGATE.search(text):
        return True
    if "\\ud" not in text and "\\uD" not in text:
        return False
    # As escapes stand for emoji too. An escaped backslash before them is no part of them.
    text = _PAIR.sub(" ", text.replace("\\\\", " "))
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
