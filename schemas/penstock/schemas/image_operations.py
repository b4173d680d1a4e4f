"""The operations of image_processing: which there are, what each takes, and their two forms.

Callers over JSON write arguments as fields (`{"op": "resize", "width": 640}`); the Avro record has them as a map of
texts (`{"op": "resize", "arguments": {"width": "640"}}`). Both are read here, strictly, and become the normal form: the
record's. `typed` gives the arguments back as numbers and flags, with the defaults filled in.

Here is checked what can be checked without the image; what depends on its size is checked where it is known.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.schemas.errors import InvalidRequest, TooLarge, UnsupportedParameter

Operation = dict[str, Any]
Value = int | float | bool | str

MAX_SIDE = 16_384
"""Pixels: the longest side of what an operation makes."""
MAX_OPERATIONS = 32
FORMATS = {"png": "image/png", "jpeg": "image/jpeg", "webp": "image/webp"}
"""What images go out as."""
SHOWN_CHARS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """A whole number from `least` to `most`. None as default: it may be left out and has no value then."""

    least: int
    most: int
    default: int | None = None
    required: bool = False

    def read(self, given: Any) -> int | None:
        """The value of a number or its text; None for what is neither or out of bounds."""
        if isinstance(given, str):
            if not _WHOLE.fullmatch(given):
                return None
            given = int(given)
        if isinstance(given, bool) or not isinstance(given, int):
            return None
        return given if self.least <= given <= self.most else None

    @property
    def described(self) -> str:
        return f"an integer from {self.least} to {self.most}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Number:
    """A finite number from `least` to `most`."""

    least: float
    most: float
    default: float | None = None
    required: bool = False

    def read(self, given: Any) -> float | None:
        if isinstance(given, str):
            try:
                given = float(given)
            except ValueError:
                return None
        if isinstance(given, bool) or not isinstance(given, int | float):
            return None
        return float(given) if math.isfinite(given) and self.least <= given <= self.most else None

    @property
    def described(self) -> str:
        return f"a number from {self.least:g} to {self.most:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Flag:
    """True or false."""

    default: bool
    required: bool = False

    def read(self, given: Any) -> bool | None:
        if isinstance(given, str):
            return {"true": True, "false": False}.get(given)
        return given if isinstance(given, bool) else None

    @property
    def described(self) -> str:
        return "true or false"


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One of some names, in any case. `others` are further names for them."""

    names: Sequence[str]
    default: str | None = None
    required: bool = False
    others: Mapping[str, str] | None = None

    def read(self, given: Any) -> str | None:
        if not isinstance(given, str):
            return None
        name = given.lower()
        name = (self.others or {}).get(name, name)
        return name if name in self.names else None

    @property
    def described(self) -> str:
        return "one of " + ", ".join(self.names)


_WHOLE = re.compile(r"-?[0-9]{1,9}")
Argument = Whole | Number | Flag | Choice

_SIDE = Whole(least=1, most=MAX_SIDE)
_NEEDED_SIDE = Whole(least=1, most=MAX_SIDE, required=True)
_EDGE = Whole(least=0, most=MAX_SIDE, default=0)
_PLACE = Whole(least=-MAX_SIDE, most=MAX_SIDE, default=0)

OPERATIONS: Mapping[str, Mapping[str, Argument]] = {
    "resize": {"width": _SIDE, "height": _SIDE, "fit": Choice(names=("exact", "contain", "cover"), default="exact")},
    "crop": {"left": _EDGE, "top": _EDGE, "width": _NEEDED_SIDE, "height": _NEEDED_SIDE},
    "rotate": {"degrees": Number(least=-360, most=360, required=True), "expand": Flag(default=True)},
    "flip": {"axis": Choice(names=("horizontal", "vertical"), required=True)},
    "convert": {
        "format": Choice(names=tuple(FORMATS), required=True, others={"jpg": "jpeg"}),
        "quality": Whole(least=1, most=100),
    },
    "thumbnail": {"width": _NEEDED_SIDE, "height": _NEEDED_SIDE},
    "composite": {"left": _PLACE, "top": _PLACE, "opacity": Number(least=0, most=1, default=1.0)},
    "strip_metadata": {},
    "upscale": {"factor": Choice(names=("2", "4"), default="4")},
}
"""By name: what an operation takes. `composite` takes an `image` too."""

WITH_IMAGE = frozenset({"composite"})
_STRUCTURE = frozenset({"op", "arguments", "image"})


def normal_operations(given: Sequence[Any]) -> list[Operation]:
    """The operations in the record's form, checked. Raises InvalidRequest, UnsupportedParameter, TooLarge, each with
    the number of the operation and the name of the field in `param`."""
    path = "payload.operations"
    if not given:
        raise InvalidRequest(f"{path} must be a list of at least one operation", param=path)
    if len(given) > MAX_OPERATIONS:
        raise TooLarge(f"{path} has more than {MAX_OPERATIONS} operations", param=path)
    return [_normal(operation, f"{path}[{number}]") for number, operation in enumerate(given)]


def typed(given: Any, path: str = "payload.operations[0]") -> dict[str, Value]:
    """The arguments of an operation as values, with the defaults of those left out. Raises as `normal_operations`."""
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{path} must be an object", param=path)
    name = given.get("op")
    if not isinstance(name, str) or name.lower() not in OPERATIONS:
        raise InvalidRequest(f"{path}.op must be one of {', '.join(OPERATIONS)}", param=f"{path}.op")
    name = name.lower()
    known = OPERATIONS[name]
    fields = _fields(given, path)
    for field in fields:
        if field not in known:
            shown = field[:SHOWN_CHARS].encode(errors="backslashreplace").decode()
            raise UnsupportedParameter(f"{path}.{shown} is not known to {name}", param=f"{path}.{shown}")
    _check_image(name, given.get("image"), path)
    values: dict[str, Value] = {}
    for field, argument in known.items():
        value = _value(argument, fields.get(field), f"{path}.{field}", name)
        if value is not None:
            values[field] = value
    _together(name, values, path)
    return values


def wants_model(operations: Sequence[Mapping[str, Any]]) -> int | None:
    """The number of the first operation that needs a model; None when all work without."""
    return next((number for number, operation in enumerate(operations) if operation.get("op") == "upscale"), None)


def _normal(given: Any, path: str) -> Operation:
    values = typed(given, path)
    operation: Operation = {"op": given["op"].lower(), "arguments": {name: _text(v) for name, v in values.items()}}
    if given.get("image") is not None:
        operation["image"] = given["image"]
    return operation


def _fields(given: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The arguments of either form; one that is given in both is refused. Null is left out."""
    inner = given.get("arguments")
    if inner is not None and not isinstance(inner, Mapping):
        raise InvalidRequest(f"{path}.arguments must be an object of texts", param=f"{path}.arguments")
    fields = {name: value for name, value in given.items() if name not in _STRUCTURE and value is not None}
    for name, value in (inner or {}).items():
        if name in fields:
            raise InvalidRequest(f"{path}.{name} is given twice, in arguments too", param=f"{path}.{name}")
        if value is not None:
            fields[name] = value
    return fields


def _check_image(name: str, image: Any, path: str) -> None:
    if name in WITH_IMAGE and image is None:
        raise InvalidRequest(f"{path}.image is missing: it must be an image", param=f"{path}.image")
    if name not in WITH_IMAGE and image is not None:
        raise UnsupportedParameter(f"{path}.image is not known to {name}", param=f"{path}.image")


def _value(argument: Argument, given: Any, param: str, name: str) -> Value | None:
    if given is None:
        if argument.required:
            raise InvalidRequest(f"{param} is missing: {name} needs it, {argument.described}", param=param)
        return argument.default
    value = argument.read(str(given) if isinstance(argument, Choice) and type(given) is int else given)
    if value is None:
        raise InvalidRequest(f"{param} must be {argument.described}", param=param)
    return value


def _together(name: str, values: Mapping[str, Value], path: str) -> None:
    if name == "convert" and values["format"] == "png" and "quality" in values:
        raise UnsupportedParameter(f"{path}.quality does not go with png, which loses nothing", param=f"{path}.quality")
    if name != "resize":
        return
    missing = [side for side in ("width", "height") if side not in values]
    if len(missing) == 2 or (missing and values["fit"] != "exact"):
        needed = "width, height or both" if values["fit"] == "exact" else "both width and height"
        param = f"{path}.{missing[0]}"
        raise InvalidRequest(f"{param} is missing: resize with fit {values['fit']} needs {needed}", param=param)


def _text(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else repr(value) if isinstance(value, float) else str(value)
